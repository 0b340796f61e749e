"""How long a request waits for promotions: as long as they keep up with computing the same tokens.

A tier may be slower than the engine: waiting for it then makes a request later than without a cache. So the
promoted tokens are compared with those that the engine would have computed in the same time. A request continues
with what is ready if its promotions fall behind by a share of the whole. This needs no estimate of a tier. A slow
tier costs at most that share of the computing time.

The engine's speed is measured, not configured: the most tokens of prompts per second over a few consecutive busy steps.
If the measurement is too low or missing, a request waits longer, at most until its deadline.
"""

from __future__ import annotations

from collections import deque

# Steps that are measured together: vLLM schedules up to two steps ahead, so that the time between two calls says
# nothing.
WINDOW_STEPS = 5
# The maximum covers this many windows and is dropped after as many more: prompts and load change.
GENERATION = 1024
# Two looks of the daemon, 10 ms apart: a tier that delivers everything in this time is never given up.
LEAST_SECONDS = 0.02


class Patience:
    """Of one engine. `lag` is the share of the computing time by which promotions may fall behind."""

    def __init__(self, lag: float):
        self._lag = lag
        self._steps: deque[tuple[float, int]] = deque(maxlen=WINDOW_STEPS)
        self._windows = 0
        self._fastest = self._fastest_before = 0.0

    @property
    def tokens_per_second(self) -> float:
        """The engine's prefill speed, 0 while unknown."""
        return max(self._fastest, self._fastest_before)

    def stepped(self, now: float, tokens: int, generated: int = 0) -> None:
        """A step with this many tokens was scheduled, so many of them no prompts'."""
        if len(self._steps) == WINDOW_STEPS:
            self._measure(now)
        if tokens:
            self._steps.append((now, tokens - generated))
        else:
            self._steps.clear()

    def is_over(self, waited: float, came: float, awaited: float, waiting: int) -> bool:
        """Whether to continue without the missing tokens, after `waited` seconds.

        `came` of `awaited` tokens are ready now; `waiting` requests need promotions, and would share the engine.
        """
        if not self.tokens_per_second:
            return False
        seconds_per_token = max(waiting, 1) / self.tokens_per_second
        return waited >= LEAST_SECONDS + (came + self._lag * awaited) * seconds_per_token

    def _measure(self, now: float) -> None:
        # The last step was scheduled but, with the engine one step behind, is not computed yet.
        tokens = sum(tokens for _, tokens in list(self._steps)[:-1])
        if not tokens:
            return
        if self._windows == GENERATION:
            self._fastest_before, self._fastest, self._windows = self._fastest, 0.0, 0
        self._windows += 1
        elapsed = now - self._steps[0][0]
        if elapsed > 0:
            self._fastest = max(self._fastest, tokens / elapsed)
