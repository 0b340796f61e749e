"""The engine is killed in the middle of a store, alone and together with the daemon: the pool holds only whole blocks.

Method: the engine stops itself at the call that hands a store to its worker, so slots are reserved and not committed,
and is then killed. The next engine loads whatever the pool says it has; its tokens are the baseline's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rig import compare, models
from rig.baseline import Baseline, baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.scenario import ask, ask_anew, join, store
from rig.workload import Workload

CONFIG = EngineConfig(models.LLAMA)
WORKLOAD = Workload(seed=5, prefixes=6, tails=2)
FIRST_STORED = 0


@dataclass
class Bench:
    base: Baseline
    daemon: Daemon
    start_engine: Callable[..., Engine]

    def engine(self, name: str) -> Engine:
        engine = self.start_engine(CONFIG, self.daemon.connector(), name)
        join(self.daemon, engine)
        return engine

    def killed_mid_store(self, name: str, prefix: int, when: str) -> Engine:
        """An engine that stands stopped in a store of this prefix."""
        engine = self.engine(name)
        store(engine, self.base, [self.base.workload.about(FIRST_STORED)])
        engine.stop_at("store", 1, when)
        engine.begin(self.base.workload.about(prefix).requests)
        engine.wait_stopped()
        return engine


@pytest.fixture(scope="module")
def bench(start_daemon: Callable[..., Daemon], start_engine: Callable[..., Engine]) -> Bench:
    return Bench(baseline(CONFIG, WORKLOAD), start_daemon(), start_engine)


@pytest.mark.parametrize(("when", "prefix"), [("before", 1), ("after", 2)])
def test_slots_of_an_engine_killed_mid_store_come_back(bench: Bench, when: str, prefix: int) -> None:
    engine = bench.killed_mid_store(f"killed-{when}", prefix, when)
    held = bench.daemon.inspect()["pinned_bytes"]
    assert held > 0, "the engine holds no slots: it was not killed in a store"
    engine.kill()
    bench.daemon.wait_for("nothing is held", lambda seen: seen["pinned_bytes"] == 0)
    assert bench.daemon.audit() > 0


def test_a_daemon_killed_with_its_engine_mid_store_has_only_whole_blocks(bench: Bench) -> None:
    engine = bench.killed_mid_store("killed-together", 3, "after")
    bench.daemon.kill()
    engine.kill()
    bench.daemon.start()
    bench.daemon.wait_for("nothing is held", lambda seen: seen["pinned_bytes"] == 0 and seen["fenced_bytes"] == 0)
    with bench.engine("heir") as heir:
        _inherit(bench, heir)
    assert bench.daemon.audit() > 0


def test_a_pool_of_another_shape_is_replaced_and_never_misread(bench: Bench) -> None:
    bench.daemon.kill()
    bench.daemon.capacity_bytes, bench.daemon.unit_bytes = 128 << 20, 4 << 20
    bench.daemon.start()
    assert "the pool is replaced; its blocks are lost" in bench.daemon.running.tail()
    newcomer = bench.engine("newcomer")
    known = bench.base.workload.about(FIRST_STORED)
    first, *_ = store(newcomer, bench.base, [known])
    assert first.hit_tokens == 0, "a block of the pool's old shape was served"
    compare.enough_hits(ask_anew(newcomer, bench.base, [known]), CONFIG.block_size, share=0.95)


def _inherit(bench: Bench, heir: Engine) -> None:
    """What the dead had stored is served; what they were storing is computed, and stored by the heir."""
    known, *cut_short = (bench.base.workload.about(prefix) for prefix in (FIRST_STORED, 1, 2, 3))
    compare.enough_hits(ask(heir, bench.base, [known]), CONFIG.block_size, share=0.95)
    for wave in cut_short:
        store(heir, bench.base, [wave])
        compare.enough_hits(ask_anew(heir, bench.base, [wave]), CONFIG.block_size, share=0.95)
