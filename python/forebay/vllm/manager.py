"""The scheduler's side: answers vLLM's questions about blocks, and tracks leases and reserved slots until they are
returned.

Invariants: no method raises into vLLM. Only `is_answered` waits, in all its calls of a step at most the step's
budget. Slots and leases that were sent to workers are tracked by job, not by vLLM's `complete_*`, which never come
for jobs that a reset of the cache dropped. They are returned only when every worker has reported.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from forebay.vllm import compat, metrics
from forebay.vllm.account import Account
from forebay.vllm.adapters import Adapter, Adapters
from forebay.vllm.guard import Breaker, caught, guarded, logger, nothing
from forebay.vllm.health import Health
from forebay.vllm.hub import IdentityError
from forebay.vllm.identity import Name
from forebay.vllm.lookup import DISK, POOL, SHARED, Lookup, group_of
from forebay.vllm.pace import Pace
from forebay.vllm.patience import Patience
from forebay.vllm.savings import Savings
from forebay.vllm.session import AbsentSession, Session, describe
from forebay.vllm.slots import PoolSlots
from forebay.vllm.stores import Run, Shape, Store, Stores, split_into_runs

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from forebay.vllm.settings import Settings
    from forebay.vllm.spec import ForebaySpec

# vLLM's names of where a block was. Of a store that hosts share vLLM has no better one.
_SOURCES = {
    POOL: compat.CacheHitSource.HOST,
    DISK: compat.CacheHitSource.DISK,
    SHARED: compat.CacheHitSource.EXTERNAL_UNSPECIFIED,
}
# Lookups in progress at once; the session's own limit is far higher.
LOOKUPS_UNDER_WAY = 32
# vLLM does not ask for an answer while its batch is full. After this time the leases of such requests are returned,
# since they keep space from running requests.
UNASKED_SECONDS = 10.0
# Limits on the hints: requests of vLLM's queue, and keys per group of each (the daemon takes no more).
WAITING_TOLD = 64
KEYS_TOLD = 2048
# Limits on the hints per step, since the hashes are copied: requests, and a number of keys after which no further
# request is begun.
TOLD_IN_A_STEP = 8
KEYS_TOLD_IN_A_STEP = 2048


class ForebayManager(OffloadingManager):
    """vLLM's offloading scheduler calls the overridden methods, `ForebayConnector` the others; `ForebayTier` calls both."""

    spec: ForebaySpec  # that made it, where one did

    def __init__(self, settings: Settings, workers: int):
        self.breaker = Breaker()
        self.health = Health()
        self.savings = Savings()
        self._settings = settings
        self._workers = workers
        self._session: Session = AbsentSession("the connector did not open it")
        self._identity: Name | None = None
        self._adapters: Adapters | None = None
        self._shapes: dict[int, Shape] = {}
        self._put_off: frozenset[int] = frozenset()  # the groups whose windows the daemon knows
        self._is_named = False
        self._fields: Mapping[str, str] = {}  # of the namespace
        self._has_told_of_short_prompts = False
        self._salt = ""  # of resets of the connector's cache
        self._epoch = ""  # of the weights in memory; empty while they equal those on disk
        self._kv_cache_manager: KVCacheManager | None = None
        self._has_stale_kv = False  # the engine itself still holds KV of other weights
        self._settle_until: float | None = None  # None until a request had to wait
        self._steps = 0
        self._is_idle = False  # the last step had nothing to run
        self._look_for_unasked_at = 0.0
        self._stock_blocks = 0
        self._stores_generated = False
        self._budget = settings.step_budget_ms / 1e3
        self._requests: dict[str, _Asked] = {}
        self._waiting: dict[str, _Asked] = {}  # not looked up yet, in their order
        self._numbers = itertools.count(1)
        self._leased: dict[Lookup, _Asked] = {}
        self._unanswered: set[Lookup] = set()
        self._promoting: set[Lookup] = set()
        self._patience = Patience(settings.promotion_lag)
        self._pace = Pace()
        self._stores = Stores(self._session, lambda adapter: adapter.asked)
        self._loads: dict[int, Lookup] = {}  # by serial
        self._jobs: dict[int, _Job] = {}  # by vLLM's job id
        self._fresh: set[int] = set()  # stores that are in no job yet
        self._serials = itertools.count()

    def open(
        self,
        session: Session,
        shapes: Sequence[Shape],
        identity: Name,
        adapters: Adapters,
        stock_blocks: int,
        breaker: Breaker,
        *,
        stores_generated: bool = False,
    ) -> None:
        """Gives the manager its session; until then everything is a miss.

        `stores_generated`: blocks of generated tokens are stored too.
        """
        self._session = session
        self._stock_blocks = stock_blocks
        self._stores_generated = stores_generated
        self._stores = Stores(session, adapters.look_again)
        # Full attention first: after a gap in it, blocks of the other groups are useless.
        self._shapes = {shape.group: shape for shape in sorted(shapes, key=lambda shape: not shape.is_full)}
        has_full = any(shape.is_full for shape in shapes)
        self._put_off = frozenset(shape.group for shape in shapes if shape.window and has_full)
        self._identity = identity
        self._adapters = adapters
        self.breaker = breaker
        self.health.watch(self.say_how_it_is)

    # ---- the match -------------------------------------------------------------------------------------------------

    @guarded(nothing)
    def get_ready(self) -> None:
        """Sets the namespace as soon as possible, which is after the connector was made."""
        if not self._is_named and self._identity is not None:
            self._name()

    @guarded(nothing)
    def new_request(self, request: Request) -> None:
        """Starts to track a request."""
        asked = self._requests[request.request_id] = self._waiting[request.request_id] = _Asked(request)
        self.get_ready()
        self._look_for_stale_kv()
        self._look_for_short_prompt(request)
        if request.lora_request is not None:
            asked.adapter = self._adapters.asked_for(request.lora_request) if self._adapters else None
            asked.is_excluded = asked.adapter is None
        if self._identity is not None and not self._identity.tells_apart(request):
            asked.is_excluded = True

    @guarded(lambda *_: True)
    def is_answered(self, request: Request) -> bool:
        """Whether this request can be matched now; if not, vLLM must ask again in its next step.

        Sends at most one lookup and waits for its answer within the step's budget.
        """
        asked = self._requests.get(request.request_id)
        self.get_ready()
        self._look_for_stale_kv()
        self.met(request.request_id)
        if asked is None or asked.is_barred or request.skip_reading_prefix_cache:
            return True
        if asked.is_left_out():
            self._release(asked)
            asked.lookup = None
            return True
        if asked.is_placed:  # preempted since the last match
            self._release(asked)
            asked.lookup, asked.is_placed = None, False
        now = time.monotonic()
        if asked.lookup is None:
            if self._settle(now) or len(self._unanswered) >= LOOKUPS_UNDER_WAY:
                return False
            if self._session.state() != "ready" or self._is_at_limit():
                return True
            self._ask(asked, now)
        assert asked.lookup is not None
        return self._poll(asked, asked.lookup, now) and not self._is_restocking(asked, now)

    @guarded(lambda *_: False)
    def asks_more(self, request: Request) -> bool:
        """Whether the match needed keys that were not looked up (partial tails); looks them up."""
        asked = self._requests.get(request.request_id)
        return asked is not None and asked.lookup is not None and asked.lookup.ask_more()

    @guarded(nothing)
    def matched(self, request: Request, tokens: int | None, engine_tokens: int) -> None:
        """Called with the match's tokens, and those that the engine has itself: without any, the lease is useless."""
        if asked := self._requests.get(request.request_id):
            asked.account.engine_tokens = engine_tokens
            if tokens == 0:
                self._release(asked)

    @guarded(nothing)
    def placed(self, request: Request, tokens: int = 0) -> None:
        """The request has its blocks, and a load of so many tokens began if one was needed: any other lease is useless."""
        self.met(request.request_id)
        if asked := self._requests.get(request.request_id):
            asked.is_placed = True
            self._release(asked)
            asked.account.load_tokens = tokens
            if not tokens:
                self._tell(asked, is_loaded=False)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """From the answer at hand; no round trip. Called for each key, and only under the connector's guard."""
        asked = self._requests.get(req_context.req_id)
        return LookupResult.MISS if asked is None or asked.lookup is None else asked.lookup.result(key)

    @guarded(nothing)
    def adapter_loads(self, request: LoRARequest) -> None:
        """Called before vLLM loads this adapter, which perhaps no request has used yet."""
        if self._adapters is not None:
            self._adapters.loading(request)

    # ---- loads -----------------------------------------------------------------------------------------------------

    @guarded(lambda self, keys, req_context: PoolSlots(-1, req_context.req_id, b"", ()))
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PoolSlots:
        """The slots that the match leased; no round trip. Without a lease the load fails in the workers."""
        lookup = self._requests[req_context.req_id].lookup
        if lookup is None or lookup.is_closed:
            return PoolSlots(-1, req_context.req_id, b"", ())
        serial = next(self._serials)
        lookup.loads += 1
        self._loads[serial] = lookup
        if self._settings.log_requests:
            self._requests[req_context.req_id].account.share_of_tiers = lookup.share_of_tiers(keys)
        return PoolSlots(serial, req_context.req_id, lookup.pool, _leased_slots(lookup, list(keys)))

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> compat.CacheHitSource:
        """The tier of the first hit after a promotion, else the host's memory. No round trip; vLLM asks once a key."""
        asked = self._requests.get(req_context.req_id)
        lookup = asked.lookup if asked else None
        return _SOURCES[lookup.source(key) if lookup else POOL]

    @guarded(nothing)
    def load_failed(self, request_ids: Collection[str]) -> None:
        """These requests are computed now: another lookup would find the same blocks and fail for ever.

        Under `MultiConnector` the ids include another connector's failed loads, which are ignored.
        """
        loading = self._give_savings_up(request_ids)
        ours = (self._requests.get(request_id) for request_id in request_ids if request_id in loading)
        for asked in filter(None, ours):
            self.health.count(metrics.FAILED_LOADS)
            self._tell(asked, is_loaded=False)
            asked.is_barred = True
            self._release(asked)
            asked.lookup = None

    # ---- stores ----------------------------------------------------------------------------------------------------

    @guarded(lambda *_: _nothing_to_store())
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Slots for blocks that are not stored yet, from the stock at hand; no round trip.

        Never answers None, after which vLLM would offer the same blocks in every step and log a warning each time.
        """
        asked = self._requests.get(req_context.req_id)
        if asked is None or asked.has_gap or asked.is_left_out() or not self._is_named or self.breaker.is_open:
            return _nothing_to_store()
        if self._has_stale_kv:  # newly computed KV may build on it
            return _nothing_to_store()
        pool = self._session.pool
        taken = [self._reserve(asked, shape, wanted) for shape, wanted in self._wanted(asked, keys)]
        runs = [run for some in taken for run in some.runs]
        if self._session.pool != pool or not pool:  # replaced meanwhile: the slots may belong to either pool
            for run in runs:
                self._session.abort(run.group, run.slots, run.generations)
            return _nothing_to_store()
        if not runs:
            return _nothing_to_store()
        chosen = {key for some in taken for key in some.keys}
        store = Store(next(self._serials), [key for key in keys if key in chosen], runs, asked.adapter)
        self._stores.add(store)
        self._fresh.add(store.serial)
        groups = tuple((some.group, some.slots, some.generations) for some in taken if some.keys)
        return PrepareStoreOutput(store.keys, PoolSlots(store.serial, req_context.req_id, pool, groups), [])

    # ---- jobs ------------------------------------------------------------------------------------------------------

    @guarded(nothing)
    def submitted(self, metadata: KVConnectorMetadata) -> None:
        """Records that this step's jobs were sent to the workers. Slots of stores that are in no job are returned."""
        for job_id, slots, is_load in compat.jobs_with_slots(metadata, PoolSlots):
            asked = self._requests.get(slots.request) if is_load else None
            self.sent(job_id, slots, is_load=is_load, tokens=asked.account.load_tokens if asked else 0)
        self.drop_unsubmitted()

    def sent(self, job_id: int, slots: PoolSlots, *, is_load: bool, tokens: int = 0) -> None:
        """These slots are in the hands of the workers from now on, until all of them have reported the job, of which
        so many tokens need not be computed."""
        self._jobs[job_id] = _Job(slots.serial, self._workers, slots.request if is_load else None, tokens)
        self._fresh.discard(slots.serial)

    @caught(nothing)
    def drop_unsubmitted(self) -> None:
        """Returns the slots of stores that no worker will receive."""
        while self._fresh:
            self._stores.drop(self._fresh.pop())

    @caught(nothing)
    def reported(self, completed: Mapping[int, int]) -> None:
        """Counts the additional workers that finished each of these jobs. Also works while Forebay is off."""
        for job_id in sorted(completed.keys() & self._jobs.keys()):
            job = self._jobs[job_id]
            job.workers_left -= completed[job_id]
            if job.workers_left <= 0:
                del self._jobs[job_id]
                self._save(job)  # first: the daemon is told with the return of the lease
                self._finish(job.serial)

    @guarded(lambda *_: False)
    def has_uncommitted(self) -> bool:
        """Whether stores wait for a look at their adapter's files: it takes a step to name them when that is over."""
        return self._stores.settle()

    @caught(nothing)
    def abandon(self) -> None:
        """Ends all steps: returns slots and leases that no worker has received. The rest is returned as the workers
        report.

        No store in progress is committed: nothing keeps its blocks from being overwritten.
        """
        self._stores.reset()
        self._stores.settle()
        self.drop_unsubmitted()
        sent = {job.serial for job in self._jobs.values()}
        for serial in self._loads.keys() - sent:
            self._finish(serial)
        self._give_savings_up(self._requests.keys())
        for asked in self._requests.values():
            self.met(asked.request.request_id)
            self._release(asked)
        self._requests.clear()

    # ---- the rest of a request's and an engine's life --------------------------------------------------------------

    @guarded(lambda *_: RequestOffloadingContext())
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if (asked := self._requests.get(req_context.req_id)) and not compat.may_load_from_host(req_context):
            asked.is_barred = True
        return RequestOffloadingContext()

    @guarded(nothing)
    def ended(self, request_id: str) -> None:
        """The request has ended: a lease that no load uses is returned. Its last blocks may still be stored."""
        self.met(request_id)
        self._give_savings_up({request_id})
        if asked := self._requests.get(request_id):
            self._release(asked)

    @guarded(nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self.ended(req_context.req_id)
        self._requests.pop(req_context.req_id, None)

    @guarded(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._budget = self._settings.step_budget_ms / 1e3

    @guarded(lambda self: self.breaker.switch_off("its cache could not be reset, so it might hit what is stale"))
    def reset_cache(self) -> None:
        """Moves this engine to a namespace of its own; nothing that other engines use is touched."""
        self._forget_all()
        if self._settings.reset_moves_namespace:
            logger.info("forebay: reset; this engine now has a namespace of its own and shares with no other")
            self._salt = uuid.uuid4().hex
            self._has_stale_kv = self.engine_holds_kv()
            if self._is_named:
                self._name()

    @guarded(lambda self, *_: self.breaker.switch_off("its weights changed, so it might hit what is stale"))
    def weights_moved(self, is_first: bool) -> None:
        """The workers compute with other weights from now on: those of the start again, or unknown ones.

        Slots of stores in progress are returned. Nothing is stored before the engine has dropped its own KV: new KV
        would be computed from old.
        """
        logger.info("forebay: the weights changed, and the namespace with them")
        self._forget_all()
        self._epoch = "" if is_first else uuid.uuid4().hex
        self._has_stale_kv = self.engine_holds_kv()
        self._is_named = False  # until the next question: an update comes in many pieces

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Lets the manager check the engine's own KV."""
        self._kv_cache_manager = kv_cache_manager

    @guarded(nothing)
    def step_ended(self, tokens: int, *, generated: int = 0, new: int = 0, is_busy: bool = False) -> None:
        """The scheduler has finished a step that computes this many tokens, so many of them no prompts', and so many of
        prompts that stand on little else; or `is_busy` with an unknown number."""
        now = time.monotonic()
        self._steps += 1
        self._is_idle = tokens == 0 and not is_busy
        self._patience.stepped(now, tokens, generated)
        self._pace.scheduled(now, tokens, new)
        if self._stores.settle() and self._is_idle:
            self._nap()
        if now >= self._look_for_unasked_at:
            self._look_for_unasked_at = now + UNASKED_SECONDS / 10
            self._give_unasked_back(now)
        if self._is_named:
            self._tell_who_waits()
            self.health.step_ended(self._session, self.breaker)
        if self._stores_generated and not self._is_idle:
            self._use_stock()

    @guarded(nothing)
    def say_how_it_is(self) -> None:
        """Logs a change in whether the session is ready, and what was saved. The thread of `health` calls it."""
        self.savings.say()
        # Each start passes through these states, and an engine that has no name shares nothing.
        is_starting = self._session.state() in ("attaching", "naming")
        if self._is_named or (self._identity is not None and not is_starting):
            self.health.say(self._session, lambda: describe(self._settings, self._fields))

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counts since the last call. vLLM calls this once for the output of each step."""
        was_known = self._pace.tokens_per_second > 0
        self._pace.computed(time.monotonic())
        if not was_known:
            self._claim(0)  # for all that was loaded before
        return self.health.take_stats()

    @caught(nothing)
    def shutdown(self) -> None:
        """Ends the session; waits at most its deadline."""
        if self._is_named:
            self.health.look(self._session, self.breaker)
        self.health.close()
        self.savings.say(is_last=True)
        if self._adapters is not None:
            self._adapters.close()
        if self._identity is not None:
            self._identity.close()
            self._identity = None
        self._session.close()

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _forget_all(self) -> None:
        """Drops all lookups and stores in progress."""
        for asked in self._requests.values():
            self._release(asked)
            asked.lookup, asked.is_placed, asked.has_gap = None, False, False
        self._stores.reset()

    def engine_holds_kv(self) -> bool:
        """Whether blocks of the engine's own hold KV; False where nobody lets the manager look."""
        return self._kv_cache_manager is not None and compat.holds_kv(self._kv_cache_manager)

    def _look_for_stale_kv(self) -> None:
        """Called at a time when the engine may have dropped all KV: before a request gets its first block."""
        self._has_stale_kv = self._has_stale_kv and self.engine_holds_kv()

    def _look_for_short_prompt(self, request: Request) -> None:
        """Says once why nothing is shared by somebody who tries it with a few words."""
        block = max((shape.tokens_per_block for shape in self._shapes.values() if shape.is_full), default=0)
        # A tier is told of no tokens before the request's turn.
        if not self._has_told_of_short_prompts and 0 < request.num_tokens < block:
            self._has_told_of_short_prompts = True
            logger.info("forebay: prompts shorter than a block (%d tokens) cannot hit", block)

    def _name(self) -> None:
        assert self._identity is not None
        try:
            fields = self._identity.fields()
        except IdentityError as error:
            self._identity = None
            logger.warning("forebay stores and loads nothing: %s", error)
            return
        if fields is None:
            return
        if self._salt:
            fields["salt"] = self._salt
        if self._epoch:
            fields["epoch"] = self._epoch
        self._session.set_namespace(fields, [shape.declared() for shape in self._shapes.values()])
        self._is_named, self._fields = True, fields
        self._settle_until = None

    def _settle(self, now: float) -> bool:
        """Whether to wait for a namespace that was just set, or for ranks at the start: worth it once, not longer."""
        if not self._is_named or self._session.state() not in ("attaching", "naming"):
            return False
        if self._settle_until is None:
            self._settle_until = now + self._settings.lookup_deadline_ms / 1e3
        if now >= self._settle_until:
            return False
        self._nap()
        return True

    def _nap(self) -> None:
        """Nothing can run: leaves the processor to those who are waited for."""
        began = time.monotonic()
        time.sleep(max(0.0, self._budget))
        self._spend(began)

    def _is_at_limit(self) -> bool:
        return not self._is_named or self.breaker.is_open or len(self._leased) >= self._settings.max_leased_requests

    def _groups(self, asked: _Asked, limit: int | None = None) -> list[tuple[int, Sequence[bytes]]]:
        """The keys of the whole prompt, or the first `limit` of each group."""
        hashes = asked.request.block_hashes
        steps = ((shape.group, shape.hashes_per_block) for shape in self._shapes.values())
        return [(group, keys) for group, step in steps if (keys := hashes[step - 1 : limit and limit * step : step])]

    def _tell_who_waits(self) -> None:
        """Sends hints for requests that were not looked up in a step: they are in vLLM's queue, and their blocks
        should not be evicted before their turn."""
        queue = itertools.islice(self._waiting.values(), WAITING_TOLD)
        fresh = (asked for asked in queue if not asked.number and not asked.is_barred and asked.is_told())
        told = 0
        for asked in itertools.islice(fresh, TOLD_IN_A_STEP):
            groups = self._groups(asked, KEYS_TOLD)
            asked.number = next(self._numbers)
            self._session.hint(asked.number, groups, asked.mask)
            told += sum(len(keys) for _, keys in groups)
            if told >= KEYS_TOLD_IN_A_STEP:
                break

    def met(self, request_id: str) -> None:
        """The request is not looked up for the first time any more: the daemon need not be told that it waits."""
        asked = self._waiting.pop(request_id, None)
        if asked is not None and asked.number:
            self._session.withdraw_hint(asked.number)

    def _ask(self, asked: _Asked, now: float) -> None:
        groups = self._groups(asked)
        deadline = now + self._settings.lookup_deadline_ms / 1e3
        asked.lookup = Lookup(self._session, groups, asked.mask, deadline, self._put_off)
        asked.asked_at = self._stores.now
        asked.polled_in, asked.polled_at = self._steps, now
        asked.restock_until = now + self._settings.restock_ms / 1e3
        self._settle_until = self._settle_until or now
        self._leased[asked.lookup] = asked
        self._unanswered.add(asked.lookup)

    def _use_stock(self) -> None:
        """Requests generate blocks to store: the session keeps its stock, however long none of these is full."""
        for group in itertools.islice(self._shapes, 1):
            self._session.reserve(group, 0)

    def _is_restocking(self, asked: _Asked, now: float) -> bool:
        """Whether the request has blocks to store while the stock is low and filling up.

        A session returns most of its stock after two seconds without a lookup or a reservation, and all after thirty:
        the blocks of the first step after that would find no slots. If the daemon gives less than requested, waiting
        would not help.
        """
        if now >= asked.restock_until or asked.lookup is None or asked.lookup.missing == 0:
            return False
        stats = self._session.stats()
        half = (len(self._shapes) * self._stock_blocks + 1) // 2
        is_low = stats.get("stock_filling", 0) > 0 and stats.get("reserved_stock", half) < half
        if is_low and self._is_idle:
            self._nap()
        return is_low

    def _poll(self, asked: _Asked, lookup: Lookup, now: float) -> bool:
        if self._steps - asked.polled_in > 1:
            lookup.skip(now - asked.polled_at)
        asked.polled_in, asked.polled_at = self._steps, now
        was_late = lookup.is_late
        is_answered = lookup.poll(max(0.0, self._budget), now)
        self._spend(now)
        self.health.count(metrics.LATE_LOOKUPS, lookup.is_late and not was_late)
        if is_answered:
            self._unanswered.discard(lookup)
            if lookup.is_promoting:
                self._await_promotions(asked, lookup, now)
            else:
                self._promoting.discard(lookup)
        return is_answered

    def _await_promotions(self, asked: _Asked, lookup: Lookup, now: float) -> None:
        self._promoting.add(lookup)
        since, *shares = lookup.progress()
        awaited, came = (share * asked.request.num_tokens for share in shares)
        if self._patience.is_over(now - since, came, awaited, len(self._promoting)):
            lookup.stop_waiting()
            self._promoting.discard(lookup)
            self.health.count(metrics.SLOW_PROMOTIONS)
        elif self._is_idle:
            self._nap()

    def _spend(self, since: float) -> None:
        waited = time.monotonic() - since
        self._budget -= waited
        self.health.timings.waited(int(waited * 1e9))

    def _release(self, asked: _Asked) -> None:
        if asked.lookup is not None and not asked.lookup.loads:
            asked.lookup.release()
            self._forget(asked.lookup)

    def _finish(self, serial: int) -> None:
        if lookup := self._loads.pop(serial, None):
            lookup.loads -= 1
            if not lookup.loads and not self._has_more_to_load(lookup):
                lookup.release()
                self._forget(lookup)
        elif serial >= 0:
            self._stores.finish(serial)

    def _give_savings_up(self, request_ids: Collection[str]) -> set[str | None]:
        """The loads of these requests under way save nothing any more; the requests of all loads under way."""
        if not request_ids:
            return set()
        for job in self._jobs.values():
            if job.loads in request_ids:
                job.tokens = 0
        return {job.loads for job in self._jobs.values()}

    @caught(nothing)
    def _save(self, job: _Job) -> None:
        """All workers have reported this job."""
        if not job.tokens:
            return
        self._claim(job.tokens)
        if asked := self._requests.get(job.loads or ""):
            self._tell(asked, is_loaded=True)

    def _claim(self, tokens: int) -> None:
        """A load saved so many tokens, and all loads perhaps more time than was claimed."""
        seconds = self.savings.loaded(tokens, self._pace.tokens_per_second)
        if tokens or seconds:
            self.health.count(metrics.SAVED_TOKENS, tokens)
            self.health.count(metrics.SAVED_SECONDS, seconds)
            self._session.saved(tokens, seconds)

    def _tell(self, asked: _Asked, *, is_loaded: bool) -> None:
        if self._settings.log_requests and self._shapes:
            block = max(shape.tokens_per_block for shape in self._shapes.values())
            asked.account.tell(asked.request.request_id, asked.request.num_prompt_tokens, block, is_loaded=is_loaded)

    def _has_more_to_load(self, lookup: Lookup) -> bool:
        """Whether blocks that the request still waits for may be loaded under this lease as well."""
        asked = self._leased.get(lookup)
        if asked is None or not self._is_alive(asked):
            return False
        return asked.lookup is lookup and not asked.is_placed

    def _is_alive(self, asked: _Asked) -> bool:
        """Whether the request has not ended: nobody asks for it any more then."""
        return self._requests.get(asked.request.request_id) is asked

    def _forget(self, lookup: Lookup) -> None:
        self._leased.pop(lookup, None)
        for lookups in (self._unanswered, self._promoting):
            lookups.discard(lookup)

    def _give_unasked_back(self, now: float) -> None:
        """Returns the leases of requests that vLLM has not asked about for long: they are in its queue again."""
        for lookup, asked in list(self._leased.items()):
            if not lookup.loads and now - asked.polled_at >= UNASKED_SECONDS:
                self._release(asked)
                asked.lookup, asked.number = None, 0
                if self._is_alive(asked):
                    self._waiting[asked.request.request_id] = asked

    def _wanted(self, asked: _Asked, keys: Collection[OffloadKey]) -> list[tuple[Shape, list[OffloadKey]]]:
        """By group, full attention first: keys that, as far as this engine knows, the daemon does not have."""
        wanted: dict[int, list[OffloadKey]] = {group: [] for group in self._shapes}
        positions = asked.positions()
        for key in keys:
            is_stored = self._stores.is_known(key, asked.asked_at) or (asked.lookup and asked.lookup.is_resident(key))
            if not is_stored and key[:-4] in positions:
                wanted[group_of(key)].append(key)
        return [(self._shapes[group], some) for group, some in wanted.items() if some]

    def _reserve(self, asked: _Asked, shape: Shape, wanted: list[OffloadKey]) -> _Taken:
        """Slots for as many of the wanted keys as available. A gap in full attention ends the storing of this
        request."""
        if asked.has_gap:
            return _Taken(shape.group, [], b"", b"", [])
        slots, generations = self._session.reserve(shape.group, len(wanted))
        count = len(slots) // 4
        self.health.count(metrics.REFUSED_BLOCKS, len(wanted) - count)
        asked.has_gap = shape.is_full and count < len(wanted)
        # A prefix needs its first blocks, a window its last.
        keys = wanted[:count] if shape.is_full else wanted[len(wanted) - count :]
        hashes = asked.request.block_hashes
        runs = split_into_runs(shape, keys, slots, generations, hashes, asked.positions())
        return _Taken(shape.group, keys, slots, generations, runs)


class _Asked:
    """Forebay's state of one request."""

    def __init__(self, request: Request):
        self.request = request
        self.account = Account()
        self.adapter: Adapter | None = None
        self.mask: bytes | None = None
        self.number = 0  # its number in the daemon's hints
        self.lookup: Lookup | None = None
        self.asked_at = 0  # in the time of `Stores.now`
        self.polled_in = 0  # the step in which vLLM last asked
        self.polled_at = 0.0
        self.restock_until = 0.0
        self.is_placed = False  # has received its blocks since the lookup
        self.is_barred = False  # is not looked up
        self.is_excluded = False  # is neither looked up nor stored
        self.has_gap = False  # one of its blocks was not stored, so later blocks would be useless
        self._positions: dict[bytes, int] = {}

    def is_told(self) -> bool:
        """Whether the names of its blocks are known; `mask` keeps its value until the next call."""
        if self.adapter is not None:
            self.mask = self.adapter.mask  # read once: another thread sets it
        return not self.is_excluded and (self.adapter is None or self.mask is not None)

    def is_left_out(self) -> bool:
        """Whether the names are unknown now. If so, the request is left out for good, since some of its blocks were
        not looked up or stored."""
        self.is_excluded = not self.is_told()
        return self.is_excluded

    def positions(self) -> Mapping[bytes, int]:
        """Index of each hash in the request's hashes, which grow as it generates tokens."""
        hashes = self.request.block_hashes
        if len(hashes) != len(self._positions) or (hashes and hashes[-1] not in self._positions):
            self._positions = {hash_: at for at, hash_ in enumerate(hashes)}
        return self._positions


@dataclass
class _Job:
    serial: int
    workers_left: int
    loads: str | None  # the request
    tokens: int  # that its load saves, 0 once it is known to save none


@dataclass
class _Taken:
    """The slots that one group received from the stock."""

    group: int
    keys: list[OffloadKey]
    slots: bytes
    generations: bytes
    runs: list[Run]


def _leased_slots(lookup: Lookup, keys: Sequence[OffloadKey]) -> tuple[tuple[int, bytes, bytes], ...]:
    """By group, in the order of the keys; empty if one of them is not leased."""
    found = []
    for group, some in itertools.groupby(keys, group_of):
        if (places := lookup.places(list(some))) is None:
            return ()
        found.append((group, *places))
    return tuple(found)


def _nothing_to_store() -> PrepareStoreOutput:
    return PrepareStoreOutput([], PoolSlots(-1, "", b"", ()), [])
