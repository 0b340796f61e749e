"""Whatever breaks, the engine goes on as if there were no cache: same tokens, no stall, nothing held in the end."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from fake import FakeDaemon, FakeEngine
from forebay.vllm.connector import ForebayConnector
from forebay.vllm.fingerprint import Unreadable
from forebay.vllm.slots import PoolSlots
from harness import Engine, Shape, prompt, vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import GPULoadStoreSpec

PROMPTS = [prompt(seed, 100) for seed in range(4)]


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What an engine says whose daemon is never there."""
    absent = FakeDaemon()
    absent.is_up = False
    engine = Engine(absent, monkeypatch, Shape(engine_id="alone"))
    return [engine.generate(f"r{at}", tokens) for at, tokens in enumerate(PROMPTS)]


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Forebay's messages, but for the one at each start that says what the engine shares by."""
    logger = logging.getLogger("vllm.forebay")
    messages: list[str] = []
    handler = logging.Handler()
    handler.addFilter(lambda record: not record.getMessage().startswith("forebay shares blocks of "))
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture
def xxhash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another 128-bit digest in the place of a package that vLLM does not require."""

    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    monkeypatch.setattr("vllm.utils.hashing._xxhash", SimpleNamespace(xxh3_128_digest=digest))


def test_without_a_daemon_nothing_is_asked_stored_or_waited_for(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    daemon.is_up = False
    engine = Engine(daemon, monkeypatch)
    assert [engine.generate(f"r{at}", tokens) for at, tokens in enumerate(PROMPTS)] == expected
    assert daemon.lookups == 0
    assert engine.connector.timings.waits.max_ns == 0
    assert engine.stats["forebay:is_ready"] == 0
    assert "vllm:kv_offload_allocation_failure" not in engine.stats  # an answer of None would count and warn
    engine.assert_no_faults()


def test_a_daemon_that_comes_later_is_used_from_then_on(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.is_up = False
    engine = Engine(daemon, monkeypatch)
    engine.generate("before", PROMPTS[0])
    daemon.is_up = True
    engine.generate("cold", PROMPTS[1])
    engine.forget()
    engine.generate("warm", PROMPTS[1])
    assert engine.hits["warm"] == 96
    engine.assert_no_faults()


def test_the_log_says_once_when_the_daemon_goes_and_comes(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr("forebay.vllm.health.LOOK_SECONDS", 0.0)
    engine = Engine(daemon, monkeypatch)
    for at, is_up in enumerate([True, True, False, False, True]):
        daemon.is_up = is_up
        engine.generate(str(at), PROMPTS[0])
        engine.connector.manager.say_how_it_is()
        assert engine.stats["forebay:is_ready"] == is_up
    ready = "forebay is ready: a pool at /nowhere"
    assert log == [ready, "forebay is not ready, requests are computed meanwhile: connecting", ready]


def test_a_daemon_that_dies_under_a_store_leaves_no_trace(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    engine = Engine(daemon, monkeypatch)
    (worker,) = engine.workers
    worker.engine.is_holding = True
    request = engine.add("r0", PROMPTS[0])
    for _ in range(3):
        engine.step()
    daemon.is_up = False
    worker.engine.is_holding = False
    assert engine.run(request)["r0"] == expected[0]
    assert [engine.generate(f"r{at}", PROMPTS[at]) for at in (1, 2, 3)] == expected[1:]
    engine.assert_no_faults()


def test_a_load_from_a_pool_that_was_replaced_is_computed(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", PROMPTS[0])
    engine.forget()
    (worker,) = engine.workers
    worker.engine.is_holding = True
    request = engine.add("warm", PROMPTS[0])
    engine.step()
    daemon.replace_pool()
    worker.engine.is_holding = False
    lookups = daemon.lookups
    assert engine.run(request)["warm"] == expected[0]
    assert daemon.lookups == lookups  # the same request does not ask again, or it might fail for ever
    assert engine.stats["forebay:failed_loads"] == 1
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_slots_taken_while_the_pool_was_replaced_are_not_used(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.connector.manager.get_ready()
    reserve = engine.session.reserve

    def reserve_and_replace(group: int, count: int) -> tuple[bytes, bytes]:
        slots = reserve(group, count)
        daemon.replace_pool()
        return slots

    monkeypatch.setattr(engine.session, "reserve", reserve_and_replace)
    assert engine.generate("r0", PROMPTS[0]) == expected[0]
    assert daemon.outcomes == []
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


@pytest.mark.parametrize("groups", ["full", "hybrid"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_fails_in_one_rank_is_computed_and_never_tried_again(
    groups: str, ranks: int, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(groups=groups, ranks=ranks))
    cold = engine.generate("cold", PROMPTS[0])
    engine.forget()
    engine.workers[-1].engine.fail_loads = 1
    assert engine.generate("warm", PROMPTS[0]) == cold
    assert engine.hits["warm"] == 0
    assert engine.stats["forebay:failed_loads"] == 1
    engine.forget()
    assert engine.generate("next", PROMPTS[0]) == cold
    assert engine.hits["next"] >= 95
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_a_load_within_its_step_that_fails_names_its_blocks(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.33 makes them with `sync_load_budget_bytes`: its request runs on, so that no request can be named."""
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", PROMPTS[0])
    (worker,) = engine.workers
    copies = worker.forebay._worker
    blocks = GPULoadStoreSpec([7, 8], group_sizes=[2], block_indices=[0])
    refused = PoolSlots(-1, "r", b"", ())
    assert copies.submit_load(90, refused, blocks, expedited=True)
    assert copies.submit_load(91, refused, GPULoadStoreSpec([9], group_sizes=[1], block_indices=[0]))
    assert {result.job_id for result in copies.get_finished()} == {90, 91}
    assert copies.take_failed_loads() == {"r"}
    assert worker.connector.get_block_ids_with_load_errors() == {7, 8}
    assert worker.connector.get_block_ids_with_load_errors() == set()


def test_a_failed_load_does_not_fail_the_request(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    assert engine.config.kv_transfer_config is not None
    assert engine.config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert engine.scheduler.recompute_kv_load_failures


def test_a_store_that_fails_in_one_rank_is_never_named(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(ranks=2))
    engine.workers[1].engine.fail_stores = 1
    engine.generate("a", PROMPTS[0])
    assert daemon.ready() == 0
    assert daemon.outcomes == ["incomplete"] * 6
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_stores_that_finish_out_of_order_are_named_in_order(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(max_tokens_per_step=32))
    original = FakeEngine.finished

    def last_first(self: FakeEngine) -> list[tuple[int, bool, int, float]]:
        """Keeps all but the newest of the finished jobs for the next time."""
        done = original(self)
        self._done = done[:-1] + self._done
        return done[-1:]

    monkeypatch.setattr(FakeEngine, "finished", last_first)
    (worker,) = engine.workers
    worker.engine.is_holding = True
    request = engine.add("a", PROMPTS[0])
    for _ in range(6):
        engine.step()
    worker.engine.is_holding = False
    engine.run(request)
    assert daemon.outcomes == ["stored"] * 6
    engine.assert_nothing_is_held()


def test_a_full_pool_ends_the_storing_of_a_request_without_a_retry(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = FakeDaemon(slots=4)
    engine = Engine(small, monkeypatch, Shape(max_tokens_per_step=32, groups="hybrid"))
    for worker in engine.workers:
        worker.engine.is_holding = True  # what is being stored cannot be evicted
    request = engine.add("a", prompt(1, 300))
    while request.num_computed_tokens < 200:
        engine.step()
    reserves = engine.session.calls.count("reserve")
    for worker in engine.workers:
        worker.engine.is_holding = False
    engine.run(request)
    assert engine.session.calls.count("reserve") == reserves <= 4
    full = small.ready(group=0)
    assert 0 < full <= 4
    assert "orphan" not in small.outcomes
    assert engine.stats["forebay:refused_blocks"] > 0
    assert "vllm:kv_offload_allocation_failure" not in engine.stats
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_a_tiny_pool_with_many_requests_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = FakeDaemon(slots=8)
    engine = Engine(tiny, monkeypatch, Shape(blocks=40, extra={"stock_blocks": 2}))
    for turn in range(3):
        requests = [engine.add(f"{turn}.{at}", prompt(at, 60 + at)) for at in range(20)]
        engine.run(*requests)
        engine.forget()
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


@pytest.mark.faults
@pytest.mark.parametrize("method", ["state", "lookup", "reserve", "commit", "abort", "set_namespace"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), type("PanicException", (BaseException,), {})("panic")])
def test_a_session_that_raises_costs_hits_and_nothing_else(
    method: str, error: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    engine = Engine(daemon, monkeypatch)
    if method != "set_namespace":
        assert engine.generate("warm up", PROMPTS[0]) == expected[0]
    engine.forget()
    engine.session.faults[method] = error
    assert [engine.generate(f"r{at}", tokens) for at, tokens in enumerate(PROMPTS)] == expected
    assert not engine.connector.manager._requests
    assert not engine.connector.manager._jobs


@pytest.mark.faults
def test_faults_are_logged_once_for_each_place_and_end_in_silence(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str], expected: list[list[int]]
) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.session.faults["lookup"] = RuntimeError("boom")
    for turn in range(5):
        assert [engine.generate(f"{turn}.{at}", tokens) for at, tokens in enumerate(PROMPTS)] == expected
    assert sum("ForebayManager.is_answered" in line for line in log) == 1
    assert sum("takes no new work" in line for line in log) == 1
    assert engine.session.calls.count("lookup") == 8
    assert engine.connector.breaker.is_open


@pytest.mark.faults
@pytest.mark.parametrize("method", ["update_state_after_alloc", "build_connector_meta", "update_connector_output"])
def test_when_vllms_part_fails_forebay_is_off_and_no_request_hangs(
    method: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str], expected: list[list[int]]
) -> None:
    engine = Engine(daemon, monkeypatch)
    for at, tokens in enumerate(PROMPTS):
        engine.generate(f"cold {at}", tokens)
    engine.forget()
    original = getattr(OffloadingConnectorScheduler, method)

    def broken(self: Any, *args: Any) -> Any:
        original(self, *args)  # raises after the books were changed, which is the worst time
        raise AssertionError("upstream")

    monkeypatch.setattr(OffloadingConnectorScheduler, method, broken)
    requests = [engine.add(f"r{at}", tokens) for at, tokens in enumerate(PROMPTS)]
    assert list(engine.run(*requests).values()) == expected
    assert sum("forebay is off" in line for line in log) == 1
    assert not engine.connector.has_pending_push_work()
    assert not engine.scheduler.requests
    engine.assert_nothing_is_held()


@pytest.mark.faults
def test_a_store_under_way_when_vllms_part_fails_is_never_named(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    """vLLM's part alone knows when the blocks that it is copied from are given to others."""
    engine = Engine(daemon, monkeypatch)
    (worker,) = engine.workers
    worker.engine.is_holding = True
    request = engine.add("r", PROMPTS[0], max_tokens=30)
    for _ in range(4):
        engine.step()
    assert daemon.reserved == 6 and daemon.ready() == 0
    monkeypatch.setattr(OffloadingConnectorScheduler, "build_connector_meta", lambda *_: 1 / 0)
    engine.step()
    assert engine.connector.breaker.is_off
    assert daemon.reserved == 6  # the worker reads and writes on
    worker.engine.is_holding = False
    engine.run(request)
    assert daemon.ready() == 0
    engine.assert_nothing_is_held()


def test_options_that_are_ignored_are_named_where_all_halves_share_one_configuration(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """As in an engine of one process, where the worker's half is made before the scheduler's."""
    engine = Engine(daemon, monkeypatch)
    config = vllm_config(Shape(extra={"sync_load_budget_bytes": 1 << 30, "self_describing_kv_events": True}))
    ForebayConnector.build_prom_metrics(config, defaultdict(MagicMock), ["engine"], {0: ["0"]})
    for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
        connector = ForebayConnector(config, role, engine.kv_config)
        passed = connector._vllm_config.kv_transfer_config
        assert passed is not None
        assert not {"sync_load_budget_bytes", "self_describing_kv_events"} & passed.kv_connector_extra_config.keys()
    for name in ("sync_load_budget_bytes", "self_describing_kv_events"):
        assert sum(f"`{name}` is ignored" in line for line in log) == 1


@pytest.mark.faults
def test_an_engine_that_spans_hosts_runs_without_forebay(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str], expected: list[list[int]]
) -> None:
    monkeypatch.setattr("vllm.config.ParallelConfig.nnodes_within_dp", 2)
    engine = Engine(daemon, monkeypatch)
    assert [engine.generate(f"r{at}", tokens) for at, tokens in enumerate(PROMPTS)] == expected
    assert not daemon.sessions and not daemon.engines
    assert sum("spans 2 hosts" in line for line in log) == 1


@pytest.mark.faults
def test_a_configuration_that_vllms_part_refuses_turns_forebay_off(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str], expected: list[list[int]]
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"block_size": 24}))
    assert [engine.generate(f"r{at}", tokens) for at, tokens in enumerate(PROMPTS)] == expected
    assert any("must be a multiple of the GPU KV cache block size" in line for line in log)
    assert not daemon.sessions


@pytest.mark.faults
def test_weights_that_cannot_be_told_are_said_once_and_leave_the_engine_without_a_cache(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str], expected: list[list[int]]
) -> None:
    def unreadable(*paths: object, **how: object) -> str:
        raise Unreadable("permission denied")

    monkeypatch.setattr("forebay.vllm.identity.START_SECONDS", 0.05)
    monkeypatch.setattr("forebay.vllm.identity.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("forebay.vllm.loaded.fingerprint", unreadable)
    engine = Engine(daemon, monkeypatch)
    assert [engine.generate(f"r{at}", tokens) for at, tokens in enumerate(PROMPTS)] == expected
    assert sum("cannot identify the weights" in line and "permission denied" in line for line in log) == 1
    assert daemon.lookups == 0 and daemon.ready() == 0
    engine.assert_no_faults()


@pytest.mark.faults
def test_a_worker_that_cannot_copy_leaves_the_engine_without_a_cache(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str], expected: list[list[int]]
) -> None:
    monkeypatch.setattr("forebay.vllm.worker._extent", lambda *_: 1 / 0)
    engine = Engine(daemon, monkeypatch, Shape(extra={"lookup_deadline_ms": 50}))
    assert [engine.generate(f"r{at}", tokens) for at, tokens in enumerate(PROMPTS)] == expected
    assert any("cannot describe" in line for line in log)
    assert daemon.lookups == 0


def test_a_random_hash_root_is_warned_of_once_and_stores_nothing(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str], xxhash: None
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(hash_algorithm="xxhash"))
    for at, tokens in enumerate(PROMPTS):
        engine.generate(f"r{at}", tokens)
    warnings = [line for line in log if "random root" in line]
    assert len(warnings) == 1
    assert "--prefix-caching-hash-algo sha256" in warnings[0] and "PYTHONHASHSEED" in warnings[0]
    assert daemon.lookups == 0 and daemon.ready() == 0
    assert engine.session.namespace is None
    engine.assert_no_faults()


def test_a_fixed_hash_root_is_as_good_as_the_default(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, xxhash: None
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    engine = Engine(daemon, monkeypatch, Shape(hash_algorithm="xxhash"))
    engine.generate("cold", PROMPTS[0])
    engine.forget()
    engine.generate("warm", PROMPTS[0])
    assert engine.hits["warm"] == 96


def test_options_that_cannot_be_used_are_named(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    extra = {"sokcet": "/x", "canonical_layout": True, "blocks_per_chunk": 2, "cpu_bytes_to_use": 1 << 30}
    engine = Engine(daemon, monkeypatch, Shape(groups="hybrid", extra=extra))
    engine.generate("a", PROMPTS[0])
    assert any("`sokcet`" in line and "did you mean `socket`?" in line for line in log)
    assert any("`canonical_layout`" in line for line in log)
    assert any("`blocks_per_chunk` is ignored: it needs a model with one kv cache group" in line for line in log)
    assert any("`cpu_bytes_to_use` is ignored: it belongs to vLLM's own offloading" in line for line in log)
    assert len([line for line in log if "ready" not in line]) == 4
    engine.assert_no_faults()
