"""Compares the instructions of the core's hot loops with those on record: run `make instructions`.

The core is deterministic, so a count says what a time on a busy machine cannot. callgrind counts what each function of
`core_instructions` takes, with all that it calls; what a key takes must be within `TOLERANCE` of `bench/instructions.json`.
Faster counts too: `make instructions UPDATE=1` puts the new figures on record.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench" / "instructions.json"
LOOPS = (
    *("reserve_free", "commit_free", "look_up", "release", "touch", "reserve_evicting", "commit_full"),
    *("hold", "resume", "gone", "unpin"),
)
# Processors differ in how the C library copies and clears memory; the compiler is pinned.
TOLERANCE = 0.02


def counts() -> dict[str, float]:
    """Instructions a key by loop."""
    build = ["cargo", "bench", "--locked", "--no-run", "--package", "forebay-bench", "--bench", "core_instructions"]
    messages = subprocess.run(
        [*build, "--message-format", "json"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    [program] = [m["executable"] for m in map(json.loads, messages.splitlines()) if m.get("executable")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        callgrind = ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}", program]
        keys = int(subprocess.run(callgrind, check=True, capture_output=True, text=True).stdout)
        annotate = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(out)]
        table = subprocess.run(annotate, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^ *([\d,]+) .*:core_instructions::(\w+) \[", table, re.MULTILINE)
    whole = {name: int(count.replace(",", "")) for count, name in found}
    return {name: round(whole[name] / keys, 1) for name in LOOPS}


def main() -> int:
    if shutil.which("valgrind") is None:
        print(
            "error: valgrind is not installed, and it counts the instructions\nhint: apt install valgrind",
            file=sys.stderr,
        )
        return 1
    now = counts()
    if os.environ.get("UPDATE"):
        RECORD.write_text(json.dumps(now, indent=2) + "\n")
        return 0
    record = json.loads(RECORD.read_text())
    assert record.keys() == now.keys(), "the loops on record are others"
    print("instructions a key    on record      now")
    for name, count in now.items():
        print(f"  {name:<18} {record[name]:>10.1f} {count:>8.1f}  {count / record[name] - 1:+.1%}")
    far = [name for name, count in now.items() if abs(count / record[name] - 1) > TOLERANCE]
    if far:
        print(f"error: {', '.join(far)} differ by more than {TOLERANCE:.0%}", file=sys.stderr)
        print("hint: look why; if the change is meant, `make instructions UPDATE=1` puts it on record", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
