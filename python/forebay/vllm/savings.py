"""What loads spared one engine: tokens that it did not compute, and the least time that computing them would have taken.

Invariants: both only grow. A load counts when all workers have reported it, if none of them failed and its request
still runs. The time is all tokens at the fastest prefill that was measured so far (`pace`): while none was, no time is
claimed, and after a faster one the time stands still until the tokens have caught up.
"""

from __future__ import annotations

import time

from forebay.vllm.guard import logger

SAY_SECONDS = 60.0


class Savings:
    """Of one engine, since its start."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._said_tokens = 0
        self._say_at = 0.0

    def loaded(self, tokens: int, tokens_per_second: float) -> float:
        """Counts a load; returns the seconds that are claimed beyond those before. A speed of 0 is unknown."""
        self.tokens += tokens
        before = self.seconds
        if tokens_per_second:
            self.seconds = max(before, self.tokens / tokens_per_second)
        return self.seconds - before

    def say(self, *, is_last: bool = False) -> None:
        """Logs what is new, at most once a minute but for the last time. Another thread than that of `loaded` may call
        it: it reads each number once."""
        now, tokens, seconds = time.monotonic(), self.tokens, self.seconds
        if tokens == self._said_tokens or (now < self._say_at and not is_last):
            return
        new, self._said_tokens, self._say_at = tokens - self._said_tokens, tokens, now + SAY_SECONDS
        prefill = f", at least {_duration(seconds)} of prefill" if seconds else ""
        text = "forebay: %s more tokens were loaded and not computed; since the start %s%s"
        logger.info(text, f"{new:,}", f"{tokens:,}", prefill)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
