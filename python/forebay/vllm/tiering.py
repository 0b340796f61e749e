"""`ForebayTieringConnector`: vLLM's own offloading connector and host tier, with Forebay's pool below it.

Users write `--kv-transfer-config
'{"kv_connector":"ForebayTieringConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":...}}'`.

Invariants: it fills in vLLM's spec and the tier, and tells the tier what vLLM tells connectors alone: the configuration, the
requests and the sizes of steps. All else is vLLM's, and fails as vLLM does; without Forebay its host tier works alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from forebay.vllm import compat
from forebay.vllm.connector import open_manager
from forebay.vllm.guard import logger
from forebay.vllm.hub import IdentityError
from forebay.vllm.identity import host_form
from forebay.vllm.manager import ForebayManager
from forebay.vllm.settings import refusal
from forebay.vllm.tier import ForebayTier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


_OTHER_TIERS = (
    "another tier below vLLM's host tier may hold KV of other weights under the same name, and new KV would build on it\n"
    "hint: leave out `secondary_tiers`; Forebay has tiers of its own below the pool"
)


class ForebayTieringConnector(OffloadingConnector):
    """One in the scheduler's process, one in each worker, where it is vLLM's alone."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        completed, warnings = compat.complete_tiering(vllm_config, kv_cache_config)
        super().__init__(completed, role, kv_cache_config)
        if role is compat.SCHEDULER:
            for warning in warnings:
                logger.warning("forebay: %s", warning)
            self.tier = compat.tier_of(self.scheduler.manager, ForebayTier)
            self._open(vllm_config, kv_cache_config)

    @property
    def manager(self) -> ForebayManager:
        return self.tier.manager

    def _open(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        tier = self.tier
        if tier.breaker.is_off:
            return
        try:
            own, *outer = compat.transfers(self, vllm_config)
            options = [transfer.kv_connector_extra_config for transfer in (own, *outer)]
            shapes = compat.group_shapes(self.scheduler, is_replicated=False)
            reason = refusal(options[0], options[1:]) or compat.unsupported_tiering(
                vllm_config, [own, *outer][-1], shapes, tier.spec.blocks_per_chunk
            )
            if compat.tier_count(self.scheduler.manager) > 1:
                reason = _OTHER_TIERS
            if reason:
                tier.breaker.switch_off(reason, logging.ERROR)
                return
            open_manager(
                tier.manager,
                tier.breaker,
                (vllm_config, kv_cache_config),
                tier.spec,
                tier.settings,
                shapes,
                tier.connect,
                tier.weights_moved,
                host_form(kv_cache_config, tier.row_bytes),
            )
        except IdentityError as error:
            tier.breaker.switch_off(str(error))
        except Exception as error:  # noqa: BLE001 - no exception reaches the engine
            logger.exception("forebay cannot work with this engine's configuration")
            tier.breaker.switch_off(f"{type(error).__name__}: {error}")

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.manager.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self.tier.new_request(request)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.tier.step_begins(scheduler_output)
        return super().build_connector_meta(scheduler_output)

    def reset_cache(self) -> bool | None:
        self.tier.reset_begins(self.scheduler)
        return super().reset_cache()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self.tier.workers_reported(compat.completed_jobs(connector_output))

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        """Runs in the front end, where no connector exists that could have filled anything in."""
        completed, _ = compat.complete_tiering(vllm_config, None)
        return super().build_prom_metrics(completed, *args, **kwargs)
