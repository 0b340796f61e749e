"""The state of the cache: counts and gauges for vLLM's metrics, lines in the log, the report for tests.

Invariants: a line is logged when the session becomes ready or ceases to be. While it is not ready, another reason
is logged at most once a minute. Steps check the session once a second for the metrics. A thread does so for the log,
from the engine's start on: an engine without requests makes no steps, and a line may cost a round trip.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.vllm import compat, metrics
from forebay.vllm.guard import Breaker, logger
from forebay.vllm.session import Session
from forebay.vllm.timing import Timings

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

LOOK_SECONDS = 1.0
# The thread's interval. It has its own clock, so that it never reads what a step is changing.
WATCH_SECONDS = 1.0
# A reason may contain details that differ each time, and the log is for people.
SAY_AGAIN_SECONDS = 60.0
# Limit on the steps kept between two reads of the stats; vLLM reads them after each step.
KEPT_STEPS = 1000


class Health:
    """The health of one engine."""

    def __init__(self) -> None:
        self.timings = Timings()
        # reported at 0 too: an absent counter would look unsupported
        self._counted: dict[str, float] = dict.fromkeys(metrics.COUNTERS, 0)
        self._step_seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        self._look_at = 0.0
        self._gauges: dict[str, int] = {}
        self._was_ready = False
        self._is_said = False
        self._said: str | None = None  # the reason in the last line, None for "ready"
        self._say_again_at = 0.0
        self._is_watched = False
        self._is_over = threading.Event()

    def count(self, metric: str, by: float = 1) -> None:
        if by:
            self._counted[metric] = self._counted.get(metric, 0) + by

    def step_ended(self, session: Session, breaker: Breaker) -> None:
        self._step_seconds.append(self.timings.end_step())
        # A session that was not ready is looked at in each step: the last before an idle time would say so all along.
        if (now := time.monotonic()) >= self._look_at or not self._was_ready:
            self._look_at = now + LOOK_SECONDS
            self.look(session, breaker)

    def look(self, session: Session, breaker: Breaker) -> None:
        """Reads the session's state; no round trip."""
        self._was_ready = session.reason() is None
        self._gauges = {metrics.IS_READY: int(self._was_ready), metrics.FAULTS: breaker.faults}
        self.timings.report(session=session.stats(), faults=breaker.faults)

    def say(self, session: Session, describe: Callable[[], str]) -> None:
        """Logs a change of the session's state; `describe` names the daemon that is ready."""
        reason = session.reason()
        if self._is_over.is_set() or (self._is_said and reason == self._said):
            return
        now = time.monotonic()
        if reason is None:
            logger.info("forebay is ready: %s", describe())
        elif self._said is None or now >= self._say_again_at:
            logger.warning("forebay is not ready, requests are computed meanwhile: %s", reason)
            self._say_again_at = now + SAY_AGAIN_SECONDS
        else:
            return
        self._is_said, self._said = True, reason

    def watch(self, say: Callable[[], object]) -> None:
        """Makes a thread call this method until `close`, or until its object is gone. Does nothing the second time."""
        if not self._is_watched:
            self._is_watched = True
            # Engines may be dropped without `close`: a thread with a strong reference would keep one for ever.
            method = weakref.WeakMethod(say)
            weakref.finalize(say.__self__, self._is_over.set)  # type: ignore[attr-defined]
            threading.Thread(target=_watch, args=(method, self._is_over), name="forebay-health", daemon=True).start()

    def close(self) -> None:
        """Ends the log's lines, and the thread within a second. Does not wait."""
        self._is_over.set()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """What has changed since the last call, None if nothing has."""
        if not (self._step_seconds or self._counted or self._gauges):
            return None
        stats = compat.new_stats()
        for seconds in self._step_seconds:
            stats.observe_histogram(metrics.STEP_SECONDS, seconds)
        for name, count in self._counted.items():
            stats.increase_counter(name, count)
        for name, value in self._gauges.items():
            stats.set_gauge(name, value)
        self._step_seconds.clear()
        self._counted, self._gauges = {}, {}
        return stats


def _watch(method: weakref.WeakMethod[Callable[[], object]], is_over: threading.Event) -> None:
    while not is_over.wait(WATCH_SECONDS):
        if (say := method()) is None:
            return
        say()
        del say
