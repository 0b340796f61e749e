"""What a lookup costs the deciding threads of two builds, so that other load on the machine does not matter.

    python bench/paired_lookups.py BINARY_A BINARY_B [KEYS] [ROUNDS]

Starts a private daemon of each build, and stores the keys. In each round one client looks up all keys 40 times at one
daemon and then at the other; the order alternates. The line has the quartiles of the deciding threads' processor time
in microseconds a lookup, and of the ratio B to A within a round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forebay

BLOCK_BYTES, LOOKUPS, WARM_UP = 4096, 40, 200


def key(seed: int) -> bytes:
    return (seed * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 4


class Side:
    def __init__(self, binary: str, root: str, keys: list[bytes]) -> None:
        sockets = f"{root}/s"
        arguments = ["--socket.directory", sockets, "--pool.directory", f"{root}/pool", "--http.address", "off"]
        arguments += ["--pool.capacity_bytes", "256MiB", "--pool.huge_pages", "off", "--log.level", "error"]
        self.daemon = subprocess.Popen([binary, "serve", *arguments])
        while not Path(f"{sockets}/forebay.sock").exists():
            time.sleep(0.01)
        time.sleep(2)
        self.client = forebay.Client(sockets, deadline=60.0)
        self.namespace = self.client.open_namespace({"model": "bench"}, {0: BLOCK_BYTES})
        self.keys = keys
        self.took: list[float] = []
        for at in range(0, len(keys), 1024):
            self.client.put(self.namespace, 0, [(name, bytes(BLOCK_BYTES)) for name in keys[at : at + 1024]])
        self.look_up(WARM_UP)

    def look_up(self, times: int) -> None:
        for _ in range(times):
            self.client.lookup(self.namespace, 0, self.keys)

    def spent_us(self) -> float:
        pid = self.daemon.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e3

    def measure(self) -> None:
        before = self.spent_us()
        self.look_up(LOOKUPS)
        self.took.append((self.spent_us() - before) / LOOKUPS)


def main() -> None:
    binaries, numbers = sys.argv[1:3], [int(number) for number in sys.argv[3:]]
    keys, rounds = [*numbers, *[1024, 400][len(numbers) :]]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as a, tempfile.TemporaryDirectory(dir="/dev/shm") as b:
        sides: list[Side] = []
        try:
            for binary, root in zip(binaries, (a, b), strict=True):
                sides.append(Side(binary, root, [key(number) for number in range(keys)]))
            for number in range(rounds):
                for side in sides[:: 1 if number % 2 else -1]:
                    side.measure()
        finally:
            for side in sides:
                side.daemon.terminate()
                side.daemon.wait()
        times = [[round(part, 1) for part in statistics.quantiles(side.took, n=4)] for side in sides]
        ratios = [second / first for first, second in zip(*(side.took for side in sides), strict=True)]
        ratio = [round(part, 3) for part in statistics.quantiles(ratios, n=4)]
        print(json.dumps({"keys": keys, "rounds": rounds, "a_us": times[0], "b_us": times[1], "b_to_a": ratio}))


if __name__ == "__main__":
    main()
