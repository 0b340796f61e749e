"""The committed texts of the kernels, as NVIDIA's compiler and assembler see them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rig.paths import CACHE, CHECKOUT

GPUS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]


def test_the_texts_are_what_the_compiler_makes_of_the_sources_and_every_gpus_assembler_takes_them() -> None:
    script = [sys.executable, str(CHECKOUT / "tools" / "ptx.py"), str(CACHE / "ptx")]
    ran = subprocess.run(script, check=False, capture_output=True, text=True, timeout=600)
    if ran.returncode == 3:
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr
    told = [line.split(":")[0] for line in ran.stdout.splitlines()]
    assert told == [f"{kernel} on {gpu}" for kernel in ("copy", "product") for gpu in GPUS]
