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
# Shorter than the wait for a turn, and longer than any answer takes while vLLM asks for it, on a busy machine too.
DEADLINE_MS = 1000.0
WORKLOAD = Workload(seed=5, prefixes=20, tails=4, prefix_tokens=200, tail_tokens=40, max_tokens=40)


def test_no_hit_is_lost_while_the_batch_is_full(
    start_engine: Callable[..., Engine], start_daemon: Callable[..., Daemon]
) -> None:
    base = baseline(CONFIG, WORKLOAD)
    daemon = start_daemon()
    engine = start_engine(CONFIG, daemon.connector(lookup_deadline_ms=DEADLINE_MS, restock_ms=20_000.0), "engine")
    join(daemon, engine)
    ask(engine, base, [base.workload.together()])
    settle(engine)
    before = engine.metrics()
    answers = ask_anew(engine, base, [base.workload.together()])
    assert max(answer.ttft_ms for answer in answers) > DEADLINE_MS, "nobody waited long enough to show anything"
    computed = sum(answer.prompt_tokens - answer.hit_tokens for answer in answers)
    # Of each prompt all whole blocks are there.
    assert computed == sum(answer.prompt_tokens % CONFIG.block_size for answer in answers)
    assert engine.metrics()["forebay:late_lookups"] == before["forebay:late_lookups"]
    daemon.wait_for("no lease is left", lambda seen: all(s["leased_blocks"] == 0 for s in seen["sessions"]))
