"""`ForebaySpec`: how vLLM's offloading connector gets Forebay's manager and worker.

Invariants: importing this module starts nothing (the front end imports it for the metric definitions alone).
Neither `get_manager` nor `get_worker` raises or waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from forebay.vllm import metrics
from forebay.vllm.guard import logger
from forebay.vllm.manager import ForebayManager
from forebay.vllm.session import AbsentEngine
from forebay.vllm.settings import Settings, incarnation

if TYPE_CHECKING:
    from forebay.vllm.worker import ForebayWorker


class ForebaySpec(OffloadingSpec):
    """One per half of the connector, in each process."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return dict(metrics.DEFINITIONS)

    def __init__(self, config: OffloadingConfig):
        super().__init__(config)
        self.settings, self.warnings = Settings.parse(config.extra_config)
        self.incarnation = incarnation(config.extra_config)
        self.may_sleep = bool(config.extra_config["may_sleep"])
        # Every rank of such an engine holds the same bytes: rank 0 stores them once.
        self.replicated_layout = config.replicated_layout
        self._manager: ForebayManager | None = None
        self._worker: ForebayWorker | None = None

    def get_manager(self) -> ForebayManager:
        if self._manager is None:
            self._manager = ForebayManager(self.settings, self.config.parallel.world_size)
            self._manager.spec = self
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> ForebayWorker:
        from forebay.vllm.worker import ForebayWorker

        if self._worker is None:
            try:
                self._worker = ForebayWorker.open(self, kv_caches)
            except Exception:  # noqa: BLE001 - no exception reaches the engine
                logger.exception("forebay cannot describe this worker's kv cache and copies nothing")
                self._worker = ForebayWorker(AbsentEngine(), kv_caches, self)
        return self._worker
