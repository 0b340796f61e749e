"""How long a purge of this host's disks takes, by the number of blocks, and what it takes of the deciding thread.

    python bench/purge_disk.py BINARY [DIRECTORY [BLOCKS ...]]

For each number of blocks: starts a private daemon of that build with a disk file in DIRECTORY, stores so many blocks of
4 KiB on the disk, a half of them in each of two namespaces, and purges one namespace and then the other. A row says how
long the purge took until no block of the namespace was on the disk, the processor time of the deciding thread by block,
and the longest turns of that thread meanwhile: the number of turns over a millisecond, and the smallest bucket of
`forebay_event_seconds` that holds them all.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import forebay

BLOCK, AT_ONCE = 4096, 2000
DEADLINE = 1800.0


def key(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 4


def wait(what: str, is_so: Any) -> None:
    until = time.monotonic() + DEADLINE
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.005)


def spent_ms(pid: int) -> float:
    """Processor time of the thread that decides, which is the process's first."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6


class Daemon:
    def __init__(self, binary: str, root: Path, disk: Path, disk_bytes: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = ["--socket.directory", f"{root}/s", "--pool.directory", f"{root}/pool"]
        arguments += [
            "--pool.capacity_bytes",
            "256MiB",
            "--pool.huge_pages",
            "off",
            "--http.address",
            f"127.0.0.1:{self.port}",
        ]
        arguments += ["--tier.ssd.disks", str(disk / "disk"), "--tier.ssd.capacity_bytes", str(disk_bytes)]
        arguments += ["--tier.ssd.admission", "all", "--tier.ssd.create", "true", "--log.level", "error"]
        self.process = subprocess.Popen([binary, "serve", *arguments])
        wait("a socket", lambda: (root / "s/forebay.sock").exists())
        self.client = forebay.Client(str(root / "s"), deadline=DEADLINE)
        wait("a disk", lambda: self.tier()["state"] == "serving")

    def tier(self) -> dict[str, Any]:
        return next(tier for tier in self.client.inspect()["tiers"] if tier["name"] == "ssd")

    def turns(self) -> list[tuple[float, float]]:
        """Turns that took at most so many seconds, counted, by these seconds."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        rows = [line for line in lines if line.startswith("forebay_event_seconds_bucket")]
        return [(float(row.split('le="')[1].split('"')[0]), float(row.split()[-1])) for row in rows]


def store(daemon: Daemon, space: int, numbers: range) -> None:
    data = b"x" * BLOCK
    on_disk = daemon.tier()["blocks"]
    for first in range(numbers.start, numbers.stop, AT_ONCE):
        some = range(first, min(first + AT_ONCE, numbers.stop))
        daemon.client.put(space, 0, [(key(number), data) for number in some])
        on_disk += len(some)
        wait("the blocks on the disk", lambda least=on_disk - 4 * AT_ONCE: daemon.tier()["blocks"] >= least)
    wait("all blocks on the disk", lambda: daemon.tier()["blocks"] >= on_disk)


def measure(binary: str, directory: str, blocks: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, tempfile.TemporaryDirectory(dir=directory) as disk:
        daemon = Daemon(binary, Path(root), Path(disk), blocks * 6000 + (1 << 30))
        try:
            spaces = [daemon.client.open_namespace({"model": "bench", "tenant": name}, {0: BLOCK}) for name in "ab"]
            for at, space in enumerate(spaces):
                store(daemon, space, range(at * blocks // 2, (at + 1) * blocks // 2))
            for name in "ab":
                purge(daemon, name, blocks)
        finally:
            daemon.process.terminate()
            daemon.process.wait()


def purge(daemon: Daemon, tenant: str, blocks: int) -> None:
    there, before, turns = daemon.tier()["blocks"], spent_ms(daemon.process.pid), dict(daemon.turns())
    begun = time.monotonic()
    ended = "complete"
    try:
        daemon.client.purge(tenant=tenant)
    except forebay.ForebayError as error:
        ended = str(error).splitlines()[0]
    replied = time.monotonic() - begun
    wait("the purge", lambda: daemon.tier()["blocks"] <= there - blocks // 2)
    took, spent = time.monotonic() - begun, spent_ms(daemon.process.pid) - before
    after = daemon.turns()
    counts = [(limit, count - turns.get(limit, 0)) for limit, count in after]
    longest = next((limit for limit, count in counts if count == counts[-1][1]), 0.0)
    slow = counts[-1][1] - next(count for limit, count in counts if limit >= 0.001)
    row = {"blocks": blocks, "purged": there - daemon.tier()["blocks"], "seconds": round(took, 3)}
    row |= {"replied_s": round(replied, 3), "us_a_block": round(spent * 1e3 / (blocks // 2), 2), "reply": ended}
    print(json.dumps(row | {"turns": counts[-1][1], "over_1ms": slow, "all_within_s": longest}), flush=True)


def main() -> None:
    binary, *rest = sys.argv[1:]
    directory, *counts = rest or ["/dev/shm"]
    for blocks in map(int, counts or ["100000", "200000", "400000"]):
        measure(binary, directory, blocks)


if __name__ == "__main__":
    main()
