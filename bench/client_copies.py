"""What `forebay.Client` moves a second, through lent memory and through messages, in turns, beside a copy in memory and
the client of kvblockd; and the processor's time for it, of client and daemon together.

    python bench/client_copies.py --socket DIRECTORY --pid PID [--block-bytes 1048576] [--blocks 64] [--per-call 64]
        [--rounds 10] [--kvblockd HOST:PORT --token TOKEN --kvblockd-pid PID]

One line of JSON for each round, in GB/s and in seconds of the processor for each GB; at the end a line of medians. All
clients compare checksums, and fill buffers that exist already; `get` alone makes `bytes`. The blocks of a round are
new; the pools must hold those of all rounds. Every other round has the ways in the opposite order. `kvblockd` can be
imported if its server is named; it stores one block a call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forebay
import numpy as np

Move = Callable[[list[bytes]], None]


def parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def forebay_moves(options: argparse.Namespace, memory_bytes: int, sources: list[Any], sinks: list[Any]) -> dict:
    client = forebay.Client(options.socket, deadline=60.0, memory_bytes=memory_bytes)
    name = client.open_namespace(
        {"model": "bench-client-copies", "revision": str(options.block_bytes)}, {0: options.block_bytes}
    )

    def put(keys: list[bytes]) -> None:
        for part in parts(list(zip(keys, sources, strict=True)), options.per_call):
            assert client.put(name, 0, list(part)) == ["stored"] * len(part)

    def get_into(keys: list[bytes]) -> None:
        for part, into in zip(parts(keys, options.per_call), parts(sinks, options.per_call), strict=True):
            assert all(client.get_into(name, 0, list(part), list(into)))

    def get(keys: list[bytes]) -> None:
        for part in parts(keys, options.per_call):
            assert None not in client.get(name, 0, list(part))

    moves = {"put": put, "get_into": get_into, "get": get}
    return {"client": client, "moves": moves, "pid": options.pid}


def rival_moves(options: argparse.Namespace, sources: list[Any], sinks: list[Any]) -> dict:
    """Another client, with its usual number of streams, and comparing what it gets."""
    from kvblockd.client import Client

    client = Client(options.kvblockd, namespace=options.namespace, token=options.token, verify=True)

    def put(keys: list[bytes]) -> None:
        for key, source in zip(keys, sources, strict=True):
            client.put(key, [memoryview(source)])

    def get_into(keys: list[bytes]) -> None:
        for part, into in zip(parts(keys, options.per_call), parts(sinks, options.per_call), strict=True):
            client.batch_get_scatter(list(part), 0, lambda at, prefix, length, into=into: memoryview(into[at]))

    def get(keys: list[bytes]) -> None:
        for part in parts(keys, options.per_call):
            assert None not in client.batch_get_bytes(list(part))[0]

    return {"client": client, "moves": {"put": put, "get_into": get_into, "get": get}, "pid": options.kvblockd_pid}


def processor_seconds(pid: int) -> float:
    """Of this process and of another one's threads, as the scheduler counts them."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return time.process_time() + sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket")
    parser.add_argument("--pid", type=int, required=True, help="the daemon's")
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--per-call", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kvblockd")
    parser.add_argument("--namespace", default="demo")
    parser.add_argument("--token", default="demo-token")
    parser.add_argument("--kvblockd-pid", type=int)
    options = parser.parse_args()
    size, count = options.block_bytes, options.blocks
    sources = [np.frombuffer(np.random.default_rng(at).bytes(size), dtype=np.uint8) for at in range(count)]
    sinks = [np.ones(size, dtype=np.uint8) for _ in range(count)]
    ways = {
        "memory": forebay_moves(options, 16 << 20, sources, sinks),
        "messages": forebay_moves(options, 0, sources, sinks),
    }
    if options.kvblockd:
        ways["kvblockd"] = rival_moves(options, sources, sinks)
    gigabytes = size * count / 1e9

    def measure(line: dict[str, Any], name: str, pid: int, move: Callable[[], None]) -> None:
        used, start = processor_seconds(pid), time.perf_counter()
        move()
        wall = time.perf_counter() - start
        line[f"{name}_gb_s"] = round(gigabytes / wall, 3)
        line[f"{name}_cpu_s_gb"] = round((processor_seconds(pid) - used) / gigabytes, 3)

    def copy() -> None:
        for sink, source in zip(sinks, sources, strict=True):
            np.copyto(sink, source)

    lines = []
    for number in range(options.rounds):
        line: dict[str, Any] = {"round": number, "load": round(os.getloadavg()[0], 2)}
        measure(line, "memcpy", os.getpid(), copy)
        for way in list(ways)[:: -1 if number % 2 else 1]:
            keys = [os.urandom(32) for _ in range(count)]
            for name, move in ways[way]["moves"].items():
                if name == "get_into":
                    for sink in sinks:
                        sink[:] = 1
                measure(line, f"{name}_{way}", ways[way]["pid"], lambda move=move, keys=keys: move(keys))
                if name == "get_into":
                    assert all((sink == source).all() for sink, source in zip(sinks, sources, strict=True))
        lines.append(line)
        print(json.dumps(line), flush=True)
    medians = {key: round(statistics.median(line[key] for line in lines), 3) for key in lines[0] if key != "round"}
    print(json.dumps({"medians": medians}), flush=True)
    assert "shared memory" in repr(ways["memory"]["client"]), ways["memory"]["client"]


if __name__ == "__main__":
    main()
