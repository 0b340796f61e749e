"""A wire between an engine and the daemon that a test can cut: the control socket, and nothing else.

Holds true: while whole it passes bytes both ways unchanged; `cut` ends all its connections and refuses new ones until
`mend`. The attach socket beside it is a link to the daemon's own, because descriptors travel there.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from typing import Self

from rig.daemon import SOCKET

ATTACH_SOCKET = "attach.sock"


class Wire:
    """Use as a context manager; `socket` is what the engine gets to see."""

    def __init__(self, daemon_socket: Path):
        self._daemon_socket = daemon_socket
        self.directory = Path(tempfile.mkdtemp(prefix="fw-"))
        self.socket = self.directory / SOCKET
        (self.directory / ATTACH_SOCKET).symlink_to(daemon_socket.with_name(ATTACH_SOCKET))
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._is_whole = True
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Ends every connection; returns how many there were."""
        with self._lock:
            self._is_whole = False
            ended = len(self._ends) // 2
            for end in self._ends:
                _shut(end)
            self._ends.clear()
        return ended

    def mend(self) -> None:
        with self._lock:
            self._is_whole = True

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._join(near)

    def _join(self, near: socket.socket) -> None:
        far = socket.socket(socket.AF_UNIX)
        with self._lock:
            try:
                if not self._is_whole:
                    raise ConnectionError("the wire is cut")
                far.connect(str(self._daemon_socket))
            except OSError:
                near.close()
                far.close()
                return
            self._ends += [near, far]
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, sink), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _shut(self._listener)
        self._listener.close()
        self.cut()
        shutil.rmtree(self.directory, ignore_errors=True)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            sink.sendall(chunk)
    _shut(sink)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
