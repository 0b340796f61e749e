"""The real daemon, `forebay serve`, with its own sockets, pool and port; and the harm that can be done to it.

Holds true: a restart keeps the directories, so it finds the pool again; nothing of it outlives the `Daemon` object,
whose directories are removed last; readiness is what `/readyz` says.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from forebay.vllm.settings import Settings, passed_on

from rig.engine import clean_env
from rig.paths import forebay_binary
from rig.process import Child, RigError, wait_until

READY_SECONDS = 30.0
DRAIN_SECONDS = 20.0
SOCKET = "forebay.sock"
POOLS = Path("/dev/shm")
POOL_PREFIX = "forebay-rig-"


@dataclass
class Daemon:
    """A pool and the daemon on it. Use as a context manager: leaving it kills the daemon and removes the pool."""

    capacity_bytes: int = 256 << 20
    unit_bytes: int | None = None
    ssd_bytes: int | None = None
    ssd_admission: str = "second_sighting"  # the default, said aloud
    ssd_load_deadline_ms: int = 1000  # the default, too
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # sections of the configuration
    pool: Mapping[str, Any] = field(default_factory=dict)  # more keys of its section
    binary: Path = field(default_factory=forebay_binary)

    def __post_init__(self) -> None:
        _remove_leftovers()
        # Short names: the path of a Unix socket has room for 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="fb-"))
        self.pool_directory = Path(tempfile.mkdtemp(prefix=f"{POOL_PREFIX}{os.getpid()}-", dir=POOLS))
        self.socket = self.directory / "run" / SOCKET
        self.ssd_path = self.directory / "ssd"
        self.port = free_port()
        self.child: Child | None = None

    def start(self) -> Self:
        """Starts it and waits until it is ready, with all of its pool and its disk."""
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> None:
        """Starts it; does not wait."""
        assert not self.is_running(), "the daemon is running already"
        config = self.directory / "forebay.toml"
        config.write_text(self._config())
        argv = [str(self.binary), "serve", "--config", str(config)]
        self.child = Child("forebay serve", argv, self.directory / "daemon.log", env=clean_env())

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        def is_ready() -> bool:
            if not self.running.is_running():
                raise self.running.failure(f"ended with status {self.running.status}")
            return self.status("/readyz") == 200 and self._is_complete()

        wait_until("the daemon is ready", is_ready, seconds)

    @property
    def running(self) -> Child:
        assert self.child is not None, "the daemon was never started"
        return self.child

    def is_running(self) -> bool:
        return self.child is not None and self.child.is_running()

    def kill(self) -> None:
        """SIGKILL: no drain, no farewell."""
        self.running.kill()

    def drain(self) -> int:
        """SIGTERM, as a service manager stops it; the exit status."""
        return self.running.terminate(DRAIN_SECONDS)

    def freeze(self) -> None:
        self.running.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.running.signal(signal.SIGCONT)

    def drop_pool(self) -> None:
        """Removes the pool's files under a dead daemon, as a reboot does."""
        for path in [*self.pool_directory.rglob("*"), *_on_huge_pages(self.pool_directory)]:
            if path.is_file():
                path.unlink()

    def status(self, page: str) -> int | None:
        """The HTTP status of a page, None if nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{page}", timeout=5) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, OSError):
            return None

    def metrics(self) -> dict[str, float]:
        """Every sample by name and labels, as `name{label="value"}`, and each name's sum over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as reply:
            return parse_metrics(reply.read().decode())

    def inspect(self) -> dict[str, Any]:
        """What `forebay inspect` says."""
        return self._ask("inspect")

    def audit(self) -> int:
        """Reads every ready block and fails if one is not what was stored; how many there were."""
        blocks: int = self._ask("audit")["blocks"]
        return blocks

    def wait_for(self, what: str, holds: Callable[[dict[str, Any]], bool], seconds: float = 30) -> dict[str, Any]:
        """Waits until what `inspect` says satisfies `holds`."""
        seen: dict[str, Any] = {}

        def probe() -> bool:
            seen.clear()
            seen.update(self.inspect())
            return holds(seen)

        try:
            wait_until(what, probe, seconds)
        except AssertionError as error:
            raise self.running.failure(f"{error}; last seen: {json.dumps(seen)}") from None
        return seen

    def purge(self, tenant: str) -> int:
        """Drops a tenant's blocks; how many there were."""
        blocks: int = self._ask("purge", "--tenant", tenant)["purged_blocks"]
        return blocks

    def connector(self, socket: Path | None = None, **options: str | float) -> dict[str, Any]:
        """What a user writes into `--kv-transfer-config`, with the socket of this daemon."""
        extra = {"socket": str(socket or self.socket)} | options
        if warnings := passed_on(extra)[1] + Settings.parse(extra)[1]:
            raise RigError(f"the connector would not take these options: {warnings}")
        return {"kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def patient_connector(self, **options: str | float) -> dict[str, Any]:
        """As `connector`, for tests that count hits and not time: machines may be slow, nothing may be given up."""
        patience = {"lookup_deadline_ms": 20_000.0, "promotion_lag": 1e6, "restock_ms": 20_000.0}
        return self.connector(None, **patience, **options)

    def _is_complete(self) -> bool:
        """It serves from the first unit of memory on, and without the disk until the disk's index is read."""
        metrics = self.metrics()
        is_populated = metrics["forebay_pool_populated_bytes"] == metrics["forebay_pool_capacity_bytes"]
        return is_populated and metrics.get('forebay_tier_state{tier="ssd",state="opening"}', 0) == 0

    def _ask(self, *command: str) -> dict[str, Any]:
        argv = [str(self.binary), *command, "--json"]
        env = clean_env() | {"FOREBAY_SOCKET_DIRECTORY": str(self.socket.parent)}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise self.running.failure(f"failed `forebay {command[0]}`: {done.stderr}{done.stdout}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def _config(self) -> str:
        sections: dict[str, Mapping[str, Any]] = {
            "socket": {"directory": str(self.socket.parent)},
            "pool": {"directory": str(self.pool_directory), "capacity_bytes": self.capacity_bytes}
            | ({"unit_bytes": self.unit_bytes} if self.unit_bytes else {})
            | dict(self.pool),
            "http": {"address": f"127.0.0.1:{self.port}"},
        }
        if self.ssd_bytes:
            disks, capacity = [str(self.ssd_path)], self.ssd_bytes
            sections["tier.ssd"] = {
                "disks": disks,
                "capacity_bytes": capacity,
                "admission": self.ssd_admission,
                "load_deadline_ms": self.ssd_load_deadline_ms,
                "create": True,
            }
        sections |= self.tiers
        return "\n".join(
            f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
            for section, keys in sections.items()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self.child is not None:
            self.child.kill()
            if error is not None:
                print(f"the end of the daemon's log:\n{self.child.tail()}")
        _remove_pool(self.pool_directory)
        shutil.rmtree(self.directory, ignore_errors=True)


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as a dictionary; see `Daemon.metrics`."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        samples[name] = float(value)
        bare = name.partition("{")[0]
        if bare != name:
            samples[bare] = samples.get(bare, 0.0) + float(value)
    return samples


def _remove_leftovers() -> None:
    """Pools whose test process was killed before it could remove them: they are memory."""
    for pool in POOLS.glob(f"{POOL_PREFIX}*"):
        owner = pool.name.removeprefix(POOL_PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            _remove_pool(pool)


def _remove_pool(directory: Path) -> None:
    """With the tmpfs that the daemon may have mounted in it, and its file on reserved huge pages."""
    for point, kind in _mounts():
        if kind == "tmpfs" and directory in point.parents:
            subprocess.run(["umount", "--lazy", str(point)], check=True)
    for path in _on_huge_pages(directory):
        path.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _on_huge_pages(directory: Path) -> list[Path]:
    """The pool's files on hugetlbfs mounts, which all pools share: the directory's identity is in their names."""
    identity = directory.stat()
    name = f"forebay-{identity.st_dev:x}-{identity.st_ino:x}*"
    return [path for point, kind in _mounts() if kind == "hugetlbfs" for path in point.glob(name)]


def _mounts() -> list[tuple[Path, str]]:
    """Mount points and their kinds of file system."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [(Path(fields[1]), fields[2]) for fields in map(str.split, lines)]


def free_port() -> int:
    """A port that was free a moment ago; kept over restarts, as an operator's is.

    Below those that the kernel gives to connections, and to whoever asks for any: one of these may take it between two
    starts of a daemon.
    """
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(min(10_000, first_of_kernel // 2), first_of_kernel)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
