"""The interface to the daemon: the part of the native module that the vLLM side uses, and its replacement if it is
missing.

Invariants: opening never raises and never waits. `AbsentSession` misses and stores nothing. `AbsentEngine` fails
every copy, so that a load becomes a computation and a store leaves no record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from forebay.vllm.fingerprint import kept_folder
from forebay.vllm.guard import logger
from forebay.vllm.settings import Settings

Groups = Sequence[tuple[int, bytes, bytes, bytes, int]]

# After this long without an answer a call counts as failed; a request with a shorter wait has its own deadline.
CALL_SECONDS = 1.0
SIZES = ("B", "KiB", "MiB", "GiB")
# A copy takes milliseconds; one that takes longer than this deserves a line in the log.
FLUSH_LOG_SECONDS = 10.0


class Ticket(Protocol):
    """A lookup in progress, and the lease of its answer; see `forebay.Ticket`."""

    def poll(self, timeout: float) -> bool: ...
    def states(self, position: int) -> bytes: ...
    def slots(self, position: int) -> bytes: ...
    def generations(self, position: int) -> bytes: ...
    def sources(self, position: int) -> bytes: ...
    def has_failed(self) -> bool: ...
    @property
    def pool(self) -> bytes: ...
    def stop_waiting(self) -> None: ...
    def release(self) -> None: ...


class Session(Protocol):
    """The scheduler's side; see `forebay.EngineSession`."""

    def state(self) -> Literal["connecting", "attaching", "naming", "ready", "refused", "closed"]: ...
    def reason(self) -> str | None: ...
    def set_namespace(
        self, fields: Mapping[str, str], groups: Sequence[tuple[int, Literal["full", "windowed"] | int, int, bool]]
    ) -> None: ...
    def lookup(self, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> Ticket: ...
    def hint(self, request: int, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> None: ...
    def withdraw_hint(self, request: int) -> None: ...
    def reserve(self, group: int, count: int) -> tuple[bytes, bytes]: ...
    def commit(
        self,
        group: int,
        hashes: Sequence[bytes],
        predecessor: bytes | None,
        slots: bytes,
        generations: bytes,
        mask: bytes | None = None,
    ) -> None: ...
    def abort(self, group: int, slots: bytes, generations: bytes) -> None: ...
    def saved(self, tokens: int, seconds: float) -> None: ...
    @property
    def pool(self) -> bytes: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class CopyEngine(Protocol):
    """The worker's side; see `forebay.WorkerEngine`."""

    def submit_store(self, job: int, pool: bytes, groups: Groups, stream: int = 0) -> None: ...
    def submit_load(self, job: int, pool: bytes, groups: Groups, stream: int = 0) -> None: ...
    def finished(self) -> list[tuple[int, bool, int, float]]: ...
    def wait(self, jobs: Sequence[int], timeout: float) -> bool: ...
    def report(self) -> dict[str, Any]: ...
    def shutdown(self) -> None: ...


def open_session(settings: Settings, engine_id: str, incarnation: bytes, ranks: int, stock_blocks: int) -> Session:
    """A session that connects in the background. Returns at once."""
    try:
        from forebay import EngineSession

        deadline = max(CALL_SECONDS, settings.lookup_deadline_ms / 1e3)
        return EngineSession(
            settings.socket,
            engine_id,
            ranks,
            incarnation=incarnation,
            stock_blocks=stock_blocks,
            deadline=deadline,
        )
    except Exception as error:  # noqa: BLE001 - no exception reaches the engine
        logger.exception("forebay cannot open a session")
        return AbsentSession(str(error))


def describe(settings: Settings, fields: Mapping[str, str]) -> str:
    """The pool and the namespace with these fields, for the log. One round trip.

    Never raises: of a daemon that does not answer, only the place is known.
    """
    try:
        from forebay import Client

        client = Client(settings.socket, deadline=CALL_SECONDS)
        seen = client.inspect()
        client.close()
        ids = [str(known["namespace_id"]) for known in seen["namespaces"] if known["fields"] == fields]
        namespace = f", namespace {ids[0]}" if ids else ""
        return f"{_size(seen['capacity_bytes'])} at {settings.socket}{namespace}"
    except Exception:  # noqa: BLE001 - no exception reaches the engine
        return f"a pool at {settings.socket}"


def _size(count: int) -> str:
    unit = min(max(0, count.bit_length() - 1) // 10, len(SIZES) - 1)
    return f"{count / 1024**unit:.6g} {SIZES[unit]}"


def open_engine(
    settings: Settings,
    engine_id: str,
    incarnation: bytes,
    rank: int,
    ranks: int,
    tensors: Sequence[tuple[int, int, int, int]],
    groups: Sequence[tuple[int, bool, Sequence[tuple[int, int]]]],
    blocks_per_chunk: int,
    device: int | None = None,
    stages: bool = True,
) -> CopyEngine:
    """A copy engine that attaches in the background. Returns at once, for a `device` after its test."""
    try:
        from forebay import ForebayError, WorkerEngine
    except Exception:  # noqa: BLE001 - no exception reaches the engine
        logger.exception("forebay cannot copy in this worker")
        return AbsentEngine()
    try:
        return WorkerEngine(
            settings.socket,
            engine_id,
            rank,
            ranks,
            incarnation=incarnation,
            tensors=tensors,
            groups=groups,
            blocks_per_chunk=blocks_per_chunk,
            threads=settings.threads,
            verify=settings.verify_loads,
            device=device,
            stages=stages,
            method=settings.gpu_method,
            multiprocessors=settings.gpu_multiprocessors,
            calibrations=None if (folder := kept_folder()) is None else str(folder),
        )
    except ForebayError as error:
        logger.error("forebay cannot copy in this worker, so this engine stores nothing: %s", error)
        return AbsentEngine()
    except Exception:  # noqa: BLE001 - no exception reaches the engine
        logger.exception("forebay cannot copy in this worker")
        return AbsentEngine()


def flush(engine: CopyEngine, jobs: Collection[int]) -> None:
    """Returns when these copies have ended. An earlier return would let a copy touch what is used otherwise next."""
    while not engine.wait(sorted(jobs), FLUSH_LOG_SECONDS):
        logger.error("forebay has waited %g s and more for copies that vLLM must flush", FLUSH_LOG_SECONDS)


class AbsentTicket:
    """A miss for every key."""

    pool = b""

    def poll(self, timeout: float) -> bool:
        return True

    def states(self, position: int) -> bytes:
        return b""

    slots = generations = sources = states

    def has_failed(self) -> bool:
        return True

    def stop_waiting(self) -> None:
        pass

    def release(self) -> None:
        pass


class AbsentSession:
    """Replaces a missing session: misses everything, stores nothing."""

    pool = b""

    def __init__(self, reason: str):
        self._reason = reason

    def state(self) -> Literal["closed"]:
        return "closed"

    def reason(self) -> str:
        return self._reason

    def set_namespace(
        self, fields: Mapping[str, str], groups: Sequence[tuple[int, Literal["full", "windowed"] | int, int, bool]]
    ) -> None:
        pass

    def lookup(self, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> Ticket:
        return AbsentTicket()

    def hint(self, request: int, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> None:
        pass

    def withdraw_hint(self, request: int) -> None:
        pass

    def reserve(self, group: int, count: int) -> tuple[bytes, bytes]:
        return b"", b""

    def commit(
        self,
        group: int,
        hashes: Sequence[bytes],
        predecessor: bytes | None,
        slots: bytes,
        generations: bytes,
        mask: bytes | None = None,
    ) -> None:
        pass

    def abort(self, group: int, slots: bytes, generations: bytes) -> None:
        pass

    def saved(self, tokens: int, seconds: float) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class AbsentEngine:
    """Replaces a missing copy engine: every job ends at once, and has failed."""

    def __init__(self) -> None:
        self._jobs: list[int] = []

    def submit_store(self, job: int, pool: bytes, groups: Groups, stream: int = 0) -> None:
        self._jobs.append(job)

    submit_load = submit_store

    def finished(self) -> list[tuple[int, bool, int, float]]:
        jobs, self._jobs = self._jobs, []
        return [(job, False, 0, 0.0) for job in jobs]

    def wait(self, jobs: Sequence[int], timeout: float) -> bool:
        return True

    def report(self) -> dict[str, Any]:
        return {"trouble": None}

    def shutdown(self) -> None:
        pass
