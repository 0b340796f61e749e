"""Multi-head latent attention: the bytes that are loaded are the bytes that were computed.

Tokens prove nothing here: vLLM's CPU kernels for latent attention answer otherwise in company than alone (the guard
of `baseline` says so), so each block that came from the pool is compared, byte for byte by digest, with the block
that the cold engine computed for the same prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from rig import compare, models
from rig.daemon import Daemon
from rig.engine import Answer, Engine, EngineConfig
from rig.scenario import join
from rig.workload import Workload, settle

# The head size of 576 forces blocks of 16 tokens. On processors with AMX vLLM would take a kernel that knows no
# float32.
CONFIG = EngineConfig(models.MLA, attention="CPU_MLA", block_size=16)
WORKLOAD = Workload(prefixes=4, tails=1)


@dataclass
class Pages:
    computed: list[Answer]
    loaded: list[Answer]
    probed: set[str]  # what the two engines say of how they write a page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, start_daemon: Callable[..., Daemon]) -> Iterator[Pages]:
    daemon = start_daemon()
    run_dir = tmp_path_factory.mktemp("mla")
    with Engine(CONFIG, run_dir, connector=daemon.patient_connector(), name="cold") as engine:
        join(daemon, engine)
        probed = {engine.fields()["probe"]}
        computed = _each_alone(engine)
    with Engine(CONFIG, run_dir, connector=daemon.patient_connector(), name="warm") as engine:
        join(daemon, engine)
        probed.add(engine.fields()["probe"])
        loaded = _each_alone(engine)
    yield Pages(computed, loaded, probed)


def test_how_latents_are_written_is_probed(pages: Pages) -> None:
    (probed,) = pages.probed
    assert "MLA" in probed and "unprobed" not in probed


def test_loaded_latents_are_the_bytes_that_were_computed(pages: Pages) -> None:
    for computed, loaded in zip(pages.computed, pages.loaded, strict=True):
        compare.same_pages(computed, loaded, CONFIG.block_size)


def test_every_whole_block_of_latents_is_found_by_a_new_engine(pages: Pages) -> None:
    assert sum(answer.hit_tokens for answer in pages.computed) == 0, (
        "the cold engine had hits: the prompts are not apart"
    )
    compare.enough_hits(pages.loaded, CONFIG.block_size, share=1.0)


def test_another_prompt_has_other_latents(pages: Pages) -> None:
    blocks = [
        digest for answer in pages.computed for digest in answer.pages[0][: answer.prompt_tokens // CONFIG.block_size]
    ]
    assert len(set(blocks)) == len(blocks), (
        "two blocks of different prompts have the same bytes: their digests prove nothing"
    )


def _each_alone(engine: Engine) -> list[Answer]:
    answers = [engine.generate(wave.requests, pages=True)[0] for wave in WORKLOAD.alone()]
    settle(engine)
    return answers
