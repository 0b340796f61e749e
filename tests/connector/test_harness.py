"""The judge is judged: what the other tests rely on to notice wrong KV does notice it."""

from __future__ import annotations

from typing import Any

import pytest
from fake import FakeDaemon, FakeEngine, FakeSession
from harness import Engine, prompt


def test_a_load_that_copies_nothing_is_noticed(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", prompt(1, 100))
    engine.forget()

    def copy_nothing(self: FakeEngine, is_store: bool, *_: Any) -> int:
        return 0

    monkeypatch.setattr(FakeEngine, "_copy", copy_nothing)
    with pytest.raises(AssertionError, match="warm relies on block"):
        engine.generate("warm", prompt(1, 100))


def test_one_flipped_byte_is_noticed(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", prompt(1, 100))
    engine.forget()
    slot = next(slot for slot in daemon.slots if slot.key)
    slot.pages[0] = bytes([slot.pages[0][0] ^ 1]) + slot.pages[0][1:]
    with pytest.raises(AssertionError, match="warm relies on block"):
        engine.generate("warm", prompt(1, 100))


def test_outputs_depend_on_the_whole_prompt(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    tail = prompt(9, 40)
    assert engine.generate("a", prompt(1, 64) + tail) != engine.generate("b", prompt(2, 64) + tail)


def test_a_store_of_an_earlier_pool_names_no_slot_of_the_next(daemon: FakeDaemon) -> None:
    session = FakeSession(daemon, "e", 1)
    engine = FakeEngine(daemon, "e", 0, [], [(0, False, [])], 1)
    session.set_namespace({"model": "m"}, [(0, "full", 16, False)])
    earlier = session.reserve(0, 2)
    daemon.replace_pool()
    session.refill()
    now = session.reserve(0, 2)
    engine.submit_store(1, session.pool, [(0, *now, b"", 0)])
    session.commit(0, [b"a" * 32, b"b" * 32], None, *earlier)
    assert daemon.outcomes == ["lost", "lost"] and not daemon.index
