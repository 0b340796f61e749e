"""What `forebay.Client` moves a second, through lent memory and through messages, in turns, beside a copy in memory and
the client of kvblockd.

    python bench/client_copies.py --socket DIRECTORY [--block-bytes 1048576] [--blocks 64] [--rounds 10]
        [--kvblockd HOST:PORT --token-file FILE]

One line of JSON for each round, in GB/s. All clients compare checksums, and all fill buffers that exist already. The
blocks of a round are new; the pools must hold those of all rounds. `kvblockd` can be imported if its server is named.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import forebay
import numpy as np


def rival(options: argparse.Namespace, sinks: list[np.ndarray]) -> tuple[Callable, Callable]:
    """The put and the get of another client: with its usual number of streams, and comparing what it gets."""
    from kvblockd.client import Client

    token = Path(options.token_file).read_text().strip()
    client = Client(options.kvblockd, namespace="bench", token=token, verify=True)

    def put(keys: list[bytes], sources: list[np.ndarray]) -> None:
        for key, source in zip(keys, sources, strict=True):
            client.put(key, [memoryview(source)])

    def get_into(keys: list[bytes]) -> None:
        client.batch_get_scatter(keys, 0, lambda index, prefix, length: [memoryview(sinks[index])])

    return put, get_into


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket")
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kvblockd")
    parser.add_argument("--token-file")
    options = parser.parse_args()
    size, count = options.block_bytes, options.blocks
    ways = {
        way: forebay.Client(options.socket, deadline=60.0, memory_bytes=bytes_lent)
        for way, bytes_lent in (("memory", 16 << 20), ("messages", 0))
    }
    names = {way: client.open_namespace({"model": "bench-client-copies"}, {0: size}) for way, client in ways.items()}
    sources = [np.frombuffer(np.random.default_rng(at).bytes(size), dtype=np.uint8) for at in range(count)]
    sinks = [np.ones(size, dtype=np.uint8) for _ in range(count)]
    other = rival(options, sinks) if options.kvblockd else None

    def rate(start: float) -> float:
        return round(size * count / (time.perf_counter() - start) / 1e9, 3)

    def check() -> None:
        assert all((sink == source).all() for sink, source in zip(sinks, sources, strict=True))
        for sink in sinks:
            sink[:] = 1

    for number in range(options.rounds):
        start = time.perf_counter()
        for sink, source in zip(sinks, sources, strict=True):
            np.copyto(sink, source)
        line: dict[str, object] = {"round": number, "memcpy_gb_s": rate(start), "load": os.getloadavg()[0]}
        for way, client in ways.items():
            keys = [os.urandom(32) for _ in range(count)]
            start = time.perf_counter()
            stored = client.put(names[way], 0, list(zip(keys, sources, strict=True)))
            line[f"put_{way}_gb_s"] = rate(start)
            assert stored == ["stored"] * count, stored
            start = time.perf_counter()
            assert all(client.get_into(names[way], 0, keys, sinks))
            line[f"get_into_{way}_gb_s"] = rate(start)
            check()
            start = time.perf_counter()
            found = client.get(names[way], 0, keys)
            line[f"get_{way}_gb_s"] = rate(start)
            assert None not in found
        if other:
            put, get_into = other
            keys = [os.urandom(32) for _ in range(count)]
            start = time.perf_counter()
            put(keys, sources)
            line["put_kvblockd_gb_s"] = rate(start)
            start = time.perf_counter()
            get_into(keys)
            line["get_into_kvblockd_gb_s"] = rate(start)
            check()
        print(json.dumps(line), flush=True)
    assert "shared memory" in repr(ways["memory"]), ways["memory"]


if __name__ == "__main__":
    main()
