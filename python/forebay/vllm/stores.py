"""Stores, from taking slots out of the stock until they are committed or returned.

Invariants: stores are committed in the order of their creation, so that no block is named before its predecessor,
whatever order the workers finish in. A slot is returned only after every worker reported, or if no worker ever
received it. Stores that a reset made stale are returned and never named. A store of an adapter is named only after a look
at the adapter's files that began later: workers that had dropped the adapter have read its files again by then. It is
returned if a look since its creation found times of change moved, or if the look takes too long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vllm.v1.kv_offload.base import OffloadKey

from forebay.vllm.adapters import Adapter
from forebay.vllm.session import Session

# A look at an adapter's files takes a millisecond. Behind a file server that hangs it would hold slots, and keep vLLM
# at work.
LOOK_SECONDS = 10.0
# Number of stored keys that are remembered, about 15 MB; beyond it all are dropped, which costs a few duplicate
# copies.
KNOWN_KEYS = 100_000

Key = OffloadKey
Hash = bytes


class Shape(NamedTuple):
    """A group as declared to the daemon; its block is vLLM's chunk."""

    group: int
    # Blocks before the end of a prefix that are needed; 0: nobody says how many; None: all, by full attention.
    window: int | None
    tokens_per_block: int
    hashes_per_block: int
    is_replicated: bool

    @property
    def is_full(self) -> bool:
        return self.window is None

    def declared(self) -> tuple[int, Literal["full", "windowed"] | int, int, bool]:
        """In the form of `Session.set_namespace`."""
        if self.window is None:
            return self.group, "full", self.tokens_per_block, self.is_replicated
        return self.group, self.window or "windowed", self.tokens_per_block, self.is_replicated


class Run(NamedTuple):
    """Neighbouring blocks of one group, in prefix order, and their slots."""

    group: int
    hashes: list[Hash]
    predecessor: Hash | None
    slots: bytes
    generations: bytes


@dataclass
class Store:
    """One job's slots."""

    serial: int
    keys: list[Key]
    runs: list[Run]
    adapter: Adapter | None = None
    looked: int = 0  # the last look at the adapter's files before
    is_done: bool = False  # by all workers
    look: int = 0  # at the adapter's files, which began after that
    look_until: float = 0.0
    is_stale: bool = False  # its content must not be named any more


class Stores:
    """All stores of one engine in progress, oldest first."""

    def __init__(self, session: Session, look_again: Callable[[Adapter], int]):
        self._session = session
        self._look_again = look_again
        self._queue: dict[int, Store] = {}
        self._committed = 0
        self._known: dict[Key, float] = {}  # when it was committed, counted in commits; infinite while in progress

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def now(self) -> int:
        """The clock of `is_known`."""
        return self._committed

    def is_known(self, key: Key, since: int) -> bool:
        """Whether this engine is storing the block, or stored it after `since`, as far as it remembers.

        A lookup's answer covers blocks that were stored before it: they may be evicted by now.
        """
        return self._known.get(key, 0) > since

    def add(self, store: Store) -> None:
        self._queue[store.serial] = store
        store.looked = store.adapter.answered if store.adapter else 0
        if len(self._known) > KNOWN_KEYS:
            self._known.clear()
        self._known.update(dict.fromkeys(store.keys, math.inf))

    def finish(self, serial: int) -> None:
        """All workers reported this store: it is named as soon as all earlier ones are, and its adapter was looked at."""
        store = self._queue[serial]
        store.is_done = True
        if store.adapter is not None and not store.is_stale:
            store.look, store.look_until = self._look_again(store.adapter), time.monotonic() + LOOK_SECONDS
        self.settle()

    def drop(self, serial: int) -> None:
        """No worker will ever receive this store: returns its slots."""
        self._give_back(self._queue.pop(serial))
        self.settle()

    def reset(self) -> None:
        """Nothing in progress may be named any more, and nothing stored so far can be hit any more."""
        for store in self._queue.values():
            store.is_stale = True
        self._known.clear()

    def settle(self) -> bool:
        """Names what can be named by now; whether there is a store that only a look at files keeps from it."""
        awaited: set[Adapter] = set()
        for store in list(self._queue.values()):
            if not store.is_done:
                break
            is_awaited = store.adapter in awaited or store.adapter is not None and _is_awaited(store, store.adapter)
            is_late = is_awaited and time.monotonic() >= store.look_until
            if store.adapter is not None and is_awaited and not is_late:
                awaited.add(store.adapter)
                continue
            del self._queue[store.serial]
            mask = store.adapter.mask if store.adapter else None
            # An adapter may have lost its mask meanwhile, and with it the names of its blocks.
            if store.is_stale or is_late or store.adapter and (mask is None or store.adapter.doubted > store.looked):
                self._give_back(store)
            else:
                self._commit(store, mask)
        return bool(awaited)

    def _commit(self, store: Store, mask: bytes | None) -> None:
        self._committed += 1
        self._known.update(dict.fromkeys(store.keys, self._committed))
        for run in store.runs:
            self._session.commit(run.group, run.hashes, run.predecessor, run.slots, run.generations, mask)

    def _give_back(self, store: Store) -> None:
        if not store.is_stale:
            for key in store.keys:
                self._known.pop(key, None)
        for run in store.runs:
            self._session.abort(run.group, run.slots, run.generations)


def _is_awaited(store: Store, adapter: Adapter) -> bool:
    return not store.is_stale and not adapter.is_lost and adapter.answered < store.look


def split_into_runs(
    shape: Shape,
    keys: Sequence[Key],
    slots: bytes,
    generations: bytes,
    hashes: Sequence[Hash],
    positions: Mapping[Hash, int],
) -> list[Run]:
    """The keys of one group as runs of neighbours; `positions` has the index of a key's hash in the request's
    `hashes`."""
    step = shape.hashes_per_block
    places = [positions[key[:-4]] for key in keys]
    starts = [at for at in range(len(keys)) if at == 0 or places[at] != places[at - 1] + step]
    runs = []
    for start, end in zip(starts, [*starts[1:], len(keys)], strict=False):
        # A partial tail ends inside a block: its predecessor is the last whole block before it.
        before = places[start] // step * step - 1
        predecessor = hashes[before] if before >= 0 else None
        span = slice(4 * start, 4 * end)
        runs.append(
            Run(shape.group, [key[:-4] for key in keys[start:end]], predecessor, slots[span], generations[span])
        )
    return runs
