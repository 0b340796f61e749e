"""The examples in `examples/` run as they stand, on a real daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rig.engine import clean_env

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_the_example_runs(example: Path, sockets: Path) -> None:
    env = clean_env() | {"FOREBAY_SOCKET_DIRECTORY": str(sockets)}
    done = subprocess.run(
        [sys.executable, str(example)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_examples_get_along_on_one_daemon(sockets: Path) -> None:
    """In either order, a second time too."""
    for example in [*EXAMPLES, *reversed(EXAMPLES)]:
        test_the_example_runs(example, sockets)
