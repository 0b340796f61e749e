"""The native module's interface over a dictionary: a daemon, sessions and copy engines in one process, made to be harmed.

Holds true: it keeps the promises of `forebay` that the connector relies on (leases pin, generations fence, a block
is named only after every rank left a birth record and, under full attention, after its predecessor), and every broken
promise of the *connector* is an error: a slot committed twice, a slot given back while a copy of it is under way, a lease
given back twice. Bytes are really copied from and to the addresses given.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

NONE = b"\xff\xff\xff\xff"
MISS, READY, PROMOTING, LEFT_OUT = 0, 1, 2, 3


@dataclass
class Slot:
    generation: int = 0
    key: tuple[Any, ...] | None = None  # (namespace, group, hash) where ready
    owner: FakeSession | None = None  # where reserved
    leases: int = 0
    copies: int = 0  # under way
    births: dict[int, int] = field(default_factory=dict)  # rank to generation
    pages: dict[int, bytes] = field(default_factory=dict)  # rank to bytes
    used_at: int = 0


class FakeDaemon:
    """A pool of slots, and what can happen to it."""

    def __init__(self, slots: int = 256):
        self.is_up = True
        self.is_frozen = False  # lookups are not answered
        self.promotions = 0  # so many looks find "promoting" what is ready
        self.promoted: set[bytes] | None = None  # of these hashes alone
        self.outcomes: list[str] = []  # of commits
        self.lookups = 0
        self.waits: list[float] = []  # how long each poll was ready to wait in vain
        self.engines: list[FakeEngine] = []
        self.sessions: list[FakeSession] = []
        self._ids = itertools.count(1)
        self._clock = itertools.count()
        self.count = slots
        self.replace_pool()

    def replace_pool(self) -> None:
        """As after a reboot: another pool, and nothing in it."""
        number = next(self._ids)
        self.pool = number.to_bytes(16, "big")
        # A session hands out no slot of a generation that its engine still has from an earlier pool.
        self.slots = [Slot(generation=number << 16) for _ in range(self.count)]
        self.index: dict[tuple[Any, ...], int] = {}
        for session in self.sessions:
            session.lose_all()

    def evict_all(self) -> None:
        for number in list(self.index.values()):
            if not self.slots[number].leases:
                self._free(number)

    def evict(self, key: tuple[Any, ...]) -> None:
        """A block that nobody holds."""
        assert not self.slots[self.index[key]].leases
        self._free(self.index[key])

    @property
    def leased(self) -> int:
        return sum(slot.leases for slot in self.slots)

    @property
    def reserved(self) -> int:
        """Slots in the hands of a job; stocks do not count."""
        stocked = {number for session in self.sessions for stock in session.stock.values() for number in stock}
        return sum(slot.owner is not None and number not in stocked for number, slot in enumerate(self.slots))

    def ready(self, group: int | None = None) -> int:
        return sum(group is None or key[1] == group for key in self.index)

    def take(self, owner: FakeSession) -> int | None:
        free = (n for n, slot in enumerate(self.slots) if not (slot.owner or slot.leases or slot.key or slot.copies))
        number = next(free, None)
        if number is None:
            idle = [n for n, slot in enumerate(self.slots) if slot.key and not slot.leases and not slot.copies]
            if not idle:
                return None
            number = min(idle, key=lambda n: self.slots[n].used_at)
            self._free(number)
        self.slots[number].owner = owner
        return number

    def commit(
        self, session: FakeSession, group: int, named: Sequence[tuple[bytes, int, int]], before: bytes | None
    ) -> None:
        attention = session.attention[group]
        for hash_, number, generation in named:
            slot = self.slots[number]
            key = (session.namespace, group, hash_)
            if slot.owner is not session or slot.generation != generation:
                self.outcomes.append("lost")
                continue
            assert not slot.copies, f"slot {number} is named while a copy of it is under way"
            writers = [0] if session.is_replicated[group] else list(range(session.ranks))
            if key in self.index:
                outcome = "duplicate"
            elif any(slot.births.get(rank) != generation for rank in writers):
                outcome = "incomplete"
            elif attention == "full" and before is not None and (session.namespace, group, before) not in self.index:
                outcome = "orphan"
            else:
                outcome = "stored"
            self.outcomes.append(outcome)
            slot.owner = None
            if outcome == "stored":
                slot.key = key
                slot.used_at = next(self._clock)
                self.index[key] = number
            else:
                self._free(number)
            before = hash_

    def _free(self, number: int) -> None:
        slot = self.slots[number]
        assert not slot.copies, f"slot {number} is given back while a copy of it is under way"
        assert not slot.leases, f"slot {number} is freed under a lease"
        if slot.key is not None:
            del self.index[slot.key]
        self.slots[number] = Slot(generation=slot.generation + 1)

    def abort(self, session: FakeSession, number: int, generation: int) -> None:
        slot = self.slots[number]
        if slot.generation == generation and slot.owner is session:
            slot.owner = None
            self._free(number)


class FakeTicket:
    """Answered when polled, unless the daemon is frozen; then each poll is a look of the daemon at what is promoting."""

    def __init__(self, session: FakeSession, groups: Sequence[tuple[int, Sequence[bytes]]]):
        self._session = session
        self.groups = [(group, list(hashes)) for group, hashes in groups]
        self._answers: list[tuple[bytes, bytes, bytes, bytes]] | None = None
        self._failed = False
        self._leased: list[int] = []
        self._is_released = False
        self.pool = b""
        session.daemon.lookups += 1

    def poll(self, timeout: float) -> bool:
        daemon = self._session.daemon
        is_lost = not daemon.is_up or self._session.state() != "ready"
        if self._answers is not None:
            if is_lost:
                self.stop_waiting()
            elif not daemon.is_frozen and any(PROMOTING in states for states, *_ in self._answers):
                self._answer(daemon)
            return True
        if is_lost:
            self._failed, self._answers = (
                True,
                [(b"\0" * len(h), NONE * len(h), NONE * len(h), b"\0" * len(h)) for _, h in self.groups],
            )
            return True
        if daemon.is_frozen:
            daemon.waits.append(timeout)
            time.sleep(timeout)
            return False
        self._answer(daemon)
        return True

    def states(self, position: int) -> bytes:
        return self._read(position)[0]

    def slots(self, position: int) -> bytes:
        return self._read(position)[1]

    def generations(self, position: int) -> bytes:
        return self._read(position)[2]

    def sources(self, position: int) -> bytes:
        return self._read(position)[3]

    def has_failed(self) -> bool:
        return self._failed

    def stop_waiting(self) -> None:
        if self._answers is not None:
            self._answers = [(answer[0].replace(b"\2", b"\0"), *answer[1:]) for answer in self._answers]

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        for number in self._leased:
            slot = self._session.daemon.slots[number]
            assert slot.leases > 0
            is_read = slot.copies and slot.leases == 1
            assert not is_read, f"the last lease of slot {number} is given back while it is being read"
            slot.leases -= 1
        self._leased.clear()

    def forget(self) -> None:
        self._leased.clear()

    def _read(self, position: int) -> tuple[bytes, bytes, bytes, bytes]:
        assert self._answers is not None, "the answer is read before it is there"
        return self._answers[position]

    def _needed(self, group: int, hashes: Sequence[bytes]) -> bytes:
        """PROMOTING for the keys to look at: of a window, from its last run before the end of the prefix on."""
        window, ends = self._session.attention.get(group), []
        for full, keys in itertools.takewhile(lambda known: known[0] != group, self.groups):
            if self._session.attention.get(full) == "full":
                there = itertools.takewhile(bool, (self._has(full, key) for key in keys))
                ends.append(sum(there) * self._session.tokens[full])
        if not isinstance(window, int) or not ends:
            return bytes([PROMOTING]) * len(hashes)
        end = min(-(-min(ends) // self._session.tokens[group]), len(hashes))
        there = [self._has(group, key) for key in hashes[:end]]
        first = next((at for at in range(end - window, -1, -1) if all(there[at : at + window])), 0)
        return bytes([LEFT_OUT] * first + [PROMOTING] * (end - first) + [MISS] * (len(hashes) - end))

    def _has(self, group: int, key: bytes) -> bool:
        return (self._session.namespace, group, key) in self._session.daemon.index

    def _answer(self, daemon: FakeDaemon) -> None:
        """Of all keys at first, then of those that are promoting."""
        is_promoting = daemon.promotions > 0
        daemon.promotions -= is_promoting
        self.pool = daemon.pool
        # What was not ready at the first look came from a tier of this host.
        source = 0 if self._answers is None else 1
        nothing = [(self._needed(g, h), NONE * len(h), NONE * len(h), b"\0" * len(h)) for g, h in self.groups]
        before = self._answers or nothing
        self._answers = []
        for (group, hashes), answer in zip(self.groups, before, strict=True):
            states, new = answer[0], [bytearray(part) for part in answer]
            for at in (at for at, state in enumerate(states) if state == PROMOTING):
                number = daemon.index.get((self._session.namespace, group, hashes[at]))
                if number is None or (is_promoting and (daemon.promoted is None or hashes[at] in daemon.promoted)):
                    new[0][at] = MISS if number is None else PROMOTING
                    continue
                new[0][at] = READY
                daemon.slots[number].leases += 0 if self._is_released else 1
                daemon.slots[number].used_at = next(daemon._clock)
                self._leased.append(number)
                new[1][4 * at : 4 * at + 4] = number.to_bytes(4, "little")
                new[2][4 * at : 4 * at + 4] = daemon.slots[number].generation.to_bytes(4, "little")
                new[3][at] = source
            self._answers.append((bytes(new[0]), bytes(new[1]), bytes(new[2]), bytes(new[3])))


class FakeSession:
    """The scheduler's side."""

    def __init__(self, daemon: FakeDaemon, engine_id: str, ranks: int, stock_blocks: int = 64):
        self.daemon = daemon
        self.engine_id = engine_id
        self.ranks = ranks
        self.stock_blocks = stock_blocks
        self.namespace: frozenset[tuple[str, str]] | None = None
        self.fields: dict[str, str] = {}
        self.attention: dict[int, str | int] = {}
        self.tokens: dict[int, int] = {}
        self.is_replicated: dict[int, bool] = {}
        self.stock: dict[int, list[int]] = {}
        self.tickets: list[FakeTicket] = []
        self.is_closed = False
        self.faults: dict[str, Exception] = {}  # method to what it raises
        self.calls: list[str] = []
        self.is_refilling = True
        self.is_used = False
        self.waiting: dict[int, dict[int, list[bytes]]] = {}
        self.saved_tokens, self.saved_seconds = 0, 0.0
        daemon.sessions.append(self)

    def state(self) -> Literal["connecting", "attaching", "naming", "ready", "refused", "closed"]:
        self._maybe_raise("state")
        if self.is_closed:
            return "closed"
        if not self.daemon.is_up:
            return "connecting"
        attached = [engine for engine in self.daemon.engines if engine.engine_id == self.engine_id]
        if len(attached) < self.ranks:
            return "attaching"
        return "ready" if self.namespace is not None else "naming"

    def reason(self) -> str | None:
        return None if self.state() == "ready" else self.state()

    def set_namespace(
        self, fields: Mapping[str, str], groups: Sequence[tuple[int, Literal["full", "windowed"] | int, int, bool]]
    ) -> None:
        self._maybe_raise("set_namespace")
        for number in itertools.chain(*self.stock.values()):
            self.daemon.slots[number].owner = None
        self.stock = {group: [] for group, *_ in groups}
        self.fields = dict(fields)
        self.namespace = frozenset(fields.items())
        self.attention = {group: attention for group, attention, *_ in groups}
        self.tokens = {group: tokens for group, _, tokens, _ in groups}
        self.is_replicated = {group: is_replicated for group, _, _, is_replicated in groups}
        self.refill()

    def lookup(self, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> FakeTicket:
        self._maybe_raise("lookup")
        self.is_used = True
        ticket = FakeTicket(self, [(group, masked(hashes, mask)) for group, hashes in groups])
        self.tickets.append(ticket)
        self.refill()
        return ticket

    def hint(self, request: int, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> None:
        self._maybe_raise("hint")
        assert request not in self.waiting, f"request {request} is told of twice"
        self.waiting[request] = {group: masked(hashes, mask) for group, hashes in groups}

    def withdraw_hint(self, request: int) -> None:
        self._maybe_raise("withdraw_hint")
        assert request in self.waiting, f"request {request} was not told of"
        del self.waiting[request]

    def reserve(self, group: int, count: int) -> tuple[bytes, bytes]:
        self._maybe_raise("reserve")
        self.is_used = True
        taken, self.stock[group] = self.stock[group][:count], self.stock[group][count:]
        self.refill()
        generations = (self.daemon.slots[number].generation for number in taken)
        return b"".join(n.to_bytes(4, "little") for n in taken), b"".join(g.to_bytes(4, "little") for g in generations)

    def commit(
        self,
        group: int,
        hashes: Sequence[bytes],
        predecessor: bytes | None,
        slots: bytes,
        generations: bytes,
        mask: bytes | None = None,
    ) -> None:
        self._maybe_raise("commit")
        pairs, names = _pairs(slots, generations), masked(hashes, mask)
        assert len(pairs) == len(names) > 0
        named = [(hash_, number, generation) for hash_, (number, generation) in zip(names, pairs, strict=True)]
        self.daemon.commit(self, group, named, predecessor and masked([predecessor], mask)[0])

    def abort(self, group: int, slots: bytes, generations: bytes) -> None:
        self._maybe_raise("abort")
        for number, generation in _pairs(slots, generations):
            self.daemon.abort(self, number, generation)

    def saved(self, tokens: int, seconds: float) -> None:
        self._maybe_raise("saved")
        assert tokens > 0 or seconds > 0
        assert tokens >= 0 and seconds >= 0
        self.saved_tokens += tokens
        self.saved_seconds += seconds

    @property
    def pool(self) -> bytes:
        return self.daemon.pool if self.state() == "ready" else b""

    def stats(self) -> dict[str, int]:
        is_short = any(len(stock) < self.stock_blocks for stock in self.stock.values())
        return {
            "lookups": len(self.tickets),
            "reserved_stock": sum(map(len, self.stock.values())),
            "stock_filling": int(is_short and not self.is_refilling),  # the thread is late, the daemon is not full
        }

    def close(self) -> None:
        """As where the process ends behind it: the daemon takes back what nobody copies to or from."""
        self.is_closed, self.is_refilling = True, False
        self.stock = {group: [] for group in self.stock}
        for ticket in self.tickets:
            ticket.release()
        for number, slot in enumerate(self.daemon.slots):
            if slot.owner is self and not slot.copies:
                slot.owner = None
                self.daemon._free(number)

    def lose_all(self) -> None:
        self.stock = {group: [] for group in self.stock}
        for ticket in self.tickets:
            ticket.forget()

    def refill(self) -> None:
        """As the background thread does when something was used."""
        for stock in self.stock.values():
            wanted = self.stock_blocks - len(stock)
            while wanted > 0 and self.is_refilling and self.state() == "ready" and not self.daemon.is_frozen:
                number = self.daemon.take(self)
                if number is None:
                    break
                stock.append(number)
                wanted -= 1

    def seconds_pass(self) -> None:
        """The stock fills up. If the engine has asked for nothing since the last call, it is idle: its stock shrinks.
        From now on the stock fills up in these calls alone."""
        self.is_refilling = self.is_used
        self.refill()
        if not self.is_used:
            for stock in self.stock.values():
                while len(stock) > 4:
                    number = stock.pop()
                    self.daemon.abort(self, number, self.daemon.slots[number].generation)
        self.is_used = self.is_refilling = False

    def _maybe_raise(self, method: str) -> None:
        self.calls.append(method)
        if method in self.faults:
            raise self.faults[method]


def masked(hashes: Sequence[bytes], mask: bytes | None) -> list[bytes]:
    """As the native module names an adapter's blocks."""
    return [hashlib.sha256(mask + hash_).digest()[: len(hash_)] if mask else hash_ for hash_ in hashes]


Groups = Sequence[tuple[int, bytes, bytes, bytes, int]]


class FakeEngine:
    """One rank's copies. Done when asked for, so that `is_holding` can keep them under way."""

    def __init__(
        self,
        daemon: FakeDaemon,
        engine_id: str,
        rank: int,
        tensors: Sequence[tuple[int, int, int, int]],
        groups: Sequence[tuple[int, bool, Sequence[tuple[int, int]]]],
        blocks_per_chunk: int,
    ):
        self.daemon = daemon
        self.engine_id = engine_id
        self.rank = rank
        self._tensors = list(tensors)
        self._refs = {group: list(refs) for group, _, refs in groups}
        self._is_replicated = {group: is_replicated for group, is_replicated, _ in groups}
        self._per_chunk = blocks_per_chunk
        self.is_holding = False
        self.fail_loads = 0  # so many loads fail
        self.fail_stores = 0
        self._queue: list[tuple[int, bool, bytes, Groups]] = []
        self._done: list[tuple[int, bool, int, float]] = []
        self.flushed: list[int] = []
        self.is_shut_down = False
        daemon.engines.append(self)

    def submit_store(self, job: int, pool: bytes, groups: Groups) -> None:
        self._submit(job, True, pool, groups)

    def submit_load(self, job: int, pool: bytes, groups: Groups) -> None:
        self._submit(job, False, pool, groups)

    def finished(self) -> list[tuple[int, bool, int, float]]:
        if not self.is_holding:
            self._run_all()
        done, self._done = self._done, []
        return done

    def wait(self, jobs: Sequence[int], timeout: float) -> bool:
        self.flushed += [job for job, *_ in self._queue if job in jobs]
        self._run_all()
        return True

    def shutdown(self) -> None:
        """Abandons the copies that have not begun."""
        self.is_shut_down = True
        for _, _, pool, groups in self._queue:
            self._count_copies(pool, groups, -1)
        self._queue.clear()

    def _submit(self, job: int, is_store: bool, pool: bytes, groups: Groups) -> None:
        self._queue.append((job, is_store, pool, groups))
        self._count_copies(pool, groups, 1)

    def _count_copies(self, pool: bytes, groups: Groups, by: int) -> None:
        if pool == self.daemon.pool:
            for _, slots, generations, _, _ in groups:
                for number, generation in _pairs(slots, generations):
                    if self.daemon.slots[number].generation == generation:
                        self.daemon.slots[number].copies += by

    def _run_all(self) -> None:
        queue, self._queue = self._queue, []
        for job, is_store, pool, groups in queue:
            self._count_copies(pool, groups, -1)
            size = self._run(is_store, pool, groups)
            self._done.append((job, size is not None, size or 0, 0.001))

    def _run(self, is_store: bool, pool: bytes, groups: Groups) -> int | None:
        """Bytes copied, None if it failed."""
        if is_store and self.fail_stores:
            self.fail_stores -= 1
            return None
        if not is_store and self.fail_loads:
            self.fail_loads -= 1
            return None
        if pool != self.daemon.pool:
            return None
        total = 0
        for group, slots, generations, block_ids, skipped in groups:
            ids = [int.from_bytes(block_ids[at : at + 4], "little") for at in range(0, len(block_ids), 4)]
            pairs = _pairs(slots, generations)
            assert len(pairs) == -(-(skipped + len(ids)) // self._per_chunk)
            for at, (number, generation) in enumerate(pairs):
                slot = self.daemon.slots[number]
                if slot.generation != generation:
                    return None
                sub_blocks = {
                    sub: ids[place]
                    for sub in range(self._per_chunk)
                    if 0 <= (place := at * self._per_chunk + sub - skipped) < len(ids)
                }
                total += self._copy(is_store, slot, group, sub_blocks)
        return total

    def _copy(self, is_store: bool, slot: Slot, group: int, blocks: Mapping[int, int]) -> int:
        refs = self._refs[group]
        block_bytes = sum(size for _, size in refs)
        rank = 0 if self._is_replicated[group] else self.rank
        if is_store:
            slot.pages[rank] = b"".join(
                ctypes.string_at(self._address(tensor, blocks[sub]), size)
                for sub in range(self._per_chunk)
                for tensor, size in refs
            )
            slot.births[rank] = slot.generation
            return len(slot.pages[rank])
        assert slot.key is not None and slot.leases, "a load reads a slot that is not leased"
        for sub, block in blocks.items():
            at = sub * block_bytes
            for tensor, size in refs:
                ctypes.memmove(self._address(tensor, block), slot.pages[rank][at : at + size], size)
                at += size
        return block_bytes * len(blocks)

    def _address(self, tensor: int, block: int) -> int:
        address, rows, stride, _ = self._tensors[tensor]
        assert 0 < block < rows, f"block {block} of {rows}: block 0 is vLLM's null block"
        return address + block * stride


def _pairs(slots: bytes, generations: bytes) -> list[tuple[int, int]]:
    assert len(slots) == len(generations)
    places = range(0, len(slots), 4)
    return [
        (int.from_bytes(slots[at : at + 4], "little"), int.from_bytes(generations[at : at + 4], "little"))
        for at in places
    ]
