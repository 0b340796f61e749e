"""The compiled part of Forebay. Users import `forebay` instead; this is what it stands on.

Every call that may wait releases the GIL first. Sizes are bytes, times are seconds unless a name says otherwise.

Nothing here survives a fork: the child has the objects but not their threads, and its copy of a lock may never be
unlocked. Make them in the process that uses them, and do not use those of a parent, not even `close`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, final

from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["Client", "EngineSession", "ForebayError", "StoreEngine", "Ticket", "WorkerEngine", "__version__"]

__version__: str

class ForebayError(Exception):
    """An error with a kind, facts and often a hint. `str()` is one line and ends with the hint."""

    kind: Literal["invalid", "not_found", "full", "io", "corrupt", "timeout", "unavailable", "unsupported"]
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

    def __new__(
        cls,
        socket_directory: str,
        engine_id: str,
        ranks: int,
        *,
        incarnation: bytes,
        stock_blocks: int = 64,
        deadline: float = 1.0,
        breaker_failures: int = 3,
    ) -> Self:
        """`engine_id` (1 to 64 bytes) and `incarnation` (16 bytes, not all zero) are the workers' too.

        `incarnation` tells one start of the engine from another: draw it anew each time (`os.urandom(16)`). What an
        earlier start of the same id holds stays out of use until its workers are gone.

        `stock_blocks`: slots of each group kept reserved ahead; a step that stores more gets only so many. An
        engine that asks for nothing for 2 s keeps 4. `deadline`: of each call; `breaker_failures` late or lost
        calls, with no lookup answered in time between them, make every lookup a miss until the daemon was reached
        again.
        Raises ForebayError (invalid).
        """
    def state(self) -> Literal["connecting", "attaching", "naming", "ready", "refused", "closed"]:
        """connecting: no daemon. attaching: waits for ranks. naming: `set_namespace` is missing or on its way.

        refused: the daemon said no for good; `reason()` says why. It is asked again now and then, in case
        another daemon takes its place; a refused namespace heals with `set_namespace`.
        """

    def reason(self) -> str | None:
        """Why the session is not ready, as one line for a log; None if it is."""

    def set_namespace(
        self, fields: Mapping[str, str], groups: Sequence[tuple[int, Literal["full", "windowed"], int, bool]]
    ) -> None:
        """Names what is stored and loaded from now on: (group, attention, tokens per block, is replicated).

        Returns at once; declared in the background and again after each reconnect. Calling it again moves to
        another namespace: stocks and unfinished commits of the old one are aborted, lookups on their way fail,
        leases stay until released. The same one again changes nothing.
        """

    def lookup(self, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> Ticket:
        """Asks for all keys of all groups of one request, in prefix order. One round trip, not waited for.

        `mask`, here and below: 32 bytes that stand for what the hashes do not tell, such as an adapter's weights. Each
        hash becomes one of the same length that is nobody else's, for 0.1 us. Raises ForebayError (invalid) for a mask
        of another length.

        Fails at once where the session is not ready or 64 lookups are on their way.
        """

    def expect(self, request: int, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> None:
        """A request waits in the engine's queue, and will look up these keys: evictions spare them, as far as there is room,
        and those on a tier come up.

        A hint, told in the background and lost with the connection. `request` is a number of the engine's own choice,
        and `met` ends it. 64 requests are told of at a time, and of each the first 2,048 keys of a group.
        """

    def met(self, request: int) -> None:
        """The request waits no more: it was looked up, or is gone. Unknown numbers are ignored."""

    def reserve(self, group: int, count: int) -> tuple[bytes, bytes]:
        """(slots, generations) as little-endian u32, up to `count` of them, from the stock: never waits."""

    def commit(
        self,
        group: int,
        hashes: Sequence[bytes],
        predecessor: bytes | None,
        slots: bytes,
        generations: bytes,
        mask: bytes | None = None,
    ) -> None:
        """Names filled slots; `predecessor` is the hash before the first. Queued, never waits.

        Slots that were lost with their daemon or pool drop out and are counted. Raises ForebayError (invalid) if
        the lists differ in length.
        """

    def abort(self, group: int, slots: bytes, generations: bytes) -> None:
        """Gives unfilled slots back. Queued, never waits."""

    @property
    def pool(self) -> bytes:
        """Id of the pool that reserved slots lie in, 16 bytes; empty when not ready."""

    def stats(self) -> dict[str, int]:
        """Counters since the start: lookups, lookup_failures, lookups_late, stored, duplicate, orphan,
        incomplete, lost, commits_dropped (became aborts), reserve_short (slots the stock did not have),
        reconnects. And as it is now: reserved_stock, stock_filling (1 or 0), leases_held,
        reservations_held, queued, breaker_open (1 or 0).
        """

    def close(self) -> None:
        """Delivers what is queued and ends the session, in at most `deadline` seconds. Idempotent."""

@final
class StoreEngine:
    """What `forebay.Store` is made of; use that.

    Numbers name batches. Buffers are kept until their batch is over; the caller vouches that nobody changes (or, for
    loads, looks at) their bytes meanwhile.
    """

    def __new__(
        cls, url: str, fields: Mapping[str, str], block_bytes: int, deadline: float, options: dict[str, Any]
    ) -> Self: ...
    def begin_dump(self, group: int, hashes: Sequence[bytes], buffers: Sequence[ReadableBuffer]) -> int:
        """Stores one buffer for each hash. Never waits."""

    def begin_load(self, group: int, hashes: Sequence[bytes], buffers: Sequence[WriteableBuffer]) -> int:
        """Fills one writable buffer for each hash. Never waits."""

    def begin_lookup(self, group: int, hashes: Sequence[bytes]) -> int:
        """Asks for each hash. Never waits."""

    def turn(self, timeout: float) -> list[tuple[int, list[str]]]:
        """Batches that are over, with an outcome for each block: stored, loaded, found, absent, or an error's kind.
        Waits at most `timeout` seconds for something to happen."""

    def fileno(self) -> int:
        """Readable when `turn` has something to do."""

    def close(self) -> None:
        """Ends all connections; what is under way never ends. Idempotent."""

@final
class WorkerEngine:
    """The worker side of one rank: maps the pool and copies between tensors and slots on its own threads.

    Attaches in the background, with backoff, for as long as it lives. Jobs for a pool that is not mapped, or
    whose slots have another generation, fail: a store job then simply leaves no birth record. The mapping
    outlives the daemon, and what was leased can be loaded while it restarts.
    """

    def __new__(
        cls,
        socket_directory: str,
        engine_id: str,
        rank: int,
        ranks: int,
        *,
        incarnation: bytes,
        tensors: Sequence[tuple[int, int, int, int]],
        groups: Sequence[tuple[int, bool, Sequence[tuple[int, int]]]],
        blocks_per_chunk: int = 1,
        threads: int = 0,
        verify: bool = True,
    ) -> Self:
        """`tensors`: (address, rows, row stride in bytes, page bytes), host memory that outlives this object.

        `groups`: (group, is replicated, refs), refs being (tensor index, page bytes) in layer order.
        `incarnation`: the session's.
        `threads`: 0 takes one for each core, at most 4.
        `verify`: whether loads are compared with the checksum that each slot has from birth, in the same pass; a slice
        of a slot is compared as a whole, also where a part of it is loaded. Not where the daemon has it switched off.
        Raises ForebayError (invalid) if a ref does not fit its tensor.
        """

    def state(self) -> Literal["connecting", "attaching", "ready", "refused", "closed"]: ...
    def reason(self) -> str | None:
        """Why the worker is not ready, as one line for a log; None if it is."""

    def submit_store(self, job: int, pool: bytes, groups: Sequence[tuple[int, bytes, bytes, bytes, int]]) -> None:
        """Queues a copy tensors -> slots. Never waits, never raises for a lost pool.

        `groups`: (group, slots u32, generations u32, block ids i32, skipped): `blocks_per_chunk` block ids a
        slot, one after another, perhaps fewer of the last; `skipped` is how many sub-blocks at the start of the
        first chunk are absent from the block ids. Absent ones are not copied; a store that lacks any fails, since
        half a block is none.
        Of replicated groups rank 0 alone copies. Raises ForebayError (invalid) if the lists do not fit together.
        """

    def submit_load(self, job: int, pool: bytes, groups: Sequence[tuple[int, bytes, bytes, bytes, int]]) -> None:
        """Queues a copy slots -> tensors, under the same rules.

        A slot that does not hold what was stored there fails the job; the daemon is told, looks for itself and drops it.
        """

    def finished(self) -> list[tuple[int, bool, int, float]]:
        """(job, all copied, bytes, seconds), each job exactly once. Never waits."""

    def wait(self, jobs: Sequence[int], timeout: float) -> bool:
        """True once all of `jobs` are finished; unknown ids count as finished."""

    def corrupt_loads(self) -> int:
        """Loads of slots that did not hold what was stored there. Counted since the start; never waits."""

    def shutdown(self) -> None:
        """Ends the copies that have begun, abandons the others and unmaps the pool. Idempotent."""

@final
class Client:
    """A plain client for any program: no engine, no shared memory needed. Raises ForebayError.

    Connects with the first call, and again after the daemon was restarted; namespace handles stay valid. One call
    at a time: threads wait for each other.
    """

    def __new__(cls, socket_directory: str, *, deadline: float = 5.0) -> Self: ...
    def open_namespace(self, fields: Mapping[str, str], block_bytes: Mapping[int, int]) -> int:
        """Namespace handle for `block_bytes` (group -> bytes of a block). One round trip."""

    def put(
        self, namespace: int, group: int, blocks: Sequence[tuple[bytes, bytes]], predecessor: bytes | None = None
    ) -> list[Literal["stored", "duplicate", "orphan", "full"]]:
        """Stores (hash, bytes) in prefix order; `predecessor` is the hash before the first. One round trip for
        each 8 MiB. A block of the group whose predecessor is not here is an orphan and not stored."""

    def get(self, namespace: int, group: int, hashes: Sequence[bytes]) -> list[bytes | None]:
        """The blocks' bytes, None where not found. One round trip for each 8 MiB."""

    def lookup(self, namespace: int, group: int, hashes: Sequence[bytes]) -> list[bool]:
        """Which are ready; none is leased afterwards. One round trip."""

    def inspect(self) -> dict[str, Any]:
        """What the daemon holds: pool, namespaces, sessions, size classes, tiers below. One round trip."""

    def purge(self, *, namespace_id: str | None = None, tenant: str | None = None) -> dict[str, int]:
        """Drops the ready blocks of a namespace or a tenant ("" for those without one). One round trip.

        {purged_blocks, purged_bytes, held_blocks}: held ones can no longer be hit and go when they are released.
        """

    def close(self) -> None:
        """Ends the connection. Idempotent."""
