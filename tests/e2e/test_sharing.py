"""Several engines on one daemon: they share what is the same, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rig import compare, models
from rig.baseline import Baseline, baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.scenario import ask, ask_anew, forget, join, store
from rig.workload import Workload

CONFIG = EngineConfig(models.LLAMA)
OTHER = EngineConfig(models.OTHER_LLAMA)


@dataclass
class Fleet:
    base: Baseline
    first: Engine
    second: Engine
    daemon: Daemon


@pytest.fixture(scope="module")
def fleet(start_daemon: Callable[..., Daemon], start_engine: Callable[..., Engine]) -> Fleet:
    base = baseline(CONFIG, Workload())
    daemon = start_daemon()
    first, second = (start_engine(CONFIG, daemon.patient_connector(), name) for name in ("first", "second"))
    join(daemon, first, second)
    store(first, base, base.waves())
    return Fleet(base, first, second, daemon)


def test_one_engine_hits_what_another_stored(fleet: Fleet) -> None:
    answers = ask(fleet.second, fleet.base, fleet.base.waves())
    compare.enough_hits(answers, CONFIG.block_size, share=0.95)


def test_two_engines_load_the_same_blocks_at_the_same_time(fleet: Fleet) -> None:
    wave = fleet.base.workload.together()
    for engine in (fleet.first, fleet.second):
        forget(engine)
    for engine in (fleet.first, fleet.second):
        engine.begin(wave.requests)
    for engine in (fleet.first, fleet.second):
        answers = engine.finish()
        compare.same_tokens(fleet.base.answers, {answer.id: answer for answer in answers})
        compare.enough_hits(answers, CONFIG.block_size, share=0.95)


def test_another_model_of_the_same_shape_gets_none_of_it(fleet: Fleet, start_engine: Callable[..., Engine]) -> None:
    base = baseline(OTHER, Workload())
    with start_engine(OTHER, fleet.daemon.patient_connector(), "other-model") as other:
        join(fleet.daemon, other)
        lone = store(other, base, base.workload.alone())
        assert sum(answer.hit_tokens for answer in lone) == 0
        again = ask_anew(other, base, base.workload.alone())
        compare.enough_hits(again, OTHER.block_size, share=1.0)


@pytest.mark.parametrize("way", ["sleep", "reset"])
def test_an_engine_that_resets_forgets_alone(fleet: Fleet, way: str) -> None:
    if way == "sleep":
        fleet.first.sleep_and_wake()
    else:
        fleet.first.reset_prefix_cache(reset_connector=True)
    fleet.first.poison()
    alone = fleet.base.workload.alone()
    lone = store(fleet.first, fleet.base, alone)
    assert sum(answer.hit_tokens for answer in lone) == 0, "KV of before the reset was served"
    compare.enough_hits(ask_anew(fleet.second, fleet.base, alone), CONFIG.block_size, share=1.0)
    compare.enough_hits(ask_anew(fleet.first, fleet.base, alone), CONFIG.block_size, share=1.0)
