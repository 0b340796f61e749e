"""`forebay bench transfer --peers`: which peers run is said, and what they move is compared.

The stand-ins have the engines' names and calls, and copy between the two processes through `/proc/PID/mem`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rig.paths import forebay_binary

MOONCAKE = """
import ctypes
import os

class TransferEngine:
    def initialize(self, host, metadata, protocol, device):
        assert (metadata, protocol) == ("P2PHANDSHAKE", "tcp")
        return 0

    def register_memory(self, address, length):
        return 0

    def get_rpc_port(self):
        return os.getpid()

    def batch_transfer_async_read(self, peer, here, there, lengths):
        with open(f"/proc/{peer.split(':')[1]}/mem", "rb", buffering=0) as memory:
            for to, at, count in zip(here, there, lengths):
                memory.seek(at)
                found = bytearray(memory.read(count))
                found[0] ^= WRONG
                ctypes.memmove(to, bytes(found), count)
        return 1

    def batch_transfer_async_write(self, peer, here, there, lengths):
        with open(f"/proc/{peer.split(':')[1]}/mem", "r+b", buffering=0) as memory:
            for at, to, count in zip(here, there, lengths):
                memory.seek(to)
                memory.write(ctypes.string_at(at, count))
        return 1

    def transfer_check_status(self, batch):
        return 1
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """Where Python finds a Mooncake that works, and a NIXL that does not load."""
    about = tmp_path / "mooncake_transfer_engine_non_cuda-0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mooncake-transfer-engine-non-cuda\nVersion: 0.0\n")
    for package, module, text in (
        ("nixl", "_api", "raise ImportError('libnixl.so is not there')"),
        ("mooncake", "engine", MOONCAKE.replace("WRONG", "0")),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / f"{module}.py").write_text(text)
    return tmp_path


def bench(*flags: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(forebay_binary()), "bench", "transfer", "--transport", "tcp", "--pairs", "1", "--run-bytes", "1MiB"]
    env = dict(os.environ, PYTHONPATH=str(path or ""))
    return subprocess.run([*command, *flags], env=env, check=False, capture_output=True, text=True, timeout=120)


def rows(answer: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert answer.returncode == 0, answer.stderr
    found: list[dict[str, Any]] = json.loads(answer.stdout)["rows"]
    return found


SHAPE = ("--size-bytes", "4KiB", "--segments", "3", "--depth", "2")


def test_peers_run_beside_sockets_and_their_bytes_are_compared(stand_ins: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    flags = ("--peers", "sockets,nixl,mooncake", "--python", sys.executable, "--direction", "read")
    answer = bench(*SHAPE, *flags, "--direction", "write", "--plot", str(plot), "--json", path=stand_ins)
    found = rows(answer)
    assert [(row["direction"], row["baseline"]) for row in found] == [
        ("read", "sockets"),
        ("read", "mooncake"),
        ("write", "sockets"),
        ("write", "mooncake"),
    ]
    for row in found:
        peers = row["baseline"] == "mooncake"
        # A run to warm up, and one that counts.
        assert row["baseline_verified_bytes"] == (2 * 2 * 3 * 4096 if peers else 0), row
        assert row["baseline_wrong_bytes"] == row["wrong_bytes"] == 0, row
        assert row.get("baseline_version") == ("mooncake 0.0" if peers else None), row
        assert min(row["ratio"], row["baseline_p99_us"], row["baseline_cpu_s_per_gb"]) > 0, row
    assert "nixl is left out: libnixl.so is not there\n" in answer.stderr
    assert "\nhint: `tools/transfer-peers.sh FOLDER` gets all peers" in answer.stderr
    drawn = plot.read_text()
    assert "read over tcp, 3 segments, depth 2" in drawn and "mooncake" in drawn, drawn


def test_a_peer_whose_bytes_are_wrong_is_named_as_an_error(stand_ins: Path) -> None:
    (stand_ins / "mooncake/engine.py").write_text(MOONCAKE.replace("WRONG", "1"))
    answer = bench(*SHAPE, "--peers", "mooncake", "--python", sys.executable, path=stand_ins)
    assert answer.returncode == 1, answer
    # One of each segment, in each run.
    assert "bytes arrived that were not sent" in answer.stderr and "mooncake=`12`" in answer.stderr, answer.stderr
    assert "12" in answer.stdout.splitlines()[2].split()[-1], answer.stdout


def test_a_peer_that_ends_is_an_error_with_what_it_said(stand_ins: Path) -> None:
    (stand_ins / "mooncake/engine.py").write_text("raise OSError('no such device')")
    answer = bench(*SHAPE, "--peers", "mooncake", "--python", sys.executable, path=stand_ins)
    assert answer.returncode == 1, answer
    assert "OSError: no such device" in answer.stderr and "hint:" in answer.stderr, answer.stderr


def test_without_a_python_only_sockets_are_measured() -> None:
    answer = bench(*SHAPE, "--peers", "sockets,nixl,mooncake,ucx", "--python", "/nowhere/python", "--json")
    assert [row["baseline"] for row in rows(answer)] == ["sockets"]
    for name in ("nixl", "mooncake", "ucx"):
        assert f"{name} is left out: there is no program `/nowhere/python`\n" in answer.stderr
    assert "hint: " in answer.stderr


@pytest.mark.parametrize("flags", [("--transport", "shm"), ("--direction", "both")])
def test_peers_are_refused_where_they_cannot_be_measured(flags: tuple[str, str]) -> None:
    command = [str(forebay_binary()), "bench", "transfer", "--peers", "ucx", *flags]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2, answer
    assert "`--peers` cannot be `ucx`" in answer.stderr and "hint:" in answer.stderr, answer.stderr
