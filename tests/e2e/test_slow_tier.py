"""A store that is slower than the engine: nobody waits for it longer than a share of computing, and what it brings late
serves the next who asks.

Method: as in `test_shared`, but host B may load so little a second that a prompt takes seconds, where computing it takes
a fraction of one; deadlines are far away. Only that the engine knows its own speed can end the wait.
"""

from __future__ import annotations

from collections.abc import Callable

from rig import models
from rig.baseline import baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.process import wait_until
from rig.scenario import ask, ask_anew, join
from rig.stores import Directory
from rig.workload import Workload, settle

CONFIG = EngineConfig(models.LLAMA, max_batched_tokens=512)
WORKLOAD = Workload(seed=6, prefixes=20, tails=2)
STORED, COLD = range(3), 19
# Blocks have 128 KiB, prompts about twenty of them.
SLOW = {"load_bytes_per_second": "1MiB", "load_deadline_ms": 60_000}


def test_a_tier_slower_than_the_engine_is_not_waited_for(
    start_engine: Callable[..., Engine], start_daemon: Callable[..., Daemon]
) -> None:
    base = baseline(CONFIG, WORKLOAD)
    waves = [base.workload.about(prefix) for prefix in STORED]
    with Directory() as store:
        daemon = start_daemon(tiers=store.sections)
        writer = start_engine(CONFIG, daemon.patient_connector(), "host-a")
        join(daemon, writer)
        ask(writer, base, waves)
        settle(writer)
        seen = daemon.metrics()
        blocks = seen["forebay_stored_blocks_total"]
        wait_until("all is written", lambda: daemon.metrics()["forebay_tier_stored_blocks_total"] >= blocks > 0, 60)
        writer.kill()
        daemon.kill()

        daemon = start_daemon(tiers={"tier.fs": store.sections["tier.fs"] | SLOW})
        reader = start_engine(CONFIG, daemon.connector(lookup_deadline_ms=60_000.0), "host-b")
        join(daemon, reader)
        ask(reader, base, [base.workload.about(COLD)])  # tells the engine's speed
        answers = [answer for wave in waves for answer in ask_anew(reader, base, [wave])]
        counted = reader.metrics()
        assert counted["forebay:slow_promotions"] >= len(STORED), [answer.hit_tokens for answer in answers]
        assert counted.get("forebay:late_lookups", 0) == 0

        # What nobody waited for comes up all the same.
        def are_hit() -> bool:
            hits = sum(answer.hit_tokens for answer in ask_anew(reader, base, waves))
            return hits > 0.9 * sum(answer.prompt_tokens for answer in answers)

        wait_until("all has come up", are_hit, 60)
        assert daemon.audit() > 0
