"""Whatever comes out of the pool, the tokens are those of an engine that computed everything.

Method, for each kind of model: a *cold* engine runs the waves on an empty pool, forgets all it has (its KV memory is
overwritten) and runs a wave again; it is killed; a *warm* engine in a new process runs all waves; the daemon is
killed with SIGKILL and started on the same pool, and the warm engine, its memory overwritten, runs a wave again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from rig import compare, models
from rig.baseline import Baseline, baseline
from rig.daemon import Daemon
from rig.engine import Answer, Duration, Engine, EngineConfig
from rig.scenario import ask_anew, external_hits, forget, join, wait_for_hits
from rig.workload import Workload, run, settle

CASES = {
    "llama": EngineConfig(models.LLAMA),
    "llama, prefix caching off": EngineConfig(models.LLAMA, prefix_caching=False),
    "llama, two ranks": EngineConfig(models.LLAMA, tensor_parallel=2),
    "sliding windows and full attention": EngineConfig(models.HYBRID),
}


@dataclass
class Course:
    """What happened in one case; the tests judge it."""

    config: EngineConfig
    base: Baseline
    daemon: Daemon
    warm_engine: Engine
    cold: dict[str, Answer]
    cold_again: dict[str, Answer]
    warm: dict[str, Answer]
    warm_external_hits: float


@pytest.fixture(scope="module", params=CASES)
def course(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    config = CASES[request.param]
    base = baseline(config, Workload())
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon()).start()
        run_dir = tmp_path_factory.mktemp("course")
        with _engine(config, daemon, run_dir, "cold") as engine:
            join(daemon, engine)
            cold = run(engine, base.waves())
            settle(engine)
            forget(engine)
            cold_again = run(engine, [base.workload.together()])
            settle(engine)
        warm_engine = stack.enter_context(_engine(config, daemon, run_dir, "warm"))
        join(daemon, warm_engine)
        warm = run(warm_engine, base.waves())
        yield Course(config, base, daemon, warm_engine, cold, cold_again, warm, external_hits(warm_engine))


def test_an_engine_that_fills_the_pool_answers_as_without_it(course: Course) -> None:
    compare.same_tokens(course.base.answers, course.cold)


def test_an_engine_that_lost_its_memory_loads_what_it_stored(course: Course) -> None:
    compare.same_tokens(course.base.answers, course.cold_again)
    compare.enough_hits(course.cold_again.values(), course.config.block_size, share=0.95)


def test_a_new_engine_answers_from_the_pool_as_if_it_had_computed(course: Course) -> None:
    compare.same_tokens(course.base.answers, course.warm)
    compare.enough_hits(course.warm.values(), course.config.block_size, share=0.95)


def test_every_whole_block_of_a_lone_prompt_is_found_by_a_new_engine(course: Course) -> None:
    alone = [course.warm[request.id] for wave in course.base.workload.alone() for request in wave.requests]
    compare.enough_hits(alone, course.config.block_size, share=1.0)
    assert course.warm_external_hits >= sum(answer.hit_tokens for answer in alone)


def test_a_killed_daemon_comes_back_with_every_block(course: Course, report: Callable[[Engine], Duration]) -> None:
    course.daemon.kill()
    course.daemon.start()
    wait_for_hits(course.warm_engine, course.base, course.base.workload.alone()[0])
    answers = ask_anew(course.warm_engine, course.base, [course.base.workload.together()])
    compare.enough_hits(answers, course.config.block_size, share=0.95)
    report(course.warm_engine)


def test_nothing_stays_held_when_the_engine_is_gone(course: Course) -> None:
    course.warm_engine.kill()
    course.daemon.wait_for("nothing is held", lambda seen: seen["pinned_bytes"] == 0 and seen["fenced_bytes"] == 0)
    assert course.daemon.audit() > 0


def _engine(config: EngineConfig, daemon: Daemon, run_dir: Path, name: str) -> Engine:
    return Engine(config, run_dir, connector=daemon.patient_connector(), name=name)
