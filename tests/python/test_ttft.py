"""`bench/ttft.py`, which measures prefixes that are computed and loaded, in a small size on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rig.paths import CHECKOUT

LENGTHS = [40, 64, 96]
REQUESTS = 4


def test_every_length_is_computed_and_loaded_and_requests_hit_as_often_as_they_should(tmp_path: Path) -> None:
    figures, picture = tmp_path / "ttft.json", tmp_path / "ttft.svg"
    script = [sys.executable, str(CHECKOUT / "bench" / "ttft.py"), "--device", "cpu", "--shape", "tiny"]
    amount = ["--lengths", ",".join(map(str, LENGTHS)), "--repeats", "1", "--requests", str(REQUESTS)]
    written = ["--json", str(figures), "--plot", str(picture)]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT / "tests")}
    ran = subprocess.run(
        [*script, *amount, *written], check=False, capture_output=True, text=True, timeout=300, env=env
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(figures.read_text())
    assert [row["tokens"] for row in told["ttft"]] == LENGTHS
    for row in told["ttft"]:
        assert 0 < row["copied_ms"] < row["loaded_ms"] and row["computed_ms"] > 0
        assert row["is_same_token"], "the token over loaded KV is another one"
    # 31 of the 32 blocks of a request are known before its last token.
    hits = {row["hit_rate"]: row["hit_tokens"] / (31 * 16) for row in told["throughput"]}
    assert hits == {None: 0, 0.0: 0, 0.25: 1, 0.5: 2, 0.75: 3, 1.0: 4}
    assert "| no cache |" in ran.stdout and "CPU" in told["device"]
    assert picture.read_text().startswith("<svg")
