"""What the scrub costs: CPU time of its thread, of a daemon of its own with a full pool of 2 GiB, over 20 s.

`python bench/scrub.py target/release/forebay 256MiB 1048576`: the daemon, its rate, bytes of a block.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from forebay import Client

SECONDS = 20
STORED_BYTES = 1_800 << 20
PORT = 19477


def scrubbed_bytes() -> float:
    page = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics").read().decode()
    return sum(float(line.split()[1]) for line in page.splitlines() if line.startswith("forebay_scrubbed_bytes_total"))


def cpu_seconds(pid: int) -> float:
    """Of the thread, as the scheduler counts it."""
    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if (task / "comm").read_text().strip() == "scrub"]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def fill(sockets: str, block_bytes: int) -> None:
    client = Client(sockets, deadline=60.0)
    namespace = client.open_namespace({"model": "scrub"}, {0: block_bytes})
    data, batch = os.urandom(block_bytes), max(1, (8 << 20) // block_bytes)
    for first in range(0, STORED_BYTES // block_bytes, batch):
        client.put(namespace, 0, [(number.to_bytes(8, "little"), data) for number in range(first, first + batch)])


def main(binary: str, rate: str, block_bytes: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        arguments = ["--socket.directory", f"{root}/s", "--pool.directory", f"{root}/pool"]
        arguments += ["--pool.capacity_bytes", "2GiB", "--http.address", f"127.0.0.1:{PORT}"]
        arguments += ["--pool.scrub_bytes_per_second", rate]
        daemon = subprocess.Popen([binary, "serve", *arguments], stderr=subprocess.DEVNULL)
        try:
            time.sleep(3)
            fill(f"{root}/s", block_bytes)
            start, before, cpu = time.monotonic(), scrubbed_bytes(), cpu_seconds(daemon.pid)
            time.sleep(SECONDS)
            read, cpu, wall = scrubbed_bytes() - before, cpu_seconds(daemon.pid) - cpu, time.monotonic() - start
            print(
                f"{rate}, blocks of {block_bytes}: {read / wall / 2**20:.1f} MiB/s, {100 * cpu / wall:.2f} % of a core"
            )
        finally:
            daemon.kill()
            daemon.wait()
            subprocess.run(["umount", f"{root}/pool/mnt"], check=False, stderr=subprocess.DEVNULL)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
