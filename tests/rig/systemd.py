"""The real systemd as the first process of a machine of its own, for the units that the pages print.

Holds true: it knows no unit but those that a test writes, and stops with the test; it shares the network, the programs
and the kernel with the machine around it, and nothing else. Needs root, systemd and the `cpu` controller of control
groups, version 1 or 2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from rig.paths import CHECKOUT
from rig.process import Child, wait_until

WORLD, BOOT = CHECKOUT / "tests/python/world.sh", CHECKOUT / "tests/rig/boot.sh"
PROGRAMS = [Path("/lib/systemd/systemd"), Path("/usr/lib/systemd/systemd")]
GROUPS = Path("/sys/fs/cgroup")
SECONDS = 30.0


def program() -> Path | None:
    """Where systemd is, if it is installed."""
    return next((path for path in PROGRAMS if path.exists()), None)


class Systemd:
    """Use as a context manager: entering it waits until systemd answers, leaving it kills all that it started."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fb-"))
        self.groups = [group / f"forebay-tests-{os.getpid()}" for group in _own_groups()]
        self.child: Child | None = None

    def __enter__(self) -> Self:
        for group in self.groups:
            group.mkdir()
        root = self.directory / "root"
        root.mkdir()
        enter = "".join(f"echo $$ > {group}/cgroup.procs; " for group in self.groups)
        unshare = ["unshare", "--mount", "--pid", "--cgroup", "--ipc", "--uts", "--fork", "--kill-child"]
        argv = ["sh", "-c", f'set -e; {enter} exec "$@"', "sh", *unshare, str(WORLD), str(root), str(BOOT)]
        env = {"PATH": os.environ["PATH"], "SYSTEMD": str(program())}
        self.child = Child("systemd", argv, self.directory / "log", env=env)
        try:
            wait_until("systemd is there", self._is_there, SECONDS)
        except BaseException:
            print(self.child.tail())
            self.__exit__()
            raise
        return self

    def _is_there(self) -> bool:
        assert self.child is not None
        if not self.child.is_running():
            raise self.child.failure(f"ended with status {self.child.status}")
        try:
            return self.ask("systemctl", "is-system-running").strip() in ("running", "degraded", "starting")
        except (AssertionError, LookupError, OSError):
            return False

    def __exit__(self, *_: object) -> None:
        if self.child is not None:
            self.child.kill()
        for group in self.groups:
            # From the leaves up; the kernel takes a moment to empty them.
            for inner in sorted(group.rglob("*/"), reverse=True) + [group]:
                wait_until(f"{inner} is empty", lambda inner=inner: _is_removed(inner), SECONDS)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def first(self) -> int:
        """The first process, by the number that it has outside."""
        assert self.child is not None
        pid = self.child.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def inside(self, *argv: str) -> list[str]:
        """The command that runs `argv` on the machine, as root."""
        spaces = ["--mount", "--pid", "--cgroup", "--ipc", "--root", "--wd"]
        return ["nsenter", "--target", str(self.first), *spaces, *argv]

    def ask(self, *argv: str, given: str | None = None, statuses: Sequence[int] | None = None) -> str:
        """What a command says on standard output; fails if it ends with another status."""
        done = subprocess.run(
            self.inside(*argv), input=given, capture_output=True, text=True, timeout=SECONDS * 2, check=False
        )
        allowed = statuses if statuses is not None else (0, 1) if "is-system-running" in argv else (0,)
        assert done.returncode in allowed, f"{' '.join(argv)}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def write(self, path: str, text: str) -> None:
        self.ask("sh", "-c", f"cat > {path}", given=text)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.ask("systemctl", "show", "--value", "--property", name, unit).strip()

    def pid(self, unit: str) -> int:
        """The main process of a unit, by the number that it has outside; 0 if it has none."""
        inner = self.show(unit, "MainPID")
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
                if numbers[2:] == [inner] and _space(int(numbers[1])) == _space(self.first):
                    return int(numbers[1])
        return 0

    def adopt(self, unit: str, pids: Sequence[int]) -> None:
        """Puts processes of the machine around it into the control groups of a service."""
        for group in self.groups:
            procs = group / f"system.slice/{unit}.service/cgroup.procs"
            for pid in pids if procs.exists() else []:
                procs.write_text(str(pid))

    def log(self) -> str:
        """What the services have printed."""
        return self.ask("cat", "/run/services.log")


def _space(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def _own_groups() -> Iterator[Path]:
    """The control groups of this process, in each hierarchy in which systemd makes groups for its units."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = (controllers.removeprefix("name=") or "unified", "")
        roots = [root for name in names if (root := GROUPS / name).joinpath("cgroup.procs").exists()]
        # A new group of `cpuset` has no processor.
        if roots and controllers != "cpuset":
            yield roots[0] / path.removeprefix("/")


def _is_removed(group: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        try:
            group.rmdir()
        except OSError:
            return False
    return True
