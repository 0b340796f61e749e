"""What the blocks of the torture contain, so that whoever reads a page can tell whose it is.

Holds true: each page of 4 KiB carries the block's key, the rank, its own number and the number of the store that wrote
it; the rest of the page follows from these. Nothing here uses Forebay's code, so a reader of the pool's files can.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PAGE_BYTES = 4096
MAGIC = b"TORTURED"
# Magic, namespace, group, rank, number of the page in its slice, block hash, store.
HEAD = struct.Struct("<8s16sHHI32sQ")


@dataclass(frozen=True)
class Group:
    """One KV group: (tensor, bytes of its rows that are the group's) in layer order, the same on each rank."""

    group: int
    refs: tuple[tuple[int, int], ...]
    attention: Literal["full", "windowed"] = "full"

    @property
    def slice_bytes(self) -> int:
        return sum(page for _, page in self.refs)


@dataclass(frozen=True)
class Space:
    """A namespace, the shape of its blocks, and the keys that there are."""

    name: str
    tenant: str
    ranks: int
    groups: tuple[Group, ...]
    prompts: int = 100
    longest: int = 10
    hash_bytes: int = 32

    @property
    def fields(self) -> dict[str, str]:
        return {"model": self.name, "tenant": self.tenant, "made.by": "torture"}

    @property
    def path(self) -> str:
        return f"{self.tenant}/{self.name}"

    @property
    def tag(self) -> bytes:
        """What stands for the namespace in pages; not Forebay's id."""
        return hashlib.sha256(self.path.encode()).digest()[:16]

    def hashes(self, prompt: int, count: int) -> list[bytes]:
        names = (f"{self.name} {prompt} {number}" for number in range(count))
        return [hashlib.sha256(name.encode()).digest()[: self.hash_bytes] for name in names]

    def group(self, number: int) -> Group | None:
        return next((group for group in self.groups if group.group == number), None)


# Slots of 52, 12, 64, 4 and 40 KiB. Slices of the second space end inside a page, so that of rank 1 begins there.
RED = Space("wide", "red", 1, (Group(0, ((0, 32768), (1, 20480))), Group(1, ((1, 12288),), "windowed")))
BLUE = Space("ranks", "blue", 2, (Group(0, ((0, 24576), (1, 7000))),))
SMALL = Space("small", "blue", 1, (Group(0, ((0, 4096),)),), prompts=300, longest=30, hash_bytes=20)
PLAIN = tuple(Space("plain", tenant, 1, (Group(0, ((0, 40000),)),), prompts=40) for tenant in ("red", "blue"))
SPACES = (RED, BLUE, SMALL, *PLAIN)


@dataclass(frozen=True)
class Slice:
    """Whose bytes these should be."""

    space: Space
    group: Group
    rank: int
    hash: bytes

    def page(self, number: int, store: int) -> bytes:
        head = HEAD.pack(MAGIC, self.space.tag, self.group.group, self.rank, number, self.hash, store)
        filler = hashlib.blake2b(head).digest()
        return head + (filler * (PAGE_BYTES // len(filler)))[: PAGE_BYTES - len(head)]

    def content(self, store: int) -> bytes:
        length = self.group.slice_bytes
        return b"".join(self.page(number, store) for number in range(-(-length // PAGE_BYTES)))[:length]

    def judge(self, found: bytes) -> tuple[int, str | None]:
        """The store that wrote it, and what is wrong with it."""
        store = HEAD.unpack_from(found)[-1]
        expected = self.content(store)
        if found == expected:
            return store, None
        wrong = [
            at // PAGE_BYTES
            for at in range(0, max(len(expected), len(found)), PAGE_BYTES)
            if found[at : at + PAGE_BYTES] != expected[at : at + PAGE_BYTES]
        ]
        tales = "; ".join(f"page {at} {told(found[at * PAGE_BYTES :][:PAGE_BYTES], self)}" for at in wrong[:3])
        return store, f"{self} of store {store:#x}: {len(wrong)} wrong of {-(-len(expected) // PAGE_BYTES)}: {tales}"

    def __str__(self) -> str:
        return f"block {self.hash.hex()[:16]} of {self.space.path} group {self.group.group} rank {self.rank}"


def told(page: bytes, meant: Slice) -> str:
    """What a wrong page is."""
    if len(page) < HEAD.size:
        return f"is short: {page.hex()[:64]}"
    magic, tag, group, rank, number, name, store = HEAD.unpack_from(page)
    if magic != MAGIC:
        return f"is no page of a block: {page[:32].hex()}"
    space = next((space for space in SPACES if space.tag == tag), None)
    whose = space.path if space else "an unknown namespace"
    own = Slice(meant.space, meant.group, rank, meant.hash)
    head = own.page(number, store)[: HEAD.size]
    if head == page[: HEAD.size] and (group, tag) == (meant.group.group, meant.space.tag):
        if own.page(number, store)[: len(page)] != page:
            return f"has its own head, of page {number} of rank {rank} by store {store:#x}, before other bytes"
        return f"is its own page {number} of rank {rank} by store {store:#x}"
    return (
        f"says that it is page {number} of {name.hex()[:16]} of {whose} group {group} rank {rank} by store {store:#x}"
    )


def words(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)
