"""Measures how soon a restarted daemon serves: `.venv/bin/python bench/warm_restart.py [--gib 2] [--rounds 5]`.

Fills a pool with blocks until nothing fits any more, kills the daemon with SIGKILL, starts it again on the same pool
and asks for one block at once. Times from `exec` to the socket's first answer, and to the first byte-verified hit.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forebay

DEADLINE = 60.0


def start(binary: str, root: Path, capacity_bytes: int) -> subprocess.Popen[bytes]:
    command = [binary, "serve", "--socket.directory", str(root / "s"), "--pool.directory", str(root / "pool")]
    command += ["--pool.capacity_bytes", str(capacity_bytes), "--http.address", "off"]
    return subprocess.Popen(command, stderr=(root / "log").open("ab"))


def wait_for(client: forebay.Client, done: str, begun: float) -> float:
    """Seconds from `begun` until the daemon answers."""
    while True:
        try:
            client.inspect()
            return time.perf_counter() - begun
        except forebay.ForebayError:
            if time.perf_counter() - begun > DEADLINE:
                sys.exit(f"error: the daemon does not answer after {done}")
            time.sleep(0.002)


def fill(client: forebay.Client, namespace: int, block: bytes, capacity_bytes: int) -> int:
    count = capacity_bytes // len(block)
    for first in range(0, count, 64):
        blocks = [(name(i), block) for i in range(first, min(first + 64, count))]
        client.put(namespace, 0, blocks, predecessor=name(first - 1) if first else None)
    return count


def name(index: int) -> bytes:
    return index.to_bytes(8, "little") * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-bytes", type=int, default=128 << 10)
    arguments = parser.parse_args()
    capacity_bytes = int(arguments.gib * (1 << 30))
    binary = os.environ.get("FOREBAY_BIN", "target/release/forebay")
    block = os.urandom(arguments.block_bytes)
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        root = Path(directory)
        daemon = start(binary, root, capacity_bytes)
        client = forebay.Client(str(root / "s"))
        wait_for(client, "the cold start", time.perf_counter())
        while (pool := client.inspect())["populated_bytes"] != pool["capacity_bytes"]:
            time.sleep(0.05)
        namespace = client.open_namespace({"model": "warm restart"}, {0: len(block)})
        fill(client, namespace, block, capacity_bytes)
        for _ in range(arguments.rounds):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
            begun = time.perf_counter()
            daemon = start(binary, root, capacity_bytes)
            client = forebay.Client(str(root / "s"))
            answer = wait_for(client, "a restart", begun)
            namespace = client.open_namespace({"model": "warm restart"}, {0: len(block)})
            hit = client.get(namespace, 0, [name(0)])[0]
            first_hit = time.perf_counter() - begun
            if hit != block:
                sys.exit("error: the first block is not what was stored")
            ready = sum(group["ready_blocks"] for ns in client.inspect()["namespaces"] for group in ns["groups"])
            rows.append({"first_answer_s": answer, "first_hit_s": first_hit, "ready_blocks": ready})
        daemon.terminate()
        daemon.wait(DEADLINE)
        subprocess.run(["umount", "-q", str(root / "pool" / "mnt")], check=False, stderr=subprocess.DEVNULL)
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    print(
        json.dumps(
            {
                "bench": "warm_restart",
                "version": forebay.__version__,
                "command": " ".join(sys.argv),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}",
                "capacity_bytes": capacity_bytes,
                "block_bytes": len(block),
                "median": median,
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
