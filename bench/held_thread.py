"""What keeps the daemon's deciding thread: how long a small call waits beside other calls.

    python bench/held_thread.py BINARY [SECONDS]

Starts a private daemon of that build. In each phase one process makes calls one after another, while another looks up
one key every millisecond. `put` and `get` move one block of 15 MiB a call, `lookup` asks for 1,024 keys that are in the
pool. The row says how long the small call took, and the processor time of the daemon's threads.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import forebay

LARGE, SMALL, KEYS = 15 << 20, 4096, 1024


def key(seed: int) -> bytes:
    return (seed * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 4


def opened(sockets: str) -> tuple[forebay.Client, int, int]:
    client = forebay.Client(sockets, deadline=60.0)
    spaces = [client.open_namespace({"model": "bench", "tenant": str(size)}, {0: size}) for size in (LARGE, SMALL)]
    return client, spaces[0], spaces[1]


def look(sockets: str, over: Any, waits: Any) -> None:
    client, _, small = opened(sockets)
    taken = []
    while not over.is_set():
        begun = time.perf_counter()
        client.lookup(small, 0, [key(0)])
        taken.append(time.perf_counter() - begun)
        time.sleep(0.001)
    waits.put(sorted(taken))


def spent(pid: int) -> dict[str, float]:
    """Milliseconds of processor time by the name of the thread."""
    times: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        times[name] = times.get(name, 0) + int((task / "schedstat").read_text().split()[0]) / 1e6
    return times


def main() -> None:
    binary, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        sockets = f"{root}/s"
        arguments = ["--socket.directory", sockets, "--pool.directory", f"{root}/pool", "--http.address", "off"]
        arguments += ["--pool.capacity_bytes", "1GiB", "--pool.huge_pages", "off", "--log.level", "error"]
        daemon = subprocess.Popen([binary, "serve", *arguments])
        try:
            while not Path(f"{sockets}/forebay.sock").exists():
                time.sleep(0.01)
            time.sleep(3)
            measure(sockets, daemon.pid, seconds)
        finally:
            daemon.terminate()
            daemon.wait()


def measure(sockets: str, pid: int, seconds: float) -> None:
    client, large, small = opened(sockets)
    keys, block = [key(n) for n in range(KEYS)], b"x" * LARGE
    client.put(small, 0, [(name, b"y" * SMALL) for name in keys])
    numbers = iter(range(1 << 30))
    phases = {
        "nothing": lambda: time.sleep(0.01),
        "put": lambda: client.put(large, 0, [(key(next(numbers) % 20), block)]),
        "get": lambda: client.get(large, 0, [key(0)]),
        "inspect": client.inspect,
        "lookup": lambda: client.lookup(small, 0, keys),
    }
    for name, call in phases.items():
        over, waits = multiprocessing.Event(), multiprocessing.Queue()
        looking = multiprocessing.Process(target=look, args=(sockets, over, waits))
        looking.start()
        before, begun, calls = spent(pid), time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            call()
            calls += 1
        after = spent(pid)
        over.set()
        taken = waits.get()
        looking.join()
        took = [round(taken[(len(taken) - 1) * permille // 1000] * 1e6) for permille in (500, 990, 1000)]
        threads = {thread: round(after[thread] - before.get(thread, 0)) for thread in sorted(after)}
        threads = {thread: ms for thread, ms in threads.items() if ms > 0}
        print(json.dumps({"beside": name, "calls": calls, "p50_p99_max_us": took, "thread_ms": threads}), flush=True)


if __name__ == "__main__":
    main()
