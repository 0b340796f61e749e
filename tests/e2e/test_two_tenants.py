"""Two tenants on one full pool, through kill -9 of the daemon, of an engine, and of both: every byte and slot is
audited.

Method: the tenants' engines run the same model and the same prompts, so only the tenant keeps their blocks apart. The
pool is smaller than what either stores. After each kill the survivors go on with the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rig import compare, models
from rig.baseline import Baseline, baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.scenario import ask, ask_anew, external_hits, forget, join, store, wait_for_hits
from rig.workload import Wave, Workload

CONFIG = EngineConfig(models.LLAMA, max_batched_tokens=512)
WORKLOAD = Workload(seed=6, prefixes=20, tails=2)
POOL_BYTES = 32 << 20
EACH_STORES = range(14)


@dataclass
class Tenants:
    base: Baseline
    daemon: Daemon
    start_engine: Callable[..., Engine]
    blue: Engine
    green: Engine

    def about(self, prefix: int) -> Wave:
        return self.base.workload.about(prefix)

    def begin_both(self, prefix: int) -> None:
        for engine in (self.blue, self.green):
            forget(engine)
            engine.begin(self.about(prefix).requests)

    def finish_both(self) -> None:
        for engine in (self.blue, self.green):
            compare.same_tokens(self.base.answers, {answer.id: answer for answer in engine.finish()})

    def both_go_on(self) -> None:
        """Both store and load again, and the pool holds nothing but what was stored."""
        last = self.about(EACH_STORES[-1])
        for engine in (self.blue, self.green):
            ask_anew(engine, self.base, [self.about(prefix) for prefix in EACH_STORES])
            store(engine, self.base, [last])
            wait_for_hits(engine, self.base, last)
        assert self.daemon.audit() > 0


def _start(start_engine: Callable[..., Engine], daemon: Daemon, tenant: str, name: str) -> Engine:
    return start_engine(CONFIG, daemon.connector(tenant=tenant), name)


@pytest.fixture(scope="module")
def tenants(start_daemon: Callable[..., Daemon], start_engine: Callable[..., Engine]) -> Tenants:
    base = baseline(CONFIG, WORKLOAD)
    daemon = start_daemon(capacity_bytes=POOL_BYTES, unit_bytes=2 << 20)
    blue, green = (_start(start_engine, daemon, tenant, tenant) for tenant in ("blue", "green"))
    join(daemon, blue, green)
    return Tenants(base, daemon, start_engine, blue, green)


def test_a_tenant_is_served_nothing_of_the_other(tenants: Tenants) -> None:
    known = tenants.about(0)
    store(tenants.blue, tenants.base, [known])
    wait_for_hits(tenants.blue, tenants.base, known)
    store(tenants.green, tenants.base, [known])
    assert external_hits(tenants.green) == 0
    wait_for_hits(tenants.green, tenants.base, known)


def test_both_are_served_right_while_they_evict_each_other(tenants: Tenants) -> None:
    for prefix in EACH_STORES:
        tenants.begin_both(prefix)
        tenants.finish_both()
    tenants.both_go_on()
    assert tenants.daemon.metrics()["forebay_evicted_blocks_total"] > 0, "the pool is not full"


def test_the_daemon_is_killed_while_both_work(tenants: Tenants) -> None:
    tenants.begin_both(1)
    tenants.daemon.kill()
    tenants.daemon.start()
    tenants.finish_both()
    tenants.both_go_on()


def test_one_engine_is_killed_in_a_store_while_the_other_works(tenants: Tenants) -> None:
    _kill_in_a_store(tenants, prefix=17, daemon_too=False)
    tenants.both_go_on()


def test_the_daemon_and_an_engine_are_killed_together(tenants: Tenants) -> None:
    _kill_in_a_store(tenants, prefix=18, daemon_too=True)
    tenants.both_go_on()


def test_purging_one_tenant_leaves_the_other_its_blocks(tenants: Tenants) -> None:
    known = tenants.about(19)
    for engine in (tenants.blue, tenants.green):
        store(engine, tenants.base, [known])
        wait_for_hits(engine, tenants.base, known)
    assert tenants.daemon.purge(tenant="blue") > 0
    before = external_hits(tenants.blue)
    ask_anew(tenants.blue, tenants.base, [known])
    assert external_hits(tenants.blue) == before, "purged blocks were served"
    wait_for_hits(tenants.green, tenants.base, known)


def test_nothing_is_held_when_all_engines_are_gone(tenants: Tenants) -> None:
    for engine in (tenants.blue, tenants.green):
        engine.kill()
    tenants.daemon.wait_for("nothing is held", lambda seen: seen["pinned_bytes"] == 0 and seen["fenced_bytes"] == 0)
    assert tenants.daemon.audit() > 0


def _kill_in_a_store(tenants: Tenants, prefix: int, daemon_too: bool) -> None:
    """Blue is killed with a store in its hands; a new engine of that tenant takes its place."""
    forget(tenants.blue)
    tenants.blue.stop_at("store", 1, "after")
    tenants.blue.begin(tenants.about(prefix).requests)
    tenants.blue.wait_stopped()
    tenants.green.begin(tenants.about(prefix).requests)
    if daemon_too:
        tenants.daemon.kill()
    tenants.blue.kill()
    if daemon_too:
        tenants.daemon.start()
    answers = tenants.green.finish()
    compare.same_tokens(tenants.base.answers, {answer.id: answer for answer in answers})
    tenants.blue = _start(tenants.start_engine, tenants.daemon, "blue", f"blue-{prefix}")
    join(tenants.daemon, tenants.blue)
    ask(tenants.blue, tenants.base, [tenants.about(prefix)])
