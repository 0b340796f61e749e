"""A user that may connect attacks the daemon; the engine of another user misses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import Engine, Group, hashes, words
from rig.daemon import Daemon
from rig.process import wait_until

NOBODY = 65_534
# Of each attack. More of it is `HOSTILE_SECONDS=10`.
ATTACK_SECONDS = float(os.environ.get("HOSTILE_SECONDS", "0.5"))
FULL = Group(0, ((0, 1000), (1, 3000)))
KNOWN = 64


class Steps:
    """What an engine does between two tokens: a lookup, a load, a store. Each must succeed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known = hashes("known", KNOWN)
        for at in range(0, KNOWN, 8):
            engine.store(FULL, self.known[at : at + 8], list(range(8)))
        self.count = 0

    def step(self) -> float:
        engine, begun = self.engine, time.perf_counter()
        ticket = engine.look_up(self.known)
        assert ticket.states(0) == b"\1" * KNOWN, "a block that the engine stored is a hit"
        [(is_whole, _)] = engine.load(FULL, ticket, [at % 16 for at in range(KNOWN)])
        assert is_whole, "a leased block can be loaded"
        slots = engine.reserve(0, 2)
        [(is_whole, _)] = engine.copy("store", engine.session.pool, [(0, *slots, words([1, 2]), 0)])
        assert is_whole, "a reserved slot can be filled"
        engine.commit(FULL, hashes("new", 2, 2 * self.count), *slots)
        self.count += 1
        return time.perf_counter() - begun


def anonymous_mib(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.running.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) >> 10


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, and root alone can be one")
def test_an_engine_misses_no_step_while_another_user_attacks() -> None:
    with Daemon(capacity_bytes=256 << 20) as daemon:
        daemon.directory.chmod(0o755)
        daemon.tiers = {"socket": {"directory": str(daemon.socket.parent), "allow_uids": [NOBODY]}}
        daemon.start()
        daemon.socket.parent.chmod(0o755)
        with Engine(daemon.socket.parent) as engine:
            steps = Steps(engine.wait_ready())
            attacked(daemon, steps)
            assert engine.session.stats()["stored"] == KNOWN + 2 * steps.count
        daemon.audit()
        warnings = [line for line in daemon.running.log.read_text().splitlines() if " WARN " in line]
        assert len(warnings) < 40, f"{len(warnings)} warnings, the last of which are {warnings[-5:]}"
        wait_until("the attacker has nothing any more", lambda: has_nothing(daemon), 30)


def attacked(daemon: Daemon, steps: Steps) -> None:
    took: dict[str, list[float]] = {"nothing": []}
    names = list(took)
    until = time.monotonic() + max(ATTACK_SECONDS, 1.0)
    while time.monotonic() < until:
        took["nothing"].append(steps.step())
    before = anonymous_mib(daemon)
    argv = [sys.executable, str(Path(__file__).with_name("hostile.py")), str(daemon.socket.parent), str(NOBODY)]
    with subprocess.Popen([*argv, str(ATTACK_SECONDS)], stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        reader = threading.Thread(target=lambda: names.extend(line.strip() for line in attacker.stdout or []))
        reader.start()
        try:
            most = before
            while attacker.poll() is None:
                took.setdefault(names[-1], []).append(steps.step())
                most = max(most, anonymous_mib(daemon))
        finally:
            attacker.kill()
            reader.join()
    for name, times in took.items():
        times.sort()
        p50, p99 = (times[(len(times) - 1) * part // 100] * 1e3 for part in (50, 99))
        print(f"{name:24} {len(times):6} steps, ms p50 {p50:7.2f} p99 {p99:7.2f} max {times[-1] * 1e3:7.2f}")
    print(f"the daemon's own memory: {before} MiB before, {most} MiB at most")
    assert names[-1] == "over", f"the attacker failed in {names[-1]}"
    # What one user may take at most is said in docs/threat-model.md.
    assert most - before < 300, f"{before} MiB grew to {most} MiB"


def has_nothing(daemon: Daemon) -> bool:
    users = [user for user in daemon.inspect()["users"] if user["uid"] == NOBODY]
    return all(user[what] == 0 for user in users for what in ("connections", "sessions", "calls", "bytes"))
