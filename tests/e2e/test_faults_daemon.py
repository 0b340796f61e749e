"""The daemon is absent, late, killed, frozen, restarted with and without its pool: the engine never notices in its
tokens.

Method: one engine lives through all of it, so each test also shows that the engine outlived the one before. Every
answer is compared with the baseline. Prompts "about" a prefix that no other test uses are new, the others are in the
pool. A worker that must be caught in the middle of a copy stops itself (SIGSTOP) at the call that hands the copy
over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from rig import compare, models
from rig.baseline import Baseline, baseline
from rig.daemon import Daemon
from rig.engine import Answer, Duration, Engine, EngineConfig
from rig.scenario import ask, ask_anew, external_hits, forget, join, store, wait_for_hits
from rig.workload import Wave, Workload

CONFIG = EngineConfig(models.LLAMA)
WORKLOAD = Workload(seed=4, prefixes=12, tails=2)
FROZEN_SECONDS = 5.0
# The connector may take 2 ms of a step. A hundred times that is what a machine with two busy cores may add, and still
# far below what it would take to wait for a daemon that does not answer.
STALL_MS = 200.0

Report = Callable[[Engine], Duration]


@dataclass
class Bench:
    base: Baseline
    daemon: Daemon
    engine: Engine

    def known(self) -> Wave:
        """In the pool since `test_an_engine_finds_a_daemon_that_came_later`."""
        return self.base.workload.about(0)

    def fresh(self, prefix: int) -> Wave:
        return self.base.workload.about(prefix)

    def wait_for_hits(self) -> None:
        wait_for_hits(self.engine, self.base, self.known())


@pytest.fixture(scope="module")
def bench(start_engine: Callable[..., Engine]) -> Iterator[Bench]:
    base = baseline(CONFIG, WORKLOAD)
    with Daemon() as daemon:
        yield Bench(base, daemon, start_engine(CONFIG, daemon.connector(), "survivor"))


@pytest.fixture(autouse=True)
def never_stalls(bench: Bench, report: Report) -> Iterator[None]:
    """After every test: no step of the scheduler waited for the daemon, and every byte in the pool is right."""
    bench.engine.durations()
    yield
    assert report(bench.engine).max_ms < STALL_MS
    if bench.daemon.is_running():
        bench.daemon.audit()


def test_an_engine_without_a_daemon_answers(bench: Bench) -> None:
    ask(bench.engine, bench.base, [bench.fresh(1)])
    ask_anew(bench.engine, bench.base, [bench.fresh(1)])
    assert external_hits(bench.engine) == 0


def test_an_engine_finds_a_daemon_that_came_later(bench: Bench) -> None:
    bench.daemon.start()
    join(bench.daemon, bench.engine)
    store(bench.engine, bench.base, [bench.known()])
    bench.wait_for_hits()


@pytest.mark.parametrize(("when", "prefix"), [("before", 2), ("after", 3)])
def test_a_daemon_killed_during_a_store_costs_nothing_but_the_store(bench: Bench, when: str, prefix: int) -> None:
    bench.wait_for_hits()
    bench.engine.stop_at("store", 1, when)
    bench.engine.begin(bench.fresh(prefix).requests)
    bench.engine.wait_stopped()
    bench.daemon.kill()
    bench.engine.resume()
    _judge(bench, bench.engine.finish())
    bench.daemon.start()
    bench.wait_for_hits()
    ask_anew(bench.engine, bench.base, [bench.fresh(prefix)])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_load_that_was_promised_ends_well_though_the_daemon_is_killed(bench: Bench, when: str) -> None:
    bench.wait_for_hits()
    forget(bench.engine)
    before = external_hits(bench.engine)
    bench.engine.stop_at("load", 1, when)
    bench.engine.begin(bench.known().requests)
    bench.engine.wait_stopped()
    bench.daemon.kill()
    bench.engine.resume()
    _judge(bench, bench.engine.finish())
    assert external_hits(bench.engine) > before, "the load ended without the promised hits"
    bench.daemon.start()
    bench.wait_for_hits()


def test_a_frozen_daemon_freezes_nobody(bench: Bench) -> None:
    bench.wait_for_hits()
    begun = time.monotonic()
    ask_anew(bench.engine, bench.base, [bench.known(), bench.fresh(4)])
    # Several times what an engine needs that waits for nobody, however busy the machine is.
    frozen_seconds = max(FROZEN_SECONDS, 5 * (time.monotonic() - begun))
    bench.daemon.freeze()
    thaw_at = time.monotonic() + frozen_seconds
    waves = 0
    while time.monotonic() < thaw_at:
        ask_anew(bench.engine, bench.base, [bench.known(), bench.fresh(4)])
        waves += 1
    bench.daemon.thaw()
    assert waves > 1, f"one wave took {frozen_seconds:g} s: it waited for the thaw"
    bench.wait_for_hits()


def test_blocks_of_before_a_kill_serve_after_it(bench: Bench) -> None:
    bench.wait_for_hits()
    bench.daemon.kill()
    ask_anew(bench.engine, bench.base, [bench.known()])
    bench.daemon.start()
    bench.wait_for_hits()
    compare.enough_hits(ask_anew(bench.engine, bench.base, [bench.known()]), CONFIG.block_size, share=1.0)


def test_a_drained_daemon_ends_by_itself_and_comes_back(bench: Bench) -> None:
    bench.wait_for_hits()
    assert bench.daemon.drain() == 0
    ask_anew(bench.engine, bench.base, [bench.known(), bench.fresh(5)])
    bench.daemon.start()
    bench.wait_for_hits()


def test_a_daemon_that_lost_its_pool_starts_empty_and_fills_again(bench: Bench) -> None:
    bench.wait_for_hits()
    bench.daemon.kill()
    bench.daemon.drop_pool()
    bench.daemon.start()
    # The worker still maps the old files. Nothing of them may be served as if it were the new pool's.
    ask_anew(bench.engine, bench.base, [bench.known(), bench.fresh(6)])
    bench.wait_for_hits()


def test_a_pool_that_is_mapped_does_not_change_its_shape(bench: Bench) -> None:
    bench.wait_for_hits()
    bench.daemon.kill()
    shape = bench.daemon.capacity_bytes, bench.daemon.unit_bytes
    bench.daemon.capacity_bytes, bench.daemon.unit_bytes = 128 << 20, 4 << 20
    bench.daemon.launch()
    assert bench.daemon.running.wait(30) != 0
    assert "cannot change the shape of the pool while workers map it" in bench.daemon.running.tail()
    ask_anew(bench.engine, bench.base, [bench.known(), bench.fresh(7)])
    bench.daemon.capacity_bytes, bench.daemon.unit_bytes = shape
    bench.daemon.start()
    bench.wait_for_hits()


def test_nothing_stays_held_after_all_that(bench: Bench) -> None:
    ask_anew(bench.engine, bench.base, [bench.known()])
    bench.daemon.wait_for("no lease is left", lambda seen: all(s["leased_blocks"] == 0 for s in seen["sessions"]))


def _judge(bench: Bench, answers: list[Answer]) -> None:
    compare.same_tokens(bench.base.answers, {answer.id: answer for answer in answers})
