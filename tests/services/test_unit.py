"""The unit that docs/operating.md prints, under the real systemd: what the page says of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fences import fences
from rig.daemon import free_port
from rig.paths import forebay_binary
from rig.process import wait_until
from rig.systemd import Systemd, program

PAGE = "docs/operating.md"
UNIT, CONFIG, COMMAND = "/etc/systemd/system/forebay.service", "/etc/forebay.toml", "/usr/local/bin/forebay"
RUNTIME = "/run/forebay"
START_SECONDS = 20.0
CAP_SYS_RESOURCE = 24  # <linux/capability.h>
# A client of the machine's; it stores a block or says how many of the two it finds.
CLIENT = """
import sys, forebay
client = forebay.Client(deadline=20.0)
space = client.open_namespace({"model": "unit"}, {0: 4096})
keys = [bytes([at]) * 32 for at in range(2)]
if sys.argv[1] == "put":
    client.put(space, 0, [(key, key * 128) for key in keys])
else:
    print(sum(found == key * 128 for key, found in zip(keys, client.get(space, 0, keys))))
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or program() is None, reason="control groups need root, and the unit needs systemd"
)


@pytest.fixture
def machine() -> Iterator[Systemd]:
    """A machine on which the reader of the page has written the unit and copied the command."""
    [unit] = [fence.text for fence in fences(PAGE) if fence.kind == "ini"]
    with Systemd() as machine:
        machine.write(UNIT, unit + "\n")
        machine.ask("cp", str(forebay_binary().resolve()), COMMAND)
        yield machine


def configure(machine: Systemd, more: str = "") -> None:
    text = f'[pool]\ncapacity_bytes = "64MiB"\n[http]\naddress = "127.0.0.1:{free_port()}"\n{more}'
    machine.write(CONFIG, text)


def client(machine: Systemd, what: str, *, as_user: str | None = None) -> str:
    python = ["env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", sys.executable, "-c", CLIENT, what]
    uid = machine.ask("id", "-u", as_user).strip() if as_user else "0"
    return machine.ask("env", f"FOREBAY_DAEMON_UID={uid}", *python).strip()


def wait_ready(machine: Systemd, *, uid: str = "0") -> None:
    def is_ready() -> bool:
        health = ["env", f"FOREBAY_DAEMON_UID={uid}", COMMAND, "health", "--ready"]
        try:
            machine.ask(*health)
        except AssertionError:
            return False
        return machine.show("forebay", "ActiveState") == "active"

    wait_until("the daemon is ready", is_ready, START_SECONDS)


def test_a_daemon_is_there_again_and_warm_after_a_kill_and_after_a_restart(machine: Systemd) -> None:
    configure(machine)
    machine.ask("systemctl", "daemon-reload")
    machine.ask("systemctl", "enable", "--now", "forebay")
    wait_ready(machine)
    assert machine.ask("systemctl", "is-enabled", "forebay").strip() == "enabled"
    client(machine, "put")
    directory = machine.ask("stat", "--format", "%i", RUNTIME)

    first = machine.pid("forebay")
    os.kill(first, signal.SIGKILL)
    wait_until("systemd starts it again", lambda: machine.pid("forebay") not in (0, first), START_SECONDS)
    wait_ready(machine)
    assert client(machine, "get") == "2"
    assert machine.ask("stat", "--format", "%i", RUNTIME) == directory, "containers have it mounted"

    begun = time.monotonic()
    machine.ask("systemctl", "stop", "forebay")
    assert time.monotonic() - begun < int(machine.show("forebay", "TimeoutStopUSec").removesuffix("s"))
    assert machine.show("forebay", "Result") == "success", "it drained, and was not killed"
    assert machine.ask("stat", "--format", "%i", RUNTIME) == directory
    machine.ask("systemctl", "start", "forebay")
    wait_ready(machine)
    assert client(machine, "get") == "2"
    # The warnings of doctor are about this machine; what it finds wrong is about the unit.
    machine.ask(COMMAND, "doctor", statuses=(0,))


def test_a_daemon_that_cannot_start_is_started_until_it_can(machine: Systemd) -> None:
    machine.ask("systemctl", "daemon-reload")
    machine.ask("systemctl", "start", "forebay")
    # By default systemd gives up after five starts.
    wait_until("systemd tries it six times", lambda: int(machine.show("forebay", "NRestarts")) > 5, START_SECONDS)
    assert "hint:" in machine.log()
    configure(machine)
    wait_ready(machine)


def test_the_unit_gives_the_daemon_ten_times_the_usual_weight_and_lets_it_lock_all_memory(machine: Systemd) -> None:
    configure(machine)
    machine.ask("systemctl", "start", "forebay")
    wait_ready(machine)
    weights = {
        "/sys/fs/cgroup/cpu/system.slice/forebay.service/cpu.shares": "10240",
        "/sys/fs/cgroup/system.slice/forebay.service/cpu.weight": "1000",
    }
    script = "".join(f"if [ -e {path} ]; then cat {path}; fi; " for path in weights)
    assert machine.ask("sh", "-c", script).strip() in weights.values()
    # Nobody has more than the first process may give.
    first, daemon = (_locked(pid) for pid in (machine.first, machine.pid("forebay")))
    assert daemon == ("unlimited" if _may_raise_limits(machine.first) else first)
    assert machine.show("forebay", "LimitMEMLOCK") == "infinity"


def _locked(pid: int) -> str:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line for line in lines if line.startswith("Max locked memory")).split()[3]


def _may_raise_limits(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    capabilities = int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)
    return bool(capabilities >> CAP_SYS_RESOURCE & 1)


def test_a_daemon_of_a_system_user_serves_clients_that_name_it(machine: Systemd) -> None:
    """As the page says: `User=` in the unit, and the directory of the sockets in the configuration."""
    [unit] = [fence.text for fence in fences(PAGE) if fence.kind == "ini"]
    machine.write(UNIT, unit.replace("[Service]", "[Service]\nUser=daemon") + "\n")
    configure(machine, f'[socket]\ndirectory = "{RUNTIME}"\n')
    machine.ask("systemctl", "daemon-reload")
    machine.ask("systemctl", "start", "forebay")
    wait_ready(machine, uid=machine.ask("id", "-u", "daemon").strip())
    client(machine, "put", as_user="daemon")
    assert client(machine, "get", as_user="daemon") == "2"
    machine.ask("systemctl", "restart", "forebay")
    wait_ready(machine, uid=machine.ask("id", "-u", "daemon").strip())
    assert client(machine, "get", as_user="daemon") == "2"
