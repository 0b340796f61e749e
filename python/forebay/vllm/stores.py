"""Stores from the moment slots leave the stock until they are committed or given back.

Holds true: stores are committed in the order in which they were made, so that no block is named before its predecessor,
whatever order the workers finish in; a slot is given back only after every worker reported, or when no worker ever heard
of it; what a reset made stale is given back and never named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vllm.v1.kv_offload.base import OffloadKey

from forebay.vllm.adapters import Adapter
from forebay.vllm.session import Session

# This many stored keys are remembered, about 15 MB of them; over it all are forgotten, which costs a few blocks copied
# twice.
KNOWN_KEYS = 100_000

Key = OffloadKey
Hash = bytes


class Shape(NamedTuple):
    """A group as the daemon sees it; its block is what vLLM calls a chunk."""

    group: int
    is_full: bool
    tokens_per_block: int
    hashes_per_block: int
    is_replicated: bool

    def declared(self) -> tuple[int, Literal["full", "windowed"], int, bool]:
        """As `Session.set_namespace` takes it."""
        return self.group, "full" if self.is_full else "windowed", self.tokens_per_block, self.is_replicated


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
    is_done: bool = False  # by all workers
    is_stale: bool = False  # what it holds must not be named any more


class Stores:
    """All stores of one engine that are under way, oldest first."""

    def __init__(self, session: Session):
        self._session = session
        self._queue: dict[int, Store] = {}
        self._committed = 0
        self._known: dict[Key, float] = {}  # when it was committed, counted in commits; infinite while under way

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def now(self) -> int:
        """The time `is_known` goes by."""
        return self._committed

    def is_known(self, key: Key, since: int) -> bool:
        """Whether this engine is storing the block, or stored it after `since`, as far as it remembers.

        What was stored before a lookup is for the lookup's answer to say: it may be evicted by now.
        """
        return self._known.get(key, 0) > since

    def add(self, store: Store) -> None:
        self._queue[store.serial] = store
        if len(self._known) > KNOWN_KEYS:
            self._known.clear()
        self._known.update(dict.fromkeys(store.keys, math.inf))

    def finish(self, serial: int) -> None:
        """All workers reported this store: it is named as soon as all before it are."""
        self._queue[serial].is_done = True
        self._settle()

    def drop(self, serial: int) -> None:
        """No worker will ever hear of this store: gives its slots back."""
        self._give_back(self._queue.pop(serial))
        self._settle()

    def reset(self) -> None:
        """Nothing under way may be named any more, and nothing stored so far can be hit any more."""
        for store in self._queue.values():
            store.is_stale = True
        self._known.clear()

    def _settle(self) -> None:
        while self._queue and (store := next(iter(self._queue.values()))).is_done:
            del self._queue[store.serial]
            mask = store.adapter.mask if store.adapter else None
            # An adapter may have lost its mask since, and with it what the blocks could be called.
            if store.is_stale or store.adapter and mask is None:
                self._give_back(store)
            else:
                self._commit(store, mask)

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


def split_into_runs(
    shape: Shape,
    keys: Sequence[Key],
    slots: bytes,
    generations: bytes,
    hashes: Sequence[Hash],
    positions: Mapping[Hash, int],
) -> list[Run]:
    """The keys of one group as runs of neighbours; `positions` says where a key's hash is in the request's `hashes`."""
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
