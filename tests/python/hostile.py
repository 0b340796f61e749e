"""A user that may connect, and takes and breaks all it can: a process of its own.

    python hostile.py DIRECTORY_OF_SOCKETS UID SECONDS

Each attack has the given time. Before an attack this process prints its name; at the end, `over`. What the daemon
refuses is not looked at: the daemon's other users are, by whoever started this process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forebay

KEYS = 400_000
BLOCK_BYTES = 15 << 20
FRAME_BYTES = 320 << 10
HEADERS, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4


class Wire:
    """HTTP/2 by hand, on one connection."""

    def __init__(self, sockets: Path, name: str = "forebay.sock", settings: bytes = b"") -> None:
        self.stream = socket.socket(socket.AF_UNIX)
        # Nobody answers a daemon that has stopped reading.
        self.stream.settimeout(0.5)
        self.stream.connect(str(sockets / name))
        if name == "forebay.sock":
            self.stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            self.frame(SETTINGS, 0, 0, settings)

    def frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.stream.sendall(frame(kind, flags, stream, payload))

    def drain(self) -> None:
        """Reads what has come, so that the daemon is not kept from writing."""
        self.stream.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self.stream.recv(1 << 16):
                pass
        self.stream.settimeout(0.5)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def head(method: str) -> bytes:
    path = f"/forebay.v1.Forebay/{method}".encode()
    return b"\x83\x86\x04" + bytes([len(path)]) + path + b"\x0f\x10\x10application/grpc\x00\x02te\x08trailers"


def prefix(length: int) -> bytes:
    return b"\0" + length.to_bytes(4, "big")


class Attack:
    def __init__(self, sockets: Path, seconds: float) -> None:
        self.sockets = sockets
        self.until = time.monotonic() + seconds

    def turns(self) -> Iterator[int]:
        """Numbers of streams, until time is over."""
        stream = 1
        while time.monotonic() < self.until:
            yield stream
            stream += 2

    def again(self, run: Callable[[Wire], None], settings: bytes = b"") -> None:
        """On one connection after another: each lasts until the daemon has had enough of it."""
        while time.monotonic() < self.until:
            with contextlib.suppress(OSError):
                wire = Wire(self.sockets, settings=settings)
                run(wire)
                wire.stream.close()

    def connections(self) -> None:
        held = []
        for turn in self.turns():
            try:
                held.append(Wire(self.sockets, ("forebay.sock", "attach.sock")[turn // 2 % 2]))
            except OSError:
                time.sleep(0.01)

    def comings_and_goings(self) -> None:
        for _ in self.turns():
            with contextlib.suppress(OSError):
                Wire(self.sockets).stream.close()

    def sessions(self) -> None:
        held = []
        for _ in self.turns():
            client = forebay.Client(str(self.sockets), deadline=1.0)
            try:
                client.open_namespace({"model": "hostile"}, {0: 4096})
                held.append(client)
            except forebay.ForebayError:
                time.sleep(0.01)

    def streams(self) -> None:
        def run(wire: Wire) -> None:
            for stream in self.turns():
                wire.frame(HEADERS, END_HEADERS, stream, head("Lookup"))
                if stream % 512 == 1:
                    wire.drain()

        self.again(run)

    def slow_headers(self) -> None:
        wires = [Wire(self.sockets) for _ in range(20)]
        for wire in wires:
            wire.frame(HEADERS, 0, 1, head("Lookup")[:-1])
        for _ in self.turns():
            for wire in wires:
                with contextlib.suppress(OSError):
                    wire.frame(CONTINUATION, 0, 1, b"")
                    # A frame that says little and never ends.
            time.sleep(0.05)

    def endless_headers(self) -> None:
        def run(wire: Wire) -> None:
            wire.frame(HEADERS, 0, 1, head("Lookup"))
            for _ in self.turns():
                wire.frame(CONTINUATION, 0, 1, b"\0\4name\x7f\x81\x07" + b"x" * 1024)

        self.again(run)

    def bodies_that_never_come(self) -> None:
        wires = []
        for _ in self.turns():
            with contextlib.suppress(OSError):
                wire = Wire(self.sockets)
                wires.append(wire)
                for stream in range(1, 200, 2):
                    wire.frame(HEADERS, END_HEADERS, stream, head("Put"))
                    wire.frame(0, 0, stream, prefix(BLOCK_BYTES))
            time.sleep(0.01)

    def huge_frames(self) -> None:
        turn = 0

        def run(wire: Wire) -> None:
            nonlocal turn
            turn += 1
            wire.frame(HEADERS, END_HEADERS, 1, head("Commit"))
            if turn % 3 == 0:
                wire.stream.sendall((0xFFFFFF).to_bytes(3, "big") + bytes([0, 0, 0, 0, 0, 1]) + bytes(1 << 20))
            elif turn % 3 == 1:
                wire.frame(0, 0, 1, prefix(0xFFFFFFFF) + bytes(1 << 19))
            else:
                for _ in self.turns():
                    wire.frame(0, 0, 1, prefix(BLOCK_BYTES) + bytes((1 << 20) - 5))

        self.again(run)

    def half_frames(self) -> None:
        """Each connection keeps a frame of which the last byte is missing."""
        held = []
        for _ in self.turns():
            with contextlib.suppress(OSError):
                wire = Wire(self.sockets)
                wire.frame(HEADERS, END_HEADERS, 1, head("Commit"))
                wire.stream.sendall((FRAME_BYTES).to_bytes(3, "big") + bytes(2) + (1).to_bytes(4, "big"))
                wire.stream.sendall(bytes(FRAME_BYTES - 1))
                held.append(wire)

    def resets(self) -> None:
        def run(wire: Wire) -> None:
            for stream in self.turns():
                begun = frame(HEADERS, END_HEADERS, stream, head("Health"))
                wire.stream.sendall(begun + frame(RESET, 0, stream, (8).to_bytes(4, "big")))
                if stream % 512 == 1:
                    wire.drain()

        self.again(run)

    def pings(self) -> None:
        many = frame(PING, 0, 0, bytes(8)) * 1000 + frame(SETTINGS, 0, 0, b"\0\4" + (1 << 16).to_bytes(4, "big")) * 200

        def run(wire: Wire) -> None:
            for turn in self.turns():
                wire.stream.sendall(many)
                # Half of the time nobody reads the answers.
                if turn % 4 == 1:
                    wire.drain()

        self.again(run)

    def windows(self) -> None:
        """Answers that may not be sent, and windows that overflow."""

        def run(wire: Wire) -> None:
            for stream in range(1, 400, 2):
                wire.frame(HEADERS, END_HEADERS, stream, head("Ping"))
                wire.frame(0, END_STREAM, stream, prefix(4) + b"\x10\x80\x80\x40")
                wire.frame(WINDOW, 0, stream, (1).to_bytes(4, "big"))
            for _ in range(100):
                wire.frame(SETTINGS, 0, 0, b"\0\4" + (time.monotonic_ns() % 2).to_bytes(4, "big"))
                time.sleep(0.001)
            wire.frame(WINDOW, 0, 0, (0x7FFFFFFF).to_bytes(4, "big"))
            wire.drain()

        self.again(run, b"\0\4\0\0\0\0")

    def half_closed(self) -> None:
        held = []
        for _ in self.turns():
            with contextlib.suppress(OSError):
                wire = Wire(self.sockets)
                held.append(wire)
                for stream in range(1, 100, 2):
                    wire.frame(HEADERS, END_HEADERS, stream, head("Inspect"))
                    wire.frame(0, END_STREAM, stream, prefix(0))
                wire.stream.shutdown(socket.SHUT_WR)
            time.sleep(0.01)

    def many_hashes(self) -> None:
        short, keys = [os.urandom(4) for _ in range(KEYS)], [os.urandom(32) for _ in range(KEYS)]

        def run(hashes: list[bytes]) -> None:
            client = forebay.Client(str(self.sockets), deadline=10.0)
            for _ in self.turns():
                with contextlib.suppress(forebay.ForebayError):
                    client.lookup(client.open_namespace({"model": "hostile"}, {0: 4096}), 0, hashes)

        self.at_once([lambda: run(short), lambda: run(keys), lambda: run(keys)])

    def puts_and_gets(self) -> None:
        def run(number: int) -> None:
            client, block = forebay.Client(str(self.sockets), deadline=10.0), bytes(BLOCK_BYTES)
            for turn in self.turns():
                with contextlib.suppress(forebay.ForebayError):
                    space = client.open_namespace({"model": "large"}, {0: BLOCK_BYTES})
                    name = (number * 2 + turn % 2).to_bytes(32, "big")
                    client.put(space, 0, [(name, block)])
                    client.get(space, 0, [name])

        self.at_once([lambda number=number: run(number) for number in range(8)])

    def noise_for_workers(self) -> None:
        for turn in self.turns():
            with contextlib.suppress(OSError):
                wire = Wire(self.sockets, "attach.sock")
                wire.stream.sendall([os.urandom(4096), (0xFFFFFFFF).to_bytes(4, "little"), bytes(4)][turn // 2 % 3])

    def at_once(self, runs: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=run) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


ATTACKS = [
    Attack.connections,
    Attack.comings_and_goings,
    Attack.sessions,
    Attack.streams,
    Attack.slow_headers,
    Attack.endless_headers,
    Attack.bodies_that_never_come,
    Attack.huge_frames,
    Attack.half_frames,
    Attack.resets,
    Attack.pings,
    Attack.windows,
    Attack.half_closed,
    Attack.many_hashes,
    Attack.puts_and_gets,
    Attack.noise_for_workers,
]


def main() -> None:
    sockets, uid, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.setresuid(uid, uid, uid)
    for attack in ATTACKS:
        print(attack.__name__, flush=True)
        attack(Attack(sockets, seconds))
    print("over", flush=True)


if __name__ == "__main__":
    main()
