"""How long a request waits for the daemon, and what it gets then: never longer than its deadline, never a whole step."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fake import LEFT_OUT, READY, FakeDaemon
from forebay.vllm.manager import LOOKUPS_UNDER_WAY, TOLD_IN_A_STEP, WAITING_TOLD
from harness import Engine, Shape, prompt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request


def test_a_slow_answer_delays_its_request_and_no_other(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", prompt(1, 100))
    engine.forget()
    running = engine.add("running", prompt(2, 30), max_tokens=50)
    engine.step()
    daemon.is_frozen = True
    waiting = engine.add("waiting", prompt(1, 100))
    before = len(running.output_token_ids)
    for _ in range(5):
        engine.step()
    assert len(running.output_token_ids) == before + 5
    assert waiting.num_computed_tokens == 0
    daemon.is_frozen = False
    engine.run(waiting, running)
    assert engine.hits["waiting"] == 96
    engine.assert_nothing_is_held()


def test_waits_of_one_step_share_its_budget(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"step_budget_ms": 5}))
    engine.generate("first", prompt(0, 40))
    daemon.is_frozen = True
    requests = [engine.add(str(at), prompt(at, 100)) for at in range(10)]
    for _ in range(10):
        daemon.waits.clear()
        engine.step()
        assert len(daemon.waits) == 10
        assert max(daemon.waits) == 0.005
        assert sum(daemon.waits) < 0.006  # with the budget for each of them it would be 50 ms
    assert engine.connector.timings.waits.max_ns >= 5e6
    assert daemon.lookups == 11  # each is asked about once, however long it waits
    daemon.is_frozen = False
    engine.run(*requests)
    engine.assert_nothing_is_held()


def test_only_an_idle_engine_spends_its_budget_on_promotions(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"step_budget_ms": 20, "lookup_deadline_ms": 60_000}))
    engine.generate("cold", prompt(1, 100))
    engine.forget()
    daemon.promotions = 1000
    waiting = engine.add("waiting", prompt(1, 100))
    for _ in range(3):
        engine.step()
    assert engine.connector.timings.waits.max_ns >= 20e6
    running = engine.add("running", prompt(2, 20), max_tokens=50)
    while not running.output_token_ids:
        engine.step()
    naps: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (naps.append(seconds), sleep(seconds)))
    for _ in range(5):
        engine.step()
    assert not naps
    daemon.promotions = 0
    engine.run(waiting, running)
    assert engine.hits["waiting"] == 96
    engine.assert_nothing_is_held()


def test_without_a_budget_the_answer_is_taken_when_it_is_there(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"step_budget_ms": 0}))
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    assert engine.generate("warm", prompt(1, 100)) == cold
    assert engine.hits["warm"] == 96


def test_an_answer_after_the_deadline_is_a_miss_for_good(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"lookup_deadline_ms": 50}))
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    daemon.is_frozen = True
    start = time.monotonic()
    request = engine.add("late", prompt(1, 100))
    while engine.hits.get("late", -1) != 0:
        engine.step()
    assert time.monotonic() - start >= 0.05
    daemon.is_frozen = False
    assert engine.run(request)["late"] == cold
    assert engine.hits["late"] == 0
    assert engine.stats["forebay:late_lookups"] == 1
    engine.assert_nothing_is_held()


def test_a_promotion_is_waited_for(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    daemon.promotions = 3
    before = daemon.lookups
    assert engine.generate("warm", prompt(1, 100)) == cold
    assert engine.hits["warm"] == 96
    assert daemon.lookups == before + 1  # the daemon goes on by itself
    engine.assert_nothing_is_held()


def test_a_promotion_that_never_ends_is_a_miss_at_the_deadline(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"lookup_deadline_ms": 50}))
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    daemon.promotions = 10**9
    assert engine.generate("warm", prompt(1, 100)) == cold
    assert engine.hits["warm"] == 0
    assert daemon.lookups == 2  # the cold one and this one, which is not asked again
    engine.assert_nothing_is_held()


def test_the_first_request_waits_for_the_namespace(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Engine(daemon, monkeypatch, Shape(engine_id="first"))
    first.generate("cold", prompt(1, 100))
    second = Engine(daemon, monkeypatch, Shape(engine_id="second"))
    attached, daemon.engines = daemon.engines, []
    request = second.add("warm", prompt(1, 100))
    for _ in range(3):
        second.step()
    assert request.num_computed_tokens == 0
    daemon.engines = attached
    second.run(request)
    assert second.hits["warm"] == 96


def test_the_namespace_is_named_before_the_first_request(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    assert engine.session.namespace is None
    assert not engine.scheduler.has_requests()  # as the engine core's loop asks before it waits for a request
    assert engine.session.namespace is not None


def test_a_daemon_that_restarts_later_is_not_waited_for(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("first", prompt(1, 100))
    daemon.engines.clear()
    steps = engine.steps
    engine.generate("second", prompt(2, 100))
    assert engine.steps - steps <= 8


def test_ranks_that_never_attach_are_waited_for_once(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"lookup_deadline_ms": 100}))
    daemon.engines.clear()
    start = time.monotonic()
    engine.generate("first", prompt(1, 100))
    assert time.monotonic() - start >= 0.1
    asked = engine.steps
    engine.generate("second", prompt(2, 100))
    assert engine.steps - asked <= 8
    assert daemon.lookups == 0


def test_one_lookup_serves_all_groups_and_all_steps_of_waiting(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(groups="mixed", blocks=20, max_requests=1))
    requests = [engine.add(str(at), prompt(at, 100), max_tokens=10) for at in range(3)]
    engine.run(*requests)
    assert engine.steps > 30
    assert daemon.lookups == 3


def test_keys_beyond_whole_blocks_are_asked_for_in_the_same_match(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for partial tails, whose keys only vLLM's own matching knows."""
    original = OffloadingConnectorScheduler._lookup
    seen = []

    def with_tail(self: OffloadingConnectorScheduler, status: Any, *args: Any) -> int | None:
        result = original(self, status, *args)
        inside_a_block = make_offload_key(status.req.block_hashes[4], 1)
        seen.append(self.manager.lookup(inside_a_block, status.req_context).name)
        return result

    engine = Engine(daemon, monkeypatch, Shape(groups="mixed"))
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    monkeypatch.setattr(OffloadingConnectorScheduler, "_lookup", with_tail)
    lookups, steps = daemon.lookups, engine.steps
    assert engine.generate("warm", prompt(1, 100)) == cold
    assert seen == ["RETRY", "MISS"]
    assert daemon.lookups == lookups + 2
    assert engine.steps - steps <= 8
    assert engine.hits["warm"] == 96
    engine.assert_nothing_is_held()


def test_an_earlier_window_is_found_if_the_last_one_does_not_come(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(groups="hybrid"))
    engine.generate("short", prompt(1, 115))  # vLLM stores the windows at the ends of prompts
    cold = engine.generate("cold", prompt(1, 200))
    engine.forget()
    assert engine.generate("warm", prompt(1, 200)) == cold
    assert engine.hits["warm"] == 192
    ticket = engine.session.tickets[-1]
    assert ticket.states(1) == bytes([LEFT_OUT] * 9 + [READY] * 3)
    # The last window's first block goes while its promotion is waited for.
    engine.forget()
    daemon.promotions = 2
    lookups = daemon.lookups
    request = engine.add("pending", prompt(1, 200))
    engine.step()
    daemon.evict((engine.session.namespace, 1, request.block_hashes[9]))
    engine.run(request)
    assert list(request.output_token_ids) == cold
    assert engine.hits["pending"] == 112
    assert daemon.lookups == lookups + 2
    engine.assert_nothing_is_held()


def test_leases_of_one_engine_are_bounded(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"max_leased_requests": 2}))
    for at in range(4):
        engine.generate(f"cold {at}", prompt(at, 60))
    engine.forget()
    for worker in engine.workers:
        worker.engine.is_holding = True
    requests = [engine.add(str(at), prompt(at, 60)) for at in range(4)]
    for _ in range(3):
        engine.step()
    assert daemon.leased == 2 * 3
    assert [engine.hits.get(str(at)) for at in range(4)] == [None, None, 0, 0]
    for worker in engine.workers:
        worker.engine.is_holding = False
    engine.run(*requests)
    engine.assert_nothing_is_held()


def test_a_hit_stays_leased_while_there_is_no_room_for_it(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(blocks=16))
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    big = engine.add("big", prompt(2, 150), max_tokens=30)
    engine.step()
    engine.step()
    hit = engine.add("hit", prompt(1, 100))
    for _ in range(5):
        engine.step()
    assert daemon.leased == 6
    daemon.evict_all()  # takes what is not leased
    assert engine.run(big, hit)["hit"] == cold
    assert engine.hits["hit"] == 96
    assert daemon.lookups == 3
    engine.assert_nothing_is_held()


def test_a_lease_that_found_no_use_goes_back_at_once(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", prompt(1, 100))
    request = engine.add("local", prompt(1, 100), max_tokens=20)  # the engine's own cache has it all
    engine.step()
    assert engine.hits["local"] == 96
    assert daemon.lookups == 2
    assert daemon.leased == 0
    engine.run(request)


def test_an_aborted_request_gives_its_lease_back(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(blocks=16))
    engine.generate("cold", prompt(1, 100))
    engine.forget()
    big = engine.add("big", prompt(2, 150), max_tokens=30)
    engine.step()
    engine.step()
    hit = engine.add("hit", prompt(1, 100))
    engine.step()
    assert daemon.leased == 6
    engine.abort(hit)
    assert daemon.leased == 0
    engine.run(big)
    engine.assert_nothing_is_held()


def test_a_request_aborted_while_loading_keeps_its_lease_until_the_copy_is_over(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch)
    engine.generate("cold", prompt(1, 100))
    engine.forget()
    (worker,) = engine.workers
    worker.engine.is_holding = True
    hit = engine.add("hit", prompt(1, 100))
    engine.step()
    engine.step()
    engine.abort(hit)
    engine.step()
    assert daemon.leased == 6
    worker.engine.is_holding = False
    engine.run()
    engine.assert_nothing_is_held()
    assert not engine.scheduler.requests


def test_lookups_under_way_are_bounded_and_nobody_misses_for_it(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(blocks=200, max_requests=64, max_tokens_per_step=512, extra={"step_budget_ms": 0})
    engine = Engine(daemon, monkeypatch, shape)
    engine.run(*[engine.add(f"cold {at}", prompt(at, 32)) for at in range(40)])
    engine.forget()
    before = daemon.lookups
    daemon.is_frozen = True
    requests = [engine.add(str(at), prompt(at, 32)) for at in range(40)]
    for _ in range(3):
        engine.step()
    assert daemon.lookups - before == LOOKUPS_UNDER_WAY < 40
    daemon.is_frozen = False
    engine.run(*requests)
    assert all(engine.hits[str(at)] == 31 for at in range(40))
    engine.assert_nothing_is_held()


class Clock:
    """The manager's time, which goes on when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr("forebay.vllm.manager.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def fill_the_batch(engine: Engine) -> Request:
    """One request that asks for nothing and leaves no room: from now on vLLM does not ask about those that wait."""
    filling = engine.add("filling", prompt(99, 20), max_tokens=60, prompt_logprobs=1)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["filling"]
    return filling


def test_an_answer_that_came_while_the_batch_was_full_is_used(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    engine = Engine(daemon, monkeypatch, Shape(max_requests=1, extra={"lookup_deadline_ms": 1000}))
    cold = [engine.generate(f"cold {at}", prompt(at, 100)) for at in range(3)]
    engine.forget()
    daemon.is_frozen = True
    requests = [engine.add(str(at), prompt(at, 100)) for at in range(3)]
    filling = fill_the_batch(engine)
    daemon.is_frozen = False
    for _ in range(5):
        clock.now += 1
        engine.step()
    outputs = engine.run(filling, *requests)
    assert [outputs[str(at)] for at in range(3)] == cold
    assert [engine.hits[str(at)] for at in range(3)] == [96, 96, 96]
    assert engine.stats["forebay:late_lookups"] == 0
    engine.assert_nothing_is_held()


def test_blocks_that_came_up_while_the_batch_was_full_are_used(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    extra = {"lookup_deadline_ms": 1000, "promotion_lag": 0.25}
    engine = Engine(daemon, monkeypatch, Shape(max_requests=1, extra=extra))
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    engine.connector.manager._patience._fastest = 1000.0  # tokens a second, so that little is waited for
    daemon.promotions = 1
    waiting = engine.add("warm", prompt(1, 100))
    filling = fill_the_batch(engine)
    assert daemon.lookups == 2
    for _ in range(5):
        clock.now += 1
        engine.step()
    assert engine.run(filling, waiting)["warm"] == cold
    assert engine.hits["warm"] == 96
    assert engine.stats["forebay:late_lookups"] == engine.stats["forebay:slow_promotions"] == 0
    engine.assert_nothing_is_held()


def test_an_answer_that_nobody_asks_for_is_held_for_ten_seconds(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    engine = Engine(daemon, monkeypatch, Shape(max_requests=1))
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    daemon.promotions, daemon.promoted = 1, {engine.add("warm", prompt(1, 100)).block_hashes[5]}
    waiting = engine.scheduler.requests["warm"]
    filling = fill_the_batch(engine)
    assert daemon.leased == 5
    for _ in range(9):
        clock.now += 1
        engine.step()
    assert daemon.leased == 5
    assert not engine.session.waiting
    for _ in range(2):
        clock.now += 1
        engine.step()
    assert daemon.leased == 0
    assert list(engine.session.waiting.values()) == [{0: waiting.block_hashes}]  # it stands in the queue again
    lookups = daemon.lookups
    assert engine.run(filling, waiting)["warm"] == cold
    assert engine.hits["warm"] == 96
    assert daemon.lookups == lookups + 1
    engine.assert_nothing_is_held()


def test_a_load_that_takes_long_keeps_its_lease(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    engine = Engine(daemon, monkeypatch, Shape(max_requests=2))
    cold = engine.generate("cold", prompt(1, 100))
    engine.forget()
    (worker,) = engine.workers
    worker.engine.is_holding = True
    running = engine.add("running", prompt(2, 20), max_tokens=60)
    warm = engine.add("warm", prompt(1, 100))
    for _ in range(20):
        clock.now += 5
        engine.step()
    assert daemon.leased == 6
    worker.engine.is_holding = False
    assert engine.run(running, warm)["warm"] == cold
    engine.assert_nothing_is_held()


def drain(engine: Engine, daemon: FakeDaemon) -> None:
    """The stock is empty, and the thread that fills it is late."""
    engine.session.is_refilling = False
    for number in engine.session.stock[0]:
        daemon.slots[number].owner = None
    engine.session.stock[0] = []


def test_a_request_waits_for_a_low_stock_that_fills_up(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"restock_ms": 60_000}))
    engine.generate("first", prompt(1, 100))
    drain(engine, daemon)
    request = engine.add("second", prompt(2, 100))
    for _ in range(5):
        engine.step()
    assert request.num_computed_tokens == 0
    engine.session.is_refilling = True
    engine.session.refill()
    engine.run(request)
    assert daemon.ready() == 12
    engine.assert_nothing_is_held()


def test_naps_of_one_step_share_its_budget(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"restock_ms": 60_000, "step_budget_ms": 20}))
    engine.generate("first", prompt(1, 100))
    drain(engine, daemon)
    requests = [engine.add(str(seed), prompt(seed, 100)) for seed in range(2, 7)]
    naps: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (naps.append(seconds), sleep(seconds)))
    for _ in range(3):
        naps.clear()
        engine.step()
        assert naps and sum(naps) < 0.021  # with the budget for each of them it would be 100 ms
    monkeypatch.setattr(time, "sleep", sleep)
    engine.session.is_refilling = True
    engine.session.refill()
    engine.run(*requests)
    engine.assert_nothing_is_held()


def test_a_stock_that_stays_low_delays_a_request_for_a_moment(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"restock_ms": 50}))
    engine.generate("first", prompt(1, 100))
    drain(engine, daemon)
    start = time.monotonic()
    engine.generate("second", prompt(2, 100))
    assert time.monotonic() - start >= 0.05
    assert daemon.ready() == 6
    engine.forget()
    steps = engine.steps
    engine.generate("hit", prompt(1, 97))  # wants no slots, so it waits for none
    assert engine.hits["hit"] == 96
    assert engine.steps - steps <= 8
    engine.assert_nothing_is_held()


def test_a_step_in_which_every_request_fills_a_block_finds_slots_for_all(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(blocks=200, max_tokens_per_step=128, max_requests=16, extra={"offload_prompt_only": False})
    engine = Engine(daemon, monkeypatch, shape)
    engine.generate("first", prompt(99, 20))  # what comes before there is a namespace finds no slots
    requests = [engine.add(str(at), prompt(at, 8), max_tokens=42) for at in range(16)]
    while not all(request.is_finished() for request in requests):
        engine.session.is_refilling = True
        engine.session.refill()
        engine.session.is_refilling = False  # until the step is over
        engine.step()
    engine.run()
    assert engine.stats["forebay:refused_blocks"] == 0
    assert daemon.ready() >= 16 * 3
    engine.assert_nothing_is_held()


def test_the_daemon_is_told_of_the_queue_and_not_of_those_served_at_once(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(daemon, monkeypatch, Shape(groups="mixed", max_requests=1))
    engine.generate("alone", prompt(0, 100))
    assert "hint" not in engine.session.calls
    running = engine.add("running", prompt(1, 100), max_tokens=100)
    queue = [engine.add(str(at), prompt(at, 100)) for at in range(2, 2 + WAITING_TOLD + 10)]
    engine.step()
    assert len(engine.session.waiting) == TOLD_IN_A_STEP  # the rest in the next steps
    for _ in range(WAITING_TOLD // TOLD_IN_A_STEP):
        engine.step()
    waiting = list(engine.session.waiting.values())
    assert len(waiting) == WAITING_TOLD
    assert waiting[0] == {0: queue[0].block_hashes, 1: queue[0].block_hashes[1::2]}
    engine.abort(queue[3])
    assert queue[3].block_hashes not in [groups[0] for groups in engine.session.waiting.values()]
    engine.run(running, *(request for request in queue if request is not queue[3]))
    engine.assert_nothing_is_held()
