"""An engine with little room and many requests at once: who waits for a turn finds its hits when the turn comes."""

from __future__ import annotations

from collections.abc import Callable

from rig import models
from rig.baseline import baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.scenario import ask, ask_anew, join
from rig.workload import Workload, settle

# About seven requests fit at once, and each runs for a while: the last wait for seconds.
CONFIG = EngineConfig(models.LLAMA, blocks=60, max_model_len=1024, max_batched_tokens=256, max_requests=8)
WORKLOAD = Workload(seed=5, prefixes=20, tails=4, prefix_tokens=200, tail_tokens=40, max_tokens=40)


def test_no_hit_is_lost_while_the_batch_is_full(
    start_engine: Callable[..., Engine], start_daemon: Callable[..., Daemon]
) -> None:
    base = baseline(CONFIG, WORKLOAD)
    daemon = start_daemon()
    # Shorter than the wait for a turn by far, and longer than any answer takes while vLLM asks for it.
    engine = start_engine(CONFIG, daemon.connector(lookup_deadline_ms=250.0, restock_ms=20_000.0), "engine")
    join(daemon, engine)
    ask(engine, base, [base.workload.together()])
    settle(engine)
    before = engine.metrics()
    answers = ask_anew(engine, base, [base.workload.together()])
    computed = sum(answer.prompt_tokens - answer.hit_tokens for answer in answers)
    # Of each prompt all whole blocks are there.
    assert computed == sum(answer.prompt_tokens % CONFIG.block_size for answer in answers)
    assert engine.metrics()["forebay:late_lookups"] == before["forebay:late_lookups"]
    daemon.wait_for("no lease is left", lambda seen: all(s["leased_blocks"] == 0 for s in seen["sessions"]))
