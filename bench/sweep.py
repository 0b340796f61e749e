"""What it costs to make room in a shared directory, by the number of blocks in it, and what an idle host costs.

    python bench/sweep.py BINARY room DIRECTORY BLOCKS...
    python bench/sweep.py BINARY idle DIRECTORY [SECONDS]

`room`: makes so many sparse files of 8 KiB in DIRECTORY that are named like blocks, in three namespaces, each used at
another time. Starts a daemon of that build with room for a twentieth less, twice: the first one has to count the files,
the second one has room for a tenth less and knows the count. A row says how many blocks were evicted, how long that
took from the start of the daemon, three seconds more included, and the processor time of the sweeper's thread for each
of them.

`idle`: two daemons of that build on one empty directory. After 30 s a row says how many system calls the sweeper's
thread of each made a second, by name (`strace`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import forebay

NAMESPACES, FILE_BYTES = 3, 8192
DEADLINE = 1800.0


def crc_table() -> list[int]:
    """Of CRC-64/NVME, the checksum that chooses a block's folder."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x9A6C9329AC4BC9B5 if value & 1 else 0)
        table.append(value)
    return table


TABLE = crc_table()


def folder_of(group_and_hash: bytes) -> int:
    crc = 2**64 - 1
    for byte in group_and_hash:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return ((crc ^ 2**64 - 1) * 0x9E3779B97F4A7C15 % 2**64) >> 52


def path_of(number: int) -> str:
    name = (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 4
    folder = folder_of(bytes(2) + name)
    return f"{number % NAMESPACES + 1:032x}/{folder >> 4:02x}/{folder & 15:x}/0000-{name.hex()}"


def make_files(directory: str, numbers: range) -> None:
    begun = time.time() - 1_000_000
    for number in numbers:
        path = f"{directory}/{path_of(number)}"
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.ftruncate(file, FILE_BYTES)
        os.utime(file, (begun, begun + number / 10))
        os.close(file)


class Daemon:
    def __init__(self, binary: str, root: Path, directory: str, capacity_bytes: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = ["--socket.directory", f"{root}/s", "--pool.directory", f"{root}/pool", "--pool.huge_pages", "off"]
        arguments += [
            "--pool.capacity_bytes",
            "64MiB",
            "--http.address",
            f"127.0.0.1:{self.port}",
            "--log.level",
            "error",
        ]
        arguments += ["--tier.fs.directories", directory, "--tier.fs.capacity_bytes", str(capacity_bytes)]
        self.begun = time.monotonic()
        self.process = subprocess.Popen([binary, "serve", *arguments])
        self.wait("a socket", lambda: (root / "s/forebay.sock").exists())
        self.client = forebay.Client(str(root / "s"), deadline=DEADLINE)
        self.wait("a sweeper", lambda: self.sweeper() is not None)

    def wait(self, what: str, is_so: Any) -> None:
        while not is_so():
            if time.monotonic() > self.begun + DEADLINE or self.process.poll() is not None:
                raise TimeoutError(what)
            time.sleep(0.02)

    def sweeper(self) -> int | None:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        names = {int(task.name): (task / "comm").read_text().strip() for task in tasks}
        return next((task for task, name in names.items() if name == "forebay-sweep"), None)

    def spent(self) -> float:
        """Processor time of the sweeper's thread, in seconds."""
        path = f"/proc/{self.process.pid}/task/{self.sweeper()}/schedstat"
        return int(Path(path).read_text().split()[0]) / 1e9

    def metric(self, name: str) -> float | None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return next(
            (float(line.split()[-1]) for line in lines if re.match(rf"forebay_shared_store_{name}", line)), None
        )

    def used_bytes(self) -> float | None:
        return self.metric("used_bytes")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def make_room(binary: str, directory: str, blocks: int) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as store, tempfile.TemporaryDirectory(dir="/dev/shm") as pools:
        root = Path(pools) / "new"
        root.mkdir()
        daemon = Daemon(binary, root, store, blocks * FILE_BYTES)
        daemon.wait("a new directory", lambda: daemon.used_bytes() is not None)
        daemon.stop()
        with ProcessPoolExecutor(2) as makers:
            step = blocks // 16
            parts = [range(first, min(first + step, blocks)) for first in range(0, blocks, step)]
            list(makers.map(make_files, [store] * len(parts), parts))
        # What a count does not know, it finds.
        (Path(store) / ".forebay/usage").write_bytes(b"")
        for at, share in enumerate((0.95, 0.85)):
            # Some builds leave it, and it counts for a minute.
            (Path(store) / ".forebay/sweeper").unlink(missing_ok=True)
            root = Path(pools) / str(at)
            root.mkdir()
            capacity_bytes = int(blocks * FILE_BYTES * share)
            daemon = Daemon(binary, root, store, capacity_bytes)
            enough_bytes = capacity_bytes - capacity_bytes // 20

            def is_swept(daemon: Daemon = daemon, enough_bytes: int = enough_bytes) -> bool:
                used_bytes = daemon.used_bytes()
                return used_bytes is not None and used_bytes <= enough_bytes

            daemon.wait("room", is_swept)
            # Some builds go on until a tenth is free.
            time.sleep(3)
            took, spent = time.monotonic() - daemon.begun, daemon.spent()
            evicted = daemon.metric('events_total.*event="evicted_blocks"') or 0.0
            daemon.stop()
            row = {"blocks": blocks, "knows_count": at == 1, "evicted": int(evicted), "seconds": round(took, 2)}
            print(json.dumps(row | {"us_a_block": round(spent * 1e6 / evicted, 1)}), flush=True)


def calls(trace: Path, sweeper: int, seconds: float) -> dict[str, float]:
    counts: dict[str, int] = {}
    for line in trace.read_text().splitlines():
        if found := re.match(rf"{sweeper} +(\w+)\(", line):
            counts[found[1]] = counts.get(found[1], 0) + 1
    return {name: round(count / seconds, 3) for name, count in sorted(counts.items())}


def idle(binary: str, directory: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as pools, tempfile.TemporaryDirectory(dir=directory) as store:
        daemons = []
        for name in ("the sweeper", "another host"):
            root = Path(pools) / name.replace(" ", "")
            root.mkdir()
            daemons.append((name, root, Daemon(binary, root, store, 1 << 30)))
            time.sleep(3)
        time.sleep(24)
        traces = [
            subprocess.Popen(
                ["strace", "-f", "-o", str(root / "trace"), "-e", "trace=%file,%desc", "-p", str(daemon.process.pid)],
                stderr=subprocess.DEVNULL,
            )
            for _, root, daemon in daemons
        ]
        time.sleep(seconds)
        for (name, root, daemon), trace in zip(daemons, traces, strict=True):
            trace.terminate()
            trace.wait()
            found = calls(root / "trace", daemon.sweeper() or 0, seconds)
            print(json.dumps({"host": name, "calls_a_second": round(sum(found.values()), 2), "by_name": found}))
            daemon.stop()


def main() -> None:
    binary, mode, directory, *rest = sys.argv[1:]
    if mode == "idle":
        if shutil.which("strace") is None:
            sys.exit("there is no strace\nhint: install it")
        idle(binary, directory, float(rest[0]) if rest else 60.0)
    else:
        for blocks in rest:
            make_room(binary, directory, int(blocks))


if __name__ == "__main__":
    main()
