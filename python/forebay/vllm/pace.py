"""The fastest prefill of one engine, as the least time that prompts can have taken: for claims of what loads saved.

Invariants: it is never below what the engine did. A step is timed from its scheduling to its output, and all tokens that
were under way in that time count for it, generated ones too: where vLLM schedules ahead, the rate is at most that many
times too high. It only grows. Only steps of many new prompt tokens count: in others, what a step costs whatever it
computes, or the attention to tokens that were loaded, would make the engine look slow and a claim too large. For the
same reason the rate is unknown until some such steps were measured: the first ones of an engine are slow.

`patience` measures the other side: it must not take the engine for faster than it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# A step of fewer new tokens says nothing of prefill.
LEAST_TOKENS = 512
# So many steps have been measured before the fastest of them says how fast the engine is.
LEAST_STEPS = 4
# Steps under way are as many as vLLM schedules ahead: one or two, or the stages of a pipeline.
MOST_STEPS = 64


@dataclass(frozen=True)
class _Step:
    began: float
    tokens: int
    tokens_before: int  # that were under way when it was scheduled
    is_prefill: bool


class Pace:
    """Of one engine."""

    def __init__(self) -> None:
        self._under_way: deque[_Step] = deque(maxlen=MOST_STEPS)
        self._measured_steps = 0
        self._fastest = 0.0

    @property
    def tokens_per_second(self) -> float:
        """0 while unknown."""
        return self._fastest if self._measured_steps >= LEAST_STEPS else 0.0

    def scheduled(self, now: float, tokens: int, new_tokens: int) -> None:
        """A step of this many tokens was scheduled, so many of them of prompts that stand on little else."""
        before = sum(step.tokens for step in self._under_way)
        self._under_way.append(_Step(now, tokens, before, new_tokens >= LEAST_TOKENS))

    def computed(self, now: float) -> None:
        """The output of the oldest step under way is there."""
        if not self._under_way:
            return
        step = self._under_way.popleft()
        if step.is_prefill and now > step.began:
            rate = (step.tokens + step.tokens_before) / (now - step.began)
            self._fastest = max(self._fastest, rate)
            self._measured_steps += 1
