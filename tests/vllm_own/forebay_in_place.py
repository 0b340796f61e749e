"""A pytest plugin that puts Forebay's connector in the place of vLLM's in vLLM's own tests of its offloading connector.

Those tests script the manager (what is found, what may be stored) and count what the workers are told to copy.
Their script stays; all that `ForebayConnector` adds around it runs for real, over a session that is ready and whose
daemon is the fake of tests/connector. So they show that the connector keeps what vLLM promises of its own: which
blocks are stored, loaded and flushed, through preemption, aborts, sliding windows, partial tails and asynchronous
scheduling. A fault that the connector would hide from an engine fails the test.

`tools/vllm-own-tests.sh` runs them. `LEFT_OUT` names those that cannot be run so, each with the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "connector"), str(TESTS.parent / "python")]
os.environ["FOREBAY_STRICT"] = "1"

import pytest
from fake import FakeDaemon, FakeSession
from forebay.vllm import compat, connector
from forebay.vllm.connector import ForebayConnector
from forebay.vllm.manager import ForebayManager
from forebay.vllm.settings import Settings
from forebay.vllm.slots import PoolSlots
from rig import models
from tests.v1.kv_connector.unit import utils
from tests.v1.kv_connector.unit.offloading_connector import utils as runner
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.v1.kv_offload.base import OffloadingManager

LEFT_OUT = {
    "test_abort_queued_request_does_not_build_store_job": "says with a mock where blocks are stored, not with a spec",
    "test_swa_load_does_not_wait_for_unusable_pending_suffix": "brings a manager of its own, around which nothing is ours",
    "test_no_annotation_marks_no_groups": "has a mock for its draft model, whose weights nobody can tell",
}

made: list[ForebayConnector] = []


class InPlace(ForebayConnector):
    """What the tests get for `OffloadingConnector`. They ask for finished transfers by the older of two calls."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._is_asked = False
        made.append(self)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._is_asked:
            return super().get_finished(finished_req_ids)
        self._is_asked = True
        results = self.get_transfer_results(finished_req_ids)
        self._is_asked = False
        assert not results.failed_recving
        return results.finished_sending, results.finished_recving


class Slots(PoolSlots):
    """The tests' own idea of where blocks are, which travels as ours does."""

    def __init__(self, offload_keys: Iterable[bytes]):
        super().__init__(-1, "", b"", ())
        object.__setattr__(self, "offload_keys", list(offload_keys))

    def __repr__(self) -> str:
        return repr(self.__dict__["offload_keys"])


def complete(original: Any = compat.complete) -> Any:
    """Does what it does for an engine, but leaves the tests' spec and options where they are."""

    def with_their_spec(vllm_config: Any, kv_cache_config: Any) -> tuple[Any, list[str]]:
        completed, warnings = original(vllm_config, kv_cache_config)
        theirs = vllm_config.kv_transfer_config.kv_connector_extra_config
        completed.kv_transfer_config.kv_connector_extra_config = dict(theirs)
        return completed, warnings

    return with_their_spec


def script(spec: Any) -> None:
    """Our manager behind the mock that the test scripts: it hears all, and answers what vLLM's interface does not have."""
    (spec.settings, spec.warnings), spec.incarnation = Settings.parse({}), bytes(16)
    ours, mock = ForebayManager(spec.settings, spec.config.parallel.world_size), spec.manager
    spec.forebay, ours.spec = ours, spec
    for name in dir(ForebayManager):
        if name.startswith("_") or hasattr(OffloadingManager, name):
            continue
        setattr(mock, name, getattr(ours, name))
    for name in ("on_new_request", "on_request_finished", "on_schedule_end", "reset_cache", "shutdown"):
        getattr(mock, name).side_effect = heard(getattr(ours, name))
    for name in ("breaker", "health", "spec"):
        setattr(mock, name, getattr(ours, name))
    mock.__class__ = ForebayManager


def heard(method: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        method(*args, **kwargs)
        return DEFAULT

    return call


def open_session(settings: Settings, engine_id: str, incarnation: bytes, ranks: int, stock_blocks: int) -> FakeSession:
    daemon = FakeDaemon(slots=4096)
    daemon.engines += [SimpleNamespace(engine_id=engine_id)] * ranks  # type: ignore[list-item]
    return FakeSession(daemon, engine_id, ranks, stock_blocks)


def put_in_place() -> None:
    model = str(models.directory(models.LLAMA))
    defaults = utils.create_vllm_config.__defaults__
    assert defaults is not None and defaults[0] == "facebook/opt-125m"
    utils.create_vllm_config.__defaults__ = (model, *defaults[1:])
    offloading_connector.OffloadingConnector = runner.OffloadingConnector = InPlace
    KVConnectorFactory._registry["OffloadingConnector"] = lambda: InPlace
    runner.MockLoadStoreSpec = Slots
    runner.MockOffloadingWorker.take_failed_loads = lambda self: set()
    begin = runner.MockOffloadingSpec.__init__

    def begin_scripted(self: Any, *args: Any) -> None:
        begin(self, *args)
        script(self)

    runner.MockOffloadingSpec.__init__ = begin_scripted
    compat.complete = complete()
    connector.open_session = open_session


put_in_place()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {item.name.partition("[")[0] for item in items}
    assert names >= set(LEFT_OUT), f"these tests are gone: {set(LEFT_OUT) - names}"
    left_out = [item for item in items if item.name.partition("[")[0] in LEFT_OUT]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def without_hidden_faults() -> Iterator[None]:
    made.clear()
    yield
    for each in made:
        assert each.breaker.faults == 0, "the connector hid a fault from the engine"
        assert not each.breaker.is_off, f"the connector is off: {each.breaker.reason}"
