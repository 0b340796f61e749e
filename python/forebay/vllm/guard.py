"""Exceptions end here: every hook that vLLM calls returns a safe answer instead of raising.

Invariants: a fault is logged once per place, with its traceback. After `LIMIT` faults the breaker is open: the
component takes no new work, but finishes work in progress. `FOREBAY_STRICT=1` raises faults again, for tests, after
the safe answer was made.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

# A child of vLLM's own logger, so that its handlers and levels apply.
logger = logging.getLogger("vllm.forebay")

# A fault here is an error in Forebay or in its fit to this vLLM, not a missing daemon: a few are enough to know.
LIMIT = 8


class Breaker:
    """Counts faults. `is_open`: no new work. `is_off`: hooks are not even run."""

    def __init__(self) -> None:
        self.faults = 0
        self.reason: str | None = None
        self._places: set[str] = set()

    @property
    def is_open(self) -> bool:
        return self.faults >= LIMIT or self.is_off

    @property
    def is_off(self) -> bool:
        return self.reason is not None

    def fault(self, place: str) -> None:
        """Counts the exception that is being handled."""
        self.faults += 1
        if place not in self._places:
            self._places.add(place)
            logger.exception("forebay failed in %s; the engine goes on without that answer", place)
        if self.faults == LIMIT:
            logger.error("forebay failed %d times and takes no new work in this process", LIMIT)

    def switch_off(self, reason: str, level: int = logging.WARNING) -> None:
        """Switches the component off for good, and logs that once."""
        if not self.is_off:
            self.reason = reason
            logger.log(level, "forebay is off in this engine: %s", reason)


Method = TypeVar("Method", bound=Callable[..., Any])


def caught(safe: Callable[..., Any]) -> Callable[[Method], Method]:
    """Makes a method return `safe(self, ...)` where it would raise."""

    def wrap(method: Method) -> Method:
        place = method.__qualname__

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a panic of the native module is not an Exception
                self.breaker.fault(place)
                answer = safe(self, *args, **kwargs)
                if os.environ.get("FOREBAY_STRICT") == "1":
                    raise
                return answer

        return cast(Method, call)

    return wrap


def guarded(safe: Callable[..., Any]) -> Callable[[Method], Method]:
    """Like `caught`, and returns the same if its object's `breaker` is off."""

    def wrap(method: Method) -> Method:
        run = caught(safe)(method)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return safe(self, *args, **kwargs) if self.breaker.is_off else run(self, *args, **kwargs)

        return cast(Method, call)

    return wrap


def nothing(*_: Any, **__: Any) -> None:
    """The safe answer of hooks without a return value."""
