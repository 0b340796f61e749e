"""Weights that change in memory move the namespace, whatever way they came; nothing else does.

The engine core is vLLM's own class around the harness's scheduler; its executor has one worker with a model of two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake import FakeDaemon
from forebay.vllm import probe
from harness import Engine, Shape, prompt
from vllm.v1.engine.core import EngineCore


class Worker:
    """What vLLM's worker has that matters here, and ways to other weights."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Embedding(50, 33), torch.nn.Linear(33, 5))
        self.saved = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.weighings = 0

    def get_model(self) -> torch.nn.Module:
        self.weighings += 1
        return self.model

    def get_draft_model(self) -> None:
        return None

    def look(self) -> str:
        return "nothing is changed by this"

    @torch.no_grad()
    def change(self) -> None:
        self.model[0].weight.data[49, 32] += 1e-7  # type: ignore[operator,index,union-attr]

    @torch.no_grad()
    def swap_rows(self) -> None:
        self.model[0].weight.data[[3, 4]] = self.model[0].weight.data[[4, 3]]  # type: ignore[operator,index,union-attr]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, saved in zip(self.model.parameters(), self.saved, strict=True):
            parameter.data.copy_(saved)

    def fail(self) -> None:
        self.change()
        raise RuntimeError("half-way")

    def update_weights(self) -> None:
        self.change()


class Executor:
    def __init__(self, worker: Worker):
        self.worker = worker
        self.sleeping_tags: set[str] = set()

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if callable(method):
            return [method(self.worker)]
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    def wake_up(self, tags: Any) -> None:
        self.sleeping_tags.clear()

    def get_kv_connector_handshake_metadata(self) -> list[None]:
        return [None]

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)


class Core(EngineCore):
    def __init__(self, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, shape: Shape | None = None):
        self.worker = Worker()
        self.model_executor: Any = Executor(self.worker)
        self.engine = Engine(daemon, monkeypatch, shape)
        self.scheduler = self.engine.scheduler

    def resume_scheduler(self) -> None: ...


@pytest.fixture
def core(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(daemon, monkeypatch)


def forget(core: Core, **how: bool) -> None:
    assert core.reset_prefix_cache(**how)
    for worker in core.engine.workers:
        worker.poison()


def test_calls_and_resets_that_change_no_weights_keep_the_namespace(core: Core) -> None:
    cold = core.engine.generate("cold", prompt(1, 100))
    named = core.engine.session.namespace
    assert core.collective_rpc("look") == ["nothing is changed by this"]
    core.wake_up()
    core.wake_up(tags=["weights"])
    forget(core)
    assert core.engine.generate("warm", prompt(1, 100)) == cold
    assert core.engine.hits["warm"] == 96
    assert core.engine.session.namespace == named and "epoch" not in core.engine.session.fields
    core.engine.assert_nothing_is_held()
    core.engine.assert_no_faults()


WAYS: dict[str, Callable[[Core], object]] = {
    "a user's call": lambda core: core.collective_rpc("change"),
    "a call that fails half-way": lambda core: pytest.raises(RuntimeError, core.collective_rpc, "fail"),
    "a function": lambda core: core.collective_rpc(Worker.change),
    "an order of rows": lambda core: core.collective_rpc("swap_rows"),
    "an update of which more is to come": lambda core: core.collective_rpc("update_weights"),
    "behind the engine's back": lambda core: core.worker.change(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", [{}, {"reset_connector": True}], ids=["reset by default", "reset with connector"])
def test_kv_of_other_weights_is_neither_found_nor_published(
    way: str, how: dict[str, bool], core: Core, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.engine.generate("cold", prompt(1, 100))
    old = set(daemon.index)
    WAYS[way](core)
    forget(core, **how)
    core.engine.generate("after", prompt(1, 100))
    assert core.engine.hits["after"] == 0
    new = set(daemon.index) - old
    assert len(new) == 6 and all(dict(key[0])["epoch"] for key in new)
    forget(core)
    core.engine.generate("again", prompt(1, 100))
    assert core.engine.hits["again"] == 96
    neighbour = Core(daemon, monkeypatch, Shape(engine_id="neighbour")).engine
    neighbour.generate("theirs", prompt(1, 100))
    assert neighbour.hits["theirs"] == 96  # of before
    core.engine.assert_nothing_is_held()
    core.engine.assert_no_faults()


def test_before_the_engine_forgets_its_own_kv_nothing_new_is_stored(core: Core, daemon: FakeDaemon) -> None:
    core.engine.generate("cold", prompt(1, 100))
    core.collective_rpc("change")
    core.engine.generate("longer", prompt(1, 100) + prompt(2, 100))  # built on KV of the old weights
    assert core.engine.hits["longer"] == 96
    assert daemon.ready() == 6
    forget(core)
    core.engine.generate("anew", prompt(1, 100) + prompt(2, 100))
    assert core.engine.hits["anew"] == 0
    assert daemon.ready() == 6 + 12


def test_a_reset_that_fails_while_requests_run_lets_nothing_be_stored(core: Core, daemon: FakeDaemon) -> None:
    core.engine.generate("cold", prompt(1, 100))
    running = core.engine.add("running", prompt(1, 100) + prompt(2, 30), max_tokens=40)
    core.engine.step()
    core.worker.change()
    assert not core.reset_prefix_cache(reset_connector=True)
    core.engine.run(running)
    assert daemon.ready() == 6
    forget(core)
    core.engine.generate("anew", prompt(1, 100))
    assert daemon.ready() == 12


def test_what_is_being_stored_when_weights_change_is_never_named(core: Core, daemon: FakeDaemon) -> None:
    (worker,) = core.engine.workers
    worker.engine.is_holding = True
    request = core.engine.add("a", prompt(1, 100), max_tokens=30)
    for _ in range(4):
        core.engine.step()
    assert daemon.reserved == 6
    core.collective_rpc("change")
    assert daemon.reserved == 6  # the worker may still be copying
    worker.engine.is_holding = False
    core.engine.run(request)
    assert daemon.outcomes == [] and daemon.ready() == 0
    core.engine.assert_nothing_is_held()
    core.engine.assert_no_faults()


def test_a_reset_that_preempts_is_a_new_beginning(core: Core, daemon: FakeDaemon) -> None:
    request = core.engine.add("a", prompt(1, 100), max_tokens=20)
    for _ in range(4):
        core.engine.step()
    old = set(daemon.index)
    core.collective_rpc("change")
    forget(core, reset_running_requests=True, reset_connector=True)
    core.engine.run(request)
    new = set(daemon.index) - old
    assert len(new) >= 6 and all(dict(key[0])["epoch"] for key in new)
    core.engine.assert_nothing_is_held()


def test_the_weights_of_the_start_have_their_name_again(core: Core) -> None:
    core.engine.generate("cold", prompt(1, 100))
    named = core.engine.session.namespace
    core.collective_rpc("change")
    forget(core)
    core.engine.generate("other", prompt(1, 100))
    core.collective_rpc("restore")
    forget(core)
    core.engine.generate("back", prompt(1, 100))
    assert core.engine.session.namespace == named
    assert core.engine.hits == {"cold": 0, "other": 0, "back": 96}


def test_every_change_is_another_namespace(core: Core) -> None:
    seen = set()
    for turn in range(3):
        core.collective_rpc("change")
        core.engine.generate(str(turn), prompt(1, 100))
        seen.add(core.engine.session.namespace)
    assert len(seen) == 3


def test_sleeping_weights_are_not_touched(core: Core) -> None:
    core.engine.generate("cold", prompt(1, 100))
    core.model_executor.sleeping_tags = {"weights", "kv_cache"}
    weighings = core.worker.weighings
    core.collective_rpc("look")
    core.reset_prefix_cache()
    assert core.worker.weighings == weighings
    core.wake_up(["weights", "kv_cache"])
    forget(core)
    core.engine.generate("awake", prompt(1, 100))
    assert core.engine.hits["awake"] == 96  # the same weights as before


def test_a_worker_that_cannot_be_asked_counts_as_changed(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    core.engine.generate("cold", prompt(1, 100))
    monkeypatch.setattr(core.worker, "get_model", lambda: 1 / 0)
    forget(core)
    core.engine.generate("after", prompt(1, 100))
    assert core.engine.hits["after"] == 0
    core.engine.assert_no_faults()


def test_weights_that_a_kernel_keeps_are_new_with_a_new_function() -> None:
    worker = Worker()
    layer = worker.model[1]
    layer.weight = torch.nn.Parameter(torch.empty(0))
    layer.cpu_linear = lambda x: x
    before = probe.weigh(worker)
    assert before is not None and not before.is_whole and probe.weigh(worker) == before
    layer.cpu_linear = lambda x: x
    assert probe.weigh(worker) != before


def test_without_an_engine_core_a_reset_of_the_connector_is_the_call_that_makes_it_right(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", prompt(1, 100))
    assert engine.session.fields["probe"] == "unprobed:no engine core"
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.generate("after", prompt(1, 100))
    assert engine.hits["after"] == 0


def test_a_worker_that_cannot_be_probed_says_so(core: Core) -> None:
    core.engine.generate("a", prompt(1, 30))
    assert "unprobed" in core.engine.session.fields["probe"]
    assert "AttributeError" in probe.probe(SimpleNamespace())
