"""The daemon of each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rig.daemon import Daemon


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(capacity_bytes=64 << 20) as daemon:
        yield daemon.start()


@pytest.fixture
def sockets(daemon: Daemon) -> Path:
    return daemon.socket.parent
