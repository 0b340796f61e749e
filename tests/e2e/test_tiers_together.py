"""Each hit has one source, with an SSD and a shared store below the pool: the daemon's counts by tier add up to all
hits, and vLLM's counts by source are the same.

Method: half of the prefixes are stored while the store is the only tier, the other half with the SSD beside it. Then
the pool is lost. The first request about a prefix hits on a tier, the second in the pool.
"""

from __future__ import annotations

from collections.abc import Callable

from rig import models
from rig.baseline import baseline
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig
from rig.process import wait_until
from rig.scenario import ask, ask_anew, join
from rig.stores import Valkey
from rig.workload import Wave, Workload, settle

CONFIG = EngineConfig(models.LLAMA, max_batched_tokens=512)
WORKLOAD = Workload(seed=6, prefixes=20, tails=2)
PREFIXES = range(12)
IN_STORE_ALONE, ON_DISK_TOO = PREFIXES[:6], PREFIXES[6:]
BY_TIER = "forebay_lookup_hits_by_tier_total"
BY_SOURCE = "vllm:prompt_tokens_cached_by_source:"
SOURCES = {"pool": "host", "ssd": "disk", "redis": "external_unspecified"}


def test_hits_by_tier_add_up_and_vllm_counts_the_same(
    start_engine: Callable[..., Engine], start_daemon: Callable[..., Daemon]
) -> None:
    base = baseline(CONFIG, WORKLOAD)
    with Valkey().start() as store:
        # Hits are counted here and not time, and a busy machine may starve the daemon for seconds.
        sections = {name: keys | {"load_deadline_ms": 20_000} for name, keys in store.sections.items()}
        daemon = start_daemon(tiers=sections, ssd_admission="all", ssd_load_deadline_ms=20_000)
        engine = start_engine(CONFIG, daemon.patient_connector(), "engine")
        for prefixes, tiers in ((IN_STORE_ALONE, ["redis"]), (ON_DISK_TOO, ["ssd", "redis"])):
            join(daemon, engine)
            ask(engine, base, [base.workload.about(prefix) for prefix in prefixes])
            settle(engine)
            wait_until("all is on the tiers", lambda tiers=tiers: _are_all_stored(daemon, tiers), 60)
            daemon.kill()
            daemon.drop_pool()
            daemon.ssd_bytes = 256 << 20
            daemon.start()
        join(daemon, engine)
        hits, tokens = _hits(daemon), _tokens(engine)
        for prefix in PREFIXES:
            for request in base.workload.about(prefix).requests:
                ask_anew(engine, base, [Wave(request.id, (request,))])
                settle(engine)
        after = _hits(daemon)
        assert sum(after.values()) == daemon.metrics()["forebay_lookup_hits_total"]
        new = {tier: after[tier] - hits[tier] for tier in SOURCES}
        assert all(count >= 6 * 16 for count in new.values()), new
        counted = {source: count - tokens[source] for source, count in _tokens(engine).items()}
        assert counted == {SOURCES[tier]: count * CONFIG.block_size for tier, count in new.items()}
        seen = daemon.inspect()
        assert {tier["name"]: tier["hits"] for tier in seen["tiers"]} == {"ssd": after["ssd"], "redis": after["redis"]}


def _are_all_stored(daemon: Daemon, tiers: list[str]) -> bool:
    seen = daemon.metrics()
    stored = [seen[f'forebay_tier_stored_blocks_total{{tier="{tier}"}}'] for tier in tiers]
    return min(stored) >= seen["forebay_stored_blocks_total"] > 0


def _hits(daemon: Daemon) -> dict[str, float]:
    seen = daemon.metrics()
    return {tier: seen.get(f'{BY_TIER}{{tier="{tier}"}}', 0.0) for tier in SOURCES}


def _tokens(engine: Engine) -> dict[str, float]:
    seen = engine.metrics()
    return {source: seen.get(BY_SOURCE + source, 0.0) for source in SOURCES.values()}
