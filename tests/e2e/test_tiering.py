"""The real vLLM on its own tiering with Forebay's pool below: the same tokens, over restarts of either side.

vLLM has the copies between device and host tier for CUDA and XPU alone; `rig.host_tier` has them for the CPU, and is all that
is not vLLM's or Forebay's here. Method: as in `test_restart.py` and `test_faults_daemon.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rig import compare, models
from rig.baseline import baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.host_tier import NAMED
from rig.scenario import ask, ask_anew, external_hits, join, store
from rig.workload import Workload

CONFIG = EngineConfig(models.LLAMA)
HOST_BYTES = 64 << 20


def below(daemon: Daemon, **options: Any) -> dict[str, Any]:
    connector = daemon.patient_connector()
    extra = connector["kv_connector_extra_config"] | {"cpu_bytes_to_use": HOST_BYTES} | NAMED | options
    return connector | {"kv_connector": "ForebayTieringConnector", "kv_connector_extra_config": extra}


@contextmanager
def started(engine: Engine) -> Iterator[Engine]:
    """vLLM leaves the memory of its host tier behind where it is killed."""
    try:
        with engine:
            yield engine.ready()
    finally:
        for path in Path("/dev/shm").glob(f"vllm_offload_{getattr(engine, 'id', None)}*"):
            path.unlink()


def test_workers_of_two_ranks_and_a_restart_share_the_rows(
    start_daemon: Callable[..., Daemon], start_engine: Callable[..., Engine]
) -> None:
    config = replace(CONFIG, tensor_parallel=2)
    base, daemon = baseline(config, Workload()), start_daemon()
    alone = base.workload.alone()
    told = []
    for name in ("before", "after"):
        with started(start_engine(config, below(daemon), name)) as engine:
            join(daemon, engine)
            answers = store(engine, base, alone)
            told.append(engine.fields())
    compare.enough_hits(answers, config.block_size, share=1.0)
    assert told[0] == told[1]
    assert daemon.audit()


def test_restarts_kills_and_resets_show_in_no_token(
    start_daemon: Callable[..., Daemon], start_engine: Callable[..., Engine]
) -> None:
    base, daemon = baseline(CONFIG, Workload()), start_daemon()
    alone = base.workload.alone()
    with started(start_engine(CONFIG, below(daemon), "before")) as before:
        join(daemon, before)
        store(before, base, alone)
    with started(start_engine(CONFIG, below(daemon, lookup_deadline_ms=1000.0), "after")) as after:
        join(daemon, after)
        compare.enough_hits(ask(after, base, alone), CONFIG.block_size, share=1.0)
        assert after.metrics()["forebay:is_ready"] == 1
        daemon.freeze()
        ask_anew(after, base, [base.workload.about(0)])
        daemon.thaw()
        daemon.kill()
        ask_anew(after, base, [base.workload.about(1)])
        daemon.start()
        join(daemon, after)
        after.reset_prefix_cache(reset_connector=True)
        hits = external_hits(after)
        ask(after, base, alone)
        assert external_hits(after) == hits, "after a reset nothing of before is found"
