"""How the cache is doing: counts and gauges for vLLM's metrics, lines in the log, the report for tests.

Holds true: a line is logged when the session becomes ready or ceases to be, and not again while it stays so; the session is
looked at once a second, whatever the number of steps.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from forebay.vllm import compat, metrics
from forebay.vllm.guard import Breaker, logger
from forebay.vllm.session import Session
from forebay.vllm.timing import Timings

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

LOOK_SECONDS = 1.0
# Steps between two takings of the stats, which vLLM does after each step: more are never kept.
KEPT_STEPS = 1000


class Health:
    """One engine's."""

    def __init__(self) -> None:
        self.timings = Timings()
        self._counted: dict[str, int] = {}
        self._step_seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        self._look_at = 0.0
        self._is_ready: bool | None = None
        self._gauges: dict[str, int] = {}

    def count(self, metric: str, by: int = 1) -> None:
        if by:
            self._counted[metric] = self._counted.get(metric, 0) + by

    def step_ended(self, session: Session, breaker: Breaker) -> None:
        self._step_seconds.append(self.timings.end_step())
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self.look(session, breaker)

    def look(self, session: Session, breaker: Breaker) -> None:
        """Asks the session how it is; no round trip."""
        reason = session.reason()
        if (reason is None) is not self._is_ready:
            self._is_ready = reason is None
            if self._is_ready:
                logger.info("forebay is ready, pool %s", session.pool.hex())
            else:
                logger.warning("forebay is not ready, requests are computed meanwhile: %s", reason)
        self._gauges = {metrics.IS_READY: int(self._is_ready), metrics.FAULTS: breaker.faults}
        self.timings.report(session=session.stats(), faults=breaker.faults)

    def take_stats(self) -> OffloadingConnectorStats | None:
        """What is new since the last call, None if nothing is."""
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
