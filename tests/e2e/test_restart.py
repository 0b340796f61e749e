"""An engine that is started anew with the same command finds what it stored."""

from __future__ import annotations

from collections.abc import Callable

from rig import compare, models
from rig.baseline import baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.scenario import ask, join, store
from rig.workload import Workload

CONFIG = EngineConfig(models.LLAMA)


def test_a_restarted_engine_hits_what_it_stored(
    start_daemon: Callable[..., Daemon], start_engine: Callable[..., Engine]
) -> None:
    base, daemon = baseline(CONFIG, Workload()), start_daemon()
    alone = base.workload.alone()
    with start_engine(CONFIG, daemon.patient_connector(), "before") as before:
        join(daemon, before)
        store(before, base, alone)
        told = before.fields()
    with start_engine(CONFIG, daemon.patient_connector(), "after") as after:
        join(daemon, after)
        compare.enough_hits(ask(after, base, alone), CONFIG.block_size, share=1.0)
        assert after.fields() == told
