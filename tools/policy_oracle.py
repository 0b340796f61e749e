"""Writes crates/sim/tests/data/oracle.json: plain object hits of libCacheSim on the cut traces.

Run with `pip install libcachesim==0.3.5` and zstd on the path. Each request's blocks are asked for last to first,
one access a block of unit size, which is the order in which the policies' own test asks.
"""

import json
import pathlib
import subprocess

import libcachesim

DATA = pathlib.Path(__file__).parents[1] / "crates/sim/tests/data"
POLICIES = {"lru": libcachesim.LRU, "arc": libcachesim.ARC}
SHARES = [0.02, 0.05, 0.2]


def accesses(trace: str) -> list[int]:
    text = subprocess.run(["zstd", "-dc", DATA / f"{trace}.jsonl.zst"], capture_output=True, check=True).stdout
    requests = [json.loads(line)["hash_ids"] for line in text.splitlines()]
    return [block for request in requests for block in reversed(request)]


def hits(policy: type, blocks: list[int], capacity: int) -> int:
    cache = policy(cache_size=capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    count = 0
    for block in blocks:
        request.obj_id = block + 1
        count += cache.get(request)
    return count


def main() -> None:
    rows = []
    for trace in ["conv", "synth", "agents"]:
        blocks = accesses(trace)
        for share in SHARES:
            capacity = int(len(set(blocks)) * share)
            for name, policy in POLICIES.items():
                row = {"trace": trace, "capacity": capacity, "policy": name, "hits": hits(policy, blocks, capacity)}
                rows.append(row)
    (DATA / "oracle.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
