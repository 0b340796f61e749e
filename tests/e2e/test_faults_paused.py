"""A worker is paused in the middle of a copy for longer than any timeout, while others fill the pool: nobody gets its
slots.

Method: one engine stops itself (SIGSTOP, all its threads) inside a store, later inside a load. Meanwhile another
stores many times the pool's size, and the daemon is killed and started again. Then the paused one goes on: its late
writes land, its late reads are used. A slot that had been given away would show as another token here or in the other
engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rig import compare, models
from rig.baseline import Baseline, baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.scenario import ask_anew, external_hits, forget, join, store, wait_for_hits
from rig.workload import Wave, Workload

# Short steps: an engine keeps as many slots at hand as one step can fill, and these two share a small pool.
CONFIG = EngineConfig(models.LLAMA, max_batched_tokens=512)
WORKLOAD = Workload(seed=6, prefixes=20, tails=2)
# 256 blocks of 128 KiB; the other engine's fourteen prefixes need 20 each.
POOL_BYTES = 32 << 20
# The longest any part of Forebay waits for another is 10 s.
PAST_EVERY_TIMEOUT_SECONDS = 11.0
OTHERS = range(6, 20)


@dataclass
class Bench:
    base: Baseline
    daemon: Daemon
    paused: Engine
    other: Engine

    def fill(self, seconds: float) -> None:
        """The other engine stores more than the pool holds, once and then for that long."""
        until = time.monotonic() + seconds
        while True:
            for prefix in OTHERS:
                store(self.other, self.base, [self.about(prefix)])
                ask_anew(self.other, self.base, [self.about(prefix)])
            if time.monotonic() > until:
                return

    def about(self, prefix: int) -> Wave:
        return self.base.workload.about(prefix)

    def audit(self) -> None:
        """What the pool serves is right, in both engines."""
        for engine in (self.other, self.paused):
            ask_anew(engine, self.base, [self.about(prefix) for prefix in OTHERS])
            store(engine, self.base, [self.about(OTHERS[-1])])
            wait_for_hits(engine, self.base, self.about(OTHERS[-1]))


@pytest.fixture(scope="module")
def bench(start_engine: Callable[..., Engine], start_daemon: Callable[..., Daemon]) -> Bench:
    base = baseline(CONFIG, WORKLOAD)
    daemon = start_daemon(capacity_bytes=POOL_BYTES, unit_bytes=2 << 20)
    paused, other = (start_engine(CONFIG, daemon.connector(), name) for name in ("paused", "other"))
    join(daemon, paused, other)
    return Bench(base, daemon, paused, other)


# What the worker was doing, where it was stopped, whether the daemon is killed meanwhile, and what about: each case
# needs a prefix that is in the pool only if the case put it there.
CASES = [
    ("store", "before", True, 0),
    ("store", "after", True, 1),
    ("store", "after", False, 2),
    ("load", "before", True, 3),
    ("load", "after", True, 4),
    ("load", "after", False, 5),
]


@pytest.mark.parametrize(("call", "when", "daemon_is_killed", "prefix"), CASES)
def test_nobody_gets_the_slots_of_a_paused_worker(
    bench: Bench, call: str, when: str, daemon_is_killed: bool, prefix: int
) -> None:
    wave = bench.about(prefix)
    forget(bench.paused)
    if call == "load":
        store(bench.paused, bench.base, [wave])
        wait_for_hits(bench.paused, bench.base, wave)
        forget(bench.paused)
    before = external_hits(bench.paused)
    bench.paused.stop_at(call, 1, when)
    bench.paused.begin(wave.requests)
    bench.paused.wait_stopped()
    try:
        if daemon_is_killed:
            bench.fill(seconds=0)
            bench.daemon.kill()
            bench.daemon.start()
        bench.fill(PAST_EVERY_TIMEOUT_SECONDS)
        evicted = bench.daemon.metrics()["forebay_evicted_blocks_total"]
        assert evicted > 0, "the pool had room for all: nobody needed the paused worker's slots"
    finally:
        bench.paused.resume()
    answers = bench.paused.finish()
    compare.same_tokens(bench.base.answers, {answer.id: answer for answer in answers})
    if call == "load":
        assert external_hits(bench.paused) > before, "nothing was being loaded: the worker was paused in vain"
    bench.audit()
    assert bench.daemon.audit() > 0
    bench.daemon.wait_for("no lease is left", lambda seen: all(s["leased_blocks"] == 0 for s in seen["sessions"]))
