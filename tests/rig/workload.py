"""What is asked of the engines: waves of seeded prompts.

Holds true: the first waves are a pure function of the `Workload`; second turns continue the *baseline's* answers, so
every engine gets the same prompts whatever it answered itself. Each tail stands behind every prefix, which shows that
the prefix matters; the prompts asked alone are asked in company too, which shows that the company does not.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rig.engine import Answer, Engine, Request
from rig.models import FIRST_PLAIN_TOKEN, VOCABULARY
from rig.process import wait_until

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Wave:
    """Requests that are put to an engine together."""

    name: str
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Workload:
    """Prefixes times tails, the first of each prefix also alone, then second turns."""

    seed: int = 1
    prefixes: int = 2
    tails: int = 3
    # Longer than the hybrid model's window, and no multiple of a block, so that partial blocks occur.
    prefix_tokens: int = 520
    tail_tokens: int = 75
    turn_tokens: int = 60
    max_tokens: int = 12

    def alone(self) -> list[Wave]:
        return [Wave(f"alone-{p}", (self._request("alone", p, 0),)) for p in range(self.prefixes)]

    def together(self) -> Wave:
        pairs = [(p, t) for t in range(self.tails) for p in range(self.prefixes)]
        return Wave("together", tuple(self._request("together", p, t) for p, t in pairs))

    def about(self, prefix: int) -> Wave:
        """The part of `together` behind one prefix: fresh prompts for as many tests as there are prefixes."""
        return Wave(f"about-{prefix}", tuple(self._request("together", prefix, t) for t in range(self.tails)))

    def turns(self, answers: Iterable[Answer]) -> Wave:
        """Each conversation of `together` goes on: prompt, its answer, new tokens."""
        answered = {answer.id: answer.tokens for answer in answers}
        requests = [
            Request(
                f"turn-{r.id}", r.prompt + answered[r.id] + self._tokens(f"turn {r.id}", self.turn_tokens), r.max_tokens
            )
            for r in self.together().requests
        ]
        return Wave("turns", tuple(requests))

    def same_tail(self) -> list[tuple[str, ...]]:
        """Ids of `together` that differ in nothing but their prefix."""
        return [tuple(_id("together", p, t) for p in range(self.prefixes)) for t in range(self.tails)]

    def same_prompt(self) -> list[tuple[str, str]]:
        """Ids of the same prompt, alone and in company."""
        return [(_id("alone", p, 0), _id("together", p, 0)) for p in range(self.prefixes)]

    def _request(self, wave: str, prefix: int, tail: int) -> Request:
        head = self._tokens(f"prefix {prefix}", self.prefix_tokens)
        return Request(_id(wave, prefix, tail), head + self._tokens(f"tail {tail}", self.tail_tokens), self.max_tokens)

    def _tokens(self, what: str, count: int) -> Tokens:
        chosen = random.Random(f"{self.seed} {what}")
        return tuple(chosen.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(count))


def run(engine: Engine, waves: Sequence[Wave], *, gaps: bool = False) -> dict[str, Answer]:
    """Puts the waves to the engine, one after another; answers by request id."""
    answers: dict[str, Answer] = {}
    for wave in waves:
        answers |= {answer.id: answer for answer in engine.generate(wave.requests, gaps=gaps)}
    return answers


def settle(engine: Engine, seconds: float = 60) -> None:
    """Short unrelated requests until no store is under way.

    vLLM hands stores to the workers in a later step, and needs steps to see them end.
    """

    def is_settled() -> bool:
        engine.generate([Request("settle", tuple(range(FIRST_PLAIN_TOKEN, FIRST_PLAIN_TOKEN + 8)), max_tokens=8)])
        return engine.stores_under_way() == 0

    wait_until("no store is under way", is_settled, seconds)


def _id(wave: str, prefix: int, tail: int) -> str:
    return f"{wave}-p{prefix}t{tail}"
