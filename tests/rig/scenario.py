"""Steps that several tests share: put waves to an engine and judge the answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rig import compare
from rig.baseline import Baseline
from rig.daemon import Daemon
from rig.engine import Answer, Engine
from rig.process import wait_until
from rig.workload import Wave, run, settle

PREEMPTIONS = "vllm:num_preemptions"
SECONDS = 60


def external_hits(engine: Engine) -> float:
    """Prompt tokens that came from the pool since the engine's start. Requests of one wave also hit each other's."""
    return engine.metrics()["vllm:external_prefix_cache_hits"]


def join(daemon: Daemon, *engines: Engine) -> None:
    """Waits until the daemon serves these engines: ranks attached, namespace open, slots at hand.

    What comes earlier is answered as well, but need not be stored.
    """

    def sessions(engines: Sequence[Engine]) -> list[dict[str, Any]]:
        by_id = {session["engine_id"]: session for session in daemon.inspect()["sessions"] if session["is_connected"]}
        return [by_id[engine.id] for engine in engines if engine.id in by_id]

    def are_attached() -> bool:
        return sum(session["attached_ranks"] == session["ranks"] for session in sessions(engines)) == len(engines)

    def has_slots(engine: Engine) -> bool:
        settle(engine)  # the first request opens the namespace; an engine without requests has no slots for long
        return any(session["reserved_blocks"] > 0 for session in sessions([engine]))

    for engine in engines:
        engine.ready()
    wait_until("all ranks attach", are_attached, SECONDS)
    for engine in engines:
        wait_until(f"{engine.id} has slots", partial(has_slots, engine), SECONDS)


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
