"""Reads the pages in order and does what they print, as a new user on a machine of their own: see `world.sh`.

Holds true: a command runs as it is printed, but for the words of `HERE`; it has to succeed. What a page tells the daemon
stays in /etc/forebay.toml, and the daemon that the README starts is there until the end, or one after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import forebay
from fake_openai import Fake
from fences import ROOT, Fence, commands, fences
from rig.process import Child, wait_until

SECONDS = 60.0
CONFIG = Path("/etc/forebay.toml")
# Of <linux/sockios.h> and <linux/if.h>.
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SERVE = "forebay serve --pool.capacity_bytes 64MiB &"

# In the order of a new user: the README, then the rows of docs/README.md.
PAGES = [
    "README.md",
    "docs/vllm.md",
    "docs/engines/vllm-tiering.md",
    "docs/compare.md",
    "docs/engines.md",
    "docs/store.md",
    "docs/transfer.md",
    "docs/config.md",
    "docs/operating.md",
    "docs/policy.md",
    "docs/troubleshooting.md",
]

# What stands for something of the reader's, or needs a larger machine than tests have.
HERE = {
    "200GiB": "64MiB",
    "800GiB": "64MiB",
    "200000": "8000",  # tokens, of which the stand-in for an engine takes 8,192
    "TRACE": "trace.jsonl.zst",
    "ONE": "one.jsonl.zst",
    "TWO": "two.jsonl.zst",
}

VLLM = "it needs a model; tests/e2e starts the same engines"
# Beginnings of what is not run, by their page, with the reason.
NOT_RUN = {
    ("README.md", "tools/wheel.sh"): "test_wheel.py builds the wheel",
    ("README.md", "pip install dist/forebay-*.whl"): "test_wheel.py installs the wheel into an empty environment",
    ("README.md", "vllm serve MODEL"): VLLM,
    ("README.md", "python -m vllm.entrypoints"): "it needs a model; test_claims.py reads its arguments as vLLM does",
    ("README.md", "make demo"): "it installs vLLM; .ci/run runs it",
    ("README.md", "make test"): "it is all tests; .ci/run runs them",
    ("docs/vllm.md", "vllm serve MODEL"): VLLM,
    ("docs/engines/vllm-tiering.md", "vllm serve MODEL"): "it needs a GPU",
    ("docs/compare.md", "vllm serve MODEL --port 8000"): VLLM,
    ("docs/compare.md", "vllm serve MODEL --port 8001"): VLLM,
    ("docs/transfer.md", "forebay bench transfer --listen"): "it needs two hosts, and measures for minutes",
    ("docs/transfer.md", "forebay bench transfer --connect"): "it needs two hosts, and measures for minutes",
    ("docs/transfer.md", "tools/transfer-peers.sh"): "it asks a package registry; `make peers` runs it",
    ("docs/transfer.md", "forebay bench transfer --transport"): "it needs what the script gets; `make peers` runs it",
    ("docs/config.md", '[pool]\ncapacity_bytes = "64GiB"'): "it requires huge pages",
}
# Commands that go on until somebody has seen enough.
ENDLESS = {
    ("docs/operating.md", "forebay top"),
    ("docs/operating.md", "forebay top --lines"),
    ("docs/policy.md", "forebay trace record traffic.jsonl --max-bytes 1073741824 --seconds 3600"),
}
# What is run, and what is only to be read.
RUN = {"sh", "python", "toml"}
READ = {
    "text": "what a command prints, or a part of a command",
    "json": "an argument of an engine",
    "ini": "a unit of systemd, which tests/services start",
    "nginx": "for a proxy; test_page.py puts one of its own before the page",
    "yaml": "for Prometheus, which test_monitoring.py runs on the rules",
}


def parts(fence: Fence) -> list[str]:
    return commands(fence) if fence.kind == "sh" else [fence.text]


def reason(page: str, part: str) -> tuple[str, str] | None:
    """The entry of `NOT_RUN`, if the part has one."""
    return next((entry for entry in NOT_RUN if entry[0] == page and part.startswith(entry[1])), None)


def main() -> None:
    home = Path("/run/reader")
    home.mkdir()
    os.chdir(home)
    os.environ |= {"HOME": str(home), "TERM": "xterm"}
    # As at a terminal: what a shell starts in the background ignores interrupts, and so would all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with machine(home), Daemon() as daemon:
        for fence in (fence for page in PAGES for fence in fences(page) if fence.kind in RUN):
            for part in parts(fence):
                if reason(fence.page, part):
                    continue
                begun = time.monotonic()
                try:
                    do(fence, part, daemon)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    sys.exit(f"{fence}: {part}\n{error}\nthe daemon's log:\n{daemon.log()}")
                print(f"{time.monotonic() - begun:6.2f} s  {fence}  {part.splitlines()[0]}", flush=True)


@contextlib.contextmanager
def machine(home: Path) -> Iterator[None]:
    """What the pages take for granted: a network on loopback, servers, engines, traces, and the directory of a shared store."""
    traces = ROOT / "crates/sim/tests/data"
    for name, trace in (("trace", "conv"), ("one", "agents"), ("two", "synth")):
        (home / f"{name}.jsonl.zst").symlink_to(traces / f"{trace}.jsonl.zst")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    with Path("/etc/hosts").open("a") as hosts:
        hosts.write("\n127.0.0.1 localhost cache.internal\n")
    Path("/mnt/kv/forebay").mkdir()
    redis = Child("redis-server", ["redis-server", "--save", ""], Path("/run/redis.log"))
    with redis, Fake(port=8000), Fake(port=8001, has_forebay=False):
        wait_until("redis answers", lambda: "Ready to accept" in redis.tail(), SECONDS)
        yield


class Daemon:
    """The one of the machine. Use as a context manager: leaving it ends the daemon."""

    def __init__(self) -> None:
        self.child: Child | None = None

    def serve(self, command: str) -> None:
        """In the place of the one before. It has something to tell: blocks of two tenants."""
        self.stop()
        self.child = Child("forebay serve", shlex.split(command.removesuffix("&")), Path("/run/daemon.log"))
        wait_until("the daemon is ready and its tiers serve", self.is_serving, SECONDS)
        with forebay.Client() as client:
            for tenant in ("blue", "red"):
                blocks = client.open_namespace({"model": "mine", "tenant": tenant}, {0: 4096})
                assert client.put(blocks, 0, [(b"hash of a block", bytes(4096))])[0] in {"stored", "duplicate"}

    def configure(self, text: str) -> None:
        """As an operator does: into the file, and the daemon anew."""
        with CONFIG.open("a") as config:
            config.write(f"{text}\n")
        run(["forebay", "config"])
        self.serve(SERVE)
        sections = tomllib.loads(CONFIG.read_text())["tier"]
        with forebay.Client() as client:
            served = {tier["name"] for tier in client.inspect()["tiers"]}
        assert served == {name for name, section in sections.items() if isinstance(section, dict)}

    def is_serving(self) -> bool:
        assert self.child is not None and self.child.is_running(), "the daemon has ended"
        if subprocess.run(["forebay", "health", "--ready"], capture_output=True, check=False).returncode != 0:
            return False
        with forebay.Client() as client:
            return all(tier["state"] == "serving" for tier in client.inspect()["tiers"])

    def stop(self) -> None:
        if self.child is not None:
            assert self.child.terminate(SECONDS) == 0
            self.child.kill()

    def log(self) -> str:
        return "" if self.child is None else self.child.tail()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child is not None:
            self.child.kill()


def do(fence: Fence, part: str, daemon: Daemon) -> None:
    part = here(part)
    match fence.kind:
        case "python":
            # What a page says of a line's output stands behind it.
            told = re.findall(r"^ *print\(.*\)  # (.+)$", part, re.MULTILINE)
            printed = run([sys.executable, "-c", part]).splitlines()
            assert sorted(printed) == sorted(told), f"the page says {told}, the program {printed}"
        case "toml":
            daemon.configure(part)
        case _ if part.startswith("forebay serve") and part.endswith("&"):
            daemon.serve(part)
        case _ if (fence.page, part) in ENDLESS:
            see_enough(part)
        case _:
            run(["bash", "-euo", "pipefail", "-c", part])


def here(part: str) -> str:
    for printed, ours in HERE.items():
        part = re.sub(rf"\b{printed}\b", ours, part)
    return part


def run(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr}"
    assert "warning:" not in done.stderr, done.stderr
    return done.stdout


def see_enough(command: str) -> None:
    """On a terminal, until it shows something or, where it is to write a file, until that is there. Then it is
    interrupted, and ends well."""
    ours, terminal = pty.openpty()
    os.set_blocking(ours, False)
    shown = b""

    def is_enough() -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(ours, 65536)
        return len(shown) > 100 or Path("traffic.jsonl").exists()

    argv = ["bash", "-c", f"exec {command}"]
    with subprocess.Popen(argv, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True) as child:
        try:
            wait_until("there is something to see", is_enough, SECONDS)
            child.send_signal(signal.SIGINT)
            # It may have more to say than a terminal holds.
            wait_until("it ends", lambda: is_enough() and child.poll() is not None, SECONDS)
        finally:
            child.kill()
    os.close(terminal)
    os.close(ours)
    assert child.returncode in {0, -signal.SIGINT}, f"status {child.returncode}: {shown!r}"


if __name__ == "__main__":
    main()
