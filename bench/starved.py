"""How long the daemon's deciding thread waits for a core beside engines that spin: `python bench/starved.py BINARY`.

A spinning rank is a process that only yields its core, as vLLM's ranks do while they wait for each other; each is in a
session of its own, as a container or a service is, and so in a scheduling group (autogroup) of its own. With `--vllm`
the ranks are those of a real engine on CPU, which answers one request after another. A client looks up keys every
millisecond. The ways to start the daemon: in a session of its own; with another nice value of the process or of its
autogroup; by the real systemd from the unit that docs/operating.md prints, with `CPUWeight=100` (the default) and with
that of the page; then the ranks are in a service, and the client is in another. A sampler of the highest priority
reads every 10 ms how long the deciding thread has been runnable without a core. Prints a JSON object a way. Needs
root, systemd, and the `cpu` controller of control groups, version 1 or 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("tests", "tests/python")]

import forebay
from fences import fences
from rig import models
from rig.engine import Engine, EngineConfig, Request
from rig.systemd import Systemd

IDLE_SERVICE = "[Service]\nExecStart=sleep infinity\n"
STEP = 0.01
WAYS = ("session", "nice -5", "autogroup nice -5", "systemd, CPUWeight=100", "systemd, CPUWeight=1000")


def spin(over: Any) -> None:
    os.setsid()
    while not over.is_set():
        for _ in range(1000):
            os.sched_yield()


def look(sockets: str, looks: Any, over: Any, waits: Any) -> None:
    os.setsid()
    client = forebay.Client(sockets, deadline=60.0)
    space = client.open_namespace({"model": "starved"}, {0: 4096})
    client.lookup(space, 0, [b"k" * 32])
    looks.set()
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
def daemon_of(binary: str, way: str, root: Path) -> Iterator[tuple[int, Systemd | None]]:
    """The daemon with sockets in `root`: its process, and the systemd that started it."""
    config = root / "forebay.toml"
    http, sockets = '[http]\naddress = "off"\n', f'[socket]\ndirectory = "{root}/s"\n'
    if not way.startswith("systemd"):
        config.write_text(f'{http}{sockets}[pool]\ndirectory = "{root}/pool"\ncapacity_bytes = "64MiB"\n')
        argv = [binary, "serve", "--config", str(config)]
        daemon = subprocess.Popen(argv, start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            if way.startswith("nice"):
                os.setpriority(os.PRIO_PROCESS, daemon.pid, int(way.split()[-1]))
            elif way.startswith("autogroup"):
                Path(f"/proc/{daemon.pid}/autogroup").write_text(way.split()[-1])
            yield daemon.pid, None
        finally:
            daemon.terminate()
            daemon.wait()
            subprocess.run([binary, "pool", "remove", f"{root}/pool"], check=True, stdout=subprocess.DEVNULL)
        return
    [unit] = [fence.text for fence in fences("docs/operating.md") if fence.kind == "ini"]
    with Systemd() as machine:
        machine.ask("cp", str(Path(binary).resolve()), "/usr/local/bin/forebay")
        machine.write("/etc/forebay.toml", f'{http}{sockets}[pool]\ncapacity_bytes = "64MiB"\n')
        weighed, count = re.subn(r"(?m)^CPUWeight=\d+$", way.split()[-1], unit)
        assert count == 1, "the page gives the daemon a weight"
        machine.write("/etc/systemd/system/forebay.service", weighed + "\n")
        for name in ("engine", "client"):
            machine.write(f"/etc/systemd/system/{name}.service", IDLE_SERVICE)
        machine.ask("systemctl", "start", "forebay", "engine", "client")
        yield machine.pid("forebay"), machine


@contextlib.contextmanager
def spinners(ranks: int) -> Iterator[list[int]]:
    over = multiprocessing.Event()
    processes = [multiprocessing.Process(target=spin, args=(over,)) for _ in range(ranks)]
    for process in processes:
        process.start()
    try:
        yield [process.pid or 0 for process in processes]
    finally:
        over.set()
        for process in processes:
            process.join(60)


@contextlib.contextmanager
def engine(ranks: int) -> Iterator[list[int]]:
    """A real engine without Forebay, which answers one request after another: its processes."""
    with (
        tempfile.TemporaryDirectory(prefix="forebay-bench-") as run_dir,
        Engine(EngineConfig(models.LLAMA, tensor_parallel=ranks), Path(run_dir)) as engine,
    ):
        engine.ready()
        over = threading.Event()

        def keep_busy() -> None:
            number = 0
            while not over.is_set():
                number += 1
                engine.generate([Request(f"busy-{number}", (models.FIRST_PLAIN_TOKEN + number % 64,) * 64, 256)])

        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            yield tree(engine.child.process.pid)
        finally:
            over.set()
            busy.join(60)


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [pid, *(below for child in children for below in tree(child))]


def measure(binary: str, way: str, ranks: int, seconds: float, *, is_vllm: bool) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        # The machine that systemd has sees it too.
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", prefix="fb-")))
        pid, machine = stack.enter_context(daemon_of(binary, way, root))
        sockets = root / "s"
        deadline = time.monotonic() + 20
        while not (sockets / "forebay.sock").exists():
            if time.monotonic() > deadline:
                sys.exit("error: the daemon has not started")
            time.sleep(0.01)
        processes = stack.enter_context((engine if is_vllm else spinners)(ranks))
        if machine is not None:
            machine.adopt("engine", processes)
        # Not by a fork: this process has threads by now.
        spawned = multiprocessing.get_context("spawn")
        looks, over, waits = spawned.Event(), spawned.Event(), spawned.Queue()
        client = spawned.Process(target=look, args=(str(sockets), looks, over, waits))
        client.start()
        if machine is not None:
            machine.adopt("client", [client.pid or 0])
        if not looks.wait(120):
            sys.exit("error: the client has had no answer for two minutes")
        steps, last, begun = [], waited(pid), time.monotonic()
        while time.monotonic() - begun < seconds:
            time.sleep(STEP)
            now = waited(pid)
            steps.append(now - last)
            last = now
        over.set()
        taken = waits.get(timeout=120)
        client.join(60)
    return {
        "way": way,
        "ranks_of": "vLLM" if is_vllm else "spinners",
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
    parser.add_argument("--vllm", action="store_true", help="the ranks of a real engine")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    print(json.dumps({"machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}"}))
    for _ in range(arguments.rounds):
        for ranks in arguments.ranks:
            for way in arguments.ways:
                print(
                    json.dumps(measure(arguments.binary, way, ranks, arguments.seconds, is_vllm=arguments.vllm)),
                    flush=True,
                )


if __name__ == "__main__":
    main()
