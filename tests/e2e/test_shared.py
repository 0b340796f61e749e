"""A store that hosts share: what one has computed another hits, with the same tokens; and the store's end costs hits
and nothing else.

Method: an engine on host A computes prompts, its daemon writes them to the store, both are killed. Host B has a pool
directory, a daemon and an engine of its own, and knows of A nothing but the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from rig import compare, models
from rig.baseline import Baseline, baseline
from rig.daemon import Daemon
from rig.engine import Answer, Duration, Engine, EngineConfig
from rig.process import wait_until
from rig.scenario import ask, ask_anew, join
from rig.stores import Directory, Valkey
from rig.workload import Workload, settle

CONFIG = EngineConfig(models.LLAMA, max_batched_tokens=512)
WORKLOAD = Workload(seed=6, prefixes=20, tails=2)
PREFIXES = range(12)
# Where hits are counted and not time: a busy machine may starve the daemon for seconds.
PATIENT = {"load_deadline_ms": 20_000}


@dataclass
class Host:
    """Host B."""

    base: Baseline
    store: Valkey | Directory
    daemon: Daemon
    engine: Engine

    def ask_about(self, *prefixes: int) -> list[Answer]:
        waves = [self.base.workload.about(prefix) for prefix in prefixes]
        return [answer for wave in waves for answer in ask_anew(self.engine, self.base, [wave])]

    def promoted_blocks(self) -> float:
        return self.daemon.metrics()[f'forebay_tier_promotions_total{{tier="{self.store.tier}",outcome="ready"}}']

    def moved_blocks(self) -> float:
        """To the store and from it."""
        return self.promoted_blocks() + self.daemon.metrics()["forebay_tier_stored_blocks_total"]

    def wait_until_it_moves(self, more_than: float) -> None:
        wait_until("the store is used", lambda: self.moved_blocks() > more_than, 30)

    def wait_until_tier_is(self, state: str) -> None:
        sample = f'forebay_tier_state{{tier="{self.store.tier}",state="{state}"}}'
        wait_until(f"the tier is {state}", lambda: self.daemon.metrics()[sample] == 1, 60)


@pytest.fixture(scope="module", params=[Valkey, Directory])
def host(
    request: pytest.FixtureRequest, start_engine: Callable[..., Engine], start_daemon: Callable[..., Daemon]
) -> Iterator[Host]:
    base = baseline(CONFIG, WORKLOAD)
    with request.param().start() as store:
        daemon = start_daemon(tiers=store.sections)
        writer = start_engine(CONFIG, daemon.patient_connector(), "host-a")
        join(daemon, writer)
        for prefix in PREFIXES:
            ask(writer, base, [base.workload.about(prefix)])
        settle(writer)
        wait_until_written(daemon)
        writer.kill()
        daemon.kill()
        daemon = start_daemon(tiers={name: keys | PATIENT for name, keys in store.sections.items()})
        reader = start_engine(CONFIG, daemon.patient_connector(), "host-b")
        join(daemon, reader)
        yield Host(base, store, daemon, reader)


def wait_until_written(daemon: Daemon) -> None:
    """All that the pool holds is in the store."""

    def is_written() -> bool:
        seen = daemon.metrics()
        return seen["forebay_tier_stored_blocks_total"] >= seen["forebay_stored_blocks_total"] > 0

    wait_until("all is written to the store", is_written, 60)


def test_a_host_hits_what_another_stored(host: Host, report: Callable[[Engine], Duration]) -> None:
    compare.enough_hits(host.ask_about(*range(6)), CONFIG.block_size, share=0.95)
    assert host.promoted_blocks() >= 6 * 16, "nothing else could have served it"
    assert host.daemon.audit() > 0
    report(host.engine)


def test_a_harmed_store_costs_hits_and_no_token(host: Host, report: Callable[[Engine], Duration]) -> None:
    prefixes = iter(range(6, 12))
    # By default a store is given up soon.
    host.daemon.kill()
    host.daemon.tiers = host.store.sections
    host.daemon.start()
    join(host.daemon, host.engine)
    for name, harm, undo in host.store.harms:
        host.engine.durations()
        harm()
        host.ask_about(next(prefixes), next(prefixes))
        in_step = report(host.engine)
        assert in_step.p50_ms < 5, f"{name}: a step waits for nobody longer than its budget of 2 ms"
        undo()
        host.wait_until_tier_is("serving")
        before = host.moved_blocks()
        host.ask_about(next(prefixes))
        settle(host.engine)
        host.wait_until_it_moves(more_than=before)
