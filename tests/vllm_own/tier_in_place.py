"""A pytest plugin that puts Forebay's tier in the place of vLLM's filesystem tier in vLLM's own tests of that.

The tier runs as it is, over the shipped daemon and its pool. What vLLM's manager does around a tier, and those tests leave
out, is done here: a request is named, its chunks have places in it, and only what a lookup has found is loaded.

`tools/vllm-own-tests.sh` runs them. `LEFT_OUT` names those that cannot be run so, each with the reason.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "connector"), str(TESTS.parent / "python")]

import pytest
from forebay.vllm import compat
from forebay.vllm.tier import ForebayTier
from rig.daemon import Daemon
from tests.v1.kv_offload.tiering import test_fs_tier as theirs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

TOKENS = 16
SECONDS = 20.0

_FILES = "harms a block's file, and a block of the pool has none; tests/connector/test_tier.py harms the pool"
_EVENTS = "is about events, and the pool announces nothing"
_THEIRS = "is about the code of the filesystem tier, or about its options"
LEFT_OUT = {
    "test_invalid_path_raises_at_construction": _THEIRS,
    "test_invalid_locality_raises_at_construction": _THEIRS,
    "test_factory_forwards_locality_to_fs_tier": _THEIRS,
    "test_shutdown_discards_pending_tasks": _THEIRS,
    "test_store_load_roundtrip_without_o_direct": _THEIRS,
    "test_wait_idle_blocks_until_tasks_complete": _THEIRS,
    "test_batch_lookup_c_extension": _THEIRS,
    "test_failed_load_corrects_verdict_and_removes_corrupt_file": _FILES,
    "test_batched_partial_load_failure_keeps_loaded_blocks": _FILES,
    "test_batched_load_first_block_fails_marks_whole_batch": _FILES,
    "test_transient_load_failure_leaves_file": _FILES,
    "test_successful_store_emits_stored_event": _EVENTS,
    "test_store_event_uses_configured_locality": _EVENTS,
    "test_load_job_emits_no_event": _EVENTS,
    "test_mixed_job_results_emit_event_only_for_successful_job": _EVENTS,
    "test_partially_failed_store_emits_no_event": _EVENTS,
    "test_events_disabled_by_default": _EVENTS,
    "test_events_require_global_kv_events_flag": _EVENTS,
    "test_cascade_store_emits_fs_event_through_tiering_manager": _EVENTS,
    "test_fs_tier_cross_tp_round_trip": "shares blocks between shapes of tensor parallelism, which Forebay does not",
}
PROVOKES_A_FAULT = "test_out_of_bounds_block_id_smoke"

daemon = Daemon(capacity_bytes=256 << 20)
made: list[InPlace] = []
numbers = itertools.count(1)


class InPlace(ForebayTier):
    """What the tests get for `FileSystemTierManager`. Each has a namespace of its own, as theirs have directories."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **_: Any):
        name = f"own-{os.getpid()}-{next(numbers)}"
        group = OffloadingGroupConfig(TOKENS, ("layer",), 0)
        config = replace(offloading_spec.config, groups=(group,), engine_id=name)
        spec: Any = SimpleNamespace(config=config, tokens_per_hash=TOKENS, blocks_per_chunk=1)
        options: dict[str, Any] = {"socket": str(daemon.socket), "lookup_deadline_ms": 60_000}
        super().__init__(spec, primary_kv_view, tier_type, namespace=name, **options)
        # They ask whether a block's file is there: what all blocks are in is.
        self.file_mapper = SimpleNamespace(get_file_name=lambda key: str(daemon.pool_directory))
        self.jobs: set[int] = set()
        made.append(self)
        until(self, self._has_stock)

    def _has_stock(self) -> bool:
        self.manager._session.reserve(0, 0)  # a session of which nothing is asked has no stock for long
        return self.manager._session.stats().get("reserved_stock", 0) > 0

    def meet(self, context: ReqContext, keys: Iterable[OffloadKey]) -> None:
        if context.req_id not in self._requests:
            compat.key_positions(context).clear()  # type: ignore[attr-defined]
            self.on_new_request(context)
        known = compat.key_positions(context)
        for key in keys:
            if key not in known:
                context.set_offload_key_position(key, (len(known) + 1) * TOKENS)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.meet(job_metadata.req_context, job_metadata.keys)
        self.jobs.add(job_metadata.job_id)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        lookup_and_wait(self, list(job_metadata.keys), job_metadata.req_context)
        self.jobs.add(job_metadata.job_id)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> list[JobResult]:
        results = list(super().get_finished_jobs())
        self.jobs -= {result.job_id for result in results}
        return results


def step(tier: InPlace) -> None:
    tier.has_pending_work()
    tier.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))


def until(tier: InPlace, holds: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, tier.manager._session.reason()
        step(tier)


def drain(tier: InPlace) -> list[JobResult]:
    """Theirs resets the tier to wait for its jobs, after which an engine of ours shares nothing with before."""
    results: list[JobResult] = []

    def is_over() -> bool:
        results.extend(tier.get_finished_jobs())
        return not tier.jobs and not tier.manager._session.stats().get("queued", 0)

    until(tier, is_over)
    return results


def lookup_and_wait(
    tier: InPlace, keys: list[OffloadKey], ctx: ReqContext = theirs._CTX, timeout: float = SECONDS
) -> list[LookupResult]:
    """As a request that comes anew, in a step of its own."""
    tier.on_request_finished(ctx)
    step(tier)
    tier.meet(ctx, keys)
    answers: list[LookupResult] = []

    def is_final() -> bool:
        answers[:] = [tier.lookup(key, ctx) for key in keys]
        return LookupResult.RETRY not in answers

    until(tier, is_final)
    return answers


theirs.FileSystemTierManager = InPlace
theirs.drain, theirs.lookup_and_wait = drain, lookup_and_wait
init_none_hash(get_hash_fn_by_name("sha256"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {item.name.partition("[")[0] for item in items}
    assert names >= set(LEFT_OUT), f"these tests are gone: {set(LEFT_OUT) - names}"
    left_out = [item for item in items if item.name.partition("[")[0] in LEFT_OUT]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="session")
def pool() -> Iterator[None]:
    with daemon:
        daemon.start()
        yield


@pytest.fixture(autouse=True)
def without_hidden_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    made.clear()
    yield
    for each in made:
        assert not each.breaker.is_off, f"the tier is off: {each.breaker.reason}"
        is_provoked = request.node.name.startswith(PROVOKES_A_FAULT)
        assert is_provoked or each.breaker.faults == 0, "the tier hid a fault from the engine"
