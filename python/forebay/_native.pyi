"""The compiled part of Forebay. Users import `forebay` instead; this is what it stands on.

Every call that may wait releases the GIL first. Sizes are bytes, times are seconds unless a name says otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, final

__version__: str

class ForebayError(Exception):
    """An error with a kind, facts and often a hint; `str()` is one line."""

    kind: str
    """invalid, not_found, full, io, corrupt, timeout, unavailable or unsupported."""
    hint: str | None

@final
class Ticket:
    """A lookup on its way. Dropping it (or `release`) gives its lease back, now or when the answer arrives."""

    def poll(self, timeout: float) -> bool:
        """True once there is an answer, a failure counting as misses. Waits at most `timeout` seconds."""

    def states(self, position: int) -> bytes:
        """One byte a key of the position-th group asked for: 0 miss, 1 ready and leased, 2 promoting."""

    def slots(self, position: int) -> bytes:
        """Little-endian u32 slots, one for each key of the group: 0xFFFFFFFF where the key is not ready."""

    def generations(self, position: int) -> bytes:
        """Little-endian u32 generations, parallel to `slots`."""

    def has_failed(self) -> bool:
        """True if the daemon could not be asked; the answer then says miss everywhere."""

    @property
    def pool(self) -> bytes:
        """Id of the pool the slots lie in, 16 bytes; empty if the lookup failed."""

    def release(self) -> None:
        """Gives the lease back. Queued, never waits. Idempotent."""

@final
class EngineSession:
    """The scheduler side of one engine: never raises for a missing daemon, never waits unless asked to.

    A background thread connects, reconnects with backoff, keeps small stocks of reserved slots, and delivers
    commits, aborts and releases in order until the daemon acknowledged them. After a reconnect it declares what
    the engine still holds.
    """

    def __init__(
        self,
        socket_directory: str,
        engine_id: str,
        ranks: int,
        *,
        stock_blocks: int = 64,
        deadline: float = 1.0,
        breaker_failures: int = 3,
    ) -> None: ...
    def state(self) -> Literal["connecting", "attaching", "naming", "ready", "refused", "closed"]:
        """connecting: no daemon. attaching: waits for ranks. naming: `set_namespace` is missing or on its way.

        refused: the daemon said no for good; `reason()` says why.
        """

    def reason(self) -> str | None:
        """Why the session is not ready, as one line for a log; None if it is."""

    def set_namespace(
        self, fields: Mapping[str, str], groups: Sequence[tuple[int, Literal["full", "windowed"], int, bool]]
    ) -> None:
        """Names what is stored and loaded from now on: (group, attention, tokens per block, is replicated).

        Returns at once; declared in the background and again after each reconnect. Calling it again moves to
        another namespace: stocks and unfinished commits of the old one are aborted, leases stay until released.
        """

    def lookup(self, groups: Sequence[tuple[int, Sequence[bytes]]]) -> Ticket:
        """Asks for all keys of all groups of one request, in prefix order. One round trip, not waited for."""

    def reserve(self, group: int, count: int) -> tuple[bytes, bytes]:
        """(slots, generations) as little-endian u32, up to `count` of them, from the stock: never waits."""

    def commit(
        self, group: int, hashes: Sequence[bytes], predecessor: bytes | None, slots: bytes, generations: bytes
    ) -> None:
        """Names filled slots; `predecessor` is the hash before the first. Queued, never waits."""

    def abort(self, group: int, slots: bytes, generations: bytes) -> None:
        """Gives unfilled slots back. Queued, never waits."""

    @property
    def pool(self) -> bytes:
        """Id of the pool that reserved slots lie in, 16 bytes; empty when not ready."""

    def stats(self) -> dict[str, int]:
        """Counters since the start: lookups, lookup_failures, lookups_late, stored, duplicate, orphan,
        incomplete, lost, reserved_stock, leases_held, reservations_held, queued, reconnects, breaker_open."""

    def close(self) -> None:
        """Ends the session and joins the thread, at most `deadline` seconds."""

@final
class WorkerEngine:
    """The worker side of one rank: maps the pool and copies between tensors and slots on its own threads.

    Attaches in the background, with backoff, for as long as it lives. Jobs for a pool that is not mapped, or
    whose slots have another generation, fail: a store job then simply leaves no birth record.
    """

    def __init__(
        self,
        socket_directory: str,
        engine_id: str,
        rank: int,
        ranks: int,
        *,
        tensors: Sequence[tuple[int, int, int, int]],
        groups: Sequence[tuple[int, bool, Sequence[tuple[int, int]]]],
        blocks_per_chunk: int = 1,
        threads: int = 0,
    ) -> None:
        """`tensors`: (address, rows, row stride in bytes, page bytes), host memory that outlives this object.

        `groups`: (group, is replicated, refs), refs being (tensor index, page bytes) in layer order.
        Raises ForebayError (invalid) if a ref does not fit its tensor.
        """

    def state(self) -> Literal["connecting", "attaching", "ready", "refused", "closed"]: ...
    def reason(self) -> str | None: ...
    def submit_store(self, job: int, pool: bytes, groups: Sequence[tuple[int, bytes, bytes, bytes, int]]) -> None:
        """Queues a copy tensors -> slots. Never waits, never raises for a lost pool.

        `groups`: (group, slots u32, generations u32, block ids i32, skipped): `blocks_per_chunk` block ids a
        slot, one after another; `skipped` is how many sub-blocks at the start of the first chunk are absent from the block
        ids (they are not copied).
        """

    def submit_load(self, job: int, pool: bytes, groups: Sequence[tuple[int, bytes, bytes, bytes, int]]) -> None:
        """Queues a copy slots -> tensors, under the same rules."""

    def finished(self) -> list[tuple[int, bool, int, float]]:
        """(job, all copied, bytes, seconds), each job exactly once. Never waits."""

    def wait(self, jobs: Sequence[int], timeout: float) -> bool:
        """True once all of `jobs` are finished; unknown ids count as finished."""

    def shutdown(self) -> None: ...

@final
class Client:
    """A plain client for any program: no engine, no shared memory needed. Raises ForebayError."""

    def __init__(self, socket_directory: str, *, deadline: float = 5.0) -> None: ...
    def open_namespace(self, fields: Mapping[str, str], block_bytes: Mapping[int, int]) -> int:
        """Namespace handle for `block_bytes` (group -> bytes of a block). One round trip."""

    def put(
        self, namespace: int, group: int, blocks: Sequence[tuple[bytes, bytes]], predecessor: bytes | None = None
    ) -> list[Literal["stored", "duplicate", "orphan", "full"]]:
        """Stores (hash, bytes) in prefix order. One round trip for each 8 MiB."""

    def get(self, namespace: int, group: int, hashes: Sequence[bytes]) -> list[bytes | None]:
        """The blocks' bytes, None where not found. One round trip for each 8 MiB."""

    def lookup(self, namespace: int, group: int, hashes: Sequence[bytes]) -> list[bool]:
        """Which are ready, leased by nobody afterwards. One round trip."""

    def inspect(self) -> dict[str, object]: ...
    def purge(self, *, namespace_id: str | None = None, tenant: str | None = None) -> dict[str, int]: ...
    def close(self) -> None: ...
