"""What a block costs below vLLM's own host tier: GB/s through the tier, and the time that vLLM's scheduler spends in it.

`python bench/tiering.py [--row-bytes N] [--chunks N] [--rounds N]`, with PYTHONPATH=python:tests and a built `forebay`.

The real `TieringOffloadingManager` over its shared region, against the shipped daemon; nobody copies from a device. A round
is one prompt: all its chunks are stored at once, then vLLM's host tier forgets them and they are loaded at once. "copy" is
what the copy engine itself took for the same bytes, so "through" over "copy" is what the way there and back costs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from forebay.vllm.tier import ForebayTier
from rig.daemon import Daemon
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

TOKENS = 16
OVER = {LookupResult.HIT, LookupResult.MISS}


class Clocked(ForebayTier):
    """Counts what vLLM's thread spends in each call."""

    spent: dict[str, float]

    def reset(self) -> None:
        self.spent = {"lookup": 0.0, "submit": 0.0, "finished": 0.0, "schedule_end": 0.0}
        self.copied_bytes, self.copy_seconds = 0, 0.0

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._clocked("lookup", super().lookup, key, req_context)

    def submit_load(self, job_metadata: Any) -> None:
        self._clocked("submit", super().submit_load, job_metadata)

    def submit_store(self, job_metadata: Any) -> None:
        self._clocked("submit", super().submit_store, job_metadata)

    def get_finished_jobs(self) -> Any:
        jobs = list(self._clocked("finished", super().get_finished_jobs))
        self.copied_bytes += sum(job.transfer_bytes for job in jobs)
        self.copy_seconds += sum(job.transfer_time for job in jobs)
        assert all(job.success for job in jobs)
        return jobs

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._clocked("schedule_end", super().on_schedule_end, context)

    def _clocked(self, name: str, call: Any, *args: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.spent[name] += time.perf_counter() - begun


def config(engine_id: str) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False)
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=engine_id,
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=parallel,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--row-bytes", type=int, default=2 << 20, help="Llama-3.1-8B has 2 MiB in 16 tokens")
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    init_none_hash(get_hash_fn_by_name("sha256"))
    prompt_bytes = options.row_bytes * options.chunks
    with Daemon(capacity_bytes=(options.rounds + 2) * prompt_bytes) as daemon:
        measure(daemon.start(), options, prompt_bytes)


def measure(daemon: Daemon, options: argparse.Namespace, prompt_bytes: int) -> None:
    engine_id = f"bench-{os.getpid()}"
    region = SharedOffloadRegion(engine_id, options.chunks, None, options.row_bytes, options.row_bytes)
    primary = CPUPrimaryTierOffloadingManager(options.chunks, region)
    spec: Any = SimpleNamespace(config=config(engine_id), tokens_per_hash=TOKENS, blocks_per_chunk=1)
    tier = Clocked(spec, primary.get_kv_memoryview(), "forebay", namespace="bench", socket=str(daemon.socket))
    tier.reset()
    manager = TieringOffloadingManager(primary, [tier])
    rows = np.asarray(primary.get_kv_memoryview())
    rows[:] = np.random.default_rng(1).integers(-128, 127, rows.shape, dtype=np.int8)
    try:
        for turn in range(options.rounds):
            keys = [make_offload_key(os.urandom(32), 0) for _ in range(options.chunks)]
            while tier.manager._session.stats().get("reserved_stock", 0) < options.chunks:
                tier.manager._session.reserve(0, 0)  # a session of which nothing is asked has no stock for long
                manager.has_pending_work()
                step(manager)
                time.sleep(0.001)
            for what, run in (("store", store), ("load", load)):
                tier.reset()
                begun = time.perf_counter()
                steps, slowest = run(manager, keys, f"{what}-{turn}")
                seconds = time.perf_counter() - begun
                print(json.dumps(line(what, tier, prompt_bytes, seconds, steps, slowest)), flush=True)
                primary.reset_cache()
    finally:
        del rows
        manager.shutdown()


def line(what: str, tier: Clocked, size: int, seconds: float, steps: int, slowest: float) -> dict[str, Any]:
    assert tier.copied_bytes == size, (tier.copied_bytes, size)
    return {
        "what": what,
        "through_gb_s": round(size / seconds / 1e9, 2),
        "copy_gb_s": round(size / tier.copy_seconds / 1e9, 2),
        "seconds": round(seconds, 4),
        "steps": steps,
        "slowest_step_ms": round(slowest * 1e3, 2),
        "ms_in_tier": {name: round(spent * 1e3, 3) for name, spent in tier.spent.items()},
    }


def begin(manager: TieringOffloadingManager, keys: list[OffloadKey], name: str) -> ReqContext:
    context = ReqContext(name)
    for at, key in enumerate(keys, 1):
        context.set_offload_key_position(key, at * TOKENS)
    manager.on_new_request(context)
    return context


def step(manager: TieringOffloadingManager) -> None:
    manager.on_schedule_end(ScheduleEndContext([], []))


def store(manager: TieringOffloadingManager, keys: list[OffloadKey], name: str) -> tuple[int, float]:
    context = begin(manager, keys, name)
    assert manager.prepare_store(keys, context) is not None
    begun = time.perf_counter()
    manager.complete_store(set(keys), context)
    manager.on_request_finished(context)
    slowest, steps = time.perf_counter() - begun, 0
    while manager.has_pending_work():
        begun = time.perf_counter()
        step(manager)
        slowest, steps = max(slowest, time.perf_counter() - begun), steps + 1
        time.sleep(0.0005)  # as a step that computes leaves the processor to others
    return steps, slowest


def load(manager: TieringOffloadingManager, keys: list[OffloadKey], name: str) -> tuple[int, float]:
    context, slowest, steps, answers = begin(manager, keys, name), 0.0, 0, {LookupResult.RETRY}
    while answers - OVER:
        begun = time.perf_counter()
        answers = {manager.lookup(key, context) for key in keys}
        step(manager)
        slowest, steps = max(slowest, time.perf_counter() - begun), steps + 1
        time.sleep(0.0005)
    assert answers == {LookupResult.HIT}
    manager.on_request_finished(context)
    return steps, slowest


if __name__ == "__main__":
    main()
