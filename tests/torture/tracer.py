"""Stops processes between any two instructions, by ptrace, and lets them go on much later: a process of its own.

A line of JSON on stdin asks for one stop, `{"all": true}` ends all stops now; each answer is a line on stdout. A stop
holds all threads of a process, or only one that copies. `aim`: the one thread is stopped again and again until it is
found outside the kernel, so while it copies.

Holds true: this process alone traces and waits, so nothing it stops is lost when whoever asked is busy; if this
process ends, the kernel lets all go on. Where ptrace is not allowed, SIGSTOP and SIGCONT take its place, and the
answers say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import json
import os
import platform
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONT, SINGLESTEP, DETACH, RUN_TO_SYSCALL, GETREGSET, SEIZE, INTERRUPT = 7, 9, 17, 24, 0x4204, 0x4206, 0x4207
NT_PRSTATUS = 1
WALL = 0x40000000
# Of x86-64's registers: what a system call answered, its number (-1 outside of one), and the next instruction.
RAX_AT, ORIG_RAX_AT, RIP_AT = 10 * 8, 15 * 8, 16 * 8
NO_ANSWER_YET = -38
SYSCALL = b"\x0f\x05"
KNOWS_REGISTERS = platform.machine() == "x86_64"
COPIES = "forebay-copy"
AIM_SECONDS = 1.0
# Less than what some blocks take.
COPY_SECONDS = 0.00004

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def ptrace(request: int, tid: int, data: int = 0) -> None:
    if libc.ptrace(request, tid, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def register(tid: int, at: int) -> int:
    registers = ctypes.create_string_buffer(1024)
    piece = Piece(ctypes.addressof(registers), len(registers))
    if libc.ptrace(GETREGSET, tid, NT_PRSTATUS, ctypes.addressof(piece)) == -1:
        raise ProcessLookupError(tid)
    return int.from_bytes(registers.raw[at : at + 8], "little", signed=True)


def is_in_kernel(tid: int) -> bool:
    """Whether a stopped thread was in a system call; on a machine whose registers are not known, it was not."""
    return KNOWS_REGISTERS and register(tid, ORIG_RAX_AT) >= 0


def calls_kernel(tid: int) -> bool:
    """Whether the next instruction of a stopped thread is a system call."""
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), len(SYSCALL), register(tid, RIP_AT)) == SYSCALL


class Traced:
    """The stopped threads of one process."""

    def __init__(self, pid: int, end: str) -> None:
        self.pid = pid
        self.end = end
        self.signals: dict[int, int] = {}  # by thread: what it was to get when it was stopped
        self.by_signal = False

    def stop(self, tid: int) -> bool:
        """Whether it stands still now."""
        ptrace(SEIZE, tid)
        self.signals[tid] = 0
        return self.interrupt(tid)

    def interrupt(self, tid: int) -> bool:
        ptrace(INTERRUPT, tid)
        return self.wait(tid, 2.0)

    def wait(self, tid: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(tid, os.WNOHANG | WALL)
                if pid == tid:
                    return self.stood(tid, status)
            time.sleep(0.0002)
        return False

    def stood(self, tid: int, status: int) -> bool:
        if not os.WIFSTOPPED(status):
            self.signals.pop(tid, None)
            return False
        if status >> 16 == 0 and os.WSTOPSIG(status) != signal.SIGTRAP:
            self.signals[tid] = os.WSTOPSIG(status)
        return True

    def step(self, tid: int, count: int) -> int:
        """Instructions that it went on, one by one, up to its next system call: it may wait in that, and the trap at
        the call's end would kill a thread that is traced no more."""
        if not KNOWS_REGISTERS or is_in_kernel(tid):
            return 0
        for done in range(count):
            if calls_kernel(tid):
                return done
            ptrace(SINGLESTEP, tid)
            if not self.wait(tid, 2.0):
                return done
        return count

    def run_to_answer(self, tid: int, deadline: float) -> bool:
        """To the end of the system call that it is in, or of its next one."""
        while True:
            ptrace(RUN_TO_SYSCALL, tid)
            if not self.wait(tid, max(0.0, deadline - time.monotonic())):
                if tid in self.signals:
                    self.interrupt(tid)
                return False
            if register(tid, RAX_AT) != NO_ANSWER_YET:
                return True

    def go_on(self) -> None:
        if self.end == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        elif self.by_signal:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
        for tid in list(self.signals):
            with contextlib.suppress(OSError):
                self.detach(tid)

    def detach(self, tid: int) -> None:
        """Only one that stands can be let go; one that is dead is gone already."""
        try:
            ptrace(DETACH, tid, self.signals[tid])
        except ProcessLookupError:
            if not is_dead(self.pid, tid) and self.interrupt(tid):
                ptrace(DETACH, tid, self.signals[tid])


class Tracer:
    def __init__(self) -> None:
        self.held: list[tuple[float, int, Traced]] = []
        self.by_ptrace = is_allowed()

    def run(self) -> None:
        answer({"by": "ptrace" if self.by_ptrace else "SIGSTOP"})
        pending = b""
        while True:
            if select.select([0], [], [], 0.01)[0]:
                read = os.read(0, 1 << 16)
                if not read:
                    return
                *lines, pending = (pending + read).split(b"\n")
                for line in lines:
                    self.ask(json.loads(line))
            self.turn(time.monotonic())

    def ask(self, asked: dict[str, Any]) -> None:
        if asked.get("all"):
            self.turn(float("inf"))
            answer({"all": True})
            return
        traced = Traced(asked["pid"], asked["end"])
        told: dict[str, Any] = {"pid": traced.pid, "stopped": False, "in_copy": False, "steps": 0}
        try:
            told |= self.stop(traced, asked)
        except OSError as error:
            # It ended meanwhile.
            told["error"] = str(error)
        heapq.heappush(self.held, (time.monotonic() + asked["hold"], id(traced), traced))
        answer(told)

    def stop(self, traced: Traced, asked: dict[str, Any]) -> dict[str, Any]:
        if not self.by_ptrace:
            traced.by_signal = True
            os.kill(traced.pid, signal.SIGSTOP)
            return {"stopped": True}
        chance = random.Random(asked["seed"])
        in_copy, steps = False, 0
        threads = tasks(traced.pid)
        copying = [tid for tid in threads if comm(traced.pid, tid).startswith(COPIES)]
        if asked["aim"] and copying:
            one = chance.choice(copying)
            in_copy = aim(traced, one, chance)
            if in_copy:
                steps = traced.step(one, asked["steps"])
        if not (asked["aim"] and asked["alone"]):
            while rest := [tid for tid in tasks(traced.pid) if tid not in traced.signals]:
                for tid in rest:
                    with contextlib.suppress(ProcessLookupError):
                        traced.stop(tid)
                if not Path(f"/proc/{traced.pid}/stat").exists():
                    break
            if not asked["aim"] and traced.signals:
                steps = traced.step(chance.choice(list(traced.signals)), asked["steps"])
        return {"stopped": bool(traced.signals), "in_copy": in_copy, "steps": steps}

    def turn(self, now: float) -> None:
        while self.held and self.held[0][0] <= now:
            traced = heapq.heappop(self.held)[2]
            traced.go_on()
            answer({"pid": traced.pid, "ended": traced.end})
        # Whoever traces a thread hears of its end first; its parent hears when we have.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG | WALL)[0]:
                pass


def aim(traced: Traced, tid: int, chance: random.Random) -> bool:
    """Whether the thread could be stopped outside the kernel, so amid a copy: it runs to the end of the call in which
    it waits for work, and a little on."""
    deadline = time.monotonic() + AIM_SECONDS
    if not traced.stop(tid):
        return False
    while is_in_kernel(tid):
        if time.monotonic() > deadline:
            return False
        if not traced.run_to_answer(tid, deadline):
            return False
        ptrace(CONT, tid)
        until = time.perf_counter() + chance.random() * COPY_SECONDS
        while time.perf_counter() < until:
            pass
        if not traced.interrupt(tid):
            return False
    return True


def tasks(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(entry) for entry in os.listdir(f"/proc/{pid}/task") if not is_dead(pid, int(entry))]
    return []


def is_dead(pid: int, tid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def comm(pid: int, tid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/task/{tid}/comm").read_text().strip()
    return ""


def is_allowed() -> bool:
    with subprocess.Popen(["sleep", "60"]) as child:
        traced = Traced(child.pid, "kill")
        try:
            return traced.stop(child.pid)
        except OSError:
            return False
        finally:
            child.kill()


def answer(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Tracer().run()
