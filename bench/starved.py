"""How long the daemon's deciding thread waits for a core beside engines that spin: `python bench/starved.py BINARY`.

A spinning rank is a process that only yields its core, as vLLM's ranks do while they wait for each other; each is in a
session of its own, as a container or a service is, and so in a scheduling group (autogroup) of its own. A client looks
up keys every millisecond. The ways to start the daemon: in a session of its own; with another nice value of the
process or of its autogroup; as systemd starts a service, in a control group with a weight (`CPUWeight=100` is the
default). A sampler of the highest priority reads every 10 ms how long the deciding thread has been runnable without a
core. Prints a JSON object a way. Needs root and the `cpu` controller of control groups, version 1 or 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forebay

# cpu.shares of version 1 is 1,024 where systemd's weight is 100.
ROOTS = ((Path("/sys/fs/cgroup/cpu"), "cpu.shares", 10.24), (Path("/sys/fs/cgroup"), "cpu.weight", 1.0))
STEP = 0.01
WAYS = ("session", "nice -5", "autogroup nice -5", "service, weight 100", "service, weight 1000")


def spin(over: Any) -> None:
    os.setsid()
    while not over.is_set():
        for _ in range(1000):
            os.sched_yield()


def look(sockets: str, over: Any, waits: Any) -> None:
    os.setsid()
    client = forebay.Client(sockets, deadline=60.0)
    space = client.open_namespace({"model": "starved"}, {0: 4096})
    taken = []
    while not over.is_set():
        begun = time.perf_counter()
        client.lookup(space, 0, [b"k" * 32])
        taken.append((time.perf_counter() - begun) * 1e3)
        time.sleep(0.001)
    waits.put(sorted(taken))


def waited(pid: int) -> float:
    """Milliseconds that the first thread, which decides, was runnable without a core."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e6


@contextlib.contextmanager
def service(weight: int) -> Iterator[Path]:
    """A control group below a slice, beside the sessions' processes."""
    root, key, factor = next(found for found in ROOTS if (found[0] / found[1]).exists() or found[1] == "cpu.weight")
    group = root / f"forebay-starved-{os.getpid()}"
    group.mkdir()
    try:
        (group / key).write_text(str(int(weight * factor)))
        yield group / "cgroup.procs"
    finally:
        deadline = time.monotonic() + 5
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        group.rmdir()


def measure(binary: str, way: str, ranks: int, seconds: float) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        sockets = f"{root}/s"
        procs = stack.enter_context(service(int(way.split()[-1]))) if way.startswith("service") else None
        arguments = ["serve", "--socket.directory", sockets, "--pool.directory", f"{root}/pool"]
        arguments += ["--pool.capacity_bytes", "64MiB", "--http.address", "off"]
        daemon = subprocess.Popen([binary, *arguments], start_new_session=True, stderr=subprocess.DEVNULL)
        stack.callback(
            subprocess.run, [binary, "pool", "remove", f"{root}/pool"], check=True, stdout=subprocess.DEVNULL
        )
        stack.callback(daemon.wait)
        stack.callback(daemon.terminate)
        if procs is not None:
            procs.write_text(str(daemon.pid))
        elif way.startswith("nice"):
            os.setpriority(os.PRIO_PROCESS, daemon.pid, int(way.split()[-1]))
        elif way.startswith("autogroup"):
            Path(f"/proc/{daemon.pid}/autogroup").write_text(way.split()[-1])
        while not Path(sockets, "forebay.sock").exists():
            if daemon.poll() is not None:
                sys.exit("error: the daemon ended")
            time.sleep(0.01)
        over, waits = multiprocessing.Event(), multiprocessing.Queue()
        others = [multiprocessing.Process(target=spin, args=(over,)) for _ in range(ranks)]
        others.append(multiprocessing.Process(target=look, args=(sockets, over, waits)))
        for other in others:
            other.start()
        time.sleep(1)
        steps, last, begun = [], waited(daemon.pid), time.monotonic()
        while time.monotonic() - begun < seconds:
            time.sleep(STEP)
            now = waited(daemon.pid)
            steps.append(now - last)
            last = now
        over.set()
        taken = waits.get(timeout=120)
        for other in others:
            other.join(60)
    return {
        "way": way,
        "ranks": ranks,
        "waited_percent": sum(steps) / seconds / 10,
        "longest_wait_ms": longest(steps),
        "lookups": len(taken),
        "lookup_ms": {"p50": taken[len(taken) // 2], "p99": taken[int(len(taken) * 0.99)], "max": taken[-1]},
    }


def longest(steps: list[float]) -> float:
    """Of neighbouring samples in which the thread waited most of the time, taken as one wait."""
    most = run = 0.0
    for step in steps:
        run = run + step if step > STEP * 1e3 * 0.9 else step
        most = max(most, run)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    print(json.dumps({"machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}"}))
    for _ in range(arguments.rounds):
        for ranks in arguments.ranks:
            for way in WAYS:
                print(json.dumps(measure(arguments.binary, way, ranks, arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()
