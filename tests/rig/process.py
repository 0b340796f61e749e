"""One process that the rig started, in a process group of its own.

Holds true: every wait has a deadline; only the own group is ever signalled, and never after its leader was reaped; the
leader dies with the test process, whatever ends that; a failure carries the end of the log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self, TypeVar

TAIL_LINES = 60
POLL_SECONDS = 0.01

T = TypeVar("T")


class RigError(AssertionError):
    """Something the rig runs did not do what it must; the message says which, and shows the end of its log."""


def wait_until(what: str, probe: Callable[[], T | None], seconds: float) -> T:
    """Polls `probe` until it answers something true; fails with `what` at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        if answer := probe():
            return answer
        if time.monotonic() > deadline:
            raise RigError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(POLL_SECONDS)


class Child:
    """A started process. Use as a context manager: leaving it kills the group."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int | IO[bytes] = subprocess.DEVNULL,
    ):
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                env=dict(os.environ if env is None else env),
                stdin=stdin,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                # A group of its own to be killed by, and no session of its own: the kernel would make each session a
                # scheduling group (autogroup), in which a process that wakes up was seen to wait for 33 s behind
                # workers that spin on all cores.
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_running(self) -> bool:
        return self.status is None

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal, None while it runs.

        The dead leader is not reaped before `kill`, so that its number, which is its group's too, stays its own.
        """
        if self.process.returncode is not None:
            return self.process.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def signal(self, number: signal.Signals) -> None:
        """Signals the whole group."""
        if self.process.returncode is None:
            os.killpg(self.pid, number)

    def wait(self, seconds: float) -> int:
        """The exit status, once it ended."""
        try:
            wait_until("the end", lambda: not self.is_running(), seconds)
        except RigError:
            raise self.failure(f"did not end within {seconds:g} s") from None
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        """SIGKILL to the group, also if its leader is dead already; then reaps the leader and frees what it shared."""
        shared = _shared_by(self.pid) if self.process.returncode is None else set()
        self.signal(signal.SIGKILL)
        self.process.wait(30)
        for path in shared:
            path.unlink(missing_ok=True)

    def terminate(self, seconds: float) -> int:
        """SIGTERM to the leader alone, as a service manager sends it; the exit status."""
        if self.is_running():
            os.kill(self.pid, signal.SIGTERM)
        return self.wait(seconds)

    def failure(self, reason: str) -> RigError:
        return RigError(f"{self.name} (pid {self.pid}) {reason}; the end of {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal (state `T`)."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else "gone"


# How Python's multiprocessing and vLLM name what their processes share. A killed process leaves it behind.
_SHARED = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")


def _shared_by(group: int) -> set[Path]:
    """Shared memory that processes of the group map."""
    members = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    shared = set()
    for pid in members:
        fields = _stat(pid)
        if len(fields) > 2 and int(fields[2]) == group:
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                shared |= {Path(line.split()[5]) for line in lines if any(prefix in line for prefix in _SHARED)}
    return shared


def _stat(pid: int) -> list[str]:
    """State, parent, group and more; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
