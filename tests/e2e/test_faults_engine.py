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
from rig.scenario import ask, ask_anew, store
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
        return self.start_engine(CONFIG, self.daemon.connector(), name)

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


def test_a_daemon_killed_with_its_engine_mid_store_has_only_whole_blocks(bench: Bench) -> None:
    engine = bench.killed_mid_store("killed-together", 3, "after")
    bench.daemon.kill()
    engine.kill()
    bench.daemon.start()
    bench.daemon.wait_for("nothing is held", lambda seen: seen["pinned_bytes"] == 0 and seen["fenced_bytes"] == 0)
    heir = bench.engine("heir")
    lone = ask(heir, bench.base, [bench.base.workload.about(FIRST_STORED)])
    compare.enough_hits(lone, CONFIG.block_size, share=0.95)
    for prefix in (1, 2, 3):
        store(heir, bench.base, [bench.base.workload.about(prefix)])
        compare.enough_hits(
            ask_anew(heir, bench.base, [bench.base.workload.about(prefix)]), CONFIG.block_size, share=0.95
        )
