"""The engine's own process: reads commands from stdin, runs vLLM in this very process, answers on the given descriptor.

Holds true: requests pass through vLLM's public engine interface and its unchanged scheduler and workers. What the rig
adds only looks (`Stopwatch`, page digests) or does harm on command (`worker_probe.py`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TextIO, cast

from prometheus_client import REGISTRY
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import KVTransferConfig
from vllm.outputs import RequestOutput
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.metrics.reader import Counter, Gauge

logger = logging.getLogger(__name__)

# A step takes some ten ms; this many without a finished request means that nothing moves any more.
IDLE_STEPS = 200_000


def main() -> None:
    reply_fd = int(sys.argv[1])
    arguments = json.loads(sys.argv[2])
    with os.fdopen(reply_fd, "w", buffering=1) as replies:
        served = Served(arguments)
        answer(replies, 0, {"pids": served.probe("probe_pid"), "id": served.engine_id})
        for line in sys.stdin:
            command = json.loads(line)
            number = command.pop("number")
            try:
                answer(replies, number, getattr(served, command.pop("command"))(**command))
            except Exception as error:
                logger.exception("a command failed")
                answer(replies, number, {"error": f"{type(error).__name__}: {error}"})
    # The pipe was closed: the test is over, and nobody is left to whom an orderly end would matter.
    os._exit(0)


def answer(replies: TextIO, number: int, reply: dict[str, Any]) -> None:
    replies.write(json.dumps({"number": number} | reply) + "\n")


class Served:
    """The engine and its commands; each method named in `Engine` (engine.py) answers one."""

    def __init__(self, arguments: dict[str, Any]):
        if transfer := arguments.pop("kv_transfer_config", None):
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        arguments["worker_extension_cls"] = "rig.worker_probe.WorkerProbe"
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        transfer_config = self.engine.vllm_config.kv_transfer_config
        self.engine_id = transfer_config.engine_id if transfer_config else None
        core = cast(InprocClient, self.engine.engine_core).engine_core
        self.scheduler: Any = core.scheduler
        self._connector = self.scheduler.connector
        self.stopwatch = Stopwatch()
        self._watch()

    def generate(self, requests: list[dict[str, Any]], gaps: bool, pages: bool) -> dict[str, Any]:
        collected: dict[str, list[list[str | None]]] = {}
        with _PagesAtFinish(self, collected) if pages else nullcontext():
            outputs = self._run(requests, gaps)
        return {"answers": [_answer(outputs[r["id"]], gaps, collected) for r in requests]}

    def reset_prefix_cache(self, reset_connector: bool) -> dict[str, Any]:
        return {"done": self.engine.reset_prefix_cache(reset_connector=reset_connector)}

    def sleep_and_wake(self) -> dict[str, Any]:
        self.engine.sleep(1)
        self.engine.wake_up()
        return {}

    def reload_weights(self, path: str) -> dict[str, Any]:
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        return {}

    def scale_embeddings(self, factor: float, is_called: bool) -> dict[str, Any]:
        """By a call of the engine, or as a trainer in the same process does, who writes where the weights are."""
        if is_called:
            self.probe("probe_scale_embeddings", factor)
        else:
            self.engine.model_executor.driver_worker.probe_scale_embeddings(factor)
        return {}

    def connect(self, is_on: bool) -> dict[str, Any]:
        """Between requests, and when all stores are over."""
        if self.scheduler.connector is not None:
            self._connector = self.scheduler.connector
        self.scheduler.connector = self._connector if is_on else None
        self.probe("probe_connect", is_on)
        return {}

    def fields(self) -> dict[str, Any]:
        """The fields of the namespace that hold from the start on."""
        return {"fields": self.scheduler.connector.manager._identity.fields()}

    def poison(self) -> dict[str, Any]:
        self.probe("probe_poison")
        return {}

    def metrics(self) -> dict[str, Any]:
        total: dict[str, float] = defaultdict(float)
        for metric in self.engine.get_metrics():
            if isinstance(metric, Counter | Gauge):
                total[metric.name] += metric.value
                if source := metric.labels.get("source"):
                    total[f"{metric.name}:{source}"] += metric.value
        for family in REGISTRY.collect():  # vLLM tells of its own alone
            if family.name.startswith("forebay:") and family.type in ("counter", "gauge"):
                samples = (sample for sample in family.samples if not sample.name.endswith("_created"))
                total[family.name] += sum(sample.value for sample in samples)
        return {"metrics": total}

    def stores(self) -> dict[str, Any]:
        """What is not over yet: copies, and commits that the daemon has not acknowledged."""
        if self.scheduler.connector is None:
            return {"under_way": 0}
        manager = self.scheduler.connector.manager
        stats = manager._session.stats()
        return {"under_way": len(manager._stores) + stats.get("reservations_held", 0) + stats.get("queued", 0)}

    def durations(self) -> dict[str, Any]:
        return {"durations": self.stopwatch.take()}

    def stop_at(self, call: str, nth: int, when: str, rank: int) -> dict[str, Any]:
        self.probe("probe_stop_at", call, nth, when, rank)
        return {}

    def probe(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of `WorkerProbe` in every worker."""
        answers: list[Any] = self.engine.collective_rpc(method, args=args)
        return answers

    def _run(self, requests: list[dict[str, Any]], gaps: bool) -> dict[str, RequestOutput]:
        names = {}
        for request in requests:
            params = SamplingParams(
                temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=2 if gaps else None
            )
            name = self.engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, params)
            names[name] = request["id"]
        done: dict[str, RequestOutput] = {}
        idle = 0
        # As vLLM's own loop does, go on until the scheduler has told the workers of the finished requests too.
        while len(done) < len(requests) or self.scheduler.has_requests():
            with self.stopwatch.step():
                outputs = self.engine.step()
            finished = [cast(RequestOutput, output) for output in outputs if output.finished]
            done |= {names.get(output.request_id, output.request_id): output for output in finished}
            idle = 0 if outputs else idle + 1
            if idle > IDLE_STEPS:
                raise RuntimeError(
                    f"{IDLE_STEPS} steps without an output, {len(done)} of {len(requests)} requests done"
                )
        return done

    def _watch(self) -> None:
        self.stopwatch.wrap(self.scheduler, "schedule", "schedule")
        for name in CONNECTOR_CALLS:
            if self.scheduler.connector is not None and hasattr(self.scheduler.connector, name):
                self.stopwatch.wrap(self.scheduler.connector, name, f"connector.{name}", in_step=True)


# The connector's scheduler side, as vLLM calls it: time spent here is time the scheduler waits.
CONNECTOR_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_loaded_kv_cache_group_ids",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
    "take_events",
)


class Stopwatch:
    """Durations of calls by name, and per engine step the sum over the connector's calls in it."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._in_step = 0.0

    def wrap(self, owner: object, method: str, name: str, *, in_step: bool = False) -> None:
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self._seen[name].append(spent)
                if in_step:
                    self._in_step += spent

        setattr(owner, method, timed)

    def step(self) -> _Step:
        return _Step(self._seen, self._take_in_step)

    def take(self) -> dict[str, dict[str, float]]:
        """The summary of all names, and forgets the durations."""
        summary = {name: _summary(sorted(seconds)) for name, seconds in self._seen.items()}
        self._seen.clear()
        return summary

    def _take_in_step(self) -> float:
        spent, self._in_step = self._in_step, 0.0
        return spent


class _Step:
    def __init__(self, seen: dict[str, list[float]], take_in_step: Callable[[], float]):
        self._seen = seen
        self._take_in_step = take_in_step

    def __enter__(self) -> None:
        self._take_in_step()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seen["step"].append(time.perf_counter() - self._start)
        self._seen["connector in a step"].append(self._take_in_step())


def _summary(ordered: list[float]) -> dict[str, float]:
    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3

    return {"calls": len(ordered), "p50_ms": at(0.50), "p99_ms": at(0.99), "max_ms": ordered[-1] * 1e3}


class _PagesAtFinish:
    """While entered, takes digests of a request's blocks at its end, just before the scheduler frees them."""

    def __init__(self, served: Served, collected: dict[str, list[list[str | None]]]):
        self._served = served
        self._collected = collected

    def __enter__(self) -> None:
        self._scheduler = self._served.scheduler
        self._free = self._scheduler._free_request

        def free(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._take(request)
            return self._free(request, *args, **kwargs)

        self._scheduler._free_request = free

    def __exit__(self, *_: object) -> None:
        self._scheduler._free_request = self._free

    def _take(self, request: Any) -> None:
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        by_rank = self._served.probe("probe_page_digests", [list(group) for group in blocks])
        self._collected[request.request_id] = [list(_join_ranks(group)) for group in zip(*by_rank, strict=True)]


def _join_ranks(by_rank: tuple[list[str | None], ...]) -> Iterator[str | None]:
    for digests in zip(*by_rank, strict=True):
        yield None if digests[0] is None else "+".join(cast(tuple[str, ...], digests))


def _answer(output: RequestOutput, gaps: bool, pages: dict[str, list[list[str | None]]]) -> dict[str, Any]:
    completion = output.outputs[0]
    collected = [digests for name, digests in pages.items() if name.startswith(f"{output.request_id}-")]
    return {
        "id": output.request_id,
        "tokens": list(completion.token_ids),
        "finish_reason": str(completion.finish_reason),
        "prompt_tokens": len(output.prompt_token_ids or ()),
        "hit_tokens": output.num_cached_tokens or 0,
        "ttft_ms": output.metrics.first_token_latency * 1e3 if output.metrics else 0.0,
        "gaps": _gaps(completion.logprobs) if gaps else [],
        "pages": collected[0] if collected else [],
    }


def _gaps(logprobs: Any) -> list[float]:
    """Per generated token, how far the best candidate is ahead of the second best."""
    ordered = (sorted((entry.logprob for entry in position.values()), reverse=True) for position in logprobs)
    return [best[0] - best[1] for best in ordered]


if __name__ == "__main__":
    main()
