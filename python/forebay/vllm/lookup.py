"""One request's lookups, their answers, and the leases of the answers.

Invariants: a block that was reported ready stays leased until `release`. A request never waits past its deadline,
nor after `stop_waiting`: then ready blocks are used and all others are misses for good. Nothing here waits longer
than the given time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from vllm.v1.kv_offload.base import LookupResult

from forebay.vllm.session import Session

MISS, READY, PROMOTING = 0, 1, 2
# Of a windowed group, before the blocks that the daemon takes for needed.
LEFT_OUT = 3
# Where a block was before its first hit: in the pool, on a tier of this host, or on one that hosts share.
POOL, DISK, SHARED = 0, 1, 2

Hash = bytes
Key = bytes  # an offload key: block hash and group
Groups = Sequence[tuple[int, Sequence[Hash]]]

_RESULTS = (LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING)
_RESULTS_WHEN_LATE = (LookupResult.MISS, LookupResult.HIT, LookupResult.MISS)


class Lookup:
    """The whole prompt is looked up at once. Keys that vLLM requests beyond that, in a second batch: partial tails, and of
    a window the keys that the daemon has left out, which vLLM needs if others turn out to be missing. If these bring vLLM
    to still others that were left out, all of them in a third. Of the groups `put_off`, the daemon takes only what the
    prefix of the others needs, and late."""

    def __init__(
        self,
        session: Session,
        groups: Groups,
        mask: bytes | None,
        deadline: float,
        put_off: Collection[int] = (),
    ):
        self._session = session
        self._mask = mask
        self._deadline = deadline
        self._questions = [_Question(session, groups, mask, put_off)]
        self._unasked: dict[int, dict[Hash, None]] = {}
        self.is_closed = False
        self.is_late = False
        self.loads = 0  # that use its leases

    def poll(self, timeout: float, now: float) -> bool:
        """Whether the answers may be used now. Waits at most `timeout` seconds."""
        if self.is_closed or self.is_late:
            return True
        # The answer may have come long ago: nobody reads it while vLLM's batch is full.
        is_last_look = now >= self._deadline
        answered = [question.poll(0.0 if is_last_look else timeout, now) for question in self._questions]
        if is_last_look:
            self.stop_waiting()
        return is_last_look or all(answered)

    def skip(self, seconds: float) -> None:
        """vLLM did not ask for this long: the request waited for its turn, not for an answer or a promotion."""
        self._deadline += seconds
        for question in self._questions:
            question.promoting_since += seconds if question.promoting_since else 0.0

    def stop_waiting(self) -> None:
        """Ready blocks are used; all others are misses for good."""
        if not self._is_settled():
            self.is_late = True
            for question in self._questions:
                question.stop_waiting()

    def progress(self) -> tuple[float, float, float]:
        """Start of the wait for promotions; the shares of the keys that were promoting then, and that became ready
        since."""
        slow = [question for question in self._questions if question.promoting_since]
        keys = sum(question.count for question in self._questions)
        awaited, came = sum(question.awaited for question in slow), sum(question.came for question in slow)
        return min(question.promoting_since for question in slow), awaited / max(keys, 1), came / max(keys, 1)

    @property
    def is_promoting(self) -> bool:
        """Whether some of its blocks are being promoted and still waited for."""
        return not self.is_closed and not self.is_late and not self._is_settled()

    def ask_more(self) -> bool:
        """Looks up the keys that `result` did not know. True if there were any; at most twice."""
        if not self._unasked:
            return False
        first, asked = self._questions[0], self._unasked
        if len(self._questions) > 1:
            asked = {}
            for key in first.left_out():
                if all(question.state(key) is None for question in self._questions[1:]):
                    asked.setdefault(group_of(key), {})[key[:-4]] = None
        groups = [(group, first.in_order(group, list(keys))) for group, keys in asked.items()]
        self._unasked = {}
        self._questions.append(_Question(self._session, groups, self._mask))
        return True

    def result(self, key: Key) -> LookupResult:
        """The answer for one of vLLM's keys. No round trip; half a microsecond, since vLLM asks for thousands."""
        if self.is_closed:
            return LookupResult.MISS
        most = 2
        for question in self._questions:
            if (state := question.state(key)) == LEFT_OUT:
                most = 3
            elif state is not None:
                return (_RESULTS_WHEN_LATE if self.is_late else _RESULTS)[state]
        if len(self._questions) >= most or self.is_late:
            return LookupResult.MISS
        self._unasked.setdefault(group_of(key), {})[key[:-4]] = None
        return LookupResult.RETRY

    def places(self, keys: Sequence[Key]) -> tuple[bytes, bytes] | None:
        """Slots and generations of these blocks; None if one of them is not leased."""
        if self.is_closed:
            return None
        for question in self._questions:
            if places := question.places(keys):
                return places
        if len(self._questions) == 1 or len(keys) == 1:
            return None
        parts = [self.places([key]) for key in keys]  # some in the prompt, some in its tail
        slots, generations = zip(*filter(None, parts), strict=True) if all(parts) else ((), ())
        return (b"".join(slots), b"".join(generations)) if slots else None

    def source(self, key: Key) -> int:
        """Where the block was before this request's hit; still known after `release`."""
        sources = (question.source(key) for question in self._questions)
        return next((source for source in sources if source is not None), POOL)

    def share_of_tiers(self, keys: Collection[Key]) -> float:
        """The share of these blocks that a tier brought up, and whose first hit is this request's."""
        return sum(self.source(key) != POOL for key in keys) / max(len(keys), 1)

    def is_resident(self, key: Key) -> bool:
        """Whether the daemon had the block at the lookup; still known after `release`."""
        return any(question.state(key) in (READY, PROMOTING) for question in self._questions)

    @property
    def missing(self) -> int:
        """Number of keys that the daemon did not have."""
        return sum(question.missing for question in self._questions)

    @property
    def pool(self) -> bytes:
        """The pool of all leased blocks; empty if the answers came from two, of which one must be gone. A question without
        an answer leased none."""
        pools = {question.pool for question in self._questions} - {b""}
        return pools.pop() if len(pools) == 1 else b""

    def _is_settled(self) -> bool:
        return all(question.is_settled() for question in self._questions)

    def release(self) -> None:
        """Returns the leases; from now on every key is a miss. Idempotent, never waits."""
        self.is_closed = True
        for question in self._questions:
            question.release()


def group_of(key: Key) -> int:
    return int.from_bytes(key[-4:], "big")


class _Question:
    """One batch of keys, looked up once. Keys that are promoting change their state in the ticket."""

    def __init__(self, session: Session, groups: Groups, mask: bytes | None, put_off: Collection[int] = ()):
        self._groups = groups
        self._put_off = put_off
        self._next = 0  # the index of the next key in prefix order, which vLLM probably asks for next
        # The answer, group after group.
        self._states = self._sources = bytes(sum(len(hashes) for _, hashes in groups))
        self._slots = self._generations = b""
        self._is_answered = False
        # Time of the first answer, if that was not final.
        self.promoting_since = 0.0
        self._first_states = b""
        self._left_out_since = 0
        self._ticket = session.lookup(groups, mask)

    def poll(self, timeout: float, now: float) -> bool:
        if not self.is_settled() and self._ticket.poll(timeout):
            self._read(now)
        return self._is_answered

    @functools.cached_property
    def _keys(self) -> list[Key]:
        """vLLM's keys. Made at the first question, and not while the lookup waits to be sent."""
        by_group = ((group.to_bytes(4, "big"), hashes) for group, hashes in self._groups)
        return [hash_ + suffix for suffix, hashes in by_group for hash_ in hashes]

    @functools.cached_property
    def _index(self) -> dict[Key, int]:
        return {key: at for at, key in enumerate(self._keys)}

    def is_settled(self) -> bool:
        return self._is_answered and PROMOTING not in self._states

    def state(self, key: Key) -> int | None:
        """None if the key was not looked up."""
        at = self._next
        if at >= len(self._keys) or self._keys[at] != key:
            if (found := self._index.get(key)) is None:
                return None
            at = found
        self._next = at + 1
        return self._states[at]

    def source(self, key: Key) -> int | None:
        """None if the key was not looked up."""
        at = self._index.get(key)
        return None if at is None or self._states[at] == LEFT_OUT else self._sources[at]

    def in_order(self, group: int, hashes: Sequence[Hash]) -> Sequence[Hash]:
        """Hashes of a group, those that were looked up in prefix order and first: vLLM asks for a window from its end."""
        suffix, last = group.to_bytes(4, "big"), len(self._keys)
        return sorted(hashes, key=lambda hash_: self._index.get(hash_ + suffix, last))

    def places(self, keys: Sequence[Key]) -> tuple[bytes, bytes] | None:
        """None if the keys, which are in prefix order, are not all ready here."""
        try:
            first = self._keys.index(keys[0])
        except ValueError:
            return None
        end = first + len(keys)
        if self._keys[end - 1 : end] == [keys[-1]]:
            is_ready = self._states.count(READY, first, end) == len(keys)
            return (self._slots[4 * first : 4 * end], self._generations[4 * first : 4 * end]) if is_ready else None
        return self._scattered(keys)

    def _scattered(self, keys: Sequence[Key]) -> tuple[bytes, bytes] | None:
        """Of keys with gaps between them: vLLM's host tier has some of the prompt's, and others are still promoted."""
        ats = [self._index.get(key, -1) for key in keys]
        if any(at < 0 or self._states[at] != READY for at in ats):
            return None
        spans = [slice(4 * at, 4 * at + 4) for at in ats]
        return b"".join(map(self._slots.__getitem__, spans)), b"".join(map(self._generations.__getitem__, spans))

    @property
    def missing(self) -> int:
        return self._states.count(MISS)

    def left_out(self) -> list[Key]:
        """In prefix order, group after group."""
        if LEFT_OUT not in self._states:
            return []
        return [key for key, state in zip(self._keys, self._states, strict=True) if state == LEFT_OUT]

    @property
    def count(self) -> int:
        """Keys, but for those that the daemon has left out, or puts off."""
        states = self._of_others(self._states)
        return len(states) - states.count(LEFT_OUT)

    @property
    def awaited(self) -> int:
        """Keys of those that were promoting in the first answer."""
        return self._of_others(self._first_states).count(PROMOTING) - self._left_out_since

    @property
    def came(self) -> int:
        """Keys of those that have become ready since."""
        first, now = self._of_others(self._first_states), self._of_others(self._states)
        return now.count(READY) - first.count(READY)

    def _of_others(self, states: bytes) -> bytes:
        """But for those of groups that are put off."""
        if not self._put_off:
            return states
        parts, at = [], 0
        for group, hashes in self._groups:
            parts += [] if group in self._put_off else [states[at : at + len(hashes)]]
            at += len(hashes)
        return b"".join(parts)

    @property
    def pool(self) -> bytes:
        return self._ticket.pool if self._is_answered else b""

    def stop_waiting(self) -> None:
        self._ticket.stop_waiting()

    def release(self) -> None:
        self._ticket.release()

    def _read(self, now: float) -> None:
        is_first, self._is_answered = not self._is_answered, True
        positions = range(len(self._groups))
        # First the states: a key that is ready in them has its slot.
        states = b"".join(map(self._ticket.states, positions))
        if states == self._states or self._ticket.has_failed():
            return
        if not is_first:
            left_out, before = (self._of_others(all_).count(LEFT_OUT) for all_ in (states, self._states))
            self._left_out_since += left_out - before
        self._states = states
        self._slots = b"".join(map(self._ticket.slots, positions))
        self._generations = b"".join(map(self._ticket.generations, positions))
        self._sources = b"".join(map(self._ticket.sources, positions))
        if is_first and PROMOTING in states:
            self.promoting_since, self._first_states = now, states
