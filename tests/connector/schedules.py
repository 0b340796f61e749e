"""Random schedules for an engine on vLLM's tiering with Forebay's pool below: everything that may happen, in any order.

Holds true: a schedule is a function of its seed. vLLM's workers copy late and in pieces, as on a GPU. After each step every row
that vLLM's host tier calls ready holds what was stored under its key, and the harness compares every block that a request
relies on. At the end all faults are over: every request ends, and neither vLLM nor Forebay holds anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import prompt
from rig.host_tier import HostWorker
from tiered import Engine
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import Request, RequestStatus

STEPS_TO_END = 3000


class LateWorker:
    """vLLM's worker as on a GPU: what is submitted is copied later, in the order of its direction, or when waited for."""

    def __init__(self, worker: HostWorker, chance: random.Random):
        self._worker, self._chance = worker, chance
        self._stores: list[tuple[Any, ...]] = []
        self._loads: list[tuple[Any, ...]] = []
        self.is_late = True
        self._copy_store, self._copy_load, self._finished = worker.submit_store, worker.submit_load, worker.get_finished
        worker.submit_store = lambda *job: bool(self._stores.append(job) or True)  # type: ignore[method-assign]
        worker.submit_load = lambda *job: bool(self._loads.append(job) or True)  # type: ignore[method-assign]
        worker.wait, worker.get_finished = self.wait, self.finished  # type: ignore[method-assign]

    def finished(self) -> Any:
        for queue, copy in ((self._stores, self._copy_store), (self._loads, self._copy_load)):
            while queue and not (self.is_late and self._chance.random() < 0.5):
                copy(*queue.pop(0))
        return self._finished()

    def wait(self, job_ids: set[int]) -> None:
        for queue, copy in ((self._stores, self._copy_store), (self._loads, self._copy_load)):
            while any(job[0] in job_ids for job in queue):
                copy(*queue.pop(0))


class Known:
    """What was stored under each key, by whichever engine came first, and the rows that are compared with it."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, OffloadKey], bytes] = {}
        self.compared = 0

    def watch(self, engine: Engine) -> None:
        manager: Any = engine.connector.scheduler.manager
        complete = manager.primary_tier.complete_store

        def completed(keys: Any, context: Any, success: bool = True) -> None:
            complete(keys, context, success)
            rows = np.asarray(engine.tier._primary_kv_view)
            for key in keys if success else ():
                if (chunk := manager.primary_tier._policy.get(key)) is not None and chunk.is_ready:
                    self.bytes.setdefault((engine.weights, key), rows[chunk.chunk_id].tobytes())

        manager.primary_tier.complete_store = completed

    def compare(self, engine: Engine) -> None:
        manager: Any = engine.connector.scheduler.manager
        rows = np.asarray(engine.tier._primary_kv_view)
        for key, chunk in manager.primary_tier._policy.chunks.items():
            if chunk.is_ready:
                self.compared += 1
                found = rows[chunk.chunk_id].tobytes()
                assert found == self.bytes[engine.weights, key], f"row {chunk.chunk_id} is not what {key.hex()} holds"


class Schedule:
    """Some engines on one daemon, and what happens to them. `harms` and `heal` are what can happen to the daemon."""

    def __init__(
        self,
        seed: int,
        start: Callable[[], Engine],
        engines: int,
        harms: list[Callable[[], None]],
        heal: Callable[[], None],
    ):
        self.chance = random.Random(seed)
        self.seed, self._start, self._harms, self._heal = seed, start, harms, heal
        self.known = Known()
        self.steps = self.hits = self.names = 0
        self.did: list[str] = []
        self.late: dict[Engine, list[LateWorker]] = {}
        self.engines = [self._begin() for _ in range(engines)]
        self.requests: dict[str, tuple[Engine, Request]] = {}

    def run(self, actions: int) -> None:
        try:
            for _ in range(actions):
                self._act()
            self._end()
        except BaseException:
            print(f"seed {self.seed}, after {len(self.did)} actions: {' '.join(self.did[-60:])}")
            raise

    def _begin(self) -> Engine:
        engine = self._start()
        workers: list[Any] = [worker.connector for worker in engine.workers]
        self.late[engine] = [LateWorker(worker.connector_worker.worker, self.chance) for worker in workers]
        self.known.watch(engine)
        return engine

    def _act(self) -> None:
        engine = self.chance.choice(self.engines)
        actions: list[tuple[int, Callable[[Engine], None]]] = [
            (40, self._steps),
            (20, self._ask),
            (4, self._abort),
            (2, self._reset),
            (2, self._reset_running),
            (2, self._new_weights),
            (2, self._finish_all),
            (1, self._again),
            (10, self._harm),
            (5, lambda _: self._heal()),
        ]
        weights, choices = zip(*actions, strict=True)
        (act,) = self.chance.choices(choices, weights)
        act(engine)

    def _steps(self, engine: Engine) -> None:
        count = self.chance.randint(1, 6)
        self.did.append(f"step*{count}")
        for _ in range(count):
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        self.steps += 1
        engine.step()
        self.known.compare(engine)

    def _ask(self, engine: Engine) -> None:
        self.names += 1
        name = f"r{self.names}"
        tokens = prompt(self.chance.randrange(4), self.chance.randint(10, 230))
        if self.chance.random() < 0.3:
            tokens = tokens[: len(tokens) // 2] + prompt(100 + self.chance.randrange(3), len(tokens) // 2 + 1)
        self.did.append(f"ask({name},{len(tokens)})")
        self.requests[name] = engine, engine.add(name, tokens, self.chance.choice((1, 4, 20)))

    def _abort(self, engine: Engine) -> None:
        names = [
            name for name, (owner, request) in self.requests.items() if owner is engine and not request.is_finished()
        ]
        if names:
            name = self.chance.choice(names)
            self.did.append(f"abort({name},{self.requests[name][1].status.name})")
            engine.abort(self.requests[name][1])

    def _reset(self, engine: Engine) -> None:
        if _may_reset(engine):
            self.did.append("reset")
            engine.scheduler.reset_prefix_cache(reset_connector=True)

    def _reset_running(self, engine: Engine) -> None:
        if _may_reset(engine) and _may_preempt_all(engine):
            self.did.append("reset_running")
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def _new_weights(self, engine: Engine) -> None:
        """As an engine that is paused, and drops all it has computed before it gets its weights or behind that."""
        if not (_may_reset(engine) and _may_preempt_all(engine)):
            return
        is_first = self.chance.random() < 0.5
        self.did.append(f"weights({is_first})")
        if is_first:
            engine.tier.weights_moved(False)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.weights += 1 if engine.weights else 1000 * self.names
        if not is_first:
            engine.tier.weights_moved(False)

    def _finish_all(self, engine: Engine) -> None:
        self.did.append("finish")
        deadline = self.steps + 60
        while engine.scheduler.has_requests() and self.steps < deadline:
            self._step(engine)

    def _again(self, engine: Engine) -> None:
        """The engine ends with all that is under way, and another takes its place."""
        self.did.append("again")
        engine.stop()
        self.requests = {name: (owner, asked) for name, (owner, asked) in self.requests.items() if owner is not engine}
        self.engines[self.engines.index(engine)] = self._begin()

    def _harm(self, engine: Engine) -> None:
        harm = self.chance.choice(self._harms)
        self.did.append(harm.__name__)
        harm()

    def _end(self) -> None:
        """Nothing harms any more."""
        self.did.append("END")
        self._heal()
        for engine in self.engines:
            for worker in self.late[engine]:
                worker.is_late = False
            first = self.steps
            while engine.scheduler.has_requests():
                assert self.steps < first + STEPS_TO_END, _held(engine)
                self._step(engine)
            engine.settle()
            self.known.compare(engine)
            _assert_vllm_holds_nothing(engine)
        for _, request in self.requests.values():
            assert request.is_finished(), request.request_id
        for engine in self.engines:
            engine.assert_nothing_is_held()
            engine.assert_no_faults()
            self.hits += sum(engine.hits.values())


def _may_reset(engine: Engine) -> bool:
    """vLLM refuses another reset before its workers have heard of the last."""
    return not engine.connector.scheduler._current_batch_jobs_to_flush


def _may_preempt_all(engine: Engine) -> bool:
    """vLLM refuses that while a request waits for its load, or has it and waits for its turn, and while a load holds blocks."""
    if len(engine.scheduler.kv_holding_waiting):
        return False
    requests = engine.scheduler.requests.values()
    is_loading = any(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests)
    return not is_loading and not any(worker.connector.connector_worker._load_jobs for worker in engine.workers)


def _held(engine: Engine) -> str:
    requests = {name: request.status.name for name, request in engine.scheduler.requests.items()}
    offloading: Any = engine.connector.scheduler
    return f"{requests} vLLM's jobs {offloading._jobs} tiering's jobs {offloading.manager._jobs}"


def _assert_vllm_holds_nothing(engine: Engine) -> None:
    offloading: Any = engine.connector.scheduler
    manager = offloading.manager
    assert not offloading._jobs and not offloading._req_status, (offloading._jobs, offloading._req_status)
    assert not manager._jobs and not manager._req_state and not manager._pending_load_submissions, manager._req_state
    for key, chunk in manager.primary_tier._policy.chunks.items():
        assert chunk.ref_cnt == 0, f"{key.hex()} is held by {chunk.ref_cnt}"
