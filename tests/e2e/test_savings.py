"""The time that loads saved, as the daemon tells it, against the time in which the same engine computes such prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rig import models
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig, Request
from rig.models import FIRST_PLAIN_TOKEN, VOCABULARY
from rig.scenario import external_hits, forget, join
from rig.workload import settle

CONFIG = EngineConfig(models.LLAMA, block_size=128)
PROMPT_TOKENS = 1600
HITS, NEW = range(6), range(10, 14)


@pytest.mark.parametrize("max_tokens", [1, 16])
def test_no_more_time_is_claimed_than_the_fastest_computing_takes(
    tmp_path: Path, start_daemon: Callable[..., Daemon], max_tokens: int
) -> None:
    daemon = start_daemon()
    with Engine(CONFIG, tmp_path, connector=daemon.patient_connector(), name="cold") as engine:
        join(daemon, engine)
        for at in HITS:
            ask(engine, at, max_tokens)
        settle(engine)
    with Engine(CONFIG, tmp_path, connector=daemon.patient_connector(), name="warm") as engine:
        join(daemon, engine)
        for at in HITS:
            ask(engine, at, max_tokens)
        saved = daemon.wait_for("it is told", lambda seen: seen["saved_tokens"] == external_hits(engine) > 0)
        assert saved["saved_prefill_us"] == 0, "it has computed nothing but remainders and answers"
        computed = min(ask(engine, at, max_tokens) for at in NEW)
        forget(engine)
        ask(engine, HITS[0], max_tokens)
        saved = daemon.wait_for("it is told", lambda seen: seen["saved_tokens"] == external_hits(engine))
    claimed = saved["saved_prefill_us"] / 1e6 / saved["saved_tokens"]
    assert 0 < claimed <= computed / PROMPT_TOKENS


def ask(engine: Engine, at: int, max_tokens: int) -> float:
    """Puts one prompt to the engine; the seconds until its last answer."""
    chance = random.Random(at)
    tokens = tuple(chance.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(PROMPT_TOKENS))
    began = time.monotonic()
    engine.generate([Request(f"prompt-{at}-{began}", tokens, max_tokens=max_tokens)])
    return time.monotonic() - began
