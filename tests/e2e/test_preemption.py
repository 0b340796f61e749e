"""An engine that is short of blocks preempts requests; what it stored and loaded around that changes no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rig import compare, models
from rig.baseline import baseline
from rig.daemon import Daemon
from rig.engine import Duration, Engine, EngineConfig
from rig.scenario import PREEMPTIONS, ask, external_hits, join, store
from rig.workload import Workload

CONFIG = EngineConfig(models.LLAMA, blocks=48, max_model_len=1024)
WORKLOAD = Workload(seed=2, prefixes=2, tails=4, max_tokens=40)


def test_preempted_requests_get_the_same_tokens(
    tmp_path: Path, start_daemon: Callable[..., Daemon], report: Callable[[Engine], Duration]
) -> None:
    base = baseline(CONFIG, WORKLOAD)
    daemon = start_daemon()
    with Engine(CONFIG, tmp_path, connector=daemon.patient_connector(), name="cold") as engine:
        join(daemon, engine)
        store(engine, base, [base.workload.together()])
        compare.enough_preemptions(engine.metrics()[PREEMPTIONS], 3)
    with Engine(CONFIG, tmp_path, connector=daemon.patient_connector(), name="warm") as engine:
        join(daemon, engine)
        answers = ask(engine, base, [base.workload.together()])
        compare.enough_preemptions(engine.metrics()[PREEMPTIONS], 3)
        compare.enough_hits(answers, CONFIG.block_size, share=0.8)
        assert external_hits(engine) > sum(answer.prompt_tokens for answer in answers) / 4
        report(engine)
        daemon.wait_for("no lease is left", lambda seen: all(s["leased_blocks"] == 0 for s in seen["sessions"]))
