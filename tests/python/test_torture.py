"""The torture (tests/torture) for some seconds, and whether it notices what it is there to notice.

`make torture` is an hour of it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from rig.engine import clean_env
from rig.paths import CHECKOUT
from torture.reader import Reader

# A run ends with calm, one more start of the daemon, and checks of what is left.
MINUTES_AT_MOST = 6


def released_pool(directory: Path) -> Path:
    """A pool that a release wrote: two blocks, and a slot that is reserved."""
    lines = (CHECKOUT / "crates/io/tests/fixtures/pool-2.hex").read_text().splitlines()
    for line in lines:
        if not line.startswith(" "):
            path, length = line.split()
            (directory / path).touch()
            os.truncate(directory / path, int(length))
        else:
            at, row = line.split()
            change(directory / path, int(at, 16), bytes.fromhex(row))
    return directory


def change(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


# What is wrong with these blocks in any case: they are none of the torture.
FOREIGN = ["slot 0 has a block of 600", "slot 640 has a block of 600"]


@pytest.mark.parametrize(
    ("file", "at", "content", "complaints"),
    [
        ("data", 4096, b"\x01", FOREIGN),
        ("data", 599, b"\x01", ["slot 0 does not match the checksum of its entry", *FOREIGN]),
        ("table", (1 << 20) + 41, b"\x01", ["the entry of slot 0 is ready and does not match", FOREIGN[1]]),
        ("table", 33, b"\x01", ["the table's header does not match its checksum", *FOREIGN]),
        ("table", 20_480, b"\x01", ["unit 0 has the word", FOREIGN[1]]),
        ("table", 64, b"\x01", ["the word at 64 of the header is not echoed", *FOREIGN]),
        ("generation", 4096, b"\x77", [FOREIGN[1]]),
    ],
)
def test_the_reader_reads_a_released_pool_and_complains_of_each_change(
    tmp_path: Path, file: str, at: int, content: bytes, complaints: list[str]
) -> None:
    pool = released_pool(tmp_path)
    change(pool / file, at, content)
    found = Reader(pool).read().complaints
    assert [said[: len(meant)] for said, meant in zip(found, complaints, strict=True)] == complaints


def torture(*arguments: str) -> tuple[int, str]:
    seed = random.SystemRandom().randrange(1 << 32)
    env = clean_env() | {"PYTHONPATH": str(CHECKOUT / "tests")}
    if binary := os.environ.get("FOREBAY_BIN"):
        env["FOREBAY_BIN"] = binary
    argv = [sys.executable, "-m", "torture", "--seed", str(seed), *arguments]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60 * MINUTES_AT_MOST, check=False)
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout


def test_some_seconds_of_torture_find_nothing_wrong() -> None:
    status, output = torture("--seconds", "20")
    assert status == 0
    counts = json.loads(output.splitlines()[-1])
    for what in ("loaded_blocks", "stored_blocks", "got_blocks", "stops", "read_pages_up", "read_pages_down", "audits"):
        assert counts[what] > 0, what


@pytest.mark.parametrize(
    ("sabotage", "complaint"),
    [
        ("flip-down", "does not match the checksum of its entry"),
        ("flip-up", "loads were not what their birth records say"),
        ("foreign", "says that it is page 0 of 0000"),
        ("mixed", "is its own page"),
        ("unpurged", "had succeeded"),
    ],
)
def test_harm_is_noticed(sabotage: str, complaint: str) -> None:
    status, output = torture("--seconds", "3", "--sabotage", sabotage)
    assert status == 1
    assert complaint in output
