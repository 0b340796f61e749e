"""`ForebayTier`: Forebay's pool below the host tier of vLLM's own `TieringOffloadingSpec`, where vLLM copies to and from GPUs.

To the daemon it is an engine of one rank, whose one tensor is vLLM's host tier: a row of that is a chunk of all ranks, and
is stored whole. What is looked up, leased, stored and named is decided by the same `ForebayManager` as for the connector.

Invariants: no method raises into vLLM, and only `lookup` waits, at most the step's budget (`drain_jobs` waits for copies,
as vLLM demands). Every job is reported exactly once, and not before its copy has ended. A chunk that vLLM was told of as a
hit stays leased until its load has ended. A request whose load failed is answered misses from then on. Rows that other
weights may have filled are not stored: all there are, until vLLM resets its host tier.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from forebay.vllm import compat, metrics
from forebay.vllm.adapters import Adapters
from forebay.vllm.guard import Breaker, caught, guarded, logger, nothing
from forebay.vllm.identity import GivenName
from forebay.vllm.lookup import group_of
from forebay.vllm.manager import ForebayManager
from forebay.vllm.names import TIERING_CONNECTOR
from forebay.vllm.session import AbsentEngine, CopyEngine, Groups, Session, flush, open_engine, open_session
from forebay.vllm.settings import Settings, bounded_engine_id, passed_on, refusal
from forebay.vllm.slots import PoolSlots
from forebay.vllm.stores import Shape
from forebay.vllm.timing import timed

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.request import Request

_UNTOLD = (
    "vLLM tells a tier neither the model's revision nor its adapters and images, so the tier cannot name blocks\n"
    f'hint: write `"kv_connector":"{TIERING_CONNECTOR}"`, or a `namespace` that names all that changes the KV'
)
_CHUNKS = (
    "vLLM does not tell a tier whether attention is windowed; if it is, chunks may lack some of their blocks\n"
    f'hint: write `"kv_connector":"{TIERING_CONNECTOR}"`, or leave out `blocks_per_chunk` and `block_size`'
)


class ForebayTier(SecondaryTierManager):
    """One per engine, in the scheduler's process. `ForebayTieringConnector` opens it; it opens itself with a `namespace`."""

    medium: ClassVar[Medium] = Medium.CPU

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return dict(metrics.DEFINITIONS)

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        namespace: str = "",
        **options: Any,
    ):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        self.spec = offloading_spec
        self.breaker = Breaker()
        self.settings = self._read(options)
        self.manager = ForebayManager(self.settings, workers=1)
        self.timings = self.manager.health.timings
        # Of the tokens of the step, if the connector says it: those of no prompt, and those of prompts that are begun.
        self._generated = self._new = 0
        self._tokens = 0  # of the step that is being scheduled: as the connector says, or else those of chunks to store
        self._resumed: Iterable[str] = ()  # requests that run again in this step, where somebody says so
        # Of vLLM's workers, dropped by a reset: how many have yet to report each. They may still write into rows.
        self._dropped_jobs: dict[int, int] = {}
        self._engine: CopyEngine = AbsentEngine()
        self._is_given = bool(namespace)
        self._is_open = False
        self._has_rows = False  # as long as no step has run since vLLM's host tier was empty
        self._has_stale_rows = False
        self._requests: dict[str, Request] = {}
        self._asking = ""  # the request that vLLM asks about at the moment
        self._is_answered = False
        self._running: set[str] = set()  # requests, where nobody says what a step computes
        self._may_rows_be_written = False  # by jobs that a reset dropped, where nobody says when they end
        self._copying: set[int] = set()  # jobs that the copy engine has
        self._loads: dict[int, str] = {}  # job to request
        self._loaded: dict[str, set[OffloadKey]] = {}  # what was loaded for a request that has not got its blocks yet
        self._results: list[JobResult] = []  # that vLLM has not taken yet
        if namespace:
            self._open_by(namespace)

    @property
    def _may_have_windows(self) -> bool:
        return self._is_given and len(self.spec.config.groups) > 1

    @property
    def row_bytes(self) -> int:
        return self._primary_kv_view.nbytes // len(self._primary_kv_view)

    def connect(self, stock: int) -> Session:
        """The session and the copy engine of this tier. Returns at once."""
        view, config = self._primary_kv_view, self.spec.config
        engine_id, incarnation = bounded_engine_id(config.engine_id), os.urandom(16)
        # The array must not stay: vLLM cannot release its memory under one.
        tensor = np.asarray(view).ctypes.data, len(view), self._block_size_bytes, self.row_bytes
        groups = [(group.group_id, False, [(0, self.row_bytes)]) for group in config.groups]
        self._engine = open_engine(self.settings, engine_id, incarnation, 0, 1, [tensor], groups, 1)
        self._is_open = True
        return open_session(self.settings, engine_id, incarnation, 1, stock)

    # ---- a request -------------------------------------------------------------------------------------------------

    @guarded(nothing)
    def new_request(self, request: Request) -> None:
        """Starts to track a request, of which a tier is told less."""
        self._requests[request.request_id] = request
        self.manager.new_request(request)

    @guarded(lambda *_: RequestOffloadingContext())
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if not self._is_open:
            self.breaker.switch_off(_UNTOLD)
        elif self._is_given:
            self.new_request(cast("Request", Told(req_context, self.spec.tokens_per_hash)))
            self.manager.met(req_context.req_id)  # its keys are not known before its turn
        return RequestOffloadingContext()

    @guarded(lambda *_: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """vLLM asks for each chunk that its host tier lacks; the first question of a step is for all of the request."""
        loaded = self._loaded.get(req_context.req_id, ())
        # A host tier too small for the prompt would push out its chunks for each other, for ever.
        if key in loaded or len(loaded) >= len(self._primary_kv_view):
            return LookupResult.MISS
        if self._dropped_jobs or self._may_rows_be_written:
            return LookupResult.MISS
        if req_context.req_id != self._asking:
            self._asking = req_context.req_id
            self._is_answered = self._match(req_context.req_id)
        if not self._is_answered:
            return LookupResult.RETRY
        result = self.manager.lookup(key, req_context)
        return LookupResult.RETRY if result is LookupResult.HIT_PENDING else result

    @timed
    def _match(self, request_id: str) -> bool:
        """Waits within the step's budget."""
        if (request := self._requests.get(request_id)) is None:
            return True
        self.manager.asks_more(request)
        return self.manager.is_answered(request)

    @guarded(nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)
        self._loaded.pop(req_context.req_id, None)
        self._running.discard(req_context.req_id)
        self.manager.on_request_finished(req_context)

    # ---- jobs ------------------------------------------------------------------------------------------------------

    @timed
    @guarded(lambda self, job: self._end(job.job_id, is_copied=False))
    def submit_load(self, job_metadata: TransferJob) -> None:
        job, context = job_metadata.job_id, job_metadata.req_context
        self._loads[job] = context.req_id
        self._loaded.setdefault(context.req_id, set()).update(job_metadata.keys)
        keys = _in_order(job_metadata)
        slots = self.manager.prepare_load(keys, context)
        self.manager.sent(job, slots, is_load=True, tokens=self._tokens_of(job_metadata))
        if not slots.groups:
            self._end(job, is_copied=not keys)
            return
        self._engine.submit_load(job, slots.pool, _groups(slots, keys, job_metadata))
        self._copying.add(job)

    @timed
    @guarded(lambda self, job: self._end(job.job_id, is_copied=self.breaker.is_off))
    def submit_store(self, job_metadata: TransferJob) -> None:
        """Chunks that no slot is at hand for are not stored, as those that the pool has: both are success."""
        job = job_metadata.job_id
        self._may_rows_be_written = False  # all jobs before the reset have ended before one after it began
        if self._is_given:
            self._tokens += self._tokens_of(job_metadata)
        keys = [] if self._has_stale_rows else _in_order(job_metadata)
        stored = self.manager.prepare_store(keys, job_metadata.req_context)
        if not stored.keys_to_store:
            self._end(job, is_copied=True)
            return
        slots = stored.store_spec
        assert isinstance(slots, PoolSlots)
        self._engine.submit_store(job, slots.pool, _groups(slots, stored.keys_to_store, job_metadata))
        self._copying.add(job)
        self.manager.sent(job, slots, is_load=False)

    @timed
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Also works while Forebay is off: vLLM keeps rows for jobs that are not over."""
        self._try_to_gather()
        results, self._results = self._results, []
        return results

    @caught(lambda self: self._stop_copies())
    def drain_jobs(self) -> None:
        """vLLM resets its host tier, which a tier hears of in no other way: the namespace moves, as for the connector."""
        flush(self._engine, self._copying)
        self.manager.reset_cache()
        self._gather()  # only now, so that no store of before is named
        self._has_rows = False
        self._may_rows_be_written = self._is_given
        # What running requests have computed comes to the host tier once more, whatever weights it is of. And where
        # nobody keeps vLLM from it, of blocks that a window has left, which may hold anything.
        is_doubtful = self.settings.reset_moves_namespace or self._has_stale_rows or self._may_have_windows
        self._has_stale_rows = is_doubtful and (bool(self._running) or self.manager.engine_holds_kv())
        self._say_if_stale()

    @guarded(lambda self, *_: self.breaker.switch_off("its cache could not be reset, so it might hit what is stale"))
    def reset_begins(self, scheduler: OffloadingConnectorScheduler) -> None:
        """vLLM is about to drop its own jobs, which its workers end at the next step."""
        self._dropped_jobs |= compat.jobs_under_way(scheduler)
        compat.forget_left_windows(scheduler)

    @guarded(nothing)
    def workers_reported(self, completed: Mapping[int, int]) -> None:
        """So many more of vLLM's workers have ended each of these jobs."""
        for job in self._dropped_jobs.keys() & completed.keys():
            self._dropped_jobs[job] -= completed[job]
            if self._dropped_jobs[job] <= 0:
                del self._dropped_jobs[job]

    # ---- a step, and the engine's life -----------------------------------------------------------------------------

    @guarded(lambda *_: False)
    def has_pending_work(self) -> bool:
        """vLLM's loop calls this before the first request: it is the first moment at which the namespace can be set."""
        self.manager.get_ready()
        return self.manager.has_uncommitted()

    @guarded(nothing)
    def step_begins(self, output: SchedulerOutput) -> None:
        """Tells of the step that is being scheduled, of which a tier is told less."""
        self._tokens = output.total_num_scheduled_tokens
        self._generated, self._new = compat.generated_tokens(output), compat.new_tokens(output)
        self._resumed = output.scheduled_cached_reqs.resumed_req_ids

    @timed
    @guarded(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The loads of this step are submitted: the leases of requests that have their blocks are of no other use."""
        self._asking, self._has_rows = "", True
        for request_id in (*context.new_req_ids, *self._resumed, *context.preempted_req_ids):
            self._loaded.pop(request_id, None)
            if request := self._requests.get(request_id):
                self.manager.placed(request)
        if self._is_given:
            self._running.update(self._requests.keys() & set(context.new_req_ids))
        self.manager.drop_unsubmitted()
        self.manager.on_schedule_end(context)
        tokens, generated, new = self._tokens, self._generated, self._new
        self._tokens = self._generated = self._new = 0
        self.manager.step_ended(tokens, generated=generated, new=new, is_busy=bool(self._running))

    @guarded(lambda self, *_: self.breaker.switch_off("its weights changed, so it might hit what is stale"))
    def weights_moved(self, is_first: bool) -> None:
        """vLLM's host tier keeps what other weights have filled until it is reset, and new KV may build on it."""
        self._has_stale_rows = self._has_rows or self.manager.engine_holds_kv()
        self.manager.weights_moved(is_first)
        self._say_if_stale()

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        return self.manager.get_stats()

    def shutdown(self) -> None:
        """Copies end before vLLM takes its host tier away."""
        self._end_copies()
        self.manager.shutdown()

    # ---- helpers ---------------------------------------------------------------------------------------------------

    @caught(lambda self, *_: self._cannot_begin() or Settings())
    def _read(self, options: Mapping[str, Any]) -> Settings:
        settings, warnings = Settings.parse(options)
        for warning in passed_on(options, {})[1] + warnings:
            logger.warning("forebay: %s", warning)
        if settings.log_requests:
            logger.warning("forebay: `log_requests` is ignored: a tier is not told what vLLM computes of a prompt")
            settings = replace(settings, log_requests=False)
        if reason := refusal(options):
            self.breaker.switch_off(reason)
        return settings

    @guarded(lambda self, *_: self._cannot_begin())
    def _open_by(self, namespace: str) -> None:
        if not isinstance(namespace, str):
            self.breaker.switch_off(f"`namespace` cannot be {namespace!r}: it must be text")
            return
        config = self.spec.config
        if config.cache.blocks_per_chunk > 1:
            self.breaker.switch_off(_CHUNKS)
            return
        window = 0 if self._may_have_windows else None  # of several, nobody says which
        shapes = [
            Shape(
                group.group_id,
                window,
                group.tokens_per_block,
                group.tokens_per_block // self.spec.tokens_per_hash,
                False,
            )
            for group in config.groups
        ]
        stock = self.settings.stock_blocks or min(compat.MAX_STOCK_BLOCKS, len(self._primary_kv_view))
        name = GivenName(namespace, config, self.row_bytes, self.settings.tenant)
        self.manager.open(self.connect(stock), shapes, name, Adapters(None, can_hear=False), stock, self.breaker)

    def _cannot_begin(self) -> None:
        self.breaker.switch_off("it cannot work with this configuration, see above")

    def _tokens_of(self, job: TransferJob) -> int:
        """The tokens of a job; those of a store were computed, each once."""
        counts = Counter(map(group_of, job.keys))
        return max((counts[group.group_id] * group.tokens_per_block for group in self.spec.config.groups), default=0)

    @caught(nothing)
    def _try_to_gather(self) -> None:
        self._gather()

    def _gather(self) -> None:
        """Keeps all results before it does anything that may fail."""
        finished = self._engine.finished()
        for job, is_copied, size, seconds in finished:
            self._results.append(JobResult(job, is_copied, transfer_time=seconds, transfer_bytes=size))
        for job, is_copied, *_ in finished:
            self._forget(job, is_copied=is_copied)

    def _end(self, job: int, *, is_copied: bool) -> None:
        """The result of a job that never reached the copy engine."""
        self._results.append(JobResult(job, is_copied, transfer_time=0.0, transfer_bytes=0))
        self._forget(job, is_copied=is_copied)

    def _forget(self, job: int, *, is_copied: bool) -> None:
        self._copying.discard(job)
        request = self._loads.pop(job, None)
        if request is not None and not is_copied:
            self.manager.load_failed([request])
        self.manager.reported({job: 1})

    def _stop_copies(self) -> None:
        """vLLM is about to give all rows to others, and nobody knows any more which copies are under way."""
        self.breaker.switch_off("its cache could not be reset, so it might hit what is stale")
        self._try_to_gather()
        self._end_copies()
        for job in sorted(self._copying):
            self._end(job, is_copied=False)

    @caught(nothing)
    def _end_copies(self) -> None:
        engine, self._engine = self._engine, AbsentEngine()
        engine.shutdown()

    def _say_if_stale(self) -> None:
        if self._has_stale_rows:
            logger.info("forebay: nothing is stored until vLLM's host tier, which holds old KV, is reset")


class Told:
    """A request, as far as a tier is told of it by its context: the hashes that keys were made of, at their places."""

    lora_request = None
    skip_reading_prefix_cache = False

    def __init__(self, context: ReqContext, tokens_per_hash: int):
        self.request_id = context.req_id
        self._context = context
        self._tokens_per_hash = tokens_per_hash
        self._hashes: list[bytes] = []
        self._count = 0  # of the keys that they were made of

    @property
    def block_hashes(self) -> list[bytes]:
        """Empty where no key ends."""
        positions = compat.key_positions(self._context)
        if len(positions) != self._count:
            self._count = len(positions)
            self._hashes = [b""] * (self.num_tokens // self._tokens_per_hash)
            for key, end in positions.items():
                self._hashes[end // self._tokens_per_hash - 1] = key[:-4]
        return self._hashes

    @property
    def num_tokens(self) -> int:
        return max(compat.key_positions(self._context).values(), default=0)


def _in_order(job: TransferJob) -> list[OffloadKey]:
    """The job's keys, which come in any order, by group and in the order of the prefix."""
    positions = compat.key_positions(job.req_context)
    return sorted(job.keys, key=lambda key: (group_of(key), positions[key]))


def _groups(slots: PoolSlots, keys: Iterable[OffloadKey], job: TransferJob) -> Groups:
    """For the copy engine: slots, generations and the rows of each group's keys, which are in the order of the slots."""
    rows: Mapping[OffloadKey, int] = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
    by_group: dict[int, array[int]] = {group: array("i") for group, _, _ in slots.groups}
    for key in keys:
        by_group[group_of(key)].append(rows[key])
    return [(group, some, generations, by_group[group].tobytes(), 0) for group, some, generations in slots.groups]
