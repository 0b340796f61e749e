"""`forebay.transfer` between two processes, and within one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forebay import ForebayError
from forebay.transfer import Endpoint, Memory, Peer, Remote, Segment

MIB = 1 << 20
# Of the other process's memory.
NBYTES = 8 * MIB
PATIENCE = 30.0


@functools.cache
def pattern(nbytes: int) -> np.ndarray:
    made = (np.arange(nbytes, dtype=np.uint64) * 2654435761 >> 13).astype(np.uint8)
    made.flags.writeable = False
    return made


def serve(address: str, told: Connection) -> None:
    """The other process: memory to read and to write, new for each word of its parent, until that kills it."""
    endpoint = Endpoint(listen=address)
    threading.Thread(target=answer_all, args=(endpoint,), daemon=True).start()
    told.send(endpoint.address)
    while True:
        told.recv()
        memory = endpoint.allocate(NBYTES, write=True)
        np.frombuffer(memory.view, np.uint8)[:] = pattern(NBYTES)
        told.send(memory.descriptor)
        told.recv()
        # What of an earlier test's writes is still under way goes nowhere.
        memory.deregister(PATIENCE)
        told.send(None)


def answer_all(endpoint: Endpoint) -> None:
    while True:
        if (peer := endpoint.accept(PATIENCE)) is not None:
            threading.Thread(target=answer, args=(peer,), daemon=True).start()


def answer(peer: Peer) -> None:
    """A message for each message, until the peer is gone."""
    with contextlib.suppress(ForebayError):
        while True:
            if (message := peer.recv(PATIENCE)) is not None:
                peer.send(message[::-1])


class Other:
    """The other process. Tests share it, each with memory of its own, so that it has to survive each of them."""

    descriptor: bytes

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(address, theirs), daemon=True)
        self.process.start()
        self.address = self.hear()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE), "the other process says nothing"
        return self.pipe.recv()

    def begin(self) -> Other:
        """New memory."""
        self.pipe.send("begin")
        self.descriptor = self.hear()
        return self

    def end(self) -> None:
        """Takes the memory away again. Who holds it still is an error."""
        self.resume()
        self.pipe.send("end")
        assert self.hear() is None

    def freeze(self) -> None:
        """Stops all its threads. The signal alone does not wait for that: one that runs may answer a while longer."""
        os.kill(self.process.pid or 0, signal.SIGSTOP)
        end = time.monotonic() + PATIENCE
        while any(
            stat.read_text().rpartition(")")[2].split()[0] != "T"
            for stat in Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        ):
            assert time.monotonic() < end, "the other process does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Other]]:
    """The other process of a transport: a new one if a test has killed the last."""
    running: dict[str, Other] = {}

    def get(transport: str) -> Other:
        if transport not in running or not running[transport].process.is_alive():
            path = tmp_path_factory.mktemp("transfer") / "other.sock"
            running[transport] = Other("tcp://127.0.0.1:0" if transport == "tcp" else f"shm://{path}")
        return running[transport]

    yield get
    for other in running.values():
        other.stop()


@pytest.fixture(params=["tcp", "shm"])
def other(request: pytest.FixtureRequest, others: Callable[[str], Other]) -> Iterator[Other]:
    other = others(request.param).begin()
    yield other
    if other.process.is_alive():
        other.end()


def meet(endpoint: Endpoint, other: Other) -> tuple[Peer, Remote]:
    peer = endpoint.connect(other.address)
    return peer, peer.memory(other.descriptor)


def test_bytes_go_both_ways_between_buffers_of_all_kinds(other: Other) -> None:
    # Here, because the other processes import this file too.
    import torch

    with Endpoint() as endpoint:
        peer, remote = meet(endpoint, other)
        assert remote.nbytes == NBYTES
        expected = pattern(NBYTES)
        array, tensor, plain = np.zeros(NBYTES, np.uint8), torch.zeros(NBYTES, dtype=torch.uint8), bytearray(NBYTES)
        pointed = np.zeros(NBYTES, np.uint8)
        ours = endpoint.allocate(NBYTES)
        memories = [
            (endpoint.register(array, read=False), array),
            (endpoint.register(tensor, read=False), tensor.numpy()),
            (endpoint.register(plain, read=False), np.frombuffer(plain, np.uint8)),
            (endpoint.register_address(pointed.ctypes.data, NBYTES, read=False), pointed),
            (ours, np.frombuffer(ours.view, np.uint8)),
        ]
        for memory, found in memories:
            assert memory.nbytes == NBYTES
            peer.read(memory, remote)
            assert np.array_equal(found, expected)
        array[:MIB] = 7
        peer.write(memories[0][0], remote, remote_offset=MIB, nbytes=MIB, notice=b"written")
        peer.read(ours, remote, remote_offset=MIB, nbytes=MIB)
        assert np.frombuffer(ours.view, np.uint8)[:MIB].tolist() == [7] * MIB
        for memory, _ in memories:
            memory.deregister()


def test_futures_work_with_threads_and_with_asyncio(other: Other) -> None:
    with Endpoint() as endpoint:
        peer, remote = meet(endpoint, other)
        memory = endpoint.allocate(NBYTES)
        parts = [Segment(memory, at * MIB, remote, at * MIB, MIB) for at in range(8)]
        futures = [peer.readv_async([part]) for part in parts]
        for future in futures:
            assert future.result(PATIENCE) is None
        assert bytes(memory.view or b"") == pattern(NBYTES).tobytes()

        async def many() -> None:
            await asyncio.gather(*(asyncio.wrap_future(peer.readv_async([part])) for part in parts))

        asyncio.run(many())
        with pytest.raises(ForebayError, match="outside") as raised:
            peer.readv_async([Segment(memory, 0, remote, NBYTES, 1)])
        assert raised.value.kind == "invalid"


def test_a_loop_of_ones_own_waits_for_the_descriptor(other: Other) -> None:
    with Endpoint() as endpoint:
        peer, remote = meet(endpoint, other)
        memory = endpoint.allocate(NBYTES)
        assert endpoint.poll() == []
        assert select.select([endpoint], [], [], 0)[0] == []
        begun = {peer.begin("read", [Segment(memory, at * MIB, remote, at * MIB, MIB)]) for at in range(8)}
        ended = set()
        while ended != begun:
            assert select.select([endpoint], [], [], PATIENCE)[0], "the descriptor never became readable"
            for number, error in endpoint.poll():
                assert error is None
                ended.add(number)
        assert select.select([endpoint], [], [], 0)[0] == []
        assert bytes(memory.view or b"") == pattern(NBYTES).tobytes()


def test_messages_come_back_in_order(other: Other) -> None:
    with Endpoint() as endpoint:
        peer, _ = meet(endpoint, other)
        for number in range(200):
            peer.send(b"message %d" % number)
            assert peer.recv(PATIENCE) == (b"message %d" % number)[::-1]
        assert peer.recv(0.01) is None
        assert peer.notice(0.0) is None
        with pytest.raises(ForebayError, match="too long"):
            peer.send(bytes(65_537))


def test_a_peer_that_is_killed_ends_what_is_under_way(other: Other) -> None:
    with Endpoint() as endpoint:
        peer, remote = meet(endpoint, other)
        # Through the socket on shared memory as well: a file that is mapped outlives its process.
        assert peer.is_up
        other.freeze()
        memory = endpoint.allocate(NBYTES)
        peer.send(b"never answered")
        future = peer.readv_async([Segment(memory, 0, remote, 0, NBYTES)])
        other.stop()
        with pytest.raises(ForebayError) as raised:
            peer.recv(PATIENCE)
        assert raised.value.kind == "unavailable"
        assert future.exception(PATIENCE) is None or isinstance(future.exception(), ForebayError)
        assert not peer.is_up
        with pytest.raises(ForebayError) as raised:
            peer.read(memory, remote)
        assert raised.value.kind in ("unavailable", "not_found")


def test_a_frozen_peer_costs_no_more_than_the_timeout(others: Callable[[str], Other]) -> None:
    other = others("tcp").begin()
    with Endpoint() as endpoint:
        peer, remote = meet(endpoint, other)
        memory = endpoint.allocate(NBYTES)
        other.freeze()
        try:
            with pytest.raises(ForebayError) as raised:
                peer.read(memory, remote, timeout=0.2)
        finally:
            other.resume()
        assert raised.value.kind == "timeout" and raised.value.hint
        peer.read(memory, remote)
        assert bytes(memory.view or b"") == pattern(NBYTES).tobytes()
    other.end()


# What a buffer holds before a read, and what its next owner fills it with.
BEFORE, NEXT_OWNER = 0xEE, 0xAA


class Interrupted(Exception):
    """What the handler of a signal raises."""


def interrupt(*_: object) -> None:
    raise Interrupted


class Ending:
    """One transfer with a stopped peer, and the ways to end it. Each returns when the caller may use the memory."""

    def __init__(self, endpoint: Endpoint, peer: Peer, verb: str, segments: list[Segment], other: Other) -> None:
        self.endpoint, self.peer, self.verb, self.segments, self.other = endpoint, peer, verb, segments, other

    def run(self, timeout: float = PATIENCE) -> None:
        (self.peer.readv if self.verb == "read" else self.peer.writev)(self.segments, timeout=timeout)

    def future(self) -> Future[None]:
        return (self.peer.readv_async if self.verb == "read" else self.peer.writev_async)(self.segments)

    def timeout(self) -> None:
        with pytest.raises(ForebayError) as raised:
            self.run(timeout=0.05)
        assert raised.value.kind == "timeout"

    def signal(self) -> None:
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted):
                self.run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def signal_before_anybody_has_the_future(self) -> None:
        self._interrupted(lambda: self.future())
        # The thread that sets futures is none the worse for it.
        assert self.future().cancel()

    def signal_before_anybody_has_the_number(self) -> None:
        self._interrupted(lambda: self.peer.begin(self.verb, self.segments))

    def _interrupted(self, begin: Callable[[], object]) -> None:
        engine = self.endpoint._engine

        class Engine:
            """A signal's handler raises as soon as the native call has returned."""

            def submit(self, *arguments: object) -> None:
                engine.submit(*arguments)
                raise Interrupted

            def __getattr__(self, name: str) -> object:
                return getattr(engine, name)

        self.endpoint._engine = Engine()
        try:
            with pytest.raises(Interrupted):
                begin()
        finally:
            self.endpoint._engine = engine

    def cancel(self) -> None:
        future = self.future()
        told: list[bool] = []
        future.add_done_callback(lambda future: told.append(future.cancelled()))
        assert future.cancel()
        assert future.cancelled() and future.cancel() and told == [True]

    def cancel_of_a_task(self) -> None:
        async def run() -> None:
            task = asyncio.create_task(self.awaited())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())

    async def awaited(self) -> None:
        await asyncio.wrap_future(self.future())

    def cancel_of_a_number(self) -> None:
        number = self.peer.begin(self.verb, self.segments)
        self.endpoint.cancel(number)
        [(ended, error)] = self.endpoint.poll(PATIENCE)
        assert ended == number and error is not None and error.kind == "timeout"

    def drop_and_deregister(self) -> None:
        self.future()
        gc.collect()
        self.segments[0].memory.deregister()

    def disconnect(self) -> None:
        future = self.future()
        self.peer.close()
        assert isinstance(future.exception(PATIENCE), ForebayError)

    def close(self) -> None:
        future = self.future()
        self.endpoint.close()
        assert isinstance(future.exception(PATIENCE), ForebayError)

    def kill(self) -> None:
        future = self.future()
        self.other.stop()
        assert isinstance(future.exception(PATIENCE), ForebayError)


ENDINGS = [name for name in vars(Ending) if not name.startswith("_") and name not in ("run", "future", "awaited")]


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_transfer_that_has_ended_gives_its_memory_back(other: Other, ending: str, verb: str) -> None:
    with Endpoint() as endpoint, Endpoint() as witness:
        peer = endpoint.connect(other.address)
        watching, theirs = meet(witness, other)
        other.freeze()
        # After the peer stopped, so that it is never mapped: a copy of this process would not wait for the peer.
        remote = peer.memory(other.descriptor)
        source = pattern(NBYTES)[::-1]
        buffer = np.full(NBYTES, BEFORE, np.uint8) if verb == "read" else source.copy()
        memory = endpoint.register(buffer, read=False)
        segments = [Segment(memory, at * MIB, remote, at * MIB, MIB) for at in range(8)]
        getattr(Ending(endpoint, peer, verb, segments, other), ending)()
        assert verb == "write" or (buffer == BEFORE).all(), "a stopped peer has answered"
        buffer[:] = NEXT_OWNER
        if ending != "kill":
            other.resume()
            fresh = witness.allocate(NBYTES)
            for who, what in [(watching, theirs)] + ([(peer, remote)] if peer.is_up else []):
                mine = fresh if who is watching else endpoint.allocate(NBYTES)
                who.read(mine, what)
                found, old = np.frombuffer(mine.view, np.uint8), pattern(NBYTES)
                # Bytes of a write that were on their way when it ended may arrive.
                assert ((found == old) | (found == source) if verb == "write" else found == old).all()
        assert (buffer == NEXT_OWNER).all(), "memory was changed after its transfer had ended"


def test_a_future_that_is_dropped_goes_on_to_its_end(other: Other) -> None:
    with Endpoint() as endpoint:
        peer, remote = meet(endpoint, other)
        memory = endpoint.allocate(NBYTES)
        gone = weakref.ref(peer.readv_async([Segment(memory, 0, remote, 0, NBYTES)]))
        end = time.monotonic() + PATIENCE
        while gone() is not None:
            assert time.monotonic() < end, "a dropped future is kept"
            time.sleep(0.01)
        assert bytes(memory.view or b"") == pattern(NBYTES).tobytes()


def test_a_forked_child_neither_uses_nor_ends_its_parents_endpoint() -> None:
    program = """
import os, sys
from forebay import ForebayError
from forebay.transfer import Endpoint, Segment
first, second = Endpoint(listen="tcp://127.0.0.1:0"), Endpoint()
theirs = first.register(bytearray(b"x" * 1000))
peer = second.connect(first.address)
back = first.accept(30)
mine = bytearray(1000)
memory, remote = second.register(mine, read=False), peer.memory(theirs.descriptor)
held = os.pipe()
child = os.fork()
if child == 0:
    os.close(held[1])
    calls = [lambda: peer.read(memory, remote), lambda: second.connect(first.address), lambda: back.recv(1),
             lambda: memory.deregister(), lambda: peer.readv_async([Segment(memory, 0, remote, 0, 9)]),
             lambda: second.poll(30), lambda: second.fileno(), lambda: first.accept(30)]
    for call in calls:
        try:
            call()
        except ForebayError as error:
            assert error.kind == "unavailable" and error.hint, error
        else:
            os._exit(1)
    assert not peer.is_up
    second.cancel(1)
    second.close()
    # Keeps the parent's sockets open until the parent lets it go.
    os.read(held[0], 1)
    sys.exit(0)
os.close(held[0])
peer.read(memory, remote)
assert mine == b"x" * 1000
second.close()
try:
    back.recv(30)
except ForebayError as error:
    assert error.kind == "unavailable", error
else:
    raise SystemExit("the peer does not hear that the parent has closed")
os.close(held[1])
assert os.waitpid(child, 0)[1] == 0
# The child has ended, with all that Python does at its end.
third = Endpoint()
peer = third.connect(first.address)
memory, remote = third.register(mine, read=False), peer.memory(theirs.descriptor)
peer.read(memory, remote)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


PAIR = """
import os, signal, threading
from forebay import ForebayError
from forebay.transfer import Endpoint, Segment
first, second = Endpoint(listen="tcp://127.0.0.1:0"), Endpoint()
theirs = first.allocate(4096)
peer = second.connect(first.address)
back = first.accept(30)
memory, remote = second.register(bytearray(4096), read=False), peer.memory(theirs.descriptor)
def begin():
    return peer.readv_async([Segment(memory, 0, remote, 0, 4096)])
"""


def run_program(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_child_that_is_forked_amid_futures_never_waits() -> None:
    run_program(
        PAIR
        + """
is_over = False
def work():
    while not is_over:
        for future in [begin() for _ in range(32)]:
            future.result(60)
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
ends = []
for number in range(100):
    child = os.fork()
    if child == 0:
        # Kills a child that waits for a lock.
        signal.alarm(30)
        try:
            second.close() if number % 2 else begin()
        except ForebayError as error:
            os._exit(0 if error.kind == "unavailable" else 1)
        os._exit(0 if number % 2 else 2)
    ends.append(os.waitpid(child, 0)[1])
    if ends[-1]:
        break
is_over = True
[thread.join() for thread in threads]
assert set(ends) == {0}, ends
peer.read(memory, remote)
print("end")
"""
    )


def test_a_handler_of_a_signal_closes_the_endpoint_while_futures_begin() -> None:
    run_program(
        PAIR
        + """
import sys, time
def leave(*_):
    second.close()
    print("end", flush=True)
    os._exit(0)
for number in range(40):
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status == 0, (number, status)
        continue
    sys.stdout = open(os.devnull, "w")
    signal.alarm(30)
    exec(compile(PAIR, "pair", "exec"))
    signal.signal(signal.SIGTERM, leave)
    threading.Timer(0.02 + number * 0.001, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    while True:
        for future in [begin() for _ in range(20)]:
            future.result(60)
print("end")
""".replace("compile(PAIR", f"compile({PAIR!r}")
    )


def test_a_callback_that_leaves_does_not_keep_other_futures_from_their_end() -> None:
    with Endpoint(listen="tcp://127.0.0.1:0") as first, Endpoint() as second:
        assert first.address is not None
        theirs, memory = first.allocate(MIB), second.allocate(MIB)
        peer = second.connect(first.address)
        remote = peer.memory(theirs.descriptor)

        def leave(future: Future[None]) -> None:
            sys.exit(0)

        # Called by the thread that sets the future, if this one has not ended already.
        with contextlib.suppress(SystemExit):
            peer.readv_async([Segment(memory, 0, remote, 0, MIB)]).add_done_callback(leave)
        for _ in range(3):
            peer.readv_async([Segment(memory, 0, remote, 0, 64)]).result(PATIENCE)


@pytest.mark.parametrize("wait", ["poll", "connect", "accept"])
def test_a_wait_is_interrupted_by_what_a_signals_handler_raises(wait: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, Endpoint(connect_timeout=PATIENCE) as endpoint:
        waits: dict[str, Callable[[], object]] = {
            "poll": lambda: endpoint.poll(PATIENCE),
            "connect": lambda: endpoint.connect(f"tcp://127.0.0.1:{mute.getsockname()[1]}"),
            "accept": lambda: endpoint.accept(PATIENCE),
        }
        before = signal.signal(signal.SIGALRM, interrupt)
        begun = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted):
                waits[wait]()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        # Not at the end of the wait.
        assert time.monotonic() - begun < PATIENCE


def test_a_transfer_is_a_read_or_a_write(other: Other) -> None:
    with Endpoint() as endpoint:
        peer, remote = meet(endpoint, other)
        memory = endpoint.allocate(NBYTES)
        with pytest.raises(ValueError, match="Write"):
            peer.begin("Write", [Segment(memory, 0, remote, 0, NBYTES)])  # type: ignore[arg-type]


def test_a_peer_that_is_collected_ends_its_session_behind_its_transfers_and_messages() -> None:
    with Endpoint(listen="tcp://127.0.0.1:0") as listener, Endpoint() as endpoint:
        assert listener.address is not None
        theirs = listener.allocate(NBYTES)
        np.frombuffer(theirs.view, np.uint8)[:] = pattern(NBYTES)
        memory = endpoint.allocate(NBYTES)
        # More than an endpoint may have at once.
        for number in range(300):
            peer = endpoint.connect(listener.address)
            peer.send(b"%d" % number)
            segments = [Segment(memory, 0, peer.memory(theirs.descriptor), 0, NBYTES if number % 50 == 0 else 9)]
            future = peer.readv_async(segments) if number % 2 else None
            begun = None if future else peer.begin("read", segments)
            accepted = listener.accept(PATIENCE)
            del peer, segments
            if future:
                future.result(PATIENCE)
            else:
                assert endpoint.poll(PATIENCE) == [(begun, None)]
            assert accepted is not None and accepted.recv(PATIENCE) == b"%d" % number
            with pytest.raises(ForebayError) as raised:
                accepted.recv(PATIENCE)
            assert raised.value.kind == "unavailable"
        assert bytes(memory.view or b"") == pattern(NBYTES).tobytes()


def test_a_buffer_is_kept_until_it_is_deregistered() -> None:
    class Bytes(bytearray):
        pass

    with Endpoint() as endpoint:
        buffer = Bytes(MIB)
        gone = weakref.ref(buffer)
        memory = endpoint.register(buffer)
        with pytest.raises(BufferError):
            buffer.clear()
        del buffer
        gc.collect()
        assert gone() is not None
        memory.deregister()
        end = time.monotonic() + PATIENCE
        while gone() is not None:
            assert time.monotonic() < end, "a deregistered buffer is kept"
            time.sleep(0.01)
        with pytest.raises(ForebayError):
            memory.deregister()


def test_a_buffer_is_its_owners_again_when_the_endpoint_is_closed() -> None:
    class Bytes(bytearray):
        # Given back by a thread of the endpoint, whose owner calls the endpoint.
        def __del__(self) -> None:
            ended.append(peer.is_up)
            with contextlib.suppress(ForebayError):
                endpoint.connect(endpoint.address or "")

    ended: list[bool] = []
    endpoint = Endpoint(listen="tcp://127.0.0.1:0")
    assert endpoint.address is not None
    peer = endpoint.connect(endpoint.address)
    buffer = bytearray(MIB)
    memory = endpoint.register(buffer)
    owned = endpoint.register(Bytes(MIB))
    endpoint.register(Bytes(MIB)).deregister()
    assert len(ended) == 1
    endpoint.close()
    buffer.clear()
    assert len(ended) == 2
    assert memory.nbytes == owned.nbytes == MIB


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e19, 0.0, -1.0])
def test_a_time_to_connect_that_is_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(ForebayError) as raised:
        Endpoint(connect_timeout=timeout)
    assert raised.value.kind == "invalid" and raised.value.hint


def test_what_cannot_be_registered_or_reached_is_refused_with_a_hint(tmp_path: Path) -> None:
    with Endpoint(listen="tcp://127.0.0.1:0") as endpoint:
        with pytest.raises(BufferError):
            endpoint.register(np.zeros((8, 8))[:, ::2])
        for objects in (np.array([object()]), np.zeros(1, dtype=[("a", "i4"), ("b", "O")])):
            with pytest.raises(BufferError, match="objects"):
                endpoint.register(objects)
        endpoint.register(np.zeros(1, dtype=[("O", "i4"), ("b", "f8")])).deregister()
        with pytest.raises(ForebayError, match="no bytes"):
            endpoint.register(bytearray())
        with pytest.raises(ForebayError, match="cannot be exported for writes"):
            endpoint.register(b"constant", write=True)
        for call in (
            lambda: Endpoint(listen="127.0.0.1:0"),
            lambda: Endpoint(listen="tcp://0.0.0.0:0"),
            lambda: Endpoint(connections=0),
            lambda: Endpoint(secret_file=tmp_path / "absent"),
            lambda: endpoint.connect(f"shm://{tmp_path / 'absent'}"),
            lambda: endpoint.connect("tcp://127.0.0.1:1"),
        ):
            with pytest.raises(ForebayError) as raised:
                call()
            assert raised.value.hint, raised.value


def test_only_who_knows_the_secret_connects(tmp_path: Path) -> None:
    for name in ("ours", "other"):
        (tmp_path / name).write_bytes(os.urandom(32).hex().encode())
        (tmp_path / name).chmod(0o600)
    with Endpoint(listen="tcp://127.0.0.1:0", secret_file=tmp_path / "ours") as endpoint:
        assert endpoint.address is not None
        with Endpoint(secret_file=tmp_path / "ours") as friend:
            peer = friend.connect(endpoint.address)
            assert peer.is_up
            assert endpoint.accept(PATIENCE) is not None
        for secret in (tmp_path / "other", None):
            with Endpoint(secret_file=secret) as stranger, pytest.raises(ForebayError, match="another secret"):
                stranger.connect(endpoint.address)
        assert endpoint.accept(0.0) is None


def test_an_encrypted_session_moves_the_bytes_and_needs_both_sides(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32).hex().encode())
    secret.chmod(0o600)
    with pytest.raises(ForebayError, match="needs a secret"):
        Endpoint(encrypt=True)
    with Endpoint(listen="tcp://127.0.0.1:0", secret_file=secret, encrypt=True) as endpoint:
        assert endpoint.address is not None
        source = endpoint.allocate(NBYTES)
        assert source.view is not None
        source.view[:] = os.urandom(NBYTES)
        with Endpoint(secret_file=secret, encrypt=True) as friend:
            peer = friend.connect(endpoint.address)
            target = friend.allocate(NBYTES)
            peer.read(target, peer.memory(source.descriptor))
            assert target.view == source.view
        with Endpoint(secret_file=secret) as plain, pytest.raises(ForebayError, match="the peer encrypts") as raised:
            plain.connect(endpoint.address)
        assert raised.value.hint


def test_a_session_goes_over_several_addresses_of_one_endpoint() -> None:
    hosts = ("tcp://127.0.0.1:", "tcp://127.0.0.2:")
    with Endpoint(listen=",".join(f"{host}0" for host in hosts)) as endpoint, Endpoint() as friend:
        assert endpoint.address is not None
        addresses = endpoint.address.split(",")
        assert [address[: len(host)] for address, host in zip(addresses, hosts, strict=True)] == list(hosts)
        source = endpoint.allocate(NBYTES)
        assert source.view is not None
        source.view[:] = os.urandom(NBYTES)
        peer = friend.connect(endpoint.address)
        target = friend.allocate(NBYTES)
        peer.read(target, peer.memory(source.descriptor))
        assert target.view == source.view
        with pytest.raises(ForebayError, match=r"over=`tcp://127\.0\.0\.2:1`"):
            friend.connect(f"{addresses[0]},tcp://127.0.0.2:1")
        with Endpoint(listen="tcp://127.0.0.1:0") as other, pytest.raises(ForebayError, match="different endpoints"):
            friend.connect(f"{addresses[0]},{other.address}")


def test_a_closed_endpoint_ends_every_wait(other: Other) -> None:
    endpoint = Endpoint()
    peer, remote = meet(endpoint, other)
    memory: Memory = endpoint.allocate(NBYTES)
    other.freeze()
    future = peer.readv_async([Segment(memory, 0, remote, 0, NBYTES)])
    endpoint.close()
    endpoint.close()
    assert future.done()
    for call in (lambda: peer.recv(), lambda: endpoint.accept(), lambda: memory.descriptor):
        with pytest.raises(ForebayError) as raised:
            call()
        assert raised.value.kind == "unavailable"


def test_a_range_behind_the_end_of_the_address_space_is_refused() -> None:
    with Endpoint() as endpoint, pytest.raises(ForebayError, match="behind the end of the address space") as raised:
        endpoint.register_address(2**64 - 4096, 8192)
    assert raised.value.kind == "invalid" and raised.value.hint


def test_a_future_without_a_thread_to_set_it_raises_the_named_error(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Endpoint() as endpoint:
        peer, remote = meet(endpoint, other)
        memory = endpoint.allocate(NBYTES)

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(ForebayError, match="can't start new thread") as raised:
                peer.readv_async([Segment(memory, 0, remote, 0, NBYTES)])
        assert raised.value.kind == "unavailable" and raised.value.hint
        assert peer.readv_async([Segment(memory, 0, remote, 0, NBYTES)]).result(PATIENCE) is None


def test_a_program_that_forgets_to_close_ends() -> None:
    program = (
        "import forebay.transfer as t; e = t.Endpoint(listen='tcp://127.0.0.1:0'); m = e.register(bytearray(100));"
        "p = t.Endpoint().connect(e.address); q = e.accept(); r = p.memory(m.descriptor);"
        "o = p._endpoint.register(bytearray(100)); p.readv_async([t.Segment(o, 0, r, 0, 100)]).result(9); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_library_of_ucx_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(ForebayError) as raised:
        Endpoint(listen="ucx://127.0.0.1:0", ucx_library=tmp_path / "libucp.so.0")
    assert raised.value.kind == "unsupported" and raised.value.hint
