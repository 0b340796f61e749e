"""`bench/gpu.sh`, which measures on a GPU host, rehearsed on the fake driver; and what `forebay doctor` says of its GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rig.paths import CHECKOUT, forebay_binary

ROWS = {1, 2, 4, 5, 6}
METHODS = {"kernel", "batch", "loop", "pitched"}


def test_every_row_runs_on_the_fake_driver_and_the_script_says_what_is_missing(tmp_path: Path) -> None:
    script = [str(CHECKOUT / "bench" / "gpu.sh"), "--rehearse", str(tmp_path)]
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT / "tests")}
    ran = subprocess.run(script, check=False, capture_output=True, text=True, timeout=500, env=env)
    assert ran.returncode == 0, ran.stderr
    figures = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {figure["row"] for figure in figures} == ROWS
    assert all(figure["value"] >= 0 for figure in figures)
    measured = json.loads((tmp_path / "device.json").read_text())["rows"]
    assert {row["method"] for row in measured if row["engine"] == "cuda"} == METHODS
    assert (tmp_path / "device.svg").read_text().startswith("<svg")
    (late,) = [figure for figure in figures if "a byte changed" in figure["what"]]
    assert late["value"] == 0
    assert [row["tokens"] for row in json.loads((tmp_path / "ttft.json").read_text())["ttft"]] == [64, 96]
    assert "Not measured:" in ran.stderr and "no figure above is a GPU's" in ran.stderr
    assert not list(Path("/dev/shm").glob("forebay-gpu-*")), "the script has left its files"


def test_doctor_has_a_line_for_each_gpu_that_the_driver_shows(tmp_path: Path) -> None:
    subprocess.run(
        ["cargo", "build", "--quiet", "--locked", "--package", "forebay-fake-cuda"], cwd=CHECKOUT, check=True
    )
    (tmp_path / "libcuda.so.1").symlink_to(CHECKOUT / "target" / "debug" / "libfake_cuda.so")
    command = [forebay_binary(), "doctor", "--json", "--pool.capacity_bytes", "64MiB", "--http.address", "127.0.0.1:0"]
    places = ["--socket.directory", tmp_path / "sockets", "--pool.directory", tmp_path / "pool"]
    env = {"LD_LIBRARY_PATH": str(tmp_path), "FOREBAY_CONFIG": ""}
    ran = subprocess.run([*command, *places], check=False, capture_output=True, text=True, timeout=60, env=env)
    found = {check["name"]: check for check in json.loads(ran.stdout)["checks"]}
    for ordinal in (0, 1):
        check = found[f"gpu {ordinal}"]
        assert check["verdict"] == "ok"
        assert check["finding"].startswith(f"fake GPU {ordinal}, at fake:0{ordinal}:00.0, ")
        assert check["finding"].endswith("CUDA 13.0")
