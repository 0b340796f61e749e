"""Blocks in a shared store, for programs that have neither an engine nor a daemon.

Invariants: every future ends, after the store's deadline at the latest. One thread per store waits for its batches.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from forebay._native import ForebayError, StoreEngine

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from forebay._native import HostTensor

# Deadlines are checked this often while an operation is in progress.
TICK_SECONDS = 0.05
IDLE_SECONDS = 3600.0

# Converts the outcomes, by name, to a future's result.
_Judge = Callable[[list[str]], Any]


class Store:
    """Blocks by hash in Redis, Valkey or a shared directory, with the names that daemons use for the same `fields`.

    `url` is `redis://[user:password@]host[:port][/db]`, `rediss://...` for TLS, `unix:///path`, several of these
    with commas between them for a cluster, or `file:///directory`. A server need not be reachable: its operations
    then end as `unavailable`. A directory must exist. `fields` name the namespace, as for `Client.open_namespace`. Each block has
    `block_bytes`; the memory used is 64 times that. Operations that take longer than `deadline` seconds end as
    `timeout`.

    Options of Redis: `connections` (4), `threads` (1), `key_prefix` ("forebay:"), `value_bytes` (1 MiB),
    `ttl_seconds`, `ca_file`, `cluster` (False), `password_file`, `secret_file`. Of a directory: `streams` (8), `buffers`
    (16), `io_direct`, `fsync` ("none", "data" or "all"), `capacity_bytes`, `shard_folders` (True), `read_only`,
    `secret_file`. `secret_file` names the file with the secret of all hosts that share the store, as the daemon's key
    `tier.secret_file`: without it their blocks are absent.

    The calls return futures of `concurrent.futures`; `await asyncio.wrap_future(...)` waits for one in a coroutine.
    Raises `ForebayError` for invalid arguments. Safe to share between threads.
    """

    def __init__(
        self, url: str, fields: Mapping[str, str], block_bytes: int, *, deadline: float = 10.0, **options: Any
    ) -> None:
        self._engine = StoreEngine(url, fields, block_bytes, deadline, options)
        self._batches: dict[int, _Batch] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="forebay-store", daemon=True)
        self._thread.start()

    def dump(
        self, hashes: Sequence[bytes], buffers: Sequence[ReadableBuffer | HostTensor], *, group: int = 0
    ) -> Future[list[str]]:
        """Stores one buffer per hash: anything with the buffer protocol, or a torch tensor in host memory, of exactly
        `block_bytes`. The future has an outcome for each: `stored`, or the error's kind.

        The buffers must not change before the future is done. One round trip for all of them.
        """
        return self._begin(lambda: self._engine.begin_dump(group, hashes, buffers), list)

    def load(
        self, hashes: Sequence[bytes], buffers: Sequence[WriteableBuffer | HostTensor], *, group: int = 0
    ) -> Future[list[str]]:
        """Fills one buffer or tensor per hash, each of `block_bytes`. The future has an outcome for each:
        `loaded`, `absent`, `invalid` if the block was stored with other `block_bytes`, or the error's kind; a buffer that is
        not `loaded` is unchanged.

        The buffers must not be used before the future is done. One round trip for all of them.
        """
        return self._begin(lambda: self._engine.begin_load(group, hashes, buffers), list)

    def lookup(self, hashes: Sequence[bytes], *, group: int = 0) -> Future[list[bool]]:
        """Which blocks exist. The future raises `ForebayError` if the store could not be asked. One round trip."""
        return self._begin(lambda: self._engine.begin_lookup(group, hashes), self._found)

    @staticmethod
    def wait(futures: Iterable[Future[Any]], timeout: float | None = None) -> bool:
        """Whether all of these are done, after at most `timeout` seconds."""
        return not concurrent.futures.wait(futures, timeout).not_done

    def fileno(self) -> int:
        """Readable when an operation has completed, for event loops."""
        return self._engine.fileno()

    def close(self) -> None:
        """Ends all connections; futures that are not done raise. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, begin: Callable[[], int], judge: _Judge) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            # Under the lock, so that the thread cannot see the end of the batch before it is recorded here.
            self._batches[begin()] = _Batch(future, judge)
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._batches and not self._is_closed:
                    self._changed.wait(IDLE_SECONDS)
                if self._is_closed:
                    break
            for number, outcomes in self._engine.turn(TICK_SECONDS):
                with self._changed:
                    batch = self._batches.pop(number)
                batch.end(outcomes)
        self._engine.close()
        for batch in self._batches.values():
            batch.future.set_exception(ForebayError("the store was closed"))

    def _found(self, outcomes: list[str]) -> list[bool]:
        for outcome in outcomes:
            if outcome not in ("found", "absent"):
                raise self._engine.refusal(outcome)
        return [outcome == "found" for outcome in outcomes]


class _Batch:
    """A future, and the function that makes its result."""

    def __init__(self, future: Future[Any], judge: _Judge):
        self.future = future
        self._judge = judge

    def end(self, outcomes: list[str]) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._judge(outcomes))
        except ForebayError as error:
            self.future.set_exception(error)
