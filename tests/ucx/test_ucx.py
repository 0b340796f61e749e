"""`forebay.transfer` through a real libucp, which `make ucx` names."""

from __future__ import annotations

import os

import numpy as np
import pytest
from forebay import ForebayError
from forebay.transfer import Endpoint

MIB = 1 << 20
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
