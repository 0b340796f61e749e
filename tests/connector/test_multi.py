"""Beside another connector, under vLLM's own `MultiConnector`; and with each role that a connector may have."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import harness
import pytest
from fake import FakeDaemon
from harness import Engine, Shape, prompt
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.request import RequestStatus

RECOMPUTE = {"kv_load_failure_policy": "recompute"}
SIBLING = {"kv_connector": "Sibling", "kv_connector_module_path": __name__, "kv_role": "kv_both"}


@dataclass
class Loads(KVConnectorMetadata):
    requests: set[str] = field(default_factory=set)


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """Another connector: promises 16 tokens to requests named `theirs...`, and every load of it fails."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads: set[str] = set()
        self._tried: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        is_ours = request.request_id.startswith("theirs") and request.request_id not in self._tried
        return (16, True) if is_ours and not num_computed_tokens else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loads.add(request.request_id)
            self._tried.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = Loads(self._loads), set()
        return loads

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        pass

    def wait_for_layer_load(self, *_: Any) -> None:
        pass

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loads = self._connector_metadata
        assert isinstance(loads, Loads)
        return KVConnectorTransferResults(finished_recving=set(loads.requests), failed_recving=set(loads.requests))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """What Forebay says at the level of an error."""
    logger = logging.getLogger("vllm.forebay")
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.mark.parametrize("order", ["before", "behind"])
def test_below_multi_connector_a_failed_load_is_computed(
    order: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(**{order: (SIBLING,)}, top=RECOMPUTE))  # type: ignore[arg-type]
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    assert engine.generate("warm", prompt(1, 100)) == cold
    assert engine.hits["warm"] == 96
    engine.forget()
    engine.workers[0].engine.fail_loads = 1
    assert engine.generate("failed", prompt(1, 100)) == cold
    assert engine.stats["forebay:failed_loads"] == 1
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_failed_load_of_another_connector_is_not_ours(
    order: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(**{order: (SIBLING,)}, top=RECOMPUTE))  # type: ignore[arg-type]
    theirs = engine.add("theirs", prompt(1, 100), max_tokens=30)
    while not theirs.output_token_ids:
        engine.step()
    assert engine.stats["forebay:failed_loads"] == 0
    assert not engine.connector.manager._requests["theirs"].is_barred
    engine.run(theirs)
    assert daemon.ready() == 6
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


@pytest.mark.parametrize("order", ["before", "behind"])
def test_below_a_policy_that_fails_requests_forebay_says_so_and_serves_nothing(
    order: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    alone = Engine(daemon, monkeypatch, Shape(engine_id="alone"))
    cold = alone.generate("cold", prompt(1, 100))
    lookups = daemon.lookups
    engine = Engine(daemon, monkeypatch, Shape(**{order: (SIBLING,)}))  # type: ignore[arg-type]
    requests = [engine.add(name, prompt(1, 100)) for name in ("first", "second")]
    assert engine.run(*requests)["second"] == cold
    assert all(request.status is RequestStatus.FINISHED_LENGTH_CAPPED for request in requests)
    assert daemon.lookups == lookups
    assert daemon.ready() == 6
    (error,) = errors
    assert "`MultiConnector` has `kv_load_failure_policy` `fail`" in error
    assert 'hint: write `"kv_load_failure_policy":"recompute"` beside `"kv_connector":"MultiConnector"`' in error


@pytest.mark.parametrize("options", [{"tenant": "a"}, {"our_tenant": "a"}, {"forebay": {"tenant": "a"}}])
def test_a_tenant_of_multi_connector_itself_switches_forebay_off(
    options: dict[str, Any], daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    """It would not reach Forebay, which would share with engines of other tenants."""
    made = harness.vllm_config

    def config(shape: Shape, rank: int = 0) -> VllmConfig:
        config = made(shape, rank)
        assert config.kv_transfer_config is not None
        config.kv_transfer_config.kv_connector_extra_config |= options
        return config

    monkeypatch.setattr(harness, "vllm_config", config)
    engine = Engine(daemon, monkeypatch, Shape(before=(SIBLING,), top=RECOMPUTE))
    engine.generate("first", prompt(1, 100))
    assert daemon.lookups == daemon.ready() == 0
    (error,) = errors
    assert "may be meant as `tenant`" in error and "hint" in error


def test_a_tenant_of_forebay_or_of_a_sibling_below_multi_connector_does_not(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    sibling = SIBLING | {"kv_connector_extra_config": {"tenant_of_theirs": "a"}}
    engine = Engine(daemon, monkeypatch, Shape(extra={"tenant": "a"}, before=(sibling,), top=RECOMPUTE))
    engine.generate("first", prompt(1, 100))
    assert daemon.ready() == 6 and not errors


@pytest.mark.parametrize("siblings", [(), (SIBLING,)])
def test_with_the_role_of_a_producer_forebay_says_so_and_serves_nothing(
    siblings: tuple[dict[str, Any], ...], daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    shape = Shape(behind=siblings, top=RECOMPUTE | {"kv_role": "kv_producer"})
    engine = Engine(daemon, monkeypatch, shape)
    assert not engine.scheduler.defer_block_free
    engine.generate("first", prompt(1, 100))
    assert daemon.lookups == daemon.ready() == 0
    (error,) = errors
    assert "with `kv_role` `kv_producer`" in error
    assert 'hint: write `"kv_role":"kv_both"`' in error


def test_a_consumer_is_served(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, errors: list[str]) -> None:
    engine = Engine(daemon, monkeypatch, Shape(top={"kv_role": "kv_consumer"}))
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    assert engine.generate("warm", prompt(1, 100)) == cold
    assert engine.hits["warm"] == 96
    assert not errors


class Particular(Sibling):
    """Needs a layout of its own."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "LBHNC"


@pytest.mark.parametrize(
    ("has_gpu", "extra", "layout"),
    [(True, {"gpu_copies": True}, "BLHNC"), (True, {}, "LBHNC"), (False, {"gpu_copies": True}, "LBHNC")]
    + [(True, {"gpu_copies": "nonsense"}, "LBHNC")],
)
def test_layers_side_by_side_are_asked_for_where_a_gpu_is_copied_from(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, extra: dict[str, Any], layout: str
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: has_gpu)
    config = harness.vllm_config(Shape(extra=extra))
    config.cache_config.kv_cache_layout = None
    assert resolve_kv_cache_layout(config, [["LBNHC", "LBHNC", "BLHNC"]]).name == layout
    config.cache_config.kv_cache_layout = None
    assert resolve_kv_cache_layout(config, [["LBHNC", "LBNHC"]]).name == "LBHNC", "the backend has no other"


def test_beside_another_connector_no_layout_is_asked_for_that_would_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    particular = SIBLING | {"kv_connector": "Particular"}
    config = harness.vllm_config(Shape(extra={"gpu_copies": True}, behind=(particular,)))
    config.cache_config.kv_cache_layout = None
    assert resolve_kv_cache_layout(config, [["LBNHC", "LBHNC", "BLHNC"]]).name == "LBHNC"
