"""The tier itself below vLLM's `TieringOffloadingManager`, by a name of the user's: what vLLM asks of its tier on disk, and more.

Most of the cases are those of vLLM's own `test_fs_tier.py`. Each chunk's bytes are compared.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forebay.vllm.tier import ForebayTier
from harness import Shape, kv_cache_config, vllm_config
from rig.daemon import Daemon
from rig.process import wait_until
from rig.stores import Directory, Valkey
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

ROWS, ROW_BYTES = 16, 8192
TOKENS = 16
SECONDS = 20.0


class Host:
    """vLLM's host tier with Forebay's below, and the hands of a GPU that fills its rows."""

    numbers = itertools.count(1)

    def __init__(self, daemon: Daemon, groups: str = "full", **options: Any):
        init_none_hash(get_hash_fn_by_name("sha256"))
        shape = Shape(engine_id=f"host-{os.getpid()}-{next(self.numbers)}", groups=groups)
        config = build_offloading_config(vllm_config(shape), kv_cache_config(shape))
        region = SharedOffloadRegion(config.engine_id, ROWS, None, ROW_BYTES, ROW_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(ROWS, region)
        spec: Any = SimpleNamespace(config=config, tokens_per_hash=TOKENS, blocks_per_chunk=1)
        view = self.primary.get_kv_memoryview()
        patient = {"lookup_deadline_ms": 60_000.0, "namespace": "mine"}
        self.tier = ForebayTier(spec, view, "forebay", **{"socket": str(daemon.socket)} | patient | options)
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.rows = np.asarray(self.primary.get_kv_memoryview())
        self.asked_ms: list[float] = []  # each step's questions

    def wait_ready(self) -> Host:
        session = self.tier.manager._session

        def has_stock() -> bool:
            session.reserve(0, 0)  # a session of which nothing is asked has no stock for long
            return session.stats().get("reserved_stock", 0) >= ROWS

        self._until(has_stock)
        return self

    def begin(self, name: str, keys: list[OffloadKey]) -> ReqContext:
        context = ReqContext(name)
        for at, key in enumerate(keys, 1):
            context.set_offload_key_position(key, at * TOKENS)
        self.manager.on_new_request(context)
        return context

    def store(self, name: str, keys: list[OffloadKey], seed: int = 0) -> None:
        """As a GPU and its connector do, up to what the daemon has acknowledged."""
        context = self.begin(name, keys)
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):  # type: ignore[attr-defined]
            self.rows[row] = content(key, seed)
        if prepared.keys_to_store:
            self.manager.complete_store(set(prepared.keys_to_store), context)
        self.manager.on_request_finished(context)
        self._until(lambda: not self.manager.has_pending_work() and not self._queued())

    def lookup(self, context: ReqContext, keys: list[OffloadKey]) -> list[LookupResult]:
        """Until every answer is final; a step goes by between two questions."""
        answers: list[LookupResult] = []

        def is_final() -> bool:
            begun = time.perf_counter()
            answers[:] = [self.manager.lookup(key, context) for key in keys]
            self.asked_ms.append(1e3 * (time.perf_counter() - begun))
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers)

        self._until(is_final)
        return answers

    def load(self, name: str, keys: list[OffloadKey]) -> list[bytes | None]:
        """The bytes that a GPU would get; None for a miss."""
        context = self.begin(name, keys)
        found = [answer is LookupResult.HIT for answer in self.lookup(context, keys)]
        hits = [key for key, is_there in zip(keys, found, strict=True) if is_there]
        ids = self.manager.prepare_load(hits, context).chunk_ids if hits else []  # type: ignore[attr-defined]
        rows = dict(zip(hits, ids, strict=True))
        loaded = [self.rows[rows[key]].tobytes() if key in rows else None for key in keys]
        if hits:
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        self.step()
        return loaded

    def forget(self) -> None:
        """vLLM's host tier is empty, and its rows hold something else."""
        self.primary.reset_cache()
        self.rows[:] = 0x33

    def reset(self) -> None:
        """As vLLM's scheduler does. From 0.33 on, the scheduler also says when the workers' jobs of before have ended."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()

    def _queued(self) -> int:
        return int(self.tier.manager._session.stats().get("queued", 0))

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline, self.tier.manager._session.reason()
            self.manager.has_pending_work()
            self.step()


def content(key: bytes, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, *key]).integers(-128, 127, ROW_BYTES, dtype=np.int8)


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([number]) * 32, 0) for number in numbers]


def right(names: list[OffloadKey]) -> list[bytes]:
    return [content(key).tobytes() for key in names]


def stored_blocks(daemon: Daemon) -> float:
    """In the tiers below the pool."""
    return daemon.metrics()["forebay_tier_stored_blocks_total"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Daemon]:
    """The shipped daemon. Each test has keys of its own."""
    with Daemon(capacity_bytes=64 << 20) as daemon:
        yield daemon.start()


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def begin(daemon: Daemon, **options: Any) -> Host:
        hosts.append(Host(daemon, **options))
        return hosts[-1]

    yield begin
    for each in hosts:
        if hasattr(each, "rows"):
            each.close()


Begin = Callable[..., Host]


def test_what_nobody_stored_is_a_miss(pool: Daemon, host: Begin) -> None:
    here = host(pool).wait_ready()
    assert here.load("r", keys(1, 2, 3)) == [None] * 3


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_was_stored_comes_back_byte_for_byte(pool: Daemon, host: Begin, count: int) -> None:
    here, names = host(pool).wait_ready(), keys(*range(10 * count, 11 * count))
    here.store("a", names)
    here.forget()
    assert here.load("b", names) == right(names)
    assert here.tier.manager.get_stats() is not None
    assert here.tier.breaker.faults == 0


def test_two_hosts_on_one_daemon_share_and_a_new_one_finds_it_all(pool: Daemon, host: Begin) -> None:
    left, other = host(pool).wait_ready(), host(pool).wait_ready()
    names = keys(60, 61, 62)
    left.store("a", names)
    assert other.load("b", names) == right(names)
    left.close()
    assert host(pool).wait_ready().load("c", names) == right(names)


def test_a_name_of_ones_own_shares_with_no_other(pool: Daemon, host: Begin) -> None:
    names = keys(70, 71)
    host(pool).wait_ready().store("a", names)
    assert host(pool, namespace="other").wait_ready().load("b", names) == [None] * 2
    assert host(pool, tenant="other").wait_ready().load("c", names) == [None] * 2


def test_a_chunk_whose_predecessor_is_gone_is_not_stored(pool: Daemon, host: Begin) -> None:
    here, names = host(pool).wait_ready(), keys(80, 81, 82)
    context = here.begin("a", names)
    here.manager.prepare_store(names[2:], context)
    here.manager.complete_store(set(names[2:]), context)
    here.manager.on_request_finished(context)
    here._until(lambda: not here.manager.has_pending_work() and not here._queued())
    here.forget()
    assert here.load("b", names) == [None] * 3


def test_requests_side_by_side_load_their_own(pool: Daemon, host: Begin) -> None:
    here = host(pool).wait_ready()
    first, second = keys(90, 91), keys(92, 93, 94)
    here.store("a", first)
    here.store("b", second)
    here.forget()
    contexts = [here.begin("c", first), here.begin("d", second)]
    for context, names in zip(contexts, (first, second), strict=True):
        here.lookup(context, names)
    for context in contexts:
        here.manager.on_request_finished(context)
    assert here.load("e", first) + here.load("f", second) == right([*first, *second])


def test_a_pool_that_is_replaced_between_lookup_and_load_fails_the_load_alone(host: Begin) -> None:
    with Daemon(capacity_bytes=64 << 20) as daemon:
        here, names = host(daemon.start()).wait_ready(), keys(1, 2)
        here.store("a", names)
        here.forget()
        context = here.begin("b", names)
        here._until(lambda: here.manager.lookup(names[0], context) is LookupResult.HIT_PENDING)
        daemon.kill()
        daemon.drop_pool()
        # The lease's memory is mapped here still, and what was leased is right.
        here.step()
        here._until(lambda: not here.manager._jobs)
        answer = here.manager.lookup(names[0], context)
        assert answer in (LookupResult.HIT, LookupResult.MISS)
        if answer is LookupResult.HIT:
            ids = here.manager.prepare_load(names[:1], context).chunk_ids  # type: ignore[attr-defined]
            assert here.rows[ids[0]].tobytes() == right(names)[0]
            here.manager.complete_load(names[:1], context)
        here.manager.on_request_finished(context)
        daemon.start()
        here.wait_ready()
        here.forget()
        assert here.load("c", names) == [None] * 2


def test_the_pool_outlives_kills_of_the_daemon(host: Begin) -> None:
    with Daemon(capacity_bytes=64 << 20) as daemon:
        here, names = host(daemon.start()).wait_ready(), keys(1, 2, 3)
        here.store("a", names)
        daemon.kill()
        here.forget()
        daemon.start()
        here.wait_ready()
        here._until(lambda: here.load(f"b-{time.monotonic()}", names) == right(names))
        assert daemon.audit() == 3


def test_a_damaged_block_is_never_served(host: Begin) -> None:
    with Daemon(capacity_bytes=64 << 20) as daemon:
        here, names = host(daemon.start()).wait_ready(), keys(1, 2)
        here.store("a", names)
        daemon.kill()
        damaged = right(names)[1][:64]
        for path in (path for path in daemon.pool_directory.rglob("*") if path.is_file()):
            if (at := path.read_bytes().find(damaged)) >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(b"wrong")
        here.forget()
        daemon.start()
        here.wait_ready()
        loaded: list[bytes | None] = []
        here._until(
            lambda: loaded.__setitem__(slice(None), here.load(f"b-{time.monotonic()}", names)) or loaded[0] is not None
        )
        assert loaded == [right(names)[0], None]


@pytest.mark.parametrize("kind", [Valkey, Directory])
def test_a_sick_tier_below_the_pool_costs_hits_and_no_byte(kind: type[Valkey | Directory], host: Begin) -> None:
    """Frozen, killed or emptied. What vLLM asks meanwhile is answered within a step's budget, and stores go on."""
    numbers = itertools.count(180)
    with kind() as store:
        store.start()
        well = ("well", lambda: None, lambda: None)
        asked = {harm: keys(next(numbers), next(numbers)) for harm in (well, *store.harms)}
        with Daemon(capacity_bytes=64 << 20, tiers=store.sections) as writer:
            there = host(writer.start()).wait_ready()
            for name, names in enumerate(asked.values()):
                there.store(f"writes-{name}", names)
            wait_until("all is in the store", lambda: stored_blocks(writer) >= sum(map(len, asked.values())), 60)
            there.close()
        with Daemon(capacity_bytes=64 << 20, tiers=store.sections) as reader:
            here = host(reader.start()).wait_ready()
            for (name, harm, undo), names in asked.items():
                harm()
                answers = here.load(f"asks-{name}", names)
                allowed = [None] * (name != "well")
                assert all(answer in (byte, *allowed) for answer, byte in zip(answers, right(names), strict=True))
                fresh = keys(next(numbers), next(numbers))
                here.store(f"stores-{name}", fresh)
                here.forget()
                assert here.load(f"reads-{name}", fresh) == right(fresh)
                assert np.median(here.asked_ms) < 5, "a step waits for nobody longer than its budget of 2 ms"
                undo()
                before = stored_blocks(reader)
                for at in range(60):
                    here.store(f"again-{name}-{at}", keys(next(numbers)))
                    if stored_blocks(reader) > before:
                        break
                    time.sleep(0.5)
                assert stored_blocks(reader) > before, f"{name}: the store is not written to again"
            assert here.tier.breaker.faults == 0


def test_a_load_without_a_lease_fails_and_is_no_fault(
    pool: Daemon, host: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_STRICT", "1")
    here, names = host(pool).wait_ready(), keys(115)
    here.store("a", names)
    here.forget()
    context = here.begin("b", names)
    here._until(lambda: here.manager.lookup(names[0], context) is LookupResult.HIT_PENDING)
    here.tier.manager.ended("b")
    here.step()
    here._until(lambda: not here.manager._jobs)
    assert here.manager.lookup(names[0], context) is LookupResult.MISS
    here.manager.on_request_finished(context)


def test_the_tail_of_a_prompt_is_found_behind_its_chunks(pool: Daemon, host: Begin) -> None:
    """vLLM asks for a partial tail when it has the whole chunks, so their lease must not end with their load."""
    here, names, tail = host(pool).wait_ready(), keys(110, 111), keys(112)
    here.store("a", names + tail)
    here.forget()
    context = here.begin("b", names)
    assert here.lookup(context, names) == [LookupResult.HIT] * 2
    context.set_offload_key_position(tail[0], 3 * TOKENS)
    assert here.lookup(context, tail) == [LookupResult.HIT]
    here.manager.on_request_finished(context)
    here.step()
    assert not here.tier.manager._leased


def compute(here: Host, name: str, names: list[OffloadKey]) -> ReqContext:
    """A step that computes these chunks, and runs on."""
    context = here.begin(name, names)
    here.manager.on_schedule_end(ScheduleEndContext([name], []))
    prepared = here.manager.prepare_store(names, context)
    assert prepared is not None
    here.manager.complete_store(set(prepared.keys_to_store), context)
    return context


def test_the_speed_of_an_engine_that_tells_nothing_is_that_of_its_chunks(pool: Daemon, host: Begin) -> None:
    here = host(pool).wait_ready()
    begun = time.monotonic()
    for at in range(8):
        context = compute(here, f"r{at}", keys(120 + 2 * at, 121 + 2 * at))
        here.manager.on_request_finished(context)
    here.step()
    tokens = 8 * 2 * TOKENS
    assert here.tier.manager._patience.tokens_per_second >= tokens / (time.monotonic() - begun) / 2


def test_an_engine_that_computes_is_never_made_to_wait(pool: Daemon, host: Begin) -> None:
    """Nobody tells what a step computes, so requests that run count as work."""
    here = host(pool).wait_ready()
    here.step()
    assert here.tier.manager._is_idle
    context = compute(here, "runs", keys(140))
    for _ in range(3):
        here.step()
        assert not here.tier.manager._is_idle
    here.manager.on_request_finished(context)
    here.step()
    assert here.tier.manager._is_idle


def test_after_a_reset_no_row_is_loaded_into_before_vllms_own_copies_have_ended(pool: Daemon, host: Begin) -> None:
    """Nobody tells when they have; they have when one that began after the reset has."""
    here, names = host(pool, reset_moves_namespace=False).wait_ready(), keys(150, 151)
    here.store("a", names)
    here.reset()
    here.wait_ready()
    assert here.load("b", names) == [None] * 2
    here.store("c", keys(152))
    assert here.load("d", names) == right(names)


def test_what_runs_through_a_reset_is_not_stored(pool: Daemon, host: Begin) -> None:
    here, names = host(pool).wait_ready(), keys(160, 161)
    runs = compute(here, "runs", keys(162))
    here.reset()
    here.manager.on_request_finished(runs)
    here.wait_ready().store("old", names)
    here.forget()
    assert here.load("b", names) == [None] * 2
    here.reset()
    here.wait_ready().store("new", names)
    here.forget()
    assert here.load("c", names) == right(names)


@pytest.mark.parametrize(("groups", "is_stored"), [("full", True), ("hybrid", False)])
def test_a_reset_that_keeps_the_namespace_trusts_the_rows_of_full_attention_alone(
    pool: Daemon, host: Begin, groups: str, is_stored: bool
) -> None:
    """A running request may offer blocks that a window has left, and nobody tells a tier which groups have windows."""
    here = host(pool, groups=groups, namespace=groups, reset_moves_namespace=False).wait_ready()
    names = keys(170, 171)
    runs = compute(here, "runs", keys(172))
    here.reset()
    here.wait_ready().store("while it runs", names)
    here.forget()
    assert here.load("b", names) == (right(names) if is_stored else [None] * 2)
    here.manager.on_request_finished(runs)
    here.reset()
    here.wait_ready().store("behind it", names)
    here.forget()
    assert here.load("c", names) == right(names)


@pytest.mark.faults
@pytest.mark.parametrize("options", [{"namespace": ["mine"]}, {"namespace": 7}, {"tenant": 7}, {"tennant": "a"}])
def test_a_configuration_that_names_nobody_is_refused(pool: Daemon, host: Begin, options: dict[str, Any]) -> None:
    here = host(pool, **options)
    assert here.tier.breaker.is_off and here.tier.breaker.faults == 0
    assert here.load("r", keys(1)) == [None]


@pytest.mark.faults
def test_what_cannot_be_opened_is_vllms_host_tier_alone(
    pool: Daemon, host: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForebayTier, "connect", lambda *_: 1 / 0)
    here = host(pool)
    assert here.tier.breaker.is_off and here.tier.breaker.faults == 1
    assert here.load("r", keys(1)) == [None]


def test_without_a_name_it_refuses_and_says_what_to_write(pool: Daemon, host: Begin) -> None:
    here = host(pool, namespace="")
    assert here.load("r", keys(1)) == [None]
    assert "ForebayTieringConnector" in str(here.tier.breaker.reason)
    here.store("s", keys(1))
    here.reset()


def test_after_its_end_it_touches_no_row(pool: Daemon, host: Begin) -> None:
    here, names = host(pool).wait_ready(), keys(100, 101, 102)
    context = here.begin("a", names)
    here.manager.prepare_store(names, context)
    here.manager.complete_store(set(names), context)
    mapped = here.primary._mmap_region.mmap_obj
    here.close()
    assert mapped is not None and mapped.closed, "a view of vLLM's memory is left, so it cannot go"
