"""`ForebayConnector`: vLLM's own offloading connector with Forebay behind it.

Invariants: no hook raises. A request never waits in the scheduler past its lookup's deadline. A load that failed in
any worker is computed instead. If vLLM's part itself fails in the middle of a step, its state can no longer be
trusted: Forebay is switched off, and loads that no worker has received are reported as failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from forebay.vllm import compat
from forebay.vllm.adapters import Adapters
from forebay.vllm.guard import Breaker, guarded, logger, nothing
from forebay.vllm.hub import IdentityError
from forebay.vllm.identity import FORMAT, Identity
from forebay.vllm.manager import ForebayManager
from forebay.vllm.probe import pages_of, weight_of
from forebay.vllm.session import Session, open_session
from forebay.vllm.settings import Settings, bounded_engine_id, refusal
from forebay.vllm.timing import Timings, timed
from forebay.vllm.watch import WeightsWatch

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from forebay.vllm.stores import Shape
    from forebay.vllm.worker import ForebayWorker

# vLLM's name of the layout in which all layers of a block lie side by side.
SIDE_BY_SIDE = "BLHNC"

# One lookup for the whole prompt, one for partial tails.
LOOKUPS_PER_MATCH = 2


class ForebayConnector(OffloadingConnector):
    """One in the scheduler's process, one in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        self.breaker = Breaker()
        self.timings = Timings()
        self._unsent_loads: set[str] = set()  # requests whose load was accepted in this step
        self._lost_loads: set[str] = set()  # requests whose load no worker will receive
        self._abandoned: ForebayManager | None = None  # with leases and slots that workers still hold
        try:
            completed, warnings = compat.complete(vllm_config, kv_cache_config)
            super().__init__(completed, role, kv_cache_config)
            own, *outer = compat.transfers(self, vllm_config)
            if not outer:
                own.kv_load_failure_policy = "recompute"  # vLLM reads it later
            options = [transfer.kv_connector_extra_config for transfer in (own, *outer)]
            if reason := refusal(options[0], options[1:]) or compat.unsupported(vllm_config, [own, *outer][-1]):
                # All processes of the engine decide the same: people read the scheduler's log.
                self.breaker.switch_off(reason, logging.ERROR if role is compat.SCHEDULER else logging.DEBUG)
            elif role is compat.SCHEDULER:
                self._open(vllm_config, kv_cache_config, warnings)
        except IdentityError as error:
            self.breaker.switch_off(str(error))
        except Exception as error:  # noqa: BLE001 - no exception reaches the engine
            logger.exception("forebay cannot work with this engine's configuration")
            self.breaker.switch_off(f"{type(error).__name__}: {error}")

    def _open(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, warnings: list[str]) -> None:
        spec = self.manager.spec
        for warning in warnings + spec.warnings:
            logger.warning("forebay: %s", warning)
        shapes = compat.group_shapes(self.scheduler, is_replicated=spec.replicated_layout)
        engine_id = bounded_engine_id(spec.config.engine_id)
        ranks = spec.config.parallel.world_size
        self.timings = self.manager.health.timings
        open_manager(
            self.manager,
            self.breaker,
            (vllm_config, kv_cache_config),
            spec,
            spec.settings,
            shapes,
            lambda stock: open_session(spec.settings, engine_id, spec.incarnation, ranks, stock),
            self.manager.weights_moved,
        )

    @guarded(nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.manager.bind(kv_cache_manager)

    @property
    def manager(self) -> ForebayManager:
        manager = self.scheduler.manager
        assert isinstance(manager, ForebayManager)
        return manager

    # ---- scheduler side, in the order of a request -----------------------------------------------------------------

    @timed
    @guarded(nothing)
    def on_new_request(self, request: Request) -> None:
        self.manager.new_request(request)
        super().on_new_request(request)

    @timed
    @guarded(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(None, False), ask again in the next step, while the daemon's answer is awaited."""
        for _ in range(LOOKUPS_PER_MATCH):
            if not self.manager.is_answered(request):
                return None, False
            match = super().get_num_new_matched_tokens(request, num_computed_tokens)
            if not self.manager.asks_more(request):
                break
        self.manager.matched(request, match[0], num_computed_tokens)
        return match

    @timed
    @guarded(lambda self, request, blocks, num_external_tokens: self._lose(request, num_external_tokens))
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._unsent_loads.add(request.request_id)
        self.manager.placed(request, num_external_tokens)

    @timed
    @guarded(lambda *_: {})
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    @guarded(lambda self, *_: self._metadata_when_off())
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = self._build_connector_meta(scheduler_output)
        tokens = scheduler_output.total_num_scheduled_tokens
        generated, new = compat.generated_tokens(scheduler_output), compat.new_tokens(scheduler_output)
        self.manager.step_ended(tokens, generated=generated, new=new)
        return metadata

    @timed
    def _build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        self._unsent_loads.clear()
        self.manager.submitted(metadata)
        return metadata

    @timed
    @guarded(lambda self, connector_output: self._settle(connector_output))
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self.manager.load_failed(connector_output.failed_recving)
        self.manager.reported(compat.completed_jobs(connector_output))

    @timed
    @guarded(lambda *_: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.manager.ended(request.request_id)
        return super().request_finished(request, block_ids)

    @timed
    @guarded(lambda *_: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.manager.ended(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    @guarded(lambda *_: False)
    def has_pending_push_work(self) -> bool:
        """vLLM's loop calls this before the first request: it is the first moment at which the namespace can be set."""
        self.manager.get_ready()
        return self.manager.has_uncommitted() or super().has_pending_push_work()

    @timed
    @guarded(lambda self: self._give_up() or True)
    def reset_cache(self) -> bool | None:
        compat.forget_left_windows(self.scheduler)
        return super().reset_cache()

    @guarded(lambda *_: ())
    def take_events(self) -> Iterable[KVCacheEvent]:
        return list(super().take_events())

    @guarded(nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return super().get_kv_connector_stats()

    def _lose(self, request: Request, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._unsent_loads.add(request.request_id)
        self._give_up()

    def _give_up(self) -> None:
        """Switches off for good: from now on workers only receive the list of loads that will never come."""
        self._lost_loads |= self._unsent_loads
        self._unsent_loads.clear()
        if not self.breaker.is_off:
            self._abandoned = self.manager
            self._abandoned.abandon()
            self.breaker.switch_off("vLLM's part of the connector failed, see above")

    def _settle(self, connector_output: KVConnectorOutput) -> None:
        """Returns what workers still hold as they report it, without vLLM's part."""
        self._give_up()
        if self._abandoned is not None:
            self._abandoned.reported(compat.completed_jobs(connector_output))

    def _metadata_when_off(self) -> KVConnectorMetadata:
        self._give_up()
        lost, self._lost_loads = frozenset(self._lost_loads), set()
        return compat.metadata_without_jobs(lost)

    # ---- worker side, in the order of a step -----------------------------------------------------------------------

    @guarded(lambda self, *_: self.breaker.switch_off("its kv cache cannot be registered, see above"))
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)

    @guarded(nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(kv_connector_metadata)

    @guarded(nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)

    @guarded(nothing)
    def wait_for_save(self) -> None:
        super().wait_for_save()  # type: ignore[no-untyped-call]

    def get_transfer_results(self, finished_req_ids: set[str]) -> compat.KVConnectorTransferResults:
        """vLLM's worker asserts that every load succeeds, so ours reports success; failed loads are separated here."""
        results = self._transfer_results(finished_req_ids)
        lost = compat.lost_loads(self._connector_metadata)
        results.finished_recving |= lost
        results.failed_recving |= lost
        return results

    @guarded(lambda *_: compat.KVConnectorTransferResults())
    def _transfer_results(self, finished_req_ids: set[str]) -> compat.KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker.take_failed_loads()
        return results

    @guarded(lambda *_: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads within a step, for which no request waits. Forebay keeps vLLM from making such
        loads."""
        return super().get_block_ids_with_load_errors() | self._worker.take_failed_blocks()

    @guarded(nothing)
    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        return super().build_connector_worker_meta()

    @property
    def _worker(self) -> ForebayWorker:
        assert self.connector_worker is not None
        return cast("ForebayWorker", self.connector_worker.worker)

    # ---- both ------------------------------------------------------------------------------------------------------

    @guarded(nothing)
    def shutdown(self) -> None:
        super().shutdown()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """vLLM drops a wish that an attention backend cannot fulfil, with a warning."""
        try:
            transfer = vllm_config.kv_transfer_config
            settings, _ = Settings.parse(transfer.kv_connector_extra_config if transfer else {})
            if settings.gpu_copies and compat.has_side_by_side_layers(cls):
                return SIDE_BY_SIDE
        except Exception:  # noqa: BLE001 - no exception reaches the engine; the constructor reports it
            logger.debug("forebay asks for no layout of its own", exc_info=True)
        return super().get_required_kvcache_layout(vllm_config)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        """Runs in the front end, where no connector exists that could have set the spec's name."""
        completed, _ = compat.complete(vllm_config, None)
        return super().build_prom_metrics(completed, *args, **kwargs)


def open_manager(
    manager: ForebayManager,
    breaker: Breaker,
    configs: tuple[VllmConfig, KVCacheConfig],
    spec: OffloadingSpec,
    settings: Settings,
    shapes: Sequence[Shape],
    connect: Callable[[int], Session],
    weights_moved: Callable[[bool], None],
    form: str = FORMAT,
) -> None:
    """Scheduler side: connects in the background, and determines which engines may share with this one.

    `connect` opens a session with a stock of so many slots of each group.
    """
    vllm_config, kv_cache_config = configs
    core = compat.engine_core()
    pages = pages_of(core)
    weigh = partial(weight_of, core)
    identity = Identity(vllm_config, kv_cache_config, spec.config, settings.tenant, pages, weigh, form)
    name = vllm_config.model_config.model
    logger.info("forebay shares blocks of `%s` by\n  %s", name, "\n  ".join(identity.values()))
    fills = compat.stock_blocks(vllm_config, shapes, is_prompt_only=spec.offload_prompt_only)
    stock = settings.stock_blocks or fills
    can_hear = vllm_config.lora_config is not None and compat.hear_of_adapters(manager)
    adapters = Adapters(vllm_config.lora_config, can_hear=can_hear)
    stores_generated = not spec.offload_prompt_only
    manager.open(connect(stock), shapes, identity, adapters, stock, breaker, stores_generated=stores_generated)
    if core is not None:
        WeightsWatch(core, weights_moved)
