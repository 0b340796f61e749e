"""Measures the Redis tier beside other clients: `.venv/bin/python bench/redis_peers.py redis://127.0.0.1:6379`.

The same server, the same sizes, in turn and in alternating order: `forebay bench redis` (every reply parsed, every
block's checksum compared), redis-py with its own parser and with hiredis, LMCache's C++ client with one, with four
and with eight connections, its default, and floors: a bare socket that does the least any client can, so that what
server and kernel cost alone is known. Peers that cannot be imported are left out and named. For each run: GB/s, and GB per second of CPU
time of client and server together; the ratios are medians over the rounds. Then, one operation at a time, how long
each takes: p50 and p99 over the rounds. Prints one JSON object with all raw figures, and a table on standard error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import platform
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FOREBAY = os.environ.get("FOREBAY_BIN", str(Path(__file__).parents[1] / "target/release/forebay"))
WORKING_SET_BYTES = 128 << 20
# Of each round: enough for a p99 of all rounds together, with the largest blocks at 1 GB/s.
SINGLE_OPERATIONS = 60
# What the pipelined floor has in flight, as our tier has by default; two values at least.
PIPELINE_BYTES = 2 << 20
# The operation, the number of the first block, how many blocks.
Pass = Callable[[str, int, int], None]
Sample = dict[str, float]


def server_cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Blocks:
    """Values of one size, in memory that nobody else uses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = max(2, WORKING_SET_BYTES // size)
        self.memory = mmap.mmap(-1, size * self.count)
        self.memory[:] = os.urandom(1 << 20) * (len(self.memory) >> 20)
        whole = memoryview(self.memory)
        self.views = [whole[at * size : (at + 1) * size] for at in range(self.count)]
        self.keys = [f"peers:{size}:{at}" for at in range(self.count)]


def redis_py(url: str, blocks: Blocks, parser: str) -> Pass:
    redis: Any = importlib.import_module("redis")
    parsers: Any = importlib.import_module("redis._parsers")
    if parser == "_HiredisParser":
        importlib.import_module("hiredis")
    pool = redis.ConnectionPool.from_url(url, parser_class=getattr(parsers, parser), protocol=2)
    client = redis.Redis(connection_pool=pool)

    def one_pass(op: str, first: int, count: int) -> None:
        for at in range(first, first + count):
            key, view = blocks.keys[at % blocks.count], blocks.views[at % blocks.count]
            if op == "set":
                client.set(key, view)
            else:
                # As a cache would: the value belongs into memory of its own.
                view[:] = client.get(key)

    return one_pass


def lmcache(url: str, blocks: Blocks, workers: int) -> Pass:
    # Its library needs symbols that torch brings.
    importlib.import_module("torch")
    module: Any = importlib.import_module("lmcache.lmcache_redis")
    place = urlsplit(url)
    client = module.LMCacheRedisClient(place.hostname, place.port or 6379, workers)

    def one_pass(op: str, first: int, count: int) -> None:
        done = 0
        while done < count:
            # One batch after the other, as its adapter submits them: all blocks of the working set.
            at = (first + done) % blocks.count
            some = min(count - done, blocks.count - at)
            submit = client.submit_batch_set if op == "set" else client.submit_batch_get
            job = submit(blocks.keys[at : at + some], blocks.views[at : at + some])
            completions: list[Any] = []
            while not completions:
                if not select.select([client.event_fd()], [], [], 60)[0]:
                    raise TimeoutError("the client has answered nothing for 60 s")
                completions = client.drain_completions()
            (ended, is_good, error, _), *_ = completions
            assert ended == job and is_good, error
            done += some

    return one_pass


def connect(url: str) -> socket.socket:
    place = urlsplit(url)
    if place.scheme == "unix":
        bare = socket.socket(socket.AF_UNIX)
        bare.connect(place.path)
    else:
        bare = socket.create_connection((place.hostname, place.port or 6379))
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # By the kernel, since Python's own timeout would make the socket one that does not wait.
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 60, 0))
    return bare


def floor(url: str, blocks: Blocks, depth: int, *, is_kept: bool) -> Pass:
    """The least that any client can do, with `depth` values in flight. How long a reply is, is known and not read. One
    that is not kept is thrown away by the kernel, which for TCP copies nothing then, and for Unix sockets to one
    buffer; all values that are sent lie in one buffer. Kept, values are received where they belong and sent from there.
    """
    bare = connect(url)
    names = [key.encode() for key in blocks.keys]
    gets = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names]
    line = b"$%d\r\n" % blocks.size
    sets = [b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n%s" % (len(name), name, line) for name in names]
    one = memoryview(bytearray(blocks.views[0]))
    rest = memoryview(bytearray(len(line) + blocks.size + 2))
    discard = 0 if bare.family == socket.AF_UNIX else socket.MSG_TRUNC

    def receive(place: memoryview, flags: int = 0) -> None:
        while len(place):
            count = bare.recv_into(place, len(place), flags | socket.MSG_WAITALL)
            assert count, "the server has closed the connection"
            place = place[count:]

    def send(pieces: list[bytes | memoryview]) -> None:
        while pieces:
            count = bare.sendmsg(pieces)
            while pieces and count >= len(pieces[0]):
                count -= len(pieces.pop(0))
            if pieces:
                pieces[0] = memoryview(pieces[0])[count:]

    def begin(op: str, at: int) -> None:
        if op == "get":
            bare.sendall(gets[at])
        else:
            send([sets[at], blocks.views[at] if is_kept else one, b"\r\n"])

    def end(op: str, at: int) -> None:
        if op == "set":
            receive(rest[:5])
            assert bytes(rest[:5]) == b"+OK\r\n", bytes(rest[:5])
        elif is_kept:
            receive(rest[: len(line)])
            assert bytes(rest[: len(line)]) == line, bytes(rest[: len(line)])
            receive(blocks.views[at])
            receive(rest[:2])
        else:
            receive(rest, discard)

    def one_pass(op: str, first: int, count: int) -> None:
        places = [at % blocks.count for at in range(first, first + count)]
        for number, at in enumerate(places):
            begin(op, at)
            if number >= depth - 1:
                end(op, places[number - depth + 1])
        for at in places[max(0, count - depth + 1) :]:
            end(op, at)

    return one_pass


def measure(one_pass: Pass, op: str, size: int, run_bytes: int, pid: int) -> Sample:
    count = -(-run_bytes // size)
    begun, client, server = time.perf_counter(), time.process_time(), server_cpu_s(pid)
    one_pass(op, 0, count)
    gb = count * size / 1e9
    return {
        "gb_per_s": gb / (time.perf_counter() - begun),
        "gb_per_cpu_s": gb / (time.process_time() - client + server_cpu_s(pid) - server),
    }


def latencies_us(one_pass: Pass, op: str) -> list[float]:
    """One operation at a time."""
    found = []
    for number in range(SINGLE_OPERATIONS):
        begun = time.perf_counter()
        one_pass(op, number, 1)
        found.append((time.perf_counter() - begun) * 1e6)
    return found


def run_forebay(arguments: argparse.Namespace, op: str, size: int, run_bytes: int, *more: str) -> dict[str, Any]:
    command = [FOREBAY, "bench", "redis", arguments.url, "--op", op, "--size-bytes", str(size), "--runs", "1"]
    command += ["--run-bytes", str(run_bytes), "--lookup-keys", "0", "--json", *more]
    command += ["--value-bytes", str(arguments.value_bytes)] if arguments.value_bytes else []
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row: dict[str, Any] = json.loads(out)["rows"][0]
    assert row["errors"] == 0, row
    return row


def measure_forebay(arguments: argparse.Namespace, op: str, size: int) -> Sample:
    row = run_forebay(arguments, op, size, arguments.run_bytes)
    return {"gb_per_s": row["gb_per_s"], "gb_per_cpu_s": 1 / row["cpu_s_per_gb"]}


def forebay_latencies_us(arguments: argparse.Namespace, op: str, size: int) -> list[float]:
    row = run_forebay(arguments, op, size, SINGLE_OPERATIONS * size, "--at-once", "1")
    return [float(latency) for latency in row["latencies_us"]]


@contextmanager
def peers(url: str, blocks: Blocks) -> Iterator[dict[str, Pass]]:
    makers: dict[str, Callable[[], Pass]] = {
        "redis-py": lambda: redis_py(url, blocks, "_RESP2Parser"),
        "redis-py + hiredis": lambda: redis_py(url, blocks, "_HiredisParser"),
        "lmcache x1": lambda: lmcache(url, blocks, 1),
        "lmcache x4": lambda: lmcache(url, blocks, 4),
        "lmcache x8": lambda: lmcache(url, blocks, 8),
        "floor": lambda: floor(url, blocks, 1, is_kept=False),
        "floor pipelined": lambda: floor(url, blocks, max(2, PIPELINE_BYTES // blocks.size), is_kept=False),
        "floor kept": lambda: floor(url, blocks, 1, is_kept=True),
    }
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"left out: {name} ({error})", file=sys.stderr)
    for one_pass in found.values():
        one_pass("set", 0, blocks.count)
    yield found


def server_of(url: str) -> tuple[int, str]:
    """Its process and its name."""
    redis: Any = importlib.import_module("redis")
    info = redis.Redis.from_url(url, protocol=2).info("server")
    name = f"valkey {info['valkey_version']}" if "valkey_version" in info else f"redis {info['redis_version']}"
    return int(info["process_id"]), name


def rows_of(arguments: argparse.Namespace, size: int, pid: int) -> list[dict[str, Any]]:
    blocks, rows = Blocks(size), []
    with peers(arguments.url, blocks) as found:
        for op in ("get", "set"):
            samples: dict[str, list[Sample]] = {name: [] for name in ("forebay", *found)}
            singles: dict[str, list[float]] = {name: [] for name in samples}
            for number in range(arguments.rounds):
                for name in list(samples)[:: 1 if number % 2 == 0 else -1]:
                    if name == "forebay":
                        samples[name].append(measure_forebay(arguments, op, size))
                        singles[name] += forebay_latencies_us(arguments, op, size)
                    else:
                        samples[name].append(measure(found[name], op, size, arguments.run_bytes, pid))
                        singles[name] += latencies_us(found[name], op)
            rows += [row_of(op, size, name, samples, singles[name]) for name in samples]
    return rows


def row_of(op: str, size: int, name: str, samples: dict[str, list[Sample]], singles: list[float]) -> dict[str, Any]:
    def middle(unit: str) -> float:
        return statistics.median(sample[unit] for sample in samples[name])

    def ratio(unit: str) -> float:
        pairs = zip(samples["forebay"], samples[name], strict=True)
        return statistics.median(ours[unit] / theirs[unit] for ours, theirs in pairs)

    percents = statistics.quantiles(singles, n=100)
    row = {"op": op, "size_bytes": size, "client": name, "samples": samples[name]}
    row |= {"p50_us": percents[49], "p99_us": percents[98]}
    row |= {unit: middle(unit) for unit in ("gb_per_s", "gb_per_cpu_s")}
    row |= {f"forebay_over_it_{unit}": ratio(unit) for unit in ("gb_per_s", "gb_per_cpu_s")}
    print(
        f"{op}  {size >> 10:>6} KiB  {name:<20} {row['gb_per_s']:5.2f} GB/s  {row['gb_per_cpu_s']:5.2f} GB/CPU-s  "
        f"forebay: {row['forebay_over_it_gb_per_s']:5.2f} x, {row['forebay_over_it_gb_per_cpu_s']:5.2f} x per CPU-s  "
        f"one at a time: p50 {row['p50_us']:6.0f} us, p99 {row['p99_us']:6.0f} us",
        file=sys.stderr,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--size-bytes", type=int, nargs="+", default=[256 << 10, 1 << 20, 4 << 20, 16 << 20])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run-bytes", type=int, default=256 << 20)
    parser.add_argument("--value-bytes", type=int, help="cut our blocks; by default they are stored whole")
    arguments = parser.parse_args()
    pid, server = server_of(arguments.url)
    rows = []
    for size in arguments.size_bytes:
        rows += rows_of(arguments, size, pid)
    report = {
        "bench": "redis peers",
        "command": " ".join(["bench/redis_peers.py", *sys.argv[1:]]),
        "server": server,
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()},
        "rows": rows,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
