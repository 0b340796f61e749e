"""A pool that is full, and one that cannot hold two requests: every request is answered, and the tokens are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import models
from rig.baseline import baseline
from rig.daemon import Daemon
from rig.engine import Duration, Engine, EngineConfig
from rig.process import wait_until
from rig.scenario import ask_anew, join, store, wait_for_hits
from rig.workload import Workload, settle

CONFIG = EngineConfig(models.LLAMA)
WORKLOAD = Workload(seed=6, prefixes=16, tails=2)

# Blocks are 128 KiB. All prompts together need about 40 MiB; one needs 2.3 MiB.
POOLS = {"full": (16 << 20, 2 << 20), "tiny": (4 << 20, 2 << 20)}


@pytest.mark.parametrize("pool", POOLS)
def test_a_short_pool_changes_no_token_and_stops_nobody(
    pool: str,
    start_daemon: Callable[..., Daemon],
    start_engine: Callable[..., Engine],
    report: Callable[[Engine], Duration],
) -> None:
    base = baseline(CONFIG, WORKLOAD)
    capacity_bytes, unit_bytes = POOLS[pool]
    daemon = start_daemon(capacity_bytes=capacity_bytes, unit_bytes=unit_bytes)
    with start_engine(CONFIG, daemon.connector(), pool) as engine:
        join(daemon, engine)

        def is_turning_over() -> bool:
            ask_anew(engine, base, [base.workload.together()])
            return daemon.metrics()["forebay_evicted_blocks_total"] > 0

        wait_until("the pool is full and evicts", is_turning_over, 60)
        settle(engine)
        seen = daemon.inspect()
        ready_bytes = sum(c["ready"] * c["slot_bytes"] for c in seen["classes"])
        assert ready_bytes > capacity_bytes // 2, (
            f"only {ready_bytes} of {capacity_bytes} bytes are used: the pool is not full"
        )
        assert all(s["leased_blocks"] == 0 for s in seen["sessions"])
        # What was asked last is still there: progress, not thrashing.
        last = base.workload.about(0)
        store(engine, base, [last])
        wait_for_hits(engine, base, last)
        report(engine)
    assert daemon.audit() > 0
