"""One-sided reads and writes between the memory of processes, over TCP or on one host. Needs no daemon.

Invariants: every transfer ends, at the latest when its timeout is over or its peer is gone, and each future is set
once. Who hears that a transfer has ended (by its result, an error, an exception of a signal's handler, a cancelled
future) has its local memory back: nothing touches it any more. A buffer that is registered stays in place until it is
deregistered, however long its owner keeps it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, cast

from forebay._native import ForebayError, TransferEngine, TransferMemory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from forebay._native import HostTensor

__all__ = ["Endpoint", "Memory", "Peer", "Remote", "Segment"]

_log = logging.getLogger(__name__)

# The peer and the segments of a transfer. They are not collected before its end, which would end it.
_Kept = tuple["Peer", list["Segment"]]
# Begins a transfer that reports to a queue under a name, and appends its number to a list.
_Begin = Callable[[int, int, list[int]], None]

TIMEOUT_SECONDS = 30.0
# Of one wait for ends of transfers.
TICK_SECONDS = 0.5
# For which `close` waits for the callbacks of futures. A signal's handler may have interrupted who holds a future's
# lock.
CLOSE_SECONDS = 1.0
# The two queues of an endpoint: of futures, and of `Endpoint.poll`.
_FUTURES, _POLLED = 0, 1


class Segment(NamedTuple):
    """A range of this side's memory, and as many bytes at an offset of the peer's."""

    memory: Memory
    offset: int
    remote: Remote
    remote_offset: int
    nbytes: int


class Endpoint:
    """One side of transfers: it registers memory, connects to peers and accepts them. Has a thread of its own.

    `listen` is `tcp://HOST:PORT` (port 0 for a free one), `shm:///PATH` for processes of this user on this host, or
    `ucx://HOST:PORT` for bytes through UCX, on a trusted network only; without it the endpoint only connects. Up to 16
    TCP addresses have commas between, as in `address`. `secret_file` holds the secret that all endpoints share; without
    one, an endpoint reaches this host only. `connections` is the number of TCP connections to each peer. With
    `encrypt`, what goes over TCP is encrypted, at some processor time for each byte; both sides need it, and a secret.
    `ucx_library` is the file of libucp for addresses of UCX, by default the system's `libucp.so.0`. Safe to share
    between threads, and may be closed by a signal's handler.
    In a child that was forked, calls raise ForebayError (unavailable) at once, except `close`, `cancel` and `is_up`,
    which do nothing; the parent's transfers go on.
    """

    def __init__(
        self,
        listen: str | None = None,
        *,
        secret_file: str | Path | None = None,
        connections: int = 4,
        connect_timeout: float = 5.0,
        encrypt: bool = False,
        ucx_library: str | Path | None = None,
    ) -> None:
        secret = None if secret_file is None else str(secret_file)
        library = None if ucx_library is None else str(ucx_library)
        self._engine = TransferEngine(secret, connections, connect_timeout, encrypt, library)
        # Before the interpreter ends: the thread may hold buffers of Python's.
        self._finalizer = weakref.finalize(self, self._engine.close)
        # By name. Each step is one call of a dictionary, so that neither a fork nor a signal's handler finds a lock.
        self._futures: dict[int, _Transfer] = {}
        # What transfers of `Peer.begin` need until `poll` reports them.
        self._begun: dict[int, _Kept] = {}
        self._names = itertools.count()
        self._thread: threading.Thread | None = None
        self.address: str | None = self._engine.listen(listen) if listen else None

    def allocate(self, nbytes: int, *, read: bool = True, write: bool = False) -> Memory:
        """New memory, all zero, which peers may `read` or `write`. Peers on this host map it and copy it themselves:
        the fastest way. Touches no page."""
        memory = TransferMemory(nbytes)
        region, _ = self._engine.register(memory, read, write)
        # A stub can name the protocol from Python 3.12 on only.
        return Memory(self, region, nbytes, memoryview(cast("bytearray", memory)))

    def register(self, buffer: ReadableBuffer | HostTensor, *, read: bool = True, write: bool = False) -> Memory:
        """Memory of anything with the buffer protocol, or of a torch tensor in host memory, in one piece. What is
        read-only can be exported for reads, and written from; nothing is read into it. Copies nothing."""
        region, nbytes = self._engine.register(buffer, read, write)
        return Memory(self, region, nbytes, None)

    def register_address(
        self, address: int, nbytes: int, *, read: bool = True, write: bool = False, writable: bool = True
    ) -> Memory:
        """Memory at an address, which the caller keeps in place until it is deregistered; Python cannot check that."""
        region = self._engine.register_address(address, nbytes, read, write, writable)
        return Memory(self, region, nbytes, None)

    def connect(self, address: str) -> Peer:
        """The endpoint that listens there. Some round trips, at most `connect_timeout`. With several TCP addresses of
        one endpoint, with commas between, the session's connections go over them in turn, at least one over each."""
        return Peer(self, self._engine.connect(address))

    def accept(self, timeout: float | None = None) -> Peer | None:
        """The next peer that has connected to this endpoint; `None` if none has within `timeout` seconds."""
        peer = self._engine.accept(timeout)
        return None if peer is None else Peer(self, peer)

    def poll(self, timeout: float = 0.0) -> list[tuple[int, ForebayError | None]]:
        """The transfers of `Peer.begin` that have ended since the last call, each with its error. Waits at most
        `timeout` seconds for one."""
        ended = self._engine.finished(_POLLED, timeout)
        for _, name, _ in ended:
            self._begun.pop(name, None)
        return [(number, error) for number, _, error in ended]

    def cancel(self, number: int) -> None:
        """Ends a transfer of `Peer.begin`, if it has not ended; nothing touches its memory of this side afterwards.
        `poll` reports it. Never waits."""
        self._engine.cancel(number)

    def fileno(self) -> int:
        """Readable while `poll` has something to report: for `select`, or `loop.add_reader` of asyncio."""
        return self._engine.fileno(_POLLED)

    def close(self) -> None:
        """Ends all connections; transfers under way end with errors. Idempotent. Waits at most a second for callbacks
        of futures."""
        self._finalizer()
        thread = self._thread
        # One that is being started by who was interrupted cannot be joined.
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _future(self, begin: _Begin, kept: _Kept) -> Future[None]:
        future, name = _Transfer(self._engine, kept), next(self._names)
        # Before it begins, so that the thread finds it at its end.
        self._futures[name] = future
        try:
            with self._ended_if_interrupted() as begun:
                begin(_FUTURES, name, begun)
                future.number = begun[0]
                self._serve_futures()
        except BaseException:
            # The end of one that began finds nobody.
            self._futures.pop(name, None)
            raise
        return future

    def _serve_futures(self) -> None:
        """Starts the thread that sets futures. Two at once, of two first callers, do no harm."""
        if self._thread is None:
            thread = threading.Thread(
                target=_serve, args=(self._engine, self._futures), name="forebay-transfer", daemon=True
            )
            self._thread = thread
            try:
                thread.start()
            except RuntimeError as why:
                self._thread = None
                hint = "raise the limit on threads, or use `readv`, `writev` or `begin`, which need no thread of Python"
                error = ForebayError(f"cannot start the thread that sets futures: {why}; hint: {hint}")
                error.kind, error.hint = "unavailable", hint
                raise error from why
            except BaseException:
                self._thread = None
                raise

    @contextlib.contextmanager
    def _ended_if_interrupted(self) -> Iterator[list[int]]:
        """A list for the number of a transfer, which ends if its caller never learns of it."""
        begun: list[int] = []
        try:
            yield begun
        except BaseException:
            for number in begun:
                self._engine.cancel(number)
            raise


class Memory:
    """Registered memory. `descriptor` goes to peers by any way; whoever has it and may connect has its rights."""

    def __init__(self, endpoint: Endpoint, region: int, nbytes: int, view: memoryview | None) -> None:
        self._endpoint, self._region = endpoint, region
        self.nbytes = nbytes
        # The bytes of allocated memory, for `numpy.frombuffer` and the like.
        self.view = view

    @property
    def descriptor(self) -> bytes:
        """48 bytes for `Peer.memory` on the other side."""
        return self._endpoint._engine.export(self._region)

    def deregister(self, timeout: float = TIMEOUT_SECONDS) -> None:
        """After it no peer and no transfer reaches the memory. Transfers of this side on it end with an error. Waits
        for peers on this host to unmap it; raises ForebayError (timeout) if one does not."""
        self._endpoint._engine.deregister(self._region, timeout)


class Remote:
    """A peer's memory, imported from its descriptor."""

    def __init__(self, endpoint: Endpoint, remote: int, nbytes: int) -> None:
        self._endpoint, self._remote = endpoint, remote
        self.nbytes = nbytes
        weakref.finalize(self, endpoint._engine.release_remote, remote).atexit = False

    @property
    def is_mapped(self) -> bool:
        """Whether transfers are copies by this process; a moment after the import, on this host."""
        return self._endpoint._engine.is_mapped(self._remote)

    def close(self) -> None:
        """Forgets it. Transfers on it end with an error."""
        self._endpoint._engine.forget(self._remote)


class Peer:
    """A session with another endpoint. When it is gone, `connect` again and import the new descriptors. Keep the object:
    the session ends when it is collected and its transfers have ended."""

    def __init__(self, endpoint: Endpoint, peer: int) -> None:
        self._endpoint, self._peer = endpoint, peer
        weakref.finalize(self, endpoint._engine.release_peer, peer).atexit = False

    @property
    def is_up(self) -> bool:
        """Whether the session stands."""
        return self._endpoint._engine.is_up(self._peer)

    def memory(self, descriptor: bytes) -> Remote:
        """The peer's memory. Raises ForebayError (not_found) for a descriptor of another start of the peer."""
        return Remote(self._endpoint, *self._endpoint._engine.import_memory(self._peer, descriptor))

    def read(
        self,
        memory: Memory,
        remote: Remote,
        *,
        offset: int = 0,
        remote_offset: int = 0,
        nbytes: int | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        """Fills `memory` from the peer's, by default from both beginnings as many bytes as both have. One round trip
        for each MiB of a connection. Raises ForebayError; what the memory holds then is unspecified."""
        self.readv([_segment(memory, offset, remote, remote_offset, nbytes)], timeout=timeout)

    def write(
        self,
        memory: Memory,
        remote: Remote,
        *,
        offset: int = 0,
        remote_offset: int = 0,
        nbytes: int | None = None,
        notice: bytes | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        """The reverse of `read`. The peer gets the `notice` when all bytes are there. A write that raised may still
        change the peer's memory until the session has ended."""
        self.writev([_segment(memory, offset, remote, remote_offset, nbytes)], notice=notice, timeout=timeout)

    def readv(self, segments: Iterable[Segment], *, timeout: float = TIMEOUT_SECONDS) -> None:
        """Reads all segments, as one transfer."""
        self._endpoint._engine.transfer(self._peer, False, _places(segments), timeout, None)

    def writev(
        self, segments: Iterable[Segment], *, notice: bytes | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        """Writes all segments, as one transfer."""
        self._endpoint._engine.transfer(self._peer, True, _places(segments), timeout, notice)

    def readv_async(self, segments: Iterable[Segment], *, timeout: float = TIMEOUT_SECONDS) -> Future[None]:
        """As `readv`, with a future of `concurrent.futures`; in a coroutine, `await asyncio.wrap_future(...)`. To
        cancel the future ends the transfer. One that is dropped goes on to its end."""
        return self._endpoint._future(*self._begin("read", segments, None, timeout))

    def writev_async(
        self, segments: Iterable[Segment], *, notice: bytes | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> Future[None]:
        """As `writev`, with a future."""
        return self._endpoint._future(*self._begin("write", segments, notice, timeout))

    def begin(
        self,
        verb: Literal["read", "write"],
        segments: Iterable[Segment],
        *,
        notice: bytes | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> int:
        """Begins a transfer, whose number `Endpoint.poll` reports when it has ended. Never waits."""
        endpoint = self._endpoint
        begin, kept = self._begin(verb, segments, notice, timeout)
        name = next(endpoint._names)
        endpoint._begun[name] = kept
        try:
            with endpoint._ended_if_interrupted() as begun:
                begin(_POLLED, name, begun)
                return begun[0]
        except BaseException:
            endpoint._begun.pop(name, None)
            raise

    def send(self, data: bytes) -> None:
        """At most 64 KiB, which `recv` returns on the other side, in order. Never waits: raises ForebayError (full) if
        the peer has not received the latest 64."""
        self._endpoint._engine.send(self._peer, data, False)

    def recv(self, timeout: float | None = None) -> bytes | None:
        """The next message; `None` if none has come within `timeout` seconds. Raises ForebayError (unavailable) if the
        peer is gone and no message is left."""
        return self._endpoint._engine.receive(self._peer, False, timeout)

    def notify(self, data: bytes) -> None:
        """As `send`, for `notice` on the other side."""
        self._endpoint._engine.send(self._peer, data, True)

    def notice(self, timeout: float | None = None) -> bytes | None:
        """The next notice, from `notify` or behind a write; otherwise as `recv`."""
        return self._endpoint._engine.receive(self._peer, True, timeout)

    def close(self) -> None:
        """Ends the session; its transfers end with errors."""
        self._endpoint._engine.disconnect(self._peer)

    def _begin(
        self,
        verb: Literal["read", "write"],
        segments: Iterable[Segment],
        notice: bytes | None,
        timeout: float,
    ) -> tuple[_Begin, _Kept]:
        if verb not in ("read", "write"):
            raise ValueError(f"a transfer is a `read` or a `write`, not {verb!r}")
        segments = list(segments)
        engine, peer, places = self._endpoint._engine, self._peer, _places(segments)

        def begin(queue: int, name: int, begun: list[int]) -> None:
            engine.submit(peer, verb == "write", places, timeout, notice, queue, name, begun)

        return begin, (self, segments)


class _Transfer(Future[None]):
    """The future of a transfer. It is cancelled when the transfer has ended, not before."""

    def __init__(self, engine: TransferEngine, kept: _Kept) -> None:
        super().__init__()
        self._engine = engine
        self.kept: _Kept | None = kept
        self.number = 0
        self.is_given_up = False

    def cancel(self) -> bool:
        self.is_given_up = True
        self._engine.cancel(self.number)
        return super().cancel()

    def end(self, error: ForebayError | None) -> None:
        self.kept = None
        if self.is_given_up and error is not None:
            super().cancel()
        if self.set_running_or_notify_cancel():
            self.set_result(None) if error is None else self.set_exception(error)


def _serve(engine: TransferEngine, futures: dict[int, _Transfer]) -> None:
    """Sets futures until the endpoint is closed. It holds no endpoint, so that one can be collected."""
    while True:
        is_last = engine.is_closed()
        for _, name, error in engine.finished(_FUTURES, TICK_SECONDS):
            _end(futures, name, error)
        if is_last:
            break


def _end(futures: dict[int, _Transfer], name: int, error: ForebayError | None) -> None:
    # None if a signal interrupted who would have got it.
    future = futures.pop(name, None)
    if future is None:
        return
    try:
        future.end(error)
    except BaseException:  # noqa: BLE001 - reported below
        # Of a callback that leaves, as by SystemExit: the other futures are to be set all the same.
        _log.exception("a callback of a future raised")


def _places(segments: Iterable[Segment]) -> list[tuple[int, int, int, int, int]]:
    return [
        (memory._region, offset, remote._remote, remote_offset, nbytes)
        for memory, offset, remote, remote_offset, nbytes in segments
    ]


def _segment(memory: Memory, offset: int, remote: Remote, remote_offset: int, nbytes: int | None) -> Segment:
    if nbytes is None:
        nbytes = min(memory.nbytes - offset, remote.nbytes - remote_offset)
    return Segment(memory, offset, remote, remote_offset, nbytes)
