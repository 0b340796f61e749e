"""Steps that several tests share: put waves to an engine and judge the answers at once."""

from __future__ import annotations

from collections.abc import Sequence

from rig import compare
from rig.baseline import Baseline
from rig.engine import Answer, Engine
from rig.process import wait_until
from rig.workload import Wave, run, settle

PREEMPTIONS = "vllm:num_preemptions"


def external_hits(engine: Engine) -> float:
    """Prompt tokens that came from the pool since the engine's start. Requests of one wave also hit each other's."""
    return engine.metrics()["vllm:external_prefix_cache_hits"]


def ask(engine: Engine, base: Baseline, waves: Sequence[Wave]) -> list[Answer]:
    """The answers to the waves; each is finished and equal to the baseline's."""
    answers = run(engine, waves)
    compare.same_tokens(base.answers, answers)
    return list(answers.values())


def forget(engine: Engine) -> None:
    """The engine forgets its own prefixes and its KV memory is overwritten: only what is loaded anew can be right."""
    engine.reset_prefix_cache()
    engine.poison()


def ask_anew(engine: Engine, base: Baseline, waves: Sequence[Wave]) -> list[Answer]:
    """As `ask`, but nothing the engine itself kept can serve."""
    forget(engine)
    return ask(engine, base, waves)


def store(engine: Engine, base: Baseline, waves: Sequence[Wave]) -> list[Answer]:
    """As `ask`, then lets the stores end."""
    answers = ask(engine, base, waves)
    settle(engine)
    return answers


def wait_for_hits(engine: Engine, base: Baseline, wave: Wave, seconds: float = 30) -> list[Answer]:
    """Asks anew until something of the wave comes from the pool, as it does soon after an engine got its daemon back.

    Every answer on the way is judged as well.
    """

    def probe() -> list[Answer] | None:
        before = external_hits(engine)
        answers = ask_anew(engine, base, [wave])
        return answers if external_hits(engine) > before else None

    return wait_until(f"hits in `{wave.name}`", probe, seconds)
