"""The judge is judged: what the other tests rely on to notice wrong KV does notice it."""

from __future__ import annotations

from typing import Any

import pytest
from fake import FakeDaemon, FakeEngine
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
