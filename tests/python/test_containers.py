"""An engine in a container shares the directory of the sockets with the host, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rig.engine import clean_env

EXAMPLE = Path(__file__).parents[2] / "examples/engine.py"

# Mounts, process ids and IPC of its own, and another `/dev/shm`.
ISOLATED = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--ipc", "sh", "-c"]
HIDDEN = 'mount -t tmpfs none /dev/shm && test -z "$(ls /dev/shm)" && exec "$@"'


def test_an_engine_maps_the_pool_with_the_directory_of_the_sockets_alone(sockets: Path) -> None:
    env = clean_env() | {"FOREBAY_SOCKET_DIRECTORY": str(sockets)}
    argv = [*ISOLATED, HIDDEN, "sh", sys.executable, str(EXAMPLE)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "came back" in done.stdout
