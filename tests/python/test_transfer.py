"""`forebay.transfer` between two processes, and within one."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from forebay import ForebayError
from forebay.transfer import Endpoint, Memory, Peer, Remote, Segment

MIB = 1 << 20
# Of the other process's memory.
NBYTES = 8 * MIB
PATIENCE = 30.0


def pattern(nbytes: int) -> np.ndarray:
    return (np.arange(nbytes, dtype=np.uint64) * 2654435761 >> 13).astype(np.uint8)


def serve(address: str, told: Connection) -> None:
    """The other process: memory to read and to write, a message for each message, until its parent says so."""
    endpoint = Endpoint(listen=address)
    memory = endpoint.allocate(NBYTES, write=True)
    np.frombuffer(memory.view, np.uint8)[:] = pattern(NBYTES)
    told.send((endpoint.address, memory.descriptor))
    peer = endpoint.accept(PATIENCE)
    assert peer is not None
    while (message := peer.recv(PATIENCE)) is not None:
        peer.send(message[::-1])


class Other:
    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(address, theirs), daemon=True)
        self.process.start()
        assert ours.poll(PATIENCE), "the other process says nothing"
        self.address, self.descriptor = ours.recv()

    def stop(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)


@pytest.fixture(params=["tcp", "shm"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Other]:
    other = Other("tcp://127.0.0.1:0" if request.param == "tcp" else f"shm://{tmp_path / 'other.sock'}")
    yield other
    other.stop()


def meet(endpoint: Endpoint, other: Other) -> tuple[Peer, Remote]:
    peer = endpoint.connect(other.address)
    return peer, peer.memory(other.descriptor)


def test_bytes_go_both_ways_between_buffers_of_all_kinds(other: Other) -> None:
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
        os.kill(other.process.pid or 0, signal.SIGSTOP)
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


def test_a_frozen_peer_costs_no_more_than_the_timeout() -> None:
    other = Other("tcp://127.0.0.1:0")
    try:
        with Endpoint() as endpoint:
            peer, remote = meet(endpoint, other)
            memory = endpoint.allocate(NBYTES)
            os.kill(other.process.pid or 0, signal.SIGSTOP)
            with pytest.raises(ForebayError) as raised:
                peer.read(memory, remote, timeout=0.2)
            assert raised.value.kind == "timeout" and raised.value.hint
            os.kill(other.process.pid or 0, signal.SIGCONT)
            peer.read(memory, remote)
            assert bytes(memory.view or b"") == pattern(NBYTES).tobytes()
    finally:
        other.stop()


def test_a_read_that_a_signal_interrupts_has_ended() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    other = Other("tcp://127.0.0.1:0")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Endpoint() as endpoint:
            peer, remote = meet(endpoint, other)
            memory = endpoint.allocate(NBYTES)
            os.kill(other.process.pid or 0, signal.SIGSTOP)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                peer.read(memory, remote)
            fresh = endpoint.allocate(NBYTES)
            os.kill(other.process.pid or 0, signal.SIGCONT)
            peer.read(fresh, remote)
            assert bytes(fresh.view or b"") == pattern(NBYTES).tobytes()
            assert bytes(memory.view or b"") == bytes(NBYTES), "the answer to a read that had ended"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        other.stop()


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


def test_what_cannot_be_registered_or_reached_is_refused_with_a_hint(tmp_path: Path) -> None:
    with Endpoint(listen="tcp://127.0.0.1:0") as endpoint:
        with pytest.raises(BufferError):
            endpoint.register(np.zeros((8, 8))[:, ::2])
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
            assert friend.connect(endpoint.address).is_up
            assert endpoint.accept(PATIENCE) is not None
        for secret in (tmp_path / "other", None):
            with Endpoint(secret_file=secret) as stranger, pytest.raises(ForebayError, match="another secret"):
                stranger.connect(endpoint.address)
        assert endpoint.accept(0.0) is None


def test_a_closed_endpoint_ends_every_wait(other: Other) -> None:
    endpoint = Endpoint()
    peer, remote = meet(endpoint, other)
    memory: Memory = endpoint.allocate(NBYTES)
    os.kill(other.process.pid or 0, signal.SIGSTOP)
    future = peer.readv_async([Segment(memory, 0, remote, 0, NBYTES)])
    endpoint.close()
    endpoint.close()
    assert future.done()
    for call in (lambda: peer.recv(), lambda: endpoint.accept(), lambda: memory.descriptor):
        with pytest.raises(ForebayError) as raised:
            call()
        assert raised.value.kind == "unavailable"


def test_a_program_that_forgets_to_close_ends() -> None:
    program = (
        "import forebay.transfer as t; e = t.Endpoint(listen='tcp://127.0.0.1:0'); m = e.register(bytearray(100));"
        "p = t.Endpoint().connect(e.address); q = e.accept(); r = p.memory(m.descriptor);"
        "o = p._endpoint.register(bytearray(100)); p.readv_async([t.Segment(o, 0, r, 0, 100)]).result(9); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
