"""The built wheel, installed into an empty environment, is the whole product: the package and the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rig.daemon import Daemon

ROOT = Path(__file__).parents[2]
ROUND = """
import sys, forebay
client = forebay.Client(sys.argv[1])
namespace = client.open_namespace({"model": "wheel"}, {0: 4096})
assert client.put(namespace, 0, [(b"k" * 32, b"v" * 4096)]) == ["stored"]
assert client.get(namespace, 0, [b"k" * 32]) == [b"v" * 4096]
"""


def run(*argv: str | Path, env: dict[str, str]) -> str:
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    venv = tmp_path_factory.mktemp("wheel") / "venv"
    built = run(ROOT / "tools" / "wheel.sh", sys.prefix, env=dict(os.environ)).splitlines()[-1]
    run(sys.executable, "-m", "venv", venv, env=dict(os.environ))
    run(venv / "bin" / "pip", "install", "--quiet", "--no-index", ROOT / built, env=dict(os.environ))
    return venv


def test_the_wheel_brings_the_command_and_the_package(empty_venv: Path) -> None:
    binaries = empty_venv / "bin"
    with Daemon(capacity_bytes=64 << 20, binary=binaries / "forebay") as daemon:
        # An empty `FOREBAY_CONFIG`: this host's own file is not read.
        sockets = {"FOREBAY_SOCKET_DIRECTORY": str(daemon.socket.parent), "FOREBAY_CONFIG": ""}
        env = {"PATH": f"{binaries}:/usr/bin:/bin"} | sockets
        assert run("forebay", "--version", env=env).startswith("forebay ")
        assert run("forebay-compare", "--help", env=env).startswith("usage: forebay-compare ")
        assert "torch" not in run("pip", "list", env=env)
        daemon.start()
        run("python", "-c", ROUND, daemon.socket.parent, env=env)
        [namespace] = daemon.inspect()["namespaces"]
        assert namespace["fields"]["model"] == "wheel"
        run("forebay", "doctor", env=env)
