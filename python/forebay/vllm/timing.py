"""Forebay's cost for the scheduler: time per call and per step, in small histograms.

Invariants: a quantile is at most 1/16 above the true one. Recording costs about a microsecond. The report at
`FOREBAY_STEP_STATS` is replaced whole each time, so that it survives a killed engine.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

REPORT_VARIABLE = "FOREBAY_STEP_STATS"


class Histogram:
    """Durations in buckets of 1/16 relative width."""

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self.max_ns = 0
        self._buckets: dict[int, int] = {}

    def record(self, ns: int) -> None:
        self.count += 1
        self.total_ns += ns
        self.max_ns = max(self.max_ns, ns)
        shift = max(0, ns.bit_length() - 5)
        bucket = shift << 5 | ns >> shift
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def quantile_ns(self, share: float) -> int:
        """The upper edge of the bucket that holds this quantile; 0 without records."""
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(self.max_ns, ((bucket & 31) + 1 << (bucket >> 5)) - 1)
        return self.max_ns

    def summary(self) -> dict[str, float]:
        return {
            "count": self.count,
            "p50_ms": self.quantile_ns(0.5) / 1e6,
            "p99_ms": self.quantile_ns(0.99) / 1e6,
            "max_ms": self.max_ns / 1e6,
            "total_ms": self.total_ns / 1e6,
        }


class Timings:
    """Histograms of one connector's calls, of whole steps, and of the waiting within steps."""

    def __init__(self) -> None:
        self.calls: dict[str, Histogram] = {}
        self.steps = Histogram()
        self.waits = Histogram()
        self._step_ns = 0
        self._wait_ns = 0

    def called(self, name: str, ns: int) -> None:
        self._step_ns += ns
        self.calls.setdefault(name, Histogram()).record(ns)

    def waited(self, ns: int) -> None:
        """Part of a call that was spent waiting for the daemon."""
        self._wait_ns += ns

    def end_step(self) -> float:
        """Ends the step; returns its seconds."""
        step_ns = self._step_ns
        self.steps.record(step_ns)
        self.waits.record(self._wait_ns)
        self._step_ns = self._wait_ns = 0
        return step_ns / 1e9

    def summary(self) -> dict[str, Any]:
        calls = {name: histogram.summary() for name, histogram in sorted(self.calls.items())}
        return {"step": self.steps.summary(), "wait": self.waits.summary(), "calls": calls}

    def report(self, **more: Any) -> None:
        """Writes the summary to the file named by `FOREBAY_STEP_STATS`, if it is set."""
        path = os.environ.get(REPORT_VARIABLE)
        if not path:
            return
        draft = f"{path}.{os.getpid()}"
        with open(draft, "w") as file:
            json.dump(self.summary() | more, file)
        os.replace(draft, path)


Method = TypeVar("Method", bound=Callable[..., Any])


def timed(method: Method) -> Method:
    """Records the duration of each call of the method in its object's `timings`."""
    name = method.__name__.lstrip("_")

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.timings.called(name, time.perf_counter_ns() - start)

    return cast(Method, call)
