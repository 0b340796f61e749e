"""The metrics that Forebay adds to vLLM's, each named once.

vLLM's own `vllm:kv_offload_*` already cover bytes, times and sizes of transfers, lookup delays and refused stores.
"""

from __future__ import annotations

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

STEP_SECONDS = "forebay:step_seconds"
IS_READY = "forebay:is_ready"
FAULTS = "forebay:faults"
FAILED_LOADS = "forebay:failed_loads"
LATE_LOOKUPS = "forebay:late_lookups"
SLOW_PROMOTIONS = "forebay:slow_promotions"
REFUSED_BLOCKS = "forebay:refused_blocks"
SAVED_TOKENS = "forebay:saved_tokens"
SAVED_SECONDS = "forebay:saved_prefill_seconds"

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    STEP_SECONDS: OffloadingHistogramMetadata(
        documentation="Time a scheduler step spends in the connector, in seconds.",
        buckets=(0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 1.0),
    ),
    IS_READY: OffloadingGaugeMetadata(documentation="1 while this engine's session with the daemon is ready, else 0."),
    FAULTS: OffloadingGaugeMetadata(documentation="Unexpected exceptions in the connector since the start."),
    FAILED_LOADS: OffloadingCounterMetadata(documentation="Requests whose load failed and that were computed instead."),
    LATE_LOOKUPS: OffloadingCounterMetadata(
        documentation="Requests computed because their lookup was not answered in time."
    ),
    SLOW_PROMOTIONS: OffloadingCounterMetadata(
        documentation="Requests that went on without blocks whose promotion fell behind computing them."
    ),
    REFUSED_BLOCKS: OffloadingCounterMetadata(documentation="Blocks not stored because no slot was at hand."),
    SAVED_TOKENS: OffloadingCounterMetadata(documentation="Tokens of prompts that were loaded and so not computed."),
    SAVED_SECONDS: OffloadingCounterMetadata(
        documentation="Least time that computing the saved tokens would have taken, in seconds, at the fastest prefill."
    ),
}
# Prometheus serves these with the suffix `_total`.
COUNTERS = [name for name, metadata in DEFINITIONS.items() if isinstance(metadata, OffloadingCounterMetadata)]
