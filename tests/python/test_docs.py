"""The examples in the documentation run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rig.engine import clean_env

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_for_other_engines_runs(sockets: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", (DOCS / "engines.md").read_text(), re.DOTALL)
    env = clean_env() | {"FOREBAY_SOCKET_DIRECTORY": str(sockets)}
    done = subprocess.run(
        [sys.executable, "-c", example], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_example_for_shared_stores_runs(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", (DOCS / "store.md").read_text(), re.DOTALL)
    here = example.replace("redis://localhost", f"file://{tmp_path}")
    assert here != example
    done = subprocess.run(
        [sys.executable, "-c", here], env=clean_env(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "['loaded', 'loaded']" in done.stdout
