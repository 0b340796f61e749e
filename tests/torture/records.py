"""What all processes of a torture write down, in files that outlive them: who stored when, and what was purged when.

Holds true: times are those of one clock. A store's time is written after the daemon had acknowledged it, a purge's
after it had succeeded; so who reads a record too early misses a fault, and never sees one where there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torture.content import Space

STORES_PER_WRITER = 1 << 20
BOARD_BYTES = 1024


def now() -> int:
    """Nanoseconds; the same clock in all processes of the machine."""
    return time.monotonic_ns()


class Writer:
    """Numbers the stores of one process, and says which of them were acknowledged."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self.count = 0
        self.file = os.open(_acks(directory, number), os.O_RDWR | os.O_CREAT, 0o600)

    def next(self) -> int:
        self.count += 1
        return self.number << 32 | self.count

    def acknowledged(self, stores: Iterable[int]) -> None:
        moment = now().to_bytes(8, "little")
        for store in stores:
            os.pwrite(self.file, moment, 8 * (store & 0xFFFFFFFF))


def _acks(directory: Path, writer: int) -> Path:
    return directory / f"stores-{writer}"


class Purges:
    """The purges that succeeded; and whether a block that was found should have been gone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = os.open(directory / "purges", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.read = 0
        self.known: list[tuple[str, int, int]] = []
        self.writers: dict[int, int] = {}

    def succeeded(self, whose: str, begun: int) -> None:
        """Of a tenant, or of `tenant/name`. Must be called after the purge was acknowledged."""
        os.write(self.file, json.dumps([whose, begun, now()]).encode() + b"\n")

    def complaint(self, space: Space, store: int, looked: int) -> str | None:
        """What is wrong with a block of this store being found by a look that began at `looked`."""
        self._catch_up()
        stored = self._acknowledged(store)
        for whose, begun, ended in self.known:
            if whose in (space.tenant, space.path) and stored and stored < begun and ended < looked:
                ago = [(looked - moment) / 1e9 for moment in (stored, begun, ended)]
                return (
                    f"store {store:#x} of {space.path} is there, which was acknowledged {ago[0]:.3f} s before the "
                    f"look; a purge of {whose} began {ago[1]:.3f} s and had succeeded {ago[2]:.3f} s before it"
                )
        return None

    def _catch_up(self) -> None:
        text = os.pread(self.file, 1 << 20, self.read)
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        self.known += [(tenant, begun, ended) for tenant, begun, ended in map(json.loads, whole.splitlines())]

    def _acknowledged(self, store: int) -> int:
        """When; 0 if it is not known."""
        writer, count = store >> 32, store & 0xFFFFFFFF
        if writer not in self.writers:
            try:
                self.writers[writer] = os.open(_acks(self.directory, writer), os.O_RDONLY)
            except FileNotFoundError:
                return 0
        return int.from_bytes(os.pread(self.writers[writer], 8, 8 * count), "little")


class Board:
    """What a process says of itself, last; and what it complains of."""

    def __init__(self, directory: Path, number: int) -> None:
        self.directory = directory
        self.file = os.open(directory / f"board-{number}", os.O_RDWR | os.O_CREAT, 0o600)
        self.counts: dict[str, int] = {}
        self.state = "beginning"

    def add(self, what: str, count: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def show(self, state: str) -> None:
        self.state = state
        said = json.dumps({"at": now(), "state": state, "counts": self.counts}).encode()
        assert len(said) <= BOARD_BYTES, "the board is too small"
        os.pwrite(self.file, said.ljust(BOARD_BYTES), 0)

    def fail(self, complaint: str) -> None:
        """The run ends with it."""
        self.show(self.state)
        line = json.dumps({"at": now(), "pid": os.getpid(), "complaint": complaint}).encode() + b"\n"
        with contextlib.closing(_Failures(self.directory)) as failures:
            os.write(failures.file, line)
        print(f"FAILURE: {complaint}", flush=True)


class _Failures:
    def __init__(self, directory: Path) -> None:
        self.file = os.open(directory / "failures", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def close(self) -> None:
        os.close(self.file)


def failures(directory: Path) -> list[str]:
    path = directory / "failures"
    lines = path.read_text().splitlines() if path.exists() else []
    return [str(json.loads(line)["complaint"]) for line in lines]


def board(directory: Path, number: int) -> dict[str, Any]:
    """What the process said last; empty if it said nothing yet, or is saying it."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        said: dict[str, Any] = json.loads((directory / f"board-{number}").read_text())
        return said
    return {}
