"""A reset of the cache (weight swap, sleep): this engine never sees its old blocks again, and nobody else notices."""

from __future__ import annotations

import pytest
from fake import FakeDaemon
from harness import Engine, Shape, left_a_window, prompt


def test_a_reset_moves_this_engine_alone(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Engine(daemon, monkeypatch, Shape(engine_id="left"))
    right = Engine(daemon, monkeypatch, Shape(engine_id="right"))
    left.generate("cold", prompt(1, 100))
    assert left.scheduler.reset_prefix_cache(reset_connector=True)
    left.generate("after", prompt(1, 100))
    assert left.hits["after"] == 0
    assert daemon.ready() == 12
    right.generate("right", prompt(1, 100))
    assert right.hits["right"] == 96
    left.forget()
    left.generate("again", prompt(1, 100))
    assert left.hits["again"] == 96  # its own, of the new weights
    for engine in (left, right):
        engine.assert_nothing_is_held()
        engine.assert_no_faults()


def test_the_log_says_that_a_reset_engine_is_alone(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = "forebay: reset; this engine now has a namespace of its own and shares with no other"
    for moves in (True, False):
        engine = Engine(daemon, monkeypatch, Shape(extra={"reset_moves_namespace": moves}))
        caplog.clear()
        with caplog.at_level("INFO", "vllm.forebay"):
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert (alone in caplog.messages) is moves


def test_each_reset_is_another_namespace(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    seen = set()
    for turn in range(3):
        engine.generate(str(turn), prompt(1, 100))
        assert engine.hits[str(turn)] == 0
        seen.add(engine.session.namespace)
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert len(seen) == 3


def test_a_reset_before_the_first_request_counts_too(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Engine(daemon, monkeypatch, Shape(engine_id="other"))
    other.generate("cold", prompt(1, 100))
    engine = Engine(daemon, monkeypatch)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.generate("first", prompt(1, 100))
    assert engine.hits["first"] == 0
    assert "salt" in engine.session.fields


def test_fleets_that_only_sleep_keep_their_namespace(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"reset_moves_namespace": False}))
    cold = engine.generate("cold", prompt(1, 100))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.forget()
    assert engine.generate("warm", prompt(1, 100)) == cold
    assert engine.hits["warm"] == 96
    engine.assert_nothing_is_held()


@pytest.mark.parametrize("ranks", [1, 2])
def test_slots_of_stores_that_a_reset_dropped_go_back_when_all_workers_reported(
    ranks: int, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(ranks=ranks, max_requests=1))
    for worker in engine.workers:
        worker.engine.is_holding = True
    request = engine.add("a", prompt(1, 100), max_tokens=30)
    for _ in range(4):
        engine.step()
    assert daemon.reserved == 6
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert daemon.reserved == 6  # workers may still be copying
    assert daemon.outcomes == []
    for worker in engine.workers:
        worker.engine.is_holding = False
    engine.run(request)
    assert set(daemon.outcomes) == {"stored"}  # of the blocks computed after the reset
    assert all(dict(key[0])["salt"] for key in daemon.index)
    for worker in engine.workers:
        assert worker.engine.flushed
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_the_lease_of_a_load_under_way_outlives_a_reset(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    (worker,) = engine.workers
    worker.engine.is_holding = True
    request = engine.add("warm", prompt(1, 100))
    engine.step()
    engine.step()
    assert daemon.leased == 6
    engine.connector.reset_cache()
    assert daemon.leased == 6
    worker.engine.is_holding = False
    assert engine.run(request)["warm"] == cold
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_a_waiting_request_asks_anew_after_a_reset(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", prompt(1, 100))
    engine.forget()
    daemon.is_frozen = True
    request = engine.add("waiting", prompt(1, 100))
    engine.step()
    engine.connector.reset_cache()
    daemon.is_frozen = False
    engine.run(request)
    assert engine.hits["waiting"] == 0
    engine.assert_nothing_is_held()


@pytest.mark.faults
def test_a_reset_that_fails_ends_caching(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", prompt(1, 100))
    engine.session.faults["set_namespace"] = RuntimeError("boom")
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    del engine.session.faults["set_namespace"]
    engine.generate("warm", prompt(1, 100))
    assert engine.hits["warm"] == 0
    assert engine.connector.breaker.is_off


def test_a_block_that_a_window_has_left_is_not_stored_after_a_reset(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM offers it once more, and it holds another request's KV by then."""
    extra = {"reset_moves_namespace": False}
    engine = Engine(daemon, monkeypatch, Shape(groups="hybrid", blocks=44, extra=extra))
    runs = left_a_window(engine)
    daemon.evict_all()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run(runs)
    reader = Engine(daemon, monkeypatch, Shape(groups="hybrid", engine_id="reader"))
    reader.generate("reads", prompt(1, 150))
    engine.forget()
    engine.generate("again", prompt(1, 150))
    for each in (engine, reader):
        each.assert_nothing_is_held()
        each.assert_no_faults()
