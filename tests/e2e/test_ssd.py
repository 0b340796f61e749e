"""A pool far smaller than what is asked for, and an SSD that holds it all: hits come up from the disk, and the tokens
are right; also after the daemon was killed and the pool's file is gone.

Method: the pool holds a third of the prompts' blocks. Every prefix is stored once, then asked anew in the same order,
so that each has left the pool before it is wanted again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rig import compare, models
from rig.baseline import Baseline, baseline
from rig.daemon import Daemon
from rig.engine import Answer, Duration, Engine, EngineConfig
from rig.process import wait_until
from rig.scenario import ask, ask_anew, join
from rig.workload import Wave, Workload, settle

CONFIG = EngineConfig(models.LLAMA, max_batched_tokens=512)
WORKLOAD = Workload(seed=6, prefixes=20, tails=2)
PREFIXES = range(16)
# 112 blocks of 128 KiB, where the prompts of sixteen prefixes have 320. Stores may reserve a quarter of it, and one
# step fills 16.
POOL_BYTES = 14 << 20
SSD_BYTES = 256 << 20
CACHED_BY = "vllm:prompt_tokens_cached_by_source:"


@dataclass
class Bench:
    base: Baseline
    daemon: Daemon
    engine: Engine

    def tier(self, name: str) -> float:
        return self.daemon.metrics()[f"forebay_tier_{name}"]

    def ask_all_anew(self) -> list[Answer]:
        answers = []
        for prefix in PREFIXES:
            answers += ask_anew(self.engine, self.base, [self.base.workload.about(prefix)])
            self.let_the_disk_follow()
        return answers

    def let_the_disk_follow(self) -> None:
        """A disk that is slower than the engine would lose blocks that leave the pool before they are written."""
        settle(self.engine)
        wait_until(
            "nothing waits to be written", lambda: self.tier("waiting_blocks") + self.tier("storing_bytes") == 0, 30
        )

    def wait_until_written(self) -> None:
        """The write-through has caught up."""
        settle(self.engine)
        seen = [-1.0]

        def is_quiet() -> bool:
            seen.append(self.tier("stored_blocks_total"))
            return seen[-1] == seen[-2] > 0

        wait_until("all is written through", is_quiet, 30)

    def hits(self, tier: str) -> float:
        return self.daemon.metrics()[f'forebay_lookup_hits_by_tier_total{{tier="{tier}"}}']

    def promoted_blocks(self) -> float:
        return self.daemon.metrics()['forebay_tier_promotions_total{tier="ssd",outcome="ready"}']


def filled(
    start_engine: Callable[..., Engine], start_daemon: Callable[..., Daemon], admission: str, name: str
) -> Bench:
    """Every prefix was asked for once."""
    base = baseline(CONFIG, WORKLOAD)
    daemon = start_daemon(
        capacity_bytes=POOL_BYTES,
        unit_bytes=2 << 20,
        ssd_bytes=SSD_BYTES,
        ssd_admission=admission,
        # Hits are counted here and not time, and a busy machine may starve the daemon for seconds.
        ssd_load_deadline_ms=20_000,
    )
    engine = start_engine(CONFIG, daemon.patient_connector(), name)
    join(daemon, engine)
    bench = Bench(base, daemon, engine)
    for prefix in PREFIXES:
        ask(engine, base, [base.workload.about(prefix)])
        bench.let_the_disk_follow()
    return bench


@pytest.fixture(scope="module")
def bench(start_engine: Callable[..., Engine], start_daemon: Callable[..., Daemon]) -> Bench:
    bench = filled(start_engine, start_daemon, "all", "engine")
    bench.wait_until_written()
    return bench


def test_by_default_what_comes_back_is_written_and_hit_from_then_on(
    start_engine: Callable[..., Engine], start_daemon: Callable[..., Daemon]
) -> None:
    bench = filled(start_engine, start_daemon, "second_sighting", "second-sighting")
    bench.ask_all_anew()
    bench.wait_until_written()
    before = bench.promoted_blocks()
    compare.enough_hits(bench.ask_all_anew(), CONFIG.block_size, share=0.9)
    assert bench.promoted_blocks() - before > 150, "the pool had them"
    bench.engine.kill()
    bench.daemon.kill()


def test_what_left_the_pool_is_hit_on_the_disk(bench: Bench, report: Callable[[Engine], Duration]) -> None:
    before = bench.promoted_blocks()
    compare.enough_hits(bench.ask_all_anew(), CONFIG.block_size, share=0.9)
    assert bench.promoted_blocks() - before > 200, "the pool had them"
    report(bench.engine)


def test_vllm_and_the_daemon_count_the_same_hits_of_the_disk(bench: Bench) -> None:
    """One request at a time: of two that wait for the same blocks, the first that has them has the disk's hits."""
    before, of_pool, of_disk, by_vllm = (
        bench.promoted_blocks(),
        bench.hits("pool"),
        bench.hits("ssd"),
        bench.engine.metrics(),
    )
    for prefix in PREFIXES:
        for request in bench.base.workload.about(prefix).requests:
            ask_anew(bench.engine, bench.base, [Wave(request.id, (request,))])
    promoted, metrics = bench.promoted_blocks() - before, bench.engine.metrics()
    of_pool, of_disk = bench.hits("pool") - of_pool, bench.hits("ssd") - of_disk
    assert promoted == of_disk > 200
    assert bench.hits("ssd") + bench.hits("pool") == bench.daemon.metrics()["forebay_lookup_hits_total"]
    tokens = {source: metrics[CACHED_BY + source] - by_vllm[CACHED_BY + source] for source in ("disk", "host")}
    assert tokens == {"disk": of_disk * CONFIG.block_size, "host": of_pool * CONFIG.block_size}


def test_the_disk_serves_what_a_killed_daemon_and_a_lost_pool_had(bench: Bench) -> None:
    bench.wait_until_written()
    bench.daemon.kill()
    bench.daemon.drop_pool()
    bench.daemon.start()
    join(bench.daemon, bench.engine)
    before = bench.promoted_blocks()
    compare.enough_hits(bench.ask_all_anew(), CONFIG.block_size, share=0.9)
    assert bench.promoted_blocks() - before > 200
    assert bench.daemon.audit() > 0


def test_a_daemon_killed_amid_promotions_costs_no_token(bench: Bench) -> None:
    for prefix in (0, 5, 10):
        bench.engine.reset_prefix_cache()
        bench.engine.poison()
        bench.engine.begin(bench.base.workload.about(prefix).requests)
        bench.daemon.kill()
        bench.daemon.start()
        answers = {answer.id: answer for answer in bench.engine.finish()}
        compare.same_tokens(bench.base.answers, answers)
    join(bench.daemon, bench.engine)
    compare.enough_hits(bench.ask_all_anew(), CONFIG.block_size, share=0.9)


def test_a_disk_that_is_gone_costs_hits_and_no_token(bench: Bench) -> None:
    bench.daemon.kill()
    bench.daemon.ssd_path.unlink()
    bench.daemon.start()
    join(bench.daemon, bench.engine)
    bench.ask_all_anew()
    bench.engine.kill()
    bench.daemon.wait_for("nothing is held", lambda seen: seen["pinned_bytes"] == 0 and seen["fenced_bytes"] == 0)
    assert bench.daemon.audit() > 0
