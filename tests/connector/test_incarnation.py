"""Which start of an engine its processes say they are."""

from __future__ import annotations

import pickle

from forebay.vllm import compat
from forebay.vllm.settings import incarnation
from harness import Shape, vllm_config
from vllm.config import VllmConfig


def named(config: VllmConfig) -> bytes:
    completed, _ = compat.complete(config, None)
    assert completed.kv_transfer_config is not None
    return incarnation(completed.kv_transfer_config.kv_connector_extra_config)


def test_all_processes_of_a_start_name_it_alike_and_another_start_otherwise() -> None:
    ours = vllm_config(Shape(engine_id="fixed"))
    # As vLLM hands it from the front end to the scheduler and to each worker.
    scheduler, worker = (pickle.loads(pickle.dumps(ours)) for _ in range(2))
    assert named(scheduler) == named(worker) != named(vllm_config(Shape(engine_id="fixed")))
    assert len(named(ours)) == 16
