"""No exception passes a guard, none is silent, and too many end the work."""

from __future__ import annotations

import logging

import pytest
from forebay.vllm.guard import LIMIT, Breaker, guarded, nothing


class Hooks:
    def __init__(self) -> None:
        self.breaker = Breaker()
        self.runs = 0

    @guarded(lambda self, value: -value)
    def double(self, value: int) -> int:
        self.runs += 1
        if value > 9:
            raise ValueError(f"{value} is too large")
        return 2 * value

    @guarded(nothing)
    def stop(self) -> None:
        raise KeyboardInterrupt


def test_the_answer_passes() -> None:
    assert Hooks().double(4) == 8


@pytest.mark.faults
def test_a_fault_gives_the_safe_answer_and_one_line_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks()
    logging.getLogger("vllm.forebay").addHandler(caplog.handler)
    try:
        assert [hooks.double(value) for value in (10, 11, 3)] == [-10, -11, 6]
    finally:
        logging.getLogger("vllm.forebay").removeHandler(caplog.handler)
    lines = {record.getMessage() for record in caplog.records}
    assert lines == {"forebay failed in Hooks.double; the engine goes on without that answer"}
    assert "10 is too large" in caplog.text
    assert hooks.breaker.faults == 2


@pytest.mark.faults
def test_the_breaker_opens_after_so_many_faults() -> None:
    hooks = Hooks()
    for _ in range(LIMIT):
        assert not hooks.breaker.is_open
        hooks.double(10)
    assert hooks.breaker.is_open
    assert hooks.double(3) == 6  # what is under way is still brought to its end


def test_what_is_off_is_not_run() -> None:
    hooks = Hooks()
    hooks.breaker.switch_off("it is too warm")
    hooks.breaker.switch_off("another reason")
    assert hooks.double(3) == -3
    assert hooks.runs == 0
    assert hooks.breaker.reason == "it is too warm"


def test_strict_mode_shows_the_fault() -> None:
    with pytest.raises(ValueError, match="12 is too large"):
        Hooks().double(12)


@pytest.mark.faults
def test_an_interrupt_is_no_fault() -> None:
    with pytest.raises(KeyboardInterrupt):
        Hooks().stop()
