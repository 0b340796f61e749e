"""An engine without a model: tensors of random bytes, a scheduler side and a worker for each rank.

Holds true: what a block should contain is computed here, from the tensors, without Forebay's help.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from forebay import EngineSession, Ticket, WorkerEngine
from rig.process import wait_until

SECONDS = 20.0
ROWS = 16

Attention = Literal["full", "windowed"] | int


def hashes(name: str, count: int, first: int = 0) -> list[bytes]:
    """As an engine's: 32 bytes each, in prefix order."""
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(first, first + count)]


def words(numbers: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def numbers(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]


@dataclass(frozen=True)
class Group:
    """One KV group: (tensor, bytes of its page that are the group's) in layer order."""

    group: int
    refs: tuple[tuple[int, int], ...]
    is_replicated: bool = False
    attention: Attention = "full"


@dataclass(frozen=True)
class Model:
    """The KV cache of one rank. A row may be wider than its page, and groups may lie in the same tensors."""

    pages: tuple[int, ...] = (1000, 3000)
    stride: int = 4096
    groups: tuple[Group, ...] = (Group(0, ((0, 1000), (1, 3000))),)
    blocks_per_chunk: int = 1
    rows: int = ROWS


def incarnation_of(engine_id: str) -> bytes:
    """A test starts each engine once."""
    return hashlib.sha256(engine_id.encode()).digest()[:16]


class Rank:
    """One worker process's half, in this process."""

    def __init__(
        self, sockets: Path, engine_id: str, rank: int, ranks: int, model: Model, seed: int, verify: bool = True
    ):
        self.model = model
        size = model.stride * model.rows
        self.buffers = [(ctypes.c_ubyte * size)() for _ in model.pages]
        self.fill(seed)
        self.worker = WorkerEngine(
            str(sockets),
            engine_id,
            rank,
            ranks,
            incarnation=incarnation_of(engine_id),
            tensors=[
                (ctypes.addressof(buffer), model.rows, model.stride, page)
                for buffer, page in zip(self.buffers, model.pages, strict=True)
            ],
            groups=[(group.group, group.is_replicated, group.refs) for group in model.groups],
            blocks_per_chunk=model.blocks_per_chunk,
            threads=2,
            verify=verify,
        )

    def fill(self, seed: int) -> None:
        for number, buffer in enumerate(self.buffers):
            ctypes.memmove(buffer, random.Random(seed * 100 + number).randbytes(len(buffer)), len(buffer))

    def clear(self) -> None:
        for buffer in self.buffers:
            ctypes.memset(buffer, 0, len(buffer))

    def block(self, group: Group, block: int) -> bytes:
        """What a block of the group contains on this rank."""
        return b"".join(
            bytes(self.buffers[tensor][block * self.model.stride : block * self.model.stride + page])
            for tensor, page in group.refs
        )

    def padding(self) -> bytes:
        """The bytes of all rows that belong to no page."""
        return b"".join(
            bytes(buffer[row * self.model.stride + page : (row + 1) * self.model.stride])
            for buffer, page in zip(self.buffers, self.model.pages, strict=True)
            for row in range(self.model.rows)
        )

    def finish(self, job: int) -> tuple[bool, int]:
        """Waits for the job's one report: (all copied, bytes)."""
        assert self.worker.wait([job], SECONDS)
        [(reported, is_whole, copied, seconds)] = self.worker.finished()
        assert reported == job and seconds >= 0
        return is_whole, copied


@dataclass
class Engine:
    """Both halves. Use as a context manager: leaving it ends them."""

    sockets: Path
    model: Model = field(default_factory=Model)
    ranks: int = 1
    engine_id: str = "engine"
    namespace: str = "model-a"
    seed: int = 1
    deadline: float = SECONDS
    stock_blocks: int = 16
    verify: bool = True

    def __post_init__(self) -> None:
        print(f"seed {self.seed}")
        self.session = EngineSession(
            str(self.sockets),
            self.engine_id,
            self.ranks,
            incarnation=incarnation_of(self.engine_id),
            stock_blocks=self.stock_blocks,
            deadline=self.deadline,
        )
        self.name(self.namespace)
        self.workers = [
            Rank(self.sockets, self.engine_id, rank, self.ranks, self.model, self.seed + rank, self.verify)
            for rank in range(self.ranks)
        ]
        self.jobs = 0

    def name(self, namespace: str) -> None:
        groups = [(group.group, group.attention, 16, group.is_replicated) for group in self.model.groups]
        self.session.set_namespace({"model": namespace, "test": "python"}, groups)

    def wait_ready(self) -> Self:
        def is_ready() -> bool:
            return self.session.state() == "ready" and all(rank.worker.state() == "ready" for rank in self.workers)

        wait_until("the engine is ready", is_ready, SECONDS)
        return self

    def reserve(self, group: int, count: int) -> tuple[bytes, bytes]:
        """Waits for the stock; an engine would go on without."""
        slots, generations = b"", b""

        def is_enough() -> bool:
            nonlocal slots, generations
            more = self.session.reserve(group, count - len(slots) // 4)
            slots, generations = slots + more[0], generations + more[1]
            return len(slots) == 4 * count

        wait_until(f"{count} slots are reserved", is_enough, SECONDS)
        return slots, generations

    def copy(
        self,
        direction: Literal["store", "load"],
        pool: bytes,
        groups: list[tuple[int, bytes, bytes, bytes, int]],
    ) -> list[tuple[bool, int]]:
        """One job on all ranks; each one's report."""
        self.jobs += 1
        for rank in self.workers:
            submit = rank.worker.submit_store if direction == "store" else rank.worker.submit_load
            submit(self.jobs, pool, groups)
        return [rank.finish(self.jobs) for rank in self.workers]

    def store(self, group: Group, keys: list[bytes], blocks: list[int], predecessor: bytes | None = None) -> None:
        """Reserve, copy, commit; waits until the daemon acknowledged."""
        slots, generations = self.reserve(group.group, len(keys))
        reports = self.copy("store", self.session.pool, [(group.group, slots, generations, words(blocks), 0)])
        assert all(is_whole for is_whole, _ in reports)
        self.commit(group, keys, slots, generations, predecessor)

    def commit(
        self, group: Group, keys: list[bytes], slots: bytes, generations: bytes, predecessor: bytes | None = None
    ) -> None:
        self.session.commit(group.group, keys, predecessor, slots, generations)
        wait_until("the commit is acknowledged", lambda: self.session.stats()["queued"] == 0, SECONDS)

    def look_up(self, keys: list[bytes], group: int = 0) -> Ticket:
        ticket = self.session.lookup([(group, keys)])
        assert ticket.poll(SECONDS)
        return ticket

    def hit(self, keys: list[bytes], group: int = 0) -> Ticket:
        """Asks until all are ready: after a restart blocks are verified first."""
        ticket = self.look_up(keys, group)

        def is_hit() -> bool:
            nonlocal ticket
            if ticket.states(0) != b"\1" * len(keys):
                ticket = self.look_up(keys, group)
            return ticket.states(0) == b"\1" * len(keys)

        wait_until(f"{len(keys)} keys are ready", is_hit, SECONDS)
        return ticket

    def load(self, group: Group, ticket: Ticket, blocks: list[int], skipped: int = 0) -> list[tuple[bool, int]]:
        lists = (group.group, ticket.slots(0), ticket.generations(0), words(blocks), skipped)
        return self.copy("load", ticket.pool, [lists])

    def close(self) -> None:
        self.session.close()
        for rank in self.workers:
            rank.worker.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(f"session {self.session.state()}: {self.session.reason()}; {self.session.stats()}")
            print([(rank.worker.state(), rank.worker.reason()) for rank in self.workers], f"pid {os.getpid()}")
        self.close()
