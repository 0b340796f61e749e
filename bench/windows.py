"""What of a prompt with sliding windows comes up from below the pool, and how long that takes: `python bench/windows.py`.

A model has one group of full attention and one with a window of 64 blocks. Two prompts of 512 blocks of 64 KiB a group
share their first 384 blocks. The first one lies on a disk, or in a directory, of a real daemon whose pool is gone. The
second one is looked up, as an engine does, until nothing is promoting. Once the engine has told the length of the window,
and once it has not; in turns, each time with another daemon. Prints a JSON object a run: blocks promoted and seconds.
Needs `FOREBAY_BIN` and the Python package.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("tests", "tests/python")]

from harness import SECONDS, Engine, Group, Model, hashes
from rig.daemon import Daemon
from rig.process import wait_until

BLOCK = 64 << 10
BLOCKS, SHARED, WINDOW = 512, 384, 64
PROMOTING = 2


def tiered(daemon: Daemon, name: str, label: str = "") -> float:
    seen = daemon.metrics()
    return sum(value for key, value in seen.items() if key.startswith(f"{name}{{") and label in key)


def run(place: Literal["disk", "directory"], is_told: bool) -> dict[str, object]:
    windowed = Group(1, ((1, BLOCK),), attention=WINDOW if is_told else "windowed")
    full = Group(0, ((0, BLOCK),))
    model = Model(pages=(BLOCK, BLOCK), stride=BLOCK, groups=(full, windowed))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as shared:
        below = (
            {"ssd_bytes": 1 << 30, "ssd_admission": "all"}
            if place == "disk"
            else {"tiers": {"tier.fs": {"directories": [shared], "capacity_bytes": 1 << 30}}}
        )
        with Daemon(capacity_bytes=256 << 20, **below) as daemon:
            daemon.start()
            with Engine(daemon.socket.parent, model, stock_blocks=64) as engine:
                engine.wait_ready()
                for group in (full, windowed):
                    keys = hashes(str(group.group), BLOCKS)
                    for at in range(0, BLOCKS, 8):
                        before = keys[at - 1] if at and group is full else None
                        engine.store(group, keys[at : at + 8], list(range(8)), before)
                stored = 2 * BLOCKS
                wait_until(
                    "all is below", lambda: tiered(daemon, "forebay_tier_stored_blocks_total") == stored, 6 * SECONDS
                )
                daemon.kill()
                daemon.drop_pool()
                daemon.start()
                engine.wait_ready()
                groups = [
                    (group.group, hashes(str(group.group), SHARED) + hashes("other", BLOCKS - SHARED))
                    for group in (full, windowed)
                ]
                begun = time.monotonic()
                ticket = engine.session.lookup(groups)
                assert ticket.poll(SECONDS)
                while any(PROMOTING in ticket.states(position) for position in range(2)):
                    assert time.monotonic() < begun + SECONDS
                    time.sleep(0.0005)
                seconds = time.monotonic() - begun
                assert ticket.states(0).count(1) == SHARED
                assert ticket.states(1)[SHARED - WINDOW : SHARED].count(1) == WINDOW
                promoted = tiered(daemon, "forebay_tier_promotions_total", 'outcome="ready"')
    return {"place": place, "is_told": is_told, "promoted": promoted, "seconds": round(seconds, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    print(json.dumps({"machine": platform.machine(), "kernel": platform.release()}))
    for pair in range(arguments.pairs):
        for place in ("disk", "directory"):
            for is_told in (True, False) if pair % 2 else (False, True):
                print(json.dumps(run(place, is_told)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
