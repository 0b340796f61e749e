"""How long a lookup takes while the daemon works on a disk of very many blocks.

    python bench/beside_disk.py BINARY FILLER DIRECTORY BLOCKS [SEGMENT_MIB]

FILLER is the built benchmark `ssd_speed`. It makes a sparse disk file in DIRECTORY, with so many blocks of 4 KiB, a
half of them in each of two namespaces. A private daemon of that build opens the file. A process of its own looks up
1,024 keys that are in the pool, every two milliseconds: while the disk is opened, while nothing happens, beside loops
in one or two other processes (what the machine adds), beside reports, stores over a full disk, a purge, and stores
where there is room.

A row has the p50, the p99 and the longest of these lookups in microseconds, as Python sees them. `missed` counts keys
that were not found. The turns are those of the daemon's deciding thread meanwhile: how many were longer than a
millisecond, and the smallest bucket of `forebay_event_seconds` that holds them all. `ran_ms` and `waited_ms` say how
long that thread ran, and waited for a core.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forebay

BLOCK, KEYS, SECONDS = 4096, 1024, 8.0
# Of stores: blocks in one call, and in a second.
AT_ONCE, RATE = 50, 5000
DEADLINE = 600.0


def key(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 4


def look(sockets: str, over: Any, told: Any) -> None:
    """Looks up the same keys until `over`; tells how long each lookup took, and how many keys it did not find."""
    client = forebay.Client(sockets, deadline=DEADLINE)
    space = client.open_namespace({"model": "bench", "tenant": "hot"}, {0: BLOCK})
    keys = [key(number) for number in range(KEYS)]
    # The pool may have no memory yet.
    until = time.monotonic() + DEADLINE
    while not all(client.lookup(space, 0, keys)) and time.monotonic() < until:
        client.put(space, 0, [(name, b"y" * BLOCK) for name in keys])
        time.sleep(0.01)
    taken, missed = [], 0
    for _ in range(100):
        client.lookup(space, 0, keys)
    told.put("ready")
    while not over.is_set():
        begun = time.perf_counter()
        found = client.lookup(space, 0, keys)
        taken.append(time.perf_counter() - begun)
        missed += KEYS - sum(found)
        time.sleep(0.002)
    told.put((sorted(taken), missed))


class Daemon:
    def __init__(self, binary: str, root: Path, disk: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.sockets = root / "s"
        options = {
            "socket.directory": self.sockets,
            "pool.directory": root / "pool",
            "pool.capacity_bytes": "256MiB",
            "pool.huge_pages": "off",
            "http.address": f"127.0.0.1:{self.port}",
            "log.level": "error",
            "tier.ssd.disks": disk,
            "tier.ssd.capacity_bytes": disk.stat().st_size if disk.exists() else "2GiB",
            "tier.ssd.create": "false" if disk.exists() else "true",
            "tier.ssd.admission": "all",
        }
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        self.process = subprocess.Popen([binary, "serve", *arguments])
        until = time.monotonic() + DEADLINE
        while not (self.sockets / "forebay.sock").exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the daemon does not start")
            time.sleep(0.005)
        self.client = forebay.Client(str(self.sockets), deadline=DEADLINE)

    def tier(self) -> dict[str, Any]:
        return next(tier for tier in self.client.inspect()["tiers"] if tier["name"] == "ssd")

    def turns(self) -> dict[float, float]:
        """Turns that took at most so many seconds, counted, by these seconds."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        rows = [line for line in lines if line.startswith("forebay_event_seconds_bucket")]
        return {float(row.split('le="')[1].split('"')[0]): float(row.split()[-1]) for row in rows}

    def ran_and_waited_ms(self) -> list[float]:
        """Of the thread that decides, which is the process's first."""
        pid = self.process.pid
        return [int(part) / 1e6 for part in Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[:2]]

    def spaces(self) -> list[tuple[str, int]]:
        """The ids of the namespaces of tenants `a` and `b`, and their handles."""
        fields = [{"model": "bench", "tenant": name} for name in "ab"]
        handles = [self.client.open_namespace(field, {0: BLOCK}) for field in fields]
        ids = {space["fields"]["tenant"]: space["namespace_id"] for space in self.client.inspect()["namespaces"]}
        return [(ids[name], handle) for name, handle in zip("ab", handles, strict=True)]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def measure(daemon: Daemon, what: str, work: Callable[[], Iterator[None]], least: float) -> None:
    """Lookups while `work` goes on, until it ends by itself or has taken `least` seconds."""
    over, told = multiprocessing.Event(), multiprocessing.Queue()
    looking = multiprocessing.Process(target=look, args=(str(daemon.sockets), over, told))
    looking.start()
    told.get(timeout=DEADLINE)
    before, times, begun = daemon.turns(), daemon.ran_and_waited_ms(), time.monotonic()
    for _ in work():
        if time.monotonic() - begun > least:
            break
    seconds, times_after, after = time.monotonic() - begun, daemon.ran_and_waited_ms(), daemon.turns()
    over.set()
    taken, missed = told.get(timeout=DEADLINE)
    looking.join()
    counts = [(limit, count - before.get(limit, 0)) for limit, count in after.items()]
    row = {"beside": what, "seconds": round(seconds, 1), "lookups": len(taken), "missed": missed}
    for name, permille in {"p50_us": 500, "p99_us": 990, "longest_us": 1000}.items():
        row[name] = round(taken[(len(taken) - 1) * permille // 1000] * 1e6)
    row |= {"turns": counts[-1][1], "over_1ms": counts[-1][1] - next(n for limit, n in counts if limit >= 0.001)}
    for name, first, last in zip(("ran_ms", "waited_ms"), times, times_after, strict=True):
        row[name] = round(last - first)
    row["all_within_s"] = next(limit for limit, count in counts if count == counts[-1][1])
    print(json.dumps(row | {"blocks": daemon.tier()["blocks"]}), flush=True)


def main() -> None:
    binary, filler, directory, blocks = sys.argv[1:5]
    segment_mib = sys.argv[5] if len(sys.argv) > 5 else "64"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, tempfile.TemporaryDirectory(dir=directory) as folder:
        disk = Path(folder) / "disk"
        daemon = Daemon(binary, Path(root), disk.with_name("small"))
        try:
            ids = [name for name, _ in daemon.spaces()]
        finally:
            daemon.end()
        subprocess.run([filler, str(disk), "fill", blocks, segment_mib, ",".join(ids)], check=True)
        daemon = Daemon(binary, Path(root), disk)
        try:
            rows(daemon)
        finally:
            daemon.end()


def rows(daemon: Daemon) -> None:
    numbers = iter(range(1 << 40))

    def opening() -> Iterator[None]:
        while daemon.tier()["state"] != "serving":
            time.sleep(0.02)
            yield

    def nothing() -> Iterator[None]:
        while True:
            time.sleep(0.1)
            yield

    def loops(count: int) -> Callable[[], Iterator[None]]:
        def beside() -> Iterator[None]:
            loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
            try:
                yield from nothing()
            finally:
                for loop in loops:
                    loop.kill()
                    loop.wait()

        return beside

    def reports() -> Iterator[None]:
        while True:
            time.sleep(0.1)
            daemon.client.inspect()
            yield

    def stores() -> Iterator[None]:
        _, (_, space) = daemon.spaces()
        while True:
            begun = time.monotonic()
            daemon.client.put(space, 0, [(key(KEYS + next(numbers)), b"x" * BLOCK) for _ in range(AT_ONCE)])
            time.sleep(max(0, AT_ONCE / RATE - time.monotonic() + begun))
            yield

    def purge() -> Iterator[None]:
        there = daemon.tier()["blocks"]
        daemon.client.purge(tenant="a", wait_seconds=int(DEADLINE))
        while daemon.tier()["blocks"] > there * 6 // 10:
            time.sleep(0.02)
            yield

    measure(daemon, "opening", opening, DEADLINE)
    measure(daemon, "nothing", nothing, SECONDS)
    phases = {"one loop": loops(1), "two loops": loops(2), "reports": reports, "stores that reclaim": stores}
    phases |= {"purge": purge, "stores": stores}
    for what, work in phases.items():
        measure(daemon, what, work, DEADLINE if what == "purge" else SECONDS)
        measure(daemon, "nothing", nothing, SECONDS)


if __name__ == "__main__":
    main()
