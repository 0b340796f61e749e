"""Rounds larger than the pool and smaller than the disk: how fast documents come from the disk, and how far ahead of their
requests.

`python bench/disk_rounds.py [--rounds N] [--json FILE]`, with PYTHONPATH=python:tests and a built `forebay`. The shipped
daemon with an SSD file in the system's directory for temporary files, and one engine without a model: session and copies
are those of the connector. It stores each document, then asks for all of them round after round, with the next documents as
queue hints or without any, and pauses for as long as a question would be computed. What is loaded is compared with what was
stored. The disk's own rate is that of plain direct reads of the same size, as many in flight as a document has blocks,
measured before each run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import queue
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from forebay import EngineSession, WorkerEngine
from rig.daemon import Daemon
from rig.process import wait_until

BLOCK_BYTES = 512 << 10
BLOCKS = 8  # of a document
POOL_BYTES = 128 << 20
DOCUMENTS = 96  # three pools
DISK_BYTES = 768 << 20
READ_BYTES = 256 << 20  # of the disk alone
AHEAD = 4  # documents in the engine's queue
SECONDS = 60.0
READY = 1


@dataclass(frozen=True)
class Round:
    policy: str
    order: str
    hinted: int
    pause_ms: float
    number: int
    gb_per_s: float  # into the engine's memory; without the pauses' share where there are none
    hit_rate: float
    ahead: float  # blocks that were ready at a lookup's first answer
    from_disk: float  # blocks that came up from the disk, of those asked for
    mean_wait_ms: float  # from a lookup to its last block
    disk_gb_per_s: float  # of the disk alone, before the run


class Engine:
    """One rank, whose memory holds one document."""

    def __init__(self, daemon: Daemon) -> None:
        self.memory = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        start = os.urandom(16)
        directory = str(daemon.socket.parent)
        self.session = EngineSession(directory, "rounds", 1, incarnation=start, stock_blocks=2 * BLOCKS)
        self.session.set_namespace({"model": "rounds"}, [(0, "full", 128, False)])
        tensors = [(self.memory.ctypes.data, BLOCKS, BLOCK_BYTES, BLOCK_BYTES)]
        groups = [(0, False, [(0, BLOCK_BYTES)])]
        self.worker = WorkerEngine(directory, "rounds", 0, 1, incarnation=start, tensors=tensors, groups=groups)
        self._rows = np.arange(BLOCKS, dtype="<i4").tobytes()
        self._jobs = 0
        wait_until("the engine is ready", lambda: self.session.state() == self.worker.state() == "ready", SECONDS)

    def store(self, document: int) -> None:
        fill(self.memory, document)
        slots = generations = b""

        def has_slots() -> bool:
            nonlocal slots, generations
            more = self.session.reserve(0, BLOCKS - len(slots) // 4)
            slots, generations = slots + more[0], generations + more[1]
            return len(slots) == 4 * BLOCKS

        wait_until("there are slots", has_slots, SECONDS)
        self._copy(self.worker.submit_store, self.session.pool, slots, generations, self._rows)
        self.session.commit(0, keys(document), None, slots, generations)

    def load(self, document: int) -> tuple[int, int, float]:
        """How many blocks were hits, how many of them at the first answer, and the wait for the last of them."""
        begun = time.perf_counter()
        ticket = self.session.lookup([(0, keys(document))])
        assert ticket.poll(SECONDS) and not ticket.has_failed()
        at_once = ticket.states(0).count(READY)
        while 2 in ticket.states(0) and time.perf_counter() - begun < SECONDS:
            time.sleep(0.0005)
        waited = time.perf_counter() - begun
        states = ticket.states(0)
        hits = len(states) - len(states.lstrip(bytes([READY])))
        if hits:
            slots, generations = ticket.slots(0)[: 4 * hits], ticket.generations(0)[: 4 * hits]
            self._copy(self.worker.submit_load, ticket.pool, slots, generations, self._rows[: 4 * hits])
            assert is_document(self.memory[:hits], document), f"document {document} has other bytes"
        ticket.release()
        return hits, at_once, waited

    def close(self) -> None:
        self.worker.shutdown()
        self.session.close()

    def _copy(self, submit: Callable[..., None], pool: bytes, slots: bytes, generations: bytes, rows: bytes) -> None:
        self._jobs += 1
        submit(self._jobs, pool, [(0, slots, generations, rows, 0)])
        assert self.worker.wait([self._jobs], SECONDS)
        assert all(is_copied for _, is_copied, _, _ in self.worker.finished())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", default="lru,default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = [
        each
        for policy in options.policies.split(",")
        for order in ("in order", "shuffled")
        for hinted, pause_ms in ((0, 0.0), (AHEAD, 0.0), (0, 20.0), (AHEAD, 20.0))
        for each in run(policy, order, hinted, pause_ms, options.rounds)
    ]
    show(measured)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in measured], indent=1) + "\n")
    return 0


def run(policy: str, order: str, hinted: int, pause_ms: float, rounds: int) -> Iterator[Round]:
    """The rounds after the first sight."""
    disk = disk_gb_per_s()
    with Daemon(
        POOL_BYTES, unit_bytes=4 << 20, ssd_bytes=DISK_BYTES, ssd_admission="all", pool={"policy": policy}
    ) as daemon:
        engine = Engine(daemon.start())
        for document in range(DOCUMENTS):
            engine.store(document)
            # Stores at the speed of memory would be evicted before the disk has them.
            wait_until("it is on the disk", lambda: is_written(daemon, document + 1), SECONDS)  # noqa: B023
        chosen = random.Random(order)
        orders = [
            chosen.sample(range(DOCUMENTS), DOCUMENTS) if order == "shuffled" else list(range(DOCUMENTS))
            for _ in range(rounds)
        ]
        line = [document for each in orders for document in each]
        for number in range(rounds):
            came = promoted(daemon)
            begun = time.perf_counter()
            told = ask(engine, line, range(number * DOCUMENTS, (number + 1) * DOCUMENTS), hinted, pause_ms / 1e3)
            seconds = time.perf_counter() - begun
            blocks = DOCUMENTS * BLOCKS
            hits, at_once, waited = (sum(part) for part in zip(*told, strict=True))
            yield Round(
                policy,
                order,
                hinted,
                pause_ms,
                number + 2,
                hits * BLOCK_BYTES / seconds / 1e9,
                hits / blocks,
                at_once / blocks,
                (promoted(daemon) - came) / blocks,
                waited / DOCUMENTS * 1e3,
                disk,
            )
            print(f"{policy}, {order}, {hinted} hinted, {pause_ms:g} ms: {seconds:.1f} s", file=sys.stderr, flush=True)
        engine.close()


def ask(engine: Engine, line: Sequence[int], places: range, hinted: int, pause: float) -> list[tuple[int, int, float]]:
    """What `Engine.load` says of each. Those behind it in the queue are hinted first."""
    told = []
    for at in places:
        for next_one in range(at + 1, min(at + 1 + hinted, len(line))):
            if next_one == at + hinted or at == places.start:
                engine.session.withdraw_hint(next_one)
                engine.session.hint(next_one, [(0, keys(line[next_one]))])
        time.sleep(pause)
        engine.session.withdraw_hint(at)
        told.append(engine.load(line[at]))
    return told


def is_written(daemon: Daemon, documents: int) -> bool:
    return daemon.metrics()["forebay_tier_stored_blocks_total"] >= documents * BLOCKS


def promoted(daemon: Daemon) -> float:
    return daemon.metrics()['forebay_tier_promotions_total{tier="ssd",outcome="ready"}']


def disk_gb_per_s() -> float:
    """Plain direct reads of blocks from a file where the daemon's is."""
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(READ_BYTES // BLOCK_BYTES):
            file.write(os.urandom(BLOCK_BYTES))
        file.flush()
        os.fsync(file.fileno())
        handle = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(BLOCKS):
            buffers.put(mmap.mmap(-1, BLOCK_BYTES))  # direct reads want whole pages

        def read(place: int) -> None:
            buffer = buffers.get()
            assert os.preadv(handle, [buffer], place * BLOCK_BYTES) == BLOCK_BYTES
            buffers.put(buffer)

        with ThreadPoolExecutor(BLOCKS) as threads:
            begun = time.perf_counter()
            list(threads.map(read, range(READ_BYTES // BLOCK_BYTES)))
            seconds = time.perf_counter() - begun
        os.close(handle)
    return READ_BYTES / seconds / 1e9


def keys(document: int) -> list[bytes]:
    return [hashlib.sha256(f"{document} {block}".encode()).digest() for block in range(BLOCKS)]


def fill(memory: np.ndarray, document: int) -> None:
    """Each block begins with its name; the rest is the same for all, since only the time to make it would differ."""
    memory[:, :16] = np.array([[document & 255, document >> 8, block] + [7] * 13 for block in range(BLOCKS)], np.uint8)


def is_document(memory: np.ndarray, document: int) -> bool:
    wanted = np.array([[document & 255, document >> 8, block] for block in range(len(memory))], np.uint8)
    return bool((memory[:, :3] == wanted).all())


def show(measured: Sequence[Round]) -> None:
    heads = (
        "policy",
        "order",
        "hinted",
        "pause, ms",
        "round",
        "hit rate",
        "ready at once",
        "from the disk",
        "wait, ms",
    )
    print(" | ".join(("", *heads, "GB/s", "the disk's", "")).strip() + "\n" + "|---" * 11 + "|")
    for each in measured:
        print(
            f"| {each.policy} | {each.order} | {each.hinted} | {each.pause_ms:g} | {each.number} | {each.hit_rate:.3f} | "
            f"{each.ahead:.3f} | {each.from_disk:.3f} | {each.mean_wait_ms:.1f} | {each.gb_per_s:.2f} | "
            f"{each.disk_gb_per_s:.2f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
