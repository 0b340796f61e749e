"""The daemon's ceiling beside Apache DataSketches, over the same keys."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from datasketches import hll_sketch, tgt_hll_type
from forebay import Client
from harness import hashes
from rig.daemon import Daemon
from rig.process import wait_until

BATCH = 2000
PRECISION = 17  # as many registers as the daemon's sketches have


def advice(daemon: Daemon, sockets: Path) -> dict[str, Any]:
    command = [str(daemon.binary), "advise", "--json", "--socket.directory", str(sockets)]
    answer: dict[str, Any] = json.loads(subprocess.check_output(command, timeout=30))
    return answer


@pytest.mark.parametrize("count", [1_000, 30_000, 200_000])
def test_different_keys_are_estimated_within_one_percent_and_as_well_as_by_datasketches(
    daemon: Daemon, sockets: Path, count: int
) -> None:
    client = Client(str(sockets), deadline=20.0)
    namespace = client.open_namespace({"model": "ceiling"}, {0: 4096})
    sketch = hll_sketch(PRECISION, tgt_hll_type.HLL_8)
    for _ in range(2):  # so that half of them could have been hits
        for first in range(0, count, BATCH):
            keys = hashes("ceiling", min(BATCH, count - first), first)
            client.lookup(namespace, 0, keys)
            for key in keys:
                sketch.update(key.hex())

    def seen() -> dict[str, Any] | None:
        told = advice(daemon, sockets)
        return told if told["windows"][2]["keys"] == 2 * count else None

    told = wait_until("all lookups are looked at", seen, 60)
    assert told["left_out"] == 0
    # On a slow machine the shortest window may have begun to forget.
    for window in told["windows"][1:]:
        different = window["different_keys"]
        assert abs(different / count - 1) <= 0.01, window
        assert abs(different / sketch.get_estimate() - 1) <= 0.015, (window, sketch.get_estimate())
        assert abs(window["ceiling"] - 0.5) <= 0.005, window
