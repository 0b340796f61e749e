"""The stub of the native module says what the module is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python"


def test_the_stub_is_equal_to_the_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "forebay._native", "--concise"],
        check=False,
        env=os.environ | {"MYPYPATH": str(PACKAGE), "MYPY_CACHE_DIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
