"""What an idle daemon costs, by thread.

    python bench/idle.py [--rounds 2] [--seconds 10] [--engines 0 16] BINARY...

Starts a private daemon of each build, with 4 MiB stored and engines that store and load nothing, as `frame.py` does.
Nobody watches it. Prints one object a line: the processor time of the process in percent of a core, and of each thread
that woke, the milliseconds and the times it woke in a second.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from frame import Side

SETTLED = 4.0


def threads(pid: int) -> dict[str, tuple[str, int, int]]:
    """By number: name, nanoseconds on a processor, and how often it gave the processor up."""
    seen = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        spent = int((task / "schedstat").read_text().split()[0])
        seen[task.name] = (status["Name"].strip(), spent, int(status["voluntary_ctxt_switches"]))
    return seen


def measure(binary: str, engines: int, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        side = Side(binary, f"{root}/0", engines)
        try:
            time.sleep(SETTLED)
            before, spent, begun = threads(side.daemon.pid), side.spent(), time.perf_counter()
            time.sleep(seconds)
            took, spent, after = time.perf_counter() - begun, side.spent() - spent, threads(side.daemon.pid)
        finally:
            side.close()
    moved = {number: (after[number], before[number]) for number in before.keys() & after.keys()}
    woken = [
        {
            "thread": now[0],
            "ms": round((now[1] - then[1]) / 1e6 / took, 3),
            "wakes": round((now[2] - then[2]) / took, 1),
        }
        for now, then in moved.values()
        if now[2] > then[2]
    ]
    return {"percent_of_a_core": round(100 * spent / took, 3), "load": os.getloadavg()[0], "threads": woken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--engines", type=int, nargs="+", default=[0, 16])
    parser.add_argument("binaries", nargs="+", metavar="BINARY")
    arguments = parser.parse_args()
    for engines in arguments.engines:
        for turn in range(arguments.rounds):
            for number, binary in enumerate(arguments.binaries):
                row = measure(binary, engines, arguments.seconds)
                print(json.dumps({"build": number, "engines": engines, "round": turn, **row}), flush=True)


if __name__ == "__main__":
    main()
