"""Eight engines on one pool against eight pools of an eighth: hits of the same requests.

`python bench/one_pool.py [--engines N] [--pool-mib N] [--json FILE]`, with PYTHONPATH=python:tests and a built `forebay`. Real
daemons; the engines are clients that look each request up and store what is not there, as engines do; no model runs, and no
block is loaded. The requests are turns of conversations behind shared system prompts, in the same random order each time.
"sticky" sends all turns of a conversation to one engine, "spread" sends each turn to any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from forebay import Client
from rig.daemon import Daemon

BLOCK_BYTES = 64 << 10
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 8, 16
CONVERSATIONS, TURNS, TURN_BLOCKS = 128, 6, 4
SEED = 13


@dataclass(frozen=True)
class Outcome:
    pools: int
    routing: str
    keys: int
    hits: int
    stored_blocks: int
    pool_bytes: int  # of all pools together
    median_lookup_ms: float

    @property
    def hit_rate(self) -> float:
        return self.hits / self.keys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--pool-mib", type=int, default=128, help="memory of all pools together")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    outcomes = [
        serve(pools, options.engines, options.pool_mib << 20, routing)
        for routing in ("sticky", "spread")
        for pools in (options.engines, 1)
    ]
    print(
        "| routing | pools | hit rate | hits of keys | blocks stored | median lookup, ms |\n|---|---|---|---|---|---|"
    )
    for each in outcomes:
        size = f"{each.pools} × {each.pool_bytes // each.pools >> 20} MiB"
        print(
            f"| {each.routing} | {size} | {each.hit_rate:.3f} | {each.hits:,} of {each.keys:,} | {each.stored_blocks:,} | "
            f"{each.median_lookup_ms:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    return 0


def serve(pools: int, engines: int, pool_bytes: int, routing: str) -> Outcome:
    with ExitStack() as stack:
        daemons = [stack.enter_context(Daemon(pool_bytes // pools, unit_bytes=2 << 20)).start() for _ in range(pools)]
        clients = [Client(str(daemons[engine % pools].socket.parent)) for engine in range(engines)]
        namespaces = [client.open_namespace({"model": "one pool"}, {0: BLOCK_BYTES}) for client in clients]
        keys = hits = 0
        times = []
        for conversation, turn in requests():
            chosen = random.Random(f"{routing} {conversation} {turn if routing == 'spread' else ''}")
            engine = chosen.randrange(engines)
            prompt = hashes(conversation, turn)
            begun = time.perf_counter()
            ready = clients[engine].lookup(namespaces[engine], 0, prompt)
            times.append(time.perf_counter() - begun)
            found = next((at for at, is_ready in enumerate(ready) if not is_ready), len(ready))
            keys, hits = keys + len(prompt), hits + found
            store(clients[engine], namespaces[engine], prompt, found)
        stored = sum(int(daemon.metrics()["forebay_stored_blocks_total"]) for daemon in daemons)
        for client in clients:
            client.close()
        return Outcome(pools, routing, keys, hits, stored, pool_bytes, sorted(times)[len(times) // 2] * 1e3)


def requests() -> Iterator[tuple[int, int]]:
    """(conversation, turn), interleaved: each conversation's turns in their order."""
    chosen = random.Random(SEED)
    left = [conversation for conversation in range(CONVERSATIONS) for _ in range(TURNS)]
    chosen.shuffle(left)
    turns = dict.fromkeys(range(CONVERSATIONS), 0)
    for conversation in left:
        yield conversation, turns[conversation]
        turns[conversation] += 1


def hashes(conversation: int, turn: int) -> list[bytes]:
    system = [f"system {conversation % SYSTEM_PROMPTS} {block}" for block in range(SYSTEM_BLOCKS)]
    said = [f"conversation {conversation} {block}" for block in range((turn + 1) * TURN_BLOCKS)]
    return [hashlib.sha256(name.encode()).digest() for name in system + said]


def store(client: Client, namespace: int, prompt: Sequence[bytes], found: int) -> None:
    if found < len(prompt):
        predecessor = prompt[found - 1] if found else None
        client.put(namespace, 0, [(key, DATA) for key in prompt[found:]], predecessor)


DATA = bytes(BLOCK_BYTES)


if __name__ == "__main__":
    sys.exit(main())
