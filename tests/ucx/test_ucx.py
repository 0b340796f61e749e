"""`forebay.transfer` through a real libucp, which `make ucx` names."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest
from forebay import ForebayError
from forebay.transfer import Endpoint, Segment

MIB = 1 << 20
NBYTES = 32 * MIB
PATIENCE = 30.0


def pattern(nbytes: int) -> np.ndarray:
    return (np.arange(nbytes) * 31 % 251).astype(np.uint8)


def test_bytes_go_through_ucx() -> None:
    library = os.environ["FOREBAY_UCX_LIBRARY"]
    with (
        Endpoint(listen="ucx://127.0.0.1:0", ucx_library=library) as first,
        Endpoint(ucx_library=library) as second,
    ):
        theirs = first.allocate(2 * MIB, write=True)
        np.frombuffer(theirs.view, np.uint8)[:] = pattern(2 * MIB)
        peer = second.connect(str(first.address))
        accepted = first.accept(PATIENCE)
        remote = peer.memory(theirs.descriptor)
        ours = np.zeros(2 * MIB, np.uint8)
        local = second.register(ours, read=False)
        peer.read(local, remote)
        assert np.array_equal(ours, pattern(2 * MIB))
        ours[:] = 7
        peer.write(local, remote, notice=b"there")
        assert accepted is not None and accepted.notice(PATIENCE) == b"there"
        assert bytes(theirs.view[:4]) == bytes([7] * 4)
        with pytest.raises(ForebayError) as raised:
            peer.read(local, remote, timeout=0.0)
        assert raised.value.kind == "timeout"
        assert not peer.is_up


def serve(told: Connection) -> None:
    """The other process: memory of ones, for whoever connects, until it is killed."""
    with Endpoint(listen="ucx://127.0.0.1:0", ucx_library=os.environ["FOREBAY_UCX_LIBRARY"]) as endpoint:
        memory = endpoint.register(np.ones(NBYTES, np.uint8))
        told.send((endpoint.address, memory.descriptor))
        peers = []
        while True:
            peers.append(endpoint.accept(None))


@pytest.mark.parametrize("way", ["future", "cancel"])
def test_memory_does_not_change_after_a_read_was_cancelled(way: str) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        address, descriptor = ours.recv()
        early = 0
        with Endpoint(ucx_library=os.environ["FOREBAY_UCX_LIBRARY"]) as endpoint:
            for number in range(20):
                buffer = np.zeros(NBYTES, np.uint8)
                memory = endpoint.register(buffer, read=False)
                peer = endpoint.connect(address)
                segments = [Segment(memory, 0, peer.memory(descriptor), 0, NBYTES)]
                future = peer.readv_async(segments) if way == "future" else None
                begun = peer.begin("read", segments) if way == "cancel" else None
                time.sleep(0.0005 * (number % 5 + 1))
                os.kill(process.pid, signal.SIGSTOP)
                if future is not None:
                    early += future.cancel()
                elif begun is not None:
                    endpoint.cancel(begun)
                    early += 1
                at_the_end = buffer.copy()
                os.kill(process.pid, signal.SIGCONT)
                time.sleep(0.1)
                assert np.array_equal(buffer, at_the_end)
                peer.close()
                memory.deregister()
        assert early > 5, "most reads were still under way"
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.join()
