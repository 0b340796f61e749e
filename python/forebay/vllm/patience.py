"""How long a request waits for promotions: as long as they keep ahead of computing the same tokens.

A tier may be slower than the engine: then waiting for it makes a request later than no cache would. So what has come up
is compared with what the engine would have computed in the same time, and a request whose promotions fall behind by a
share of the whole goes on with what is there. No estimate of a tier is needed, and the most that a slow one can cost
is that share of the time which computing takes.

The engine's speed is measured, not configured: the most tokens a second that it was given in a few busy steps one after
another. Where it is measured too low a request waits longer, at most until its deadline, as it does as long as nothing
is known.
"""

from __future__ import annotations

from collections import deque

# Steps that are looked at together: vLLM schedules up to two steps ahead, so that the time between two calls says nothing.
WINDOW_STEPS = 5
# After so many windows the fastest of them is forgotten with the next as many: prompts and load change.
GENERATION = 1024
# Two looks at the answer: a tier that brings everything in this time is never given up.
LEAST_SECONDS = 0.02


class Patience:
    """Of one engine. `lag` is the share of the computing time that promotions may fall behind."""

    def __init__(self, lag: float):
        self._lag = lag
        self._steps: deque[tuple[float, int]] = deque(maxlen=WINDOW_STEPS)
        self._windows = 0
        self._fastest = self._fastest_before = 0.0

    @property
    def tokens_per_second(self) -> float:
        """The engine's prefill, 0 while unknown."""
        return max(self._fastest, self._fastest_before)

    def stepped(self, now: float, tokens: int) -> None:
        """A step was scheduled, with so many tokens."""
        if len(self._steps) == WINDOW_STEPS:
            self._measure(now)
        if tokens:
            self._steps.append((now, tokens))
        else:
            self._steps.clear()

    def is_over(self, waited: float, came: float, awaited: float, waiting: int) -> bool:
        """Whether to go on without what is missing, after `waited` seconds.

        `came` of `awaited` tokens are there now; `waiting` requests want promotions, and would share the engine.
        """
        if not self.tokens_per_second:
            return False
        seconds_per_token = max(waiting, 1) / self.tokens_per_second
        return waited >= LEAST_SECONDS + (came + self._lag * awaited) * seconds_per_token

    def _measure(self, now: float) -> None:
        if self._windows == GENERATION:
            self._fastest_before, self._fastest, self._windows = self._fastest, 0.0, 0
        self._windows += 1
        # The last step was scheduled and is, with the engine a step behind, not computed yet.
        tokens = sum(tokens for _, tokens in list(self._steps)[:-1])
        elapsed = now - self._steps[0][0]
        if elapsed > 0:
            self._fastest = max(self._fastest, tokens / elapsed)
