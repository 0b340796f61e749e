"""The log says how the session with the daemon is, and what the metrics page holds before anything happened."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fake import FakeDaemon
from forebay.vllm import health, metrics
from harness import Engine, Shape, prompt

NOT_READY = "forebay is not ready, requests are computed meanwhile: "
# The stand-in for the daemon tells nobody but its sessions how large it is.
READY = "forebay is ready: a pool at /nowhere"
LONG_ENOUGH = 30.0


class Session:
    """Is as it is told."""

    pool = b"pool"

    def __init__(self) -> None:
        self.why: str | None = None

    def reason(self) -> str | None:
        return self.why


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_another_reason_is_said_at_most_once_a_minute(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    session, said = Session(), health.Health()
    steps: list[tuple[float, str | None]] = [
        (0, "cannot reach the daemon"),
        (1, "cannot reach the daemon"),
        (2, "other protocol"),  # not yet: a line was said two seconds ago
        (59, "other protocol"),
        (60, "other protocol"),
        (61, "cannot reach the daemon"),
        (119, "other protocol"),
        (500, "other protocol"),
        (501, None),
        (502, "gone"),  # news at once
        (503, None),
    ]
    with caplog.at_level("INFO", "vllm.forebay"):
        for at, why in steps:
            clock.now, session.why = 1000.0 + at, why
            said.say(session, lambda: "1 GiB at /here")  # type: ignore[arg-type]
    ready = "forebay is ready: 1 GiB at /here"
    assert caplog.messages == [
        NOT_READY + "cannot reach the daemon",
        NOT_READY + "other protocol",
        ready,
        NOT_READY + "gone",
        ready,
    ]


def wait_until(what: str, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_ENOUGH
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.005)


@pytest.mark.parametrize("is_up", [True, False])
def test_an_engine_says_where_it_stands_before_anybody_asks_it_anything(
    is_up: bool, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "WATCH_SECONDS", 0.005)
    daemon.is_up = is_up
    with caplog.at_level("INFO", "vllm.forebay"):
        engine = Engine(daemon, monkeypatch)
        if is_up:  # how each start is, which is no news
            time.sleep(0.05)
            assert not any("ready" in message for message in caplog.messages)
            engine.connector.has_pending_push_work()
        line = READY if is_up else NOT_READY + "connecting"
        wait_until("it says where it stands", lambda: line in caplog.messages)
    assert sum("ready" in message for message in caplog.messages) == 1
    engine.connector.shutdown()


def test_prompts_shorter_than_a_block_are_named_once(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = "forebay: prompts shorter than a block (16 tokens) cannot hit"
    with caplog.at_level("INFO", "vllm.forebay"):
        engine = Engine(daemon, monkeypatch)
        engine.generate("as long", prompt(1, 16))
        engine.connector.manager._look_for_short_prompt(SimpleNamespace(num_tokens=0))  # type: ignore[arg-type]
        assert line not in caplog.messages
        for name in ("short", "again"):
            engine.generate(name, prompt(1, 15))
    assert caplog.messages.count(line) == 1
    engine.assert_no_faults()


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "forebay-health"]


def test_an_engine_without_requests_says_when_the_daemon_is_there_and_goes(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "WATCH_SECONDS", 0.005)
    with caplog.at_level("INFO", "vllm.forebay"):
        engine = Engine(daemon, monkeypatch)
        engine.connector.has_pending_push_work()  # as vLLM's loop asks before it waits for the first request
        wait_until("it says that it is ready", lambda: READY in caplog.messages)
        daemon.is_up = False
        wait_until("it says that it is not", lambda: NOT_READY + "connecting" in caplog.messages)
    engine.connector.shutdown()
    engine.assert_no_faults()


@pytest.mark.parametrize("ends", ["by shutdown", "without a word"])
def test_the_thread_ends_with_the_engine(ends: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    others = watchers()
    engine: Engine | None = Engine(daemon, monkeypatch)
    assert engine is not None
    for _ in range(2):
        engine.connector.has_pending_push_work()
        engine.connector.reset_cache()
    (mine,) = [thread for thread in watchers() if thread not in others]
    if ends == "by shutdown":
        engine.connector.shutdown()
    else:
        engine = None

    def has_ended() -> bool:
        gc.collect()
        return not mine.is_alive()

    wait_until("the thread ends", has_ended)


def test_no_line_is_written_after_the_end(caplog: pytest.LogCaptureFixture) -> None:
    said = health.Health()
    said.close()
    with caplog.at_level("INFO", "vllm.forebay"):
        said.say(Session(), lambda: "1 GiB at /here")  # type: ignore[arg-type]
    assert caplog.messages == []


def test_every_counter_is_there_from_the_first_step_on(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape())
    engine.generate("a", prompt(1, 40))
    assert {name: engine.stats.get(name) for name in metrics.COUNTERS} == dict.fromkeys(metrics.COUNTERS, 0)


def test_the_gauge_follows_a_session_that_becomes_ready_before_the_next_look(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that falls idle right after its first requests showed 0 until it worked again."""
    monkeypatch.setattr(health, "LOOK_SECONDS", 3600.0)
    daemon.is_up = False
    engine = Engine(daemon, monkeypatch)
    engine.generate("before", prompt(1, 40))
    assert engine.stats["forebay:is_ready"] == 0
    daemon.is_up = True
    engine.generate("after", prompt(2, 40))
    assert engine.stats["forebay:is_ready"] == 1
    engine.assert_no_faults()
