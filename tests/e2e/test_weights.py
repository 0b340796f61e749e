"""Weights that change in the memory of a running engine: no KV of the old ones is served, none of the new ones misnamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import compare, models
from rig.baseline import baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.scenario import ask_anew, forget, join, store
from rig.workload import Workload, run, settle

CONFIG = EngineConfig(models.LLAMA)
OTHER = EngineConfig(models.OTHER_LLAMA)


@pytest.fixture(scope="module")
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon()


@pytest.fixture(scope="module")
def engine(daemon: Daemon, start_engine: Callable[..., Engine]) -> Engine:
    engine = start_engine(CONFIG, daemon.patient_connector(), "learner")
    join(daemon, engine)
    return engine


def test_pages_are_probed_and_two_engines_agree(daemon: Daemon, engine: Engine) -> None:
    probed = engine.fields()["probe"]
    assert "CPUAttentionBackendImpl:" in probed and "unprobed" not in probed
    with Engine(CONFIG, engine.run_dir, connector=daemon.patient_connector(), name="twin") as twin:
        assert twin.fields() == engine.fields()


@pytest.mark.parametrize("is_called", [True, False], ids=["by a call", "behind the engine's back"])
def test_kv_of_weights_written_in_place_is_never_mixed_with_kv_of_the_old(engine: Engine, is_called: bool) -> None:
    base = baseline(CONFIG, Workload())
    alone = base.workload.alone()
    store(engine, base, alone)
    engine.scale_embeddings(2.0, is_called=is_called)
    forget(engine)
    answers = list(run(engine, alone).values())
    settle(engine)
    assert sum(answer.hit_tokens for answer in answers) == 0, "KV of the old weights was served"
    engine.scale_embeddings(0.5, is_called=is_called)
    # The weights it began with: what was stored of them is right again, and nothing else is.
    compare.enough_hits(ask_anew(engine, base, alone), CONFIG.block_size, share=1.0)


def test_kv_of_reloaded_weights_is_never_mixed_with_kv_of_the_old(engine: Engine) -> None:
    old, new = baseline(CONFIG, Workload()), baseline(OTHER, Workload())
    alone = old.workload.alone()
    store(engine, old, alone)
    engine.reload_weights(models.OTHER_LLAMA)
    engine.reset_prefix_cache()
    engine.poison()
    answers = store(engine, new, alone)
    assert sum(answer.hit_tokens for answer in answers) == 0, "KV of the old weights was served"
    compare.enough_hits(ask_anew(engine, new, alone), CONFIG.block_size, share=1.0)
    engine.reload_weights(models.LLAMA)
    answers = ask_anew(engine, old, alone)
    assert sum(answer.hit_tokens for answer in answers) == 0, "KV of the new weights was served"
