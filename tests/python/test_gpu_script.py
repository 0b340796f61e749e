"""`bench/gpu.sh`, which measures on a GPU host, rehearsed on the fake driver."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from rig.paths import CHECKOUT

ROWS = {1, 2, 3, 4, 5, 6}


def test_every_row_runs_on_the_fake_driver_and_the_script_says_what_is_missing(tmp_path: Path) -> None:
    script = [str(CHECKOUT / "bench" / "gpu.sh"), "--rehearse", str(tmp_path)]
    ran = subprocess.run(script, check=False, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    figures = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {figure["row"] for figure in figures} == ROWS
    assert all(figure["value"] >= 0 for figure in figures)
    (late,) = [figure for figure in figures if "a byte changed" in figure["what"]]
    assert late["value"] == 0
    assert "Not measured:" in ran.stderr and "no figure above is a GPU's" in ran.stderr
    assert not list(Path("/dev/shm").glob("forebay-gpu-*")), "the script has left its files"
