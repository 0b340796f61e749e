"""What is asked: requests with shared prefixes, as token ids.

Holds true: a prompt is a pure function of the seed and of the names of its parts, so both endpoints get the same one,
and equal names are equal prefixes. Prompts are made when they are sent, because all of them may be gigabytes.

Token ids give each model prompts of the same length, and need no tokenizer. The ids are above those that tokenizers
keep for bytes and special tokens, and below the size of every vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKEN_IDS = range(1024, 2048)

FIRST = "first sight"
SECOND = "second sight"


@dataclass(frozen=True)
class Part:
    """A piece of a prompt."""

    name: str
    tokens: int

    def token_ids(self, seed: int) -> list[int]:
        return random.Random(f"{seed} {self.name}").choices(TOKEN_IDS, k=self.tokens)


@dataclass(frozen=True)
class Request:
    id: str
    parts: tuple[Part, ...]
    max_tokens: int

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def prompt(self, seed: int) -> list[int]:
        return [token for part in self.parts for token in part.token_ids(seed)]


@dataclass(frozen=True)
class Point:
    """Where a phase lies on the curve: `working_set` is a multiple of the capacity."""

    order: str
    documents: int
    working_set: float


@dataclass(frozen=True)
class Phase:
    """Requests that are sent one after another; phases of one group are one row of the table."""

    group: str
    requests: tuple[Request, ...]
    point: Point | None = None


@dataclass(frozen=True)
class Conversations:
    """Conversations behind one system prompt, asked turn by turn, then all of it once more.

    What is said in a turn, the answer before it included, is drawn from the seed: an endpoint's own answers would make
    other prompts of it.
    """

    conversations: int = 16
    turns: int = 4
    system_tokens: int = 2000
    turn_tokens: int = 500
    max_tokens: int = 16

    def phases(self) -> list[Phase]:
        turns = [self._request(c, t) for t in range(self.turns) for c in range(self.conversations)]
        return [Phase(FIRST, tuple(turns)), Phase(SECOND, tuple(turns))]

    def describe(self) -> str:
        return (
            f"{self.conversations} conversations of {self.turns} turns of {self.turn_tokens:,} tokens, "
            f"behind one system prompt of {self.system_tokens:,}"
        )

    @property
    def distinct_tokens(self) -> int:
        """What a cache would have to keep to miss nothing twice."""
        return self.system_tokens + self.conversations * self.turns * self.turn_tokens

    def _request(self, conversation: int, turn: int) -> Request:
        said = (Part(f"conversation {conversation} turn {t}", self.turn_tokens) for t in range(turn + 1))
        parts = (Part("system", self.system_tokens), *said)
        return Request(f"conversation {conversation} turn {turn}", parts, self.max_tokens)


@dataclass(frozen=True)
class Documents:
    """Questions on long documents, in rounds: the capacity cliff.

    Each point of the curve has documents of its own, so it begins with documents that nobody has seen. Its first round
    is in order and is the first sight; the later rounds are in the order that is tried.
    """

    capacity_tokens: int
    document_tokens: int = 4000
    question_tokens: int = 50
    rounds: int = 3
    max_tokens: int = 16
    working_sets: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)

    def phases(self) -> list[Phase]:
        return [phase for order in ORDERS for size in self.sizes() for phase in self._point(order, size)]

    def describe(self) -> str:
        sizes = self.sizes()
        return (
            f"{sizes[0]} to {sizes[-1]} documents of {self.document_tokens:,} tokens, {self.rounds} rounds; "
            f"capacity {self.capacity_tokens:,} tokens"
        )

    def sizes(self) -> list[int]:
        """How many documents each point of the curve has."""
        share = self.capacity_tokens / self.document_tokens
        return sorted({max(1, round(share * working_set)) for working_set in self.working_sets})

    @property
    def distinct_tokens(self) -> int:
        return self.sizes()[-1] * self.document_tokens

    def _point(self, order: str, size: int) -> Iterator[Phase]:
        point = Point(order, size, size * self.document_tokens / self.capacity_tokens)
        later = [document for number in range(1, self.rounds) for document in self._round(order, size, number)]
        yield Phase(FIRST, self._requests(point, "first", range(size)), point)
        yield Phase(order, self._requests(point, "later", later), point)

    def _round(self, order: str, size: int, number: int) -> list[int]:
        """The documents, as they are asked."""
        # Not the user's seed: the order belongs to the workload, and the seed says what stands in it.
        chosen = random.Random(f"{order} {size} {number}")
        if order == RANDOM:
            return chosen.choices(range(size), k=size)
        return chosen.sample(range(size), size) if order == SHUFFLED else list(range(size))

    def _requests(self, point: Point, what: str, documents: Sequence[int]) -> tuple[Request, ...]:
        """A question of its own on each of the documents."""
        return tuple(self._request(point, document, f"{what} {n}") for n, document in enumerate(documents))

    def _request(self, point: Point, document: int, question: str) -> Request:
        name = f"{point.order} {point.documents} document {document}"
        parts = (Part(name, self.document_tokens), Part(f"{name} question {question}", self.question_tokens))
        return Request(f"{name} question {question}", parts, self.max_tokens)


IN_ORDER = "in order"
SHUFFLED = "shuffled"
RANDOM = "random"
ORDERS = (IN_ORDER, SHUFFLED, RANDOM)

Workload = Conversations | Documents

# For a small model on a CPU: a minute or two for both endpoints. Every prompt ends inside a block, of whatever size an
# engine has: of a prompt of whole blocks that are all hits, an engine computes the last token alone. Its floating-point
# results then differ a little from those of a prefill, and with them now and then the text.
DEMO_CONVERSATIONS = Conversations(conversations=8, turns=3, system_tokens=1030, turn_tokens=258)
DEMO_DOCUMENTS = Documents(
    capacity_tokens=4096, document_tokens=1024, question_tokens=40, working_sets=(0.5, 1.0, 1.5, 2.0, 3.0)
)


def longest(phases: Sequence[Phase]) -> Request:
    return max((request for phase in phases for request in phase.requests), key=lambda request: request.tokens)
