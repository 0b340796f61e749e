"""What it costs to watch a daemon, and what lookups notice of it.

    python bench/frame.py [--rounds 20] [--seconds 10] [--engines 16] BINARY...

Starts a private daemon of each build, with engines (a session and a worker each). A watcher asks for a frame once a
second: `page` as the page at `/` does, with the steps that it has; `full` for all of the history; `top` is the build's
own `forebay top --lines`. In each round every daemon is idle for some seconds without a watcher and for as many with
each; the order changes. Then the same beside a client that looks up 1,024 keys about a hundred times a second.

Prints one object a line: each phase, with the processor time of the daemon's process and the times of the lookups, and
then each watcher's cost as medians of the pairs within a round.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import forebay

BLOCK_BYTES, KEYS, DEADLINE = 4096, 1024, 60.0
PAUSE, SETTLED = 0.01, 3.0
IDLE, LOADED = ("none", "page", "full", "top"), ("none", "page", "top")


def key(seed: int) -> bytes:
    return (seed * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 4


def wait_for(what: str, is_so: Any) -> None:
    deadline = time.monotonic() + DEADLINE
    while not is_so():
        if time.monotonic() > deadline:
            sys.exit(f"error: never: {what}")
        time.sleep(0.01)


class Engine:
    """A session and one worker. It stores and loads nothing."""

    def __init__(self, sockets: str, number: int) -> None:
        name = f"engine-{number}"
        incarnation = hashlib.sha256(name.encode()).digest()[:16]
        self.memory = (ctypes.c_ubyte * BLOCK_BYTES)()
        self.session = forebay.EngineSession(sockets, name, 1, incarnation=incarnation)
        self.session.set_namespace({"model": "bench", "tenant": name}, [(0, "full", 16, False)])
        self.worker = forebay.WorkerEngine(
            sockets,
            name,
            0,
            1,
            incarnation=incarnation,
            tensors=[(ctypes.addressof(self.memory), 1, BLOCK_BYTES, BLOCK_BYTES)],
            groups=[(0, False, [(0, BLOCK_BYTES)])],
            threads=1,
        )

    def is_ready(self) -> bool:
        return self.session.state() == "ready" and self.worker.state() == "ready"

    def close(self) -> None:
        self.session.close()
        self.worker.shutdown()


class Side:
    """One build's daemon with its engines."""

    def __init__(self, binary: str, root: str, engines: int) -> None:
        self.binary, self.sockets = binary, f"{root}/s"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = ["--socket.directory", self.sockets, "--pool.directory", f"{root}/pool", "--log.level", "error"]
        arguments += ["--pool.capacity_bytes", "256MiB", "--pool.huge_pages", "off", "--http.address", self.address]
        self.daemon = subprocess.Popen([binary, "serve", *arguments])
        wait_for("the daemon's socket", Path(f"{self.sockets}/forebay.sock").exists)
        self.engines = [Engine(self.sockets, number) for number in range(engines)]
        wait_for("the engines are ready", lambda: all(engine.is_ready() for engine in self.engines))
        self.client = forebay.Client(self.sockets, deadline=DEADLINE)
        self.namespace = self.client.open_namespace({"model": "bench"}, {0: BLOCK_BYTES})
        self.keys = [key(number) for number in range(KEYS)]
        self.client.put(self.namespace, 0, [(name, bytes(BLOCK_BYTES)) for name in self.keys])

    def spent(self) -> float:
        """Seconds of processor time of all threads there ever were: the clock of the process."""
        return time.clock_gettime((~self.daemon.pid << 3) | 2)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.client.close()
        self.daemon.terminate()
        self.daemon.wait()


class Watcher:
    """Asks at once and then every second, until it is closed."""

    def __init__(self, kind: str, side: Side) -> None:
        self.process: Any = None
        if kind == "top":
            command = [side.binary, "top", "--lines", "--socket.directory", side.sockets]
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            self.ended = self.process.wait
        elif kind != "none":
            # Not a fork: this process has the threads of the engines.
            self.process = multiprocessing.get_context("spawn").Process(target=ask, args=(kind, side.address))
            self.process.start()
            self.ended = self.process.join

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.ended()


def ask(kind: str, address: str) -> None:
    query = ""
    while True:
        with urllib.request.urlopen(f"http://{address}/frame.json{query}", timeout=DEADLINE) as reply:
            body = reply.read()
        if kind == "page":
            frame = json.loads(body)
            query = f"?boot={frame['boot']}&hour_last={frame['hour']['last']}&day_last={frame['day']['last']}"
        time.sleep(1)


def phase(side: Side, watched: str, seconds: float, is_loaded: bool) -> dict[str, Any]:
    watcher = Watcher(watched, side)
    # The first answer has all of the history.
    time.sleep(SETTLED)
    spent, begun, times = side.spent(), time.perf_counter(), []
    while time.perf_counter() - begun < seconds:
        if is_loaded:
            asked = time.perf_counter()
            side.client.lookup(side.namespace, 0, side.keys)
            times.append(time.perf_counter() - asked)
            time.sleep(PAUSE)
        else:
            time.sleep(max(0.0, begun + seconds - time.perf_counter()))
    took, spent = time.perf_counter() - begun, side.spent() - spent
    watcher.close()
    row = {"watcher": watched, "loaded": is_loaded, "seconds": round(took, 3), "spent_ms": round(spent * 1e3, 3)}
    if times:
        cuts = statistics.quantiles(times, n=100)
        row |= {"lookups": len(times), "p50_us": round(cuts[49] * 1e6), "p99_us": round(cuts[98] * 1e6)}
    return row


def summary(rows: list[dict[str, Any]], watched: str, is_loaded: bool) -> dict[str, Any]:
    """Of the pairs of phases with and without the watcher in one round."""
    mine = [row for row in rows if row["loaded"] == is_loaded]
    without, beside = ([row for row in mine if row["watcher"] == kind] for kind in ("none", watched))
    pairs = list(zip(without, beside, strict=True))
    told: dict[str, Any] = {"watcher": watched, "loaded": is_loaded, "pairs": len(pairs)}
    more = [row["spent_ms"] / row["seconds"] - base["spent_ms"] / base["seconds"] for base, row in pairs]
    told["ms_a_second"] = quartiles(more, 3)
    if is_loaded:
        for name in ("p50_us", "p99_us"):
            told[name] = [round(statistics.median(row[name] for row in part)) for part in (without, beside)]
            told[f"{name}_ratio"] = quartiles([row[name] / base[name] for base, row in pairs], 3)
    else:
        told["percent_of_a_core"] = [round(part / 10, 4) for part in told["ms_a_second"]]
    return told


def quartiles(values: list[float], digits: int) -> list[float]:
    return [round(part, digits) for part in statistics.quantiles(values, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("binaries", nargs="+", metavar="BINARY")
    arguments = parser.parse_args()
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release()}
    print(json.dumps({**vars(arguments), **machine}), flush=True)
    rows: list[list[dict[str, Any]]] = [[] for _ in arguments.binaries]
    sides: list[Side] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        try:
            for number, binary in enumerate(arguments.binaries):
                sides.append(Side(binary, f"{root}/{number}", arguments.engines))
            for is_loaded, kinds in ((False, IDLE), (True, LOADED)):
                for turn in range(arguments.rounds):
                    for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                        for number, side in list(enumerate(sides))[:: 1 if turn % 2 else -1]:
                            row = phase(side, kind, arguments.seconds, is_loaded)
                            rows[number].append(row)
                            print(json.dumps({"build": number, "round": turn, **row}), flush=True)
        finally:
            for side in sides:
                side.close()
    for number, part in enumerate(rows):
        for is_loaded, kinds in ((False, IDLE), (True, LOADED)):
            for kind in kinds[1:]:
                print(json.dumps({"build": number, **summary(part, kind, is_loaded)}), flush=True)


if __name__ == "__main__":
    main()
