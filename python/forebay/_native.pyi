"""The compiled part of Forebay. Users import `forebay`, which re-exports it.

Every call that may wait releases the GIL first. Sizes are bytes, times are seconds unless a name says otherwise.

Nothing here survives a fork: the child has the objects but not their threads, and its copy of a lock may never be
unlocked. Make them in the process that uses them, and do not use those of a parent. A child may end, and drop or close
what it inherited, at once; the parent's objects are not touched.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self, final, type_check_only

from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "Client",
    "EngineSession",
    "ForebayError",
    "StoreEngine",
    "Ticket",
    "TransferEngine",
    "TransferMemory",
    "WorkerEngine",
    "__version__",
    "find_sockets",
]

__version__: str

def find_sockets(named: str | None = None) -> str:
    """The directory of the daemon's sockets, by the rule that commands, programs and engines share.

    `named` (the directory, or the path of `forebay.sock` in it), else `FOREBAY_SOCKET`, else
    `FOREBAY_SOCKET_DIRECTORY`, else `socket.directory` of the configuration file (`FOREBAY_CONFIG`, else
    `/etc/forebay.toml`) if this user may read it, else the first of `/run/forebay` and `$XDG_RUNTIME_DIR/forebay` that
    is there.
    """

@type_check_only
class HostTensor(Protocol):
    """A contiguous torch tensor in host memory, which has no buffer protocol of its own."""

    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...

class ForebayError(Exception):
    """An error with a kind, facts and often a hint. `str()` is one line and ends with the hint."""

    kind: Literal["invalid", "not_found", "full", "io", "corrupt", "timeout", "unavailable", "unsupported"]
    hint: str | None

@final
class Ticket:
    """A lookup in progress. Dropping it (or `release`) returns its lease, now or when the answer arrives."""

    def poll(self, timeout: float) -> bool:
        """True once there is an answer; a failure is an answer of misses. Waits at most `timeout` seconds."""

    def states(self, position: int) -> bytes:
        """One byte per key of the position-th requested group: 0 miss, 1 ready and leased, 2 promoting,
        3 left out, of a group with a window (see `EngineSession.set_namespace`).

        A key that is promoting becomes one of the others in a later call, without another lookup. Nothing else changes.
        """

    def slots(self, position: int) -> bytes:
        """Little-endian u32 slots, one per key of the group: 0xFFFFFFFF where the key is not ready."""

    def generations(self, position: int) -> bytes:
        """Little-endian u32 generations, parallel to `slots`."""

    def sources(self, position: int) -> bytes:
        """Where each key's block was before this hit, a byte a key: 0 the pool, 1 a tier of this host, 2 a tier that hosts
        share. The first hit of a block that a tier brought up is the tier's."""

    def has_failed(self) -> bool:
        """True if the daemon could not be asked; the answer is then a miss for every key."""

    @property
    def pool(self) -> bytes:
        """Id of the pool with the slots, 16 bytes; empty if the lookup failed."""

    def stop_waiting(self) -> None:
        """Keys that are promoting are misses from now on; without an answer, all keys. What is ready stays leased.
        Never waits. Idempotent."""

    def release(self) -> None:
        """Returns the lease. Queued, never waits. Idempotent."""

@final
class EngineSession:
    """The scheduler side of one engine: never raises for a missing daemon, never waits unless asked to.

    A background thread connects, reconnects with backoff, and keeps small stocks of reserved slots. It delivers
    commits, aborts and releases in order until the daemon has acknowledged them. After a reconnect it declares what
    the engine still holds.
    """

    def __new__(
        cls,
        socket_directory: str | None,
        engine_id: str,
        ranks: int,
        *,
        incarnation: bytes,
        stock_blocks: int = 64,
        deadline: float = 1.0,
        breaker_failures: int = 3,
    ) -> Self:
        """`engine_id` (1 to 64 bytes) and `incarnation` (16 bytes, not all zero) must equal the workers'.

        `incarnation` identifies one start of the engine: draw a new one for each start (`os.urandom(16)`). Slots
        that an earlier start of the same id holds stay out of use until its workers are gone.

        `stock_blocks`: slots of each group kept reserved; a step that stores more gets only this many. With 0, the
        session stores nothing. An engine that neither looks up nor reserves, and has no slot of `reserve` in its
        hands, keeps 4 slots of each group after 2 s and none after 30 s. The next call of `lookup` or `reserve` begins
        to fill the stock, so a first `reserve` after 30 s gets nothing: call it again after a few milliseconds. An
        engine whose requests run calls `reserve(group, 0)` in each step to keep its stock. `deadline`: limit of each
        call. `breaker_failures`: after this many late or lost calls, with no lookup answered in time between them,
        every lookup is a miss until the daemon was reached again. Raises ForebayError (invalid).
        """
    def state(self) -> Literal["connecting", "attaching", "naming", "ready", "refused", "closed"]:
        """connecting: no daemon. attaching: waits for ranks. naming: `set_namespace` is missing or in progress.

        refused: the daemon refused for good; `reason()` says why. The request is repeated from time to time, in
        case another daemon takes its place; `set_namespace` recovers from a refused namespace.
        """

    def reason(self) -> str | None:
        """Why the session is not ready, as one line for a log; None if it is."""

    def set_namespace(
        self, fields: Mapping[str, str], groups: Sequence[tuple[int, Literal["full", "windowed"] | int, int, bool]]
    ) -> None:
        """Sets the namespace for all later stores and loads: (group, attention, tokens per block, is replicated).

        A number as attention is the length of a window: the group needs so many blocks before the end of a prefix.
        Lookups and hints that name a group of full attention before it then bring up little more of it than the prefix
        needs, and `Ticket.states` has 3 for keys before these. A lookup without a group of full attention brings up all.

        Returns at once; it is declared in the background and again after each reconnect. A later call changes the
        namespace: stocks and unfinished commits of the old one are aborted, lookups in progress fail, leases stay
        until released. A call with the same namespace changes nothing.
        """

    def lookup(self, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> Ticket:
        """Looks up all keys of all groups of one request, in prefix order. One round trip, not waited for.

        `mask`, also in later methods: 32 bytes that stand for anything that the hashes do not cover, such as an
        adapter's weights. It maps each hash to a unique one of the same length, in 0.1 us. Raises ForebayError
        (invalid) for a mask of another length.

        Fails at once if the session is not ready or 1,024 lookups are in progress.
        """

    def hint(self, request: int, groups: Sequence[tuple[int, Sequence[bytes]]], mask: bytes | None = None) -> None:
        """Hints that a request waits in the engine's queue and will look up these keys. The daemon protects their
        blocks from eviction as far as there is space, and prefetches those on a tier.

        Sent in the background and lost with the connection. The engine chooses the number `request`;
        `withdraw_hint` ends the hint. At most 64 requests at a time are sent, with the first 2,048 keys per group
        of each.
        """

    def withdraw_hint(self, request: int) -> None:
        """Withdraws the hint of a request that was looked up or is gone. Unknown numbers are ignored."""

    def reserve(self, group: int, count: int) -> tuple[bytes, bytes]:
        """(slots, generations) as little-endian u32, up to `count` of them, from the stock: never waits.

        There may be fewer, or none: go on without the others, or ask again."""

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

        Slots that were lost with their daemon or pool are dropped and counted. Raises ForebayError (invalid) if the
        lists differ in length.
        """

    def abort(self, group: int, slots: bytes, generations: bytes) -> None:
        """Returns unfilled slots. Queued, never waits."""

    def saved(self, tokens: int, seconds: float) -> None:
        """Tells what loads have saved: tokens that were not computed, and the least time that computing them would have
        taken. Sent with the next release of a lease, at most once. Never waits."""

    @property
    def pool(self) -> bytes:
        """Id of the pool with the reserved slots, 16 bytes; empty when not ready."""

    def stats(self) -> dict[str, int]:
        """Counters since the start: lookups, lookup_failures, lookups_late, stored, duplicate, orphan, incomplete,
        lost, commits_dropped (became aborts), reserve_short (slots the stock did not have), reconnects. Present
        values: reserved_stock, stock_filling (1 or 0), leases_held, reservations_held, queued, breaker_open (1 or
        0)."""

    def close(self) -> None:
        """Delivers queued messages and ends the session, in at most `deadline` seconds. Idempotent."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *raised: object) -> None:
        """As `close`."""

@final
class StoreEngine:
    """The native part of `forebay.Store`; use that class.

    Numbers identify batches. Buffers are kept until their batch has ended. The caller guarantees that nobody
    changes (or, for loads, reads) their bytes meanwhile.
    """

    def __new__(
        cls, url: str, fields: Mapping[str, str], block_bytes: int, deadline: float, options: dict[str, Any]
    ) -> Self: ...
    def begin_dump(self, group: int, hashes: Sequence[bytes], buffers: Sequence[ReadableBuffer | HostTensor]) -> int:
        """Stores one buffer per hash. Never waits."""

    def begin_load(self, group: int, hashes: Sequence[bytes], buffers: Sequence[WriteableBuffer | HostTensor]) -> int:
        """Fills one writable buffer per hash. Never waits."""

    def begin_lookup(self, group: int, hashes: Sequence[bytes]) -> int:
        """Looks up each hash. Never waits."""

    def turn(self, timeout: float) -> list[tuple[int, list[str]]]:
        """Batches that have ended, with an outcome per block: stored, loaded, found, absent, or an error's kind.
        Waits at most `timeout` seconds for an event."""

    def refusal(self, outcome: str) -> ForebayError:
        """What to raise where a block ended with this outcome, with the store's name and its present trouble."""

    def fileno(self) -> int:
        """Readable when `turn` has something to do."""

    def close(self) -> None:
        """Ends all connections; operations in progress never complete. Idempotent."""

@final
class WorkerEngine:
    """The worker side of one rank: maps the pool and copies between tensors and slots on its own threads.

    Attaches in the background, with backoff, for as long as it lives. Jobs for a pool that is not mapped, or whose
    slots have another generation, fail: a store job then leaves no birth record (slice checksum record). The
    mapping outlives the daemon, and leased blocks can be loaded while it restarts.
    """

    def __new__(
        cls,
        socket_directory: str | None,
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
        device: int | None = None,
        stages: bool = True,
        method: Literal["auto", "kernel", "batch", "loop", "pitched"] = "auto",
        multiprocessors: int = 0,
        calibrations: str | None = None,
    ) -> Self:
        """`tensors`: (address, rows, row stride in bytes, page bytes), memory that outlives this object: of the host,
        or of the CUDA device with the number `device`. `stages`: whether copies may go through staging memory where the
        driver has not registered the pool; set to False if tensors may be unmapped without `wait`. `method`: how a
        device copies, if it can; what is next in `report` stands in. `multiprocessors`: the most that the kernel for
        loads takes of the device; 0 takes eight. `calibrations`: the folder that keeps what is measured for "auto";
        without one each engine measures it.

        `groups`: (group, is replicated, refs), refs being (tensor index, page bytes) in layer order. `incarnation`:
        the session's. `threads`: 0 takes one per core, at most 4. `verify`: whether loads are compared with the
        birth record of each slot, in the same pass. A slice of a slot is compared as a whole, even if only a part
        of it is loaded. No comparison if the daemon has it switched off. Raises ForebayError: invalid if a ref does
        not fit its tensor; unsupported, unavailable or corrupt if the device cannot be used or fails its test, which
        takes some 100 ms.
        """

    def state(self) -> Literal["connecting", "attaching", "ready", "refused", "closed"]: ...
    def reason(self) -> str | None:
        """Why the worker is not ready, as one line for a log; None if it is."""

    def submit_store(
        self, job: int, pool: bytes, groups: Sequence[tuple[int, bytes, bytes, bytes, int]], stream: int = 0
    ) -> None:
        """Queues a copy tensors -> slots. Never waits, never raises for a lost pool.

        `groups`: (group, slots u32, generations u32, block ids i32, skipped): `blocks_per_chunk` block ids per
        slot, consecutively, perhaps fewer for the last; `skipped` is the number of sub-blocks at the start of the
        first chunk that are absent from the block ids. Absent ones are not copied; a store with any absent one
        fails, since a partial block is useless. Only rank 0 copies replicated groups. `stream`: of a device, the handle
        whose work so far comes before the copies. Raises ForebayError (invalid) if the lists do not fit together.
        """

    def submit_load(
        self, job: int, pool: bytes, groups: Sequence[tuple[int, bytes, bytes, bytes, int]], stream: int = 0
    ) -> None:
        """Queues a copy slots -> tensors, under the same rules.

        A slot without the stored content fails the job. The worker reports the slot to the daemon, which verifies
        it and drops the block if it is corrupt.
        """

    def finished(self) -> list[tuple[int, bool, int, float]]:
        """(job, all copied, bytes, seconds), each job exactly once. Never waits."""

    def wait(self, jobs: Sequence[int], timeout: float) -> bool:
        """True once no tensor of `jobs` is touched any more; unknown ids count as ended. A job on a device may be
        reported later."""

    def report(self) -> dict[str, Any]:
        """How it copies: device, numa_node (near which it copies, on a host with several; or None), methods, choice
        (where their order comes from: "given", "measured" by this engine, or "kept" from an earlier one), pool_bytes,
        registered_bytes (of them by the driver), copied_bytes, staged_bytes (of them through staging memory), trouble
        (what hinders it, or None). Never waits."""

    def corrupt_loads(self) -> int:
        """Loads of slots without the stored content. Counted since the start; never waits."""

    def shutdown(self) -> None:
        """Ends the copies that have begun, abandons the others and unmaps the pool. Idempotent."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *raised: object) -> None:
        """As `shutdown`."""

@final
class Client:
    """A plain client for any program: no engine, no mapping of the pool needed. Raises ForebayError.

    Connects with the first call, and again after the daemon was restarted; namespace handles stay valid. One call
    at a time: threads wait for each other. Blocks travel through memory that the client lends to the daemon, or else
    through messages; `repr` says which, and why.
    """

    def __new__(
        cls, socket_directory: str | None = None, *, deadline: float = 5.0, memory_bytes: int = 16777216
    ) -> Self:
        """`socket_directory`: found by `find_sockets` if None. `deadline`: limit of each call. `memory_bytes`: of the
        memory that is lent, whole MiB up to 64 MiB; 0: blocks travel through messages."""

    def open_namespace(self, fields: Mapping[str, str], block_bytes: Mapping[int, int]) -> int:
        """Namespace handle for `block_bytes` (group -> bytes of a block). One round trip. The handle stays valid; the
        daemon keeps the last 256 that a client opened, and a call on an older one takes two more round trips."""

    def put(
        self,
        namespace: int,
        group: int,
        blocks: Sequence[tuple[bytes, ReadableBuffer | HostTensor]],
        predecessor: bytes | None = None,
    ) -> list[Literal["stored", "duplicate", "orphan", "full"]]:
        """Stores (hash, buffer) in prefix order; `predecessor` is the hash before the first. One round trip per 8
        MiB. A buffer is anything with the buffer protocol, or a torch tensor in host memory. Stores nothing and raises if
        the hashes differ in length, or a buffer's size from the group's.

        An outcome for each block. stored: the pool has it now. duplicate: the pool had it already. orphan: not stored,
        since the block before it is neither in the pool nor on a tier, and no lookup of a prefix would reach it; put
        the earlier blocks first. full: not stored, since the pool has no slot to give now; put it later, or not at all,
        and the blocks behind it in the same call are mostly orphans."""

    def get(self, namespace: int, group: int, hashes: Sequence[bytes]) -> list[bytes | None]:
        """The blocks' bytes, None where not found. The hashes have one length. One round trip per 8 MiB."""

    def get_into(
        self, namespace: int, group: int, hashes: Sequence[bytes], buffers: Sequence[WriteableBuffer | HostTensor]
    ) -> list[bool]:
        """Fills one buffer or tensor per hash, each as long as a block of the group, and says which were found; the
        others are unchanged. One round trip per 8 MiB."""

    def lookup(self, namespace: int, group: int, hashes: Sequence[bytes]) -> list[bool]:
        """Which blocks the pool has now; no lease remains afterwards. One round trip.

        Blocks that only a lower tier has are False: nothing is brought up for a lookup. So are blocks that the daemon
        still compares with their checksums, after it was killed. `get` returns both.
        """

    def inspect(self) -> dict[str, Any]:
        """The daemon's content and state: version, pool, policy, namespaces, sessions, size classes, lower tiers.

        One round trip.
        """

    def purge(
        self, *, namespace_id: str | None = None, tenant: str | None = None, wait_seconds: int = 10
    ) -> dict[str, Any]:
        """Drops the ready blocks of a namespace or a tenant ("" for blocks without a tenant). One round trip.

        {purged_blocks, purged_bytes, held_blocks, namespace_ids}: held ones can no longer be hit and are dropped when
        they are released. `namespace_ids` are the purged namespaces that the daemon knows; none for a tenant of which
        no engine has opened a namespace since the daemon's start. Waits until this host's disks have removed the
        blocks: for at most `wait_seconds`, and for ten seconds in which they remove nothing. After that it raises, and
        the daemon goes on: `inspect()["tiers"]` has `purge` for a tier that is not done.
        """

    def close(self) -> None:
        """Ends the connection. Idempotent."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *raised: object) -> None:
        """As `close`."""

@final
class TransferMemory:
    """Zeroed memory that peers on this host can map; a writable buffer. Use `forebay.transfer.Endpoint.allocate`."""

    def __new__(cls, nbytes: int) -> Self: ...

@final
class TransferEngine:
    """The native part of `forebay.transfer.Endpoint`; use that class.

    Numbers identify regions, peers and transfers. A registered buffer is kept until it is deregistered; its bytes
    change whenever a peer or a transfer writes to it.
    """

    def __new__(
        cls,
        secret_file: str | None,
        connections: int,
        connect_timeout: float,
        encrypt: bool,
        ucx_library: str | None,
    ) -> Self: ...
    def listen(self, address: str) -> str:
        """The address with the port that it got; several have commas between. May ask the resolver."""

    def register(
        self, buffer: ReadableBuffer | HostTensor | TransferMemory, read: bool, write: bool
    ) -> tuple[int, int]:
        """Number and length of the region. Copies nothing."""

    def register_address(self, address: int, nbytes: int, read: bool, write: bool, may_write: bool) -> int:
        """The caller guarantees that the bytes are there until they are deregistered, and writable if `may_write`."""

    def export(self, region: int) -> bytes:
        """What a peer imports."""

    def deregister(self, region: int, timeout: float) -> None:
        """Waits until nothing reaches the region."""

    def connect(self, address: str) -> int:
        """Waits until the peer has proven who it is, or the timeout of connecting is over. Several addresses of one
        endpoint have commas between."""

    def accept(self, timeout: float | None) -> int | None:
        """Waits for a peer that connects."""

    def is_up(self, peer: int) -> bool:
        """Never waits."""

    def disconnect(self, peer: int) -> None:
        """Ends the session."""

    def import_memory(self, peer: int, descriptor: bytes) -> tuple[int, int]:
        """Number and length of the peer's region. Never waits."""

    def is_mapped(self, remote: int) -> bool:
        """Never waits."""

    def forget(self, remote: int) -> None:
        """Never waits."""

    def release_peer(self, peer: int) -> None:
        """Ends the session when what was sent has left, and drops its messages. Never waits, takes no lock for long."""

    def release_remote(self, remote: int) -> None:
        """As `forget`, soon. Never waits, takes no lock for long."""

    def transfer(
        self,
        peer: int,
        write: bool,
        places: list[tuple[int, int, int, int, int]],
        deadline: float,
        notice: bytes | None,
    ) -> None:
        """Runs a transfer of places (region, offset, remote, offset, bytes) to its end, and raises its error. If a
        signal interrupts it, the transfer ends first."""

    def submit(
        self,
        peer: int,
        write: bool,
        places: list[tuple[int, int, int, int, int]],
        deadline: float,
        notice: bytes | None,
        queue: int,
        name: int,
        begun: list[int],
    ) -> None:
        """Begins a transfer and appends its number to `begun`. Its end is for `finished` of the queue 0 or 1, with this
        name. Never waits."""

    def cancel(self, op: int) -> None:
        """Ends a transfer, if it has not ended; nothing touches its local memory afterwards. Never waits."""

    def finished(self, queue: int, timeout: float) -> list[tuple[int, int, ForebayError | None]]:
        """Waits at most `timeout` seconds for transfers that have ended: their numbers, names and errors."""

    def is_closed(self) -> bool:
        """Whether nothing ends any more that `finished` would not report now. Never waits."""

    def fileno(self, queue: int) -> int:
        """Readable while `finished` of the queue has something to report."""

    def send(self, peer: int, data: bytes, is_notice: bool) -> None:
        """Never waits."""

    def receive(self, peer: int, is_notice: bool, timeout: float | None) -> bytes | None:
        """Waits for a message or notice."""

    def close(self) -> None:
        """Ends everything. Idempotent."""
