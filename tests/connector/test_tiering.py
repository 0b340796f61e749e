"""Forebay's pool below vLLM's own host tier: vLLM's scheduler and tiering, and every block a request relies on is checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
from fake import FakeDaemon
from harness import Shape, left_a_window, prompt
from rig.daemon import Daemon
from rig.process import wait_until
from test_multi import SIBLING
from tiered import Engine
from vllm.v1.metrics.cache_hit_source import CacheHitSource

Start = Callable[..., Engine]
# What one step may cost while nobody answers: the budget is 2 ms, and the machine may be busy.
STALL_SECONDS = 0.2


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts engines that are stopped when the test ends."""
    started: list[Engine] = []

    def begin(daemon: FakeDaemon | Daemon, **shape: Any) -> Engine:
        if isinstance(daemon, Daemon):
            # Steps take no time here, so a stock would not fill up between them.
            extra = {"socket": str(daemon.socket), "stock_blocks": 64} | shape.pop("extra", {})
            engine = Engine(monkeypatch, extra=extra, **shape)
            if daemon.is_running():
                engine.wait_for_stock()
        else:
            engine = Engine(monkeypatch, daemon, **shape)
        started.append(engine)
        return engine

    yield begin
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def pool() -> Iterator[Daemon]:
    """The shipped daemon. Its tests have prompts of their own."""
    with Daemon(capacity_bytes=64 << 20) as daemon:
        yield daemon.start()


def stored(engine: Engine, *prompts: list[int]) -> None:
    for at, tokens in enumerate(prompts):
        engine.generate(f"cold-{at}-{tokens[0]}", tokens)
    engine.settle()


def broken(*_: Any) -> Any:
    raise RuntimeError("broken")


def held_in_a_load(engine: Engine, name: str, tokens: list[int]) -> Any:
    """The request whose load has begun, and does not end before `is_holding` of the copies is taken back."""
    engine.copies.is_holding = True
    request = engine.add(name, tokens)
    while not engine.tier._loads:
        engine.step()
    return request


def slowest(engine: Engine, name: str, tokens: list[int]) -> float:
    """Runs a request; the seconds of its longest step."""
    request, longest = engine.add(name, tokens), 0.0
    while not request.is_finished():
        begun = time.monotonic()
        engine.step()
        longest = max(longest, time.monotonic() - begun)
    return longest


# ---- against the shipped daemon
# ------------------------------------------------------------------------------------------


def test_a_prompt_comes_back_after_the_engine_was_started_anew(pool: Daemon, start: Start) -> None:
    first = start(pool)
    answer = first.generate("cold", prompt(1, 100))
    assert first.hits["cold"] == 0
    first.settle()
    first.assert_nothing_is_held()
    first.stop()
    second = start(pool)
    assert second.generate("warm", prompt(1, 100)) == answer
    assert second.hits["warm"] == 96
    second.settle()
    for engine in (first, second):
        engine.assert_no_faults()
        engine.assert_nothing_is_held()


def test_what_came_back_is_saved_and_the_daemon_is_told(pool: Daemon, start: Start) -> None:
    first = start(pool)
    first.generate("cold", prompt(70, 100))
    first.settle()
    first.stop()
    before = pool.inspect()["saved_tokens"]
    second = start(pool)
    second.generate("warm", prompt(70, 100))
    second.settle()
    saved = second.tier.manager.savings.tokens
    assert 0 < saved == second.external_tokens
    wait_until("the daemon is told", lambda: pool.inspect()["saved_tokens"] == before + saved, 20)
    second.assert_no_faults()


def test_a_line_for_each_request_is_not_to_be_had_below_vllms_host_tier(
    daemon: FakeDaemon, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "vllm.forebay"):
        engine = start(daemon, extra={"log_requests": True})
        engine.generate("any", prompt(1, 100))
    said = [message for message in caplog.messages if "log_requests" in message]
    assert said == ["forebay: `log_requests` is ignored: a tier is not told what vLLM computes of a prompt"]
    assert not any(message.startswith("forebay request") for message in caplog.messages)


def test_two_engines_share_while_both_run(pool: Daemon, start: Start) -> None:
    left, right = start(pool), start(pool)
    stored(left, prompt(2, 100))
    right.generate("right", prompt(2, 100))
    assert right.hits["right"] == 96
    stored(right, prompt(3, 200))
    left.generate("left", prompt(3, 200))
    assert left.hits["left"] == 192


@pytest.mark.parametrize(
    "shape", [{"groups": "hybrid"}, {"groups": "mixed"}, {"ranks": 2}, {"extra": {"blocks_per_chunk": 2}}]
)
def test_every_layout_comes_back(pool: Daemon, start: Start, shape: dict[str, Any]) -> None:
    engine = start(pool, **shape)
    stored(engine, prompt(4, 200))
    engine.forget_rows()
    engine.generate("warm", prompt(4, 200))
    assert engine.hits["warm"] == 192
    engine.assert_no_faults()


def test_requests_come_back_through_preemptions(pool: Daemon, start: Start) -> None:
    engine = start(pool, blocks=24, prefix_caching=False, max_tokens_per_step=64)
    prompts = [prompt(10 + at, 90) for at in range(4)]
    stored(engine, *prompts)
    engine.forget_rows()
    engine.run(*(engine.add(f"warm-{at}", tokens, 60) for at, tokens in enumerate(prompts)))
    assert engine.preemptions and sum(engine.hits[f"warm-{at}"] for at in range(4)) >= 80
    engine.settle()
    engine.assert_no_faults()
    engine.assert_nothing_is_held()


def test_a_host_tier_too_small_for_a_prompt_ends_in_an_answer(pool: Daemon, start: Start) -> None:
    engine = start(pool, rows=4)
    writer = start(pool)
    stored(writer, prompt(15, 200))
    engine.generate("warm", prompt(15, 200))
    engine.settle()
    engine.assert_no_faults()
    engine.assert_nothing_is_held()


def test_a_killed_and_a_frozen_daemon_are_misses_and_never_stalls(start: Start) -> None:
    with Daemon(capacity_bytes=64 << 20) as daemon:
        engine = start(daemon, extra={"lookup_deadline_ms": 100.0, "socket": str(daemon.socket)})
        slowest(engine, "absent", prompt(20, 100))
        daemon.start()
        deadline = time.monotonic() + 20
        while engine.session.state() != "ready":
            assert time.monotonic() < deadline, engine.session.reason()
            engine.generate(f"wake-{time.monotonic()}", prompt(21, 20))
        engine.wait_for_stock()
        stored(engine, prompt(22, 100))
        engine.forget_rows()
        daemon.freeze()
        assert slowest(engine, "frozen", prompt(22, 100)) < STALL_SECONDS
        assert engine.hits["frozen"] == 0
        daemon.thaw()
        daemon.kill()
        engine.forget_rows()
        assert slowest(engine, "killed", prompt(22, 100)) < STALL_SECONDS
        assert engine.hits["killed"] == 0
        daemon.start()
        deadline = time.monotonic() + 20
        for turn in range(1000):
            assert time.monotonic() < deadline, engine.session.reason()
            engine.forget_rows()
            engine.generate(f"again-{turn}", prompt(22, 100))
            if engine.hits[f"again-{turn}"]:
                break
            time.sleep(0.01)
        assert daemon.audit()
        engine.assert_no_faults()


# ---- against a daemon that checks what it is asked
# -------------------------------------------------------------------------


def test_hits_name_the_host_memory_they_come_from(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    engine.forget_rows()
    sources: list[dict[CacheHitSource, int]] = []
    told = engine.connector.get_external_cache_hit_sources
    engine.connector.get_external_cache_hit_sources = lambda *args: sources.append(told(*args)) or sources[-1]  # type: ignore
    engine.generate("warm", prompt(1, 100))
    assert sources == [{CacheHitSource.HOST: 96}]
    assert engine.stats["forebay:is_ready"] == 1
    assert engine.stats["vllm:kv_offload_tiering_read_bytes"] > 0
    engine.assert_nothing_is_held()


def test_the_tier_and_the_connector_never_find_each_others_blocks(
    daemon: FakeDaemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered = start(daemon)
    connector = harness.Engine(daemon, monkeypatch, Shape())
    stored(tiered, prompt(1, 100))
    connector.generate("cold", prompt(1, 100))
    assert connector.hits["cold"] == 0
    connector.generate("other", prompt(2, 100))
    tiered.generate("other", prompt(2, 100))
    assert tiered.hits["other"] == 0
    ours, theirs = tiered.session.fields, connector.session.fields
    assert {name for name in ours if ours[name] != theirs[name]} == {"format"}


def test_rows_of_another_shape_have_another_name(daemon: FakeDaemon, start: Start) -> None:
    shapes: list[dict[str, Any]] = [
        {},
        {"blocks": 32},
        {"groups": "hybrid"},
        {"ranks": 2},
        {"extra": {"blocks_per_chunk": 2}},
    ]
    names = []
    for shape in shapes:
        engine = start(daemon, **shape)
        engine.generate("a", prompt(1, 20))
        names.append(engine.session.namespace)
    assert names[0] == names[1], "how much memory there is does not count"
    assert len(set(names)) == len(shapes) - 1


def test_blocks_that_are_promoted_first_are_waited_for(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 200))
    engine.forget_rows()
    daemon.promotions = 3
    daemon.promoted = {key[2] for key in list(daemon.index)[5:]}
    engine.generate("warm", prompt(1, 200))
    assert engine.hits["warm"] == 192
    engine.settle()
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_a_failed_load_is_computed_and_not_tried_again(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    engine.forget_rows()
    engine.copies.fail_loads = 1
    engine.generate("failed", prompt(1, 100))
    assert engine.hits["failed"] == 0
    assert engine.stats["forebay:failed_loads"] == 1
    engine.forget_rows()
    engine.generate("warm", prompt(1, 100))
    assert engine.hits["warm"] == 96
    engine.assert_nothing_is_held()


def test_a_failed_store_is_never_named(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    engine.copies.fail_stores = 1
    stored(engine, prompt(1, 100))
    assert daemon.ready() == 0
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_another_pool_in_the_middle_of_a_load_is_a_miss(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    engine.forget_rows()
    request = held_in_a_load(engine, "lost", prompt(1, 100))
    daemon.replace_pool()
    engine.copies.is_holding = False
    engine.run(request)
    assert engine.hits["lost"] == 0
    engine.settle()
    engine.assert_nothing_is_held()


def test_an_aborted_request_gives_its_lease_back_when_its_load_has_ended(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    engine.forget_rows()
    request = held_in_a_load(engine, "aborted", prompt(1, 100))
    engine.abort(request)
    engine.step()
    assert daemon.leased
    engine.copies.is_holding = False
    engine.settle()
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_an_aborted_request_gives_its_lease_back_while_more_of_it_comes_up(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 200))
    engine.forget_rows()
    daemon.promotions = 1_000_000
    daemon.promoted = {key[2] for key in list(daemon.index)[5:]}
    request = held_in_a_load(engine, "aborted", prompt(1, 200))
    engine.abort(request)
    engine.step()
    engine.copies.is_holding = False
    engine.settle()
    engine.assert_nothing_is_held()


def test_a_request_that_runs_holds_no_lease_that_it_has_no_use_for(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    request = engine.add("longer", [*prompt(1, 100), *prompt(2, 40)], max_tokens=40)
    while not request.output_token_ids:
        engine.step()
    assert len(engine.session.tickets) > 1, "what the engine itself lacks was looked up"
    assert daemon.leased == 0
    engine.run(request)
    engine.assert_nothing_is_held()


def test_a_reset_waits_for_copies_and_moves_this_engine_alone(daemon: FakeDaemon, start: Start) -> None:
    left, right = start(daemon), start(daemon)
    stored(left, prompt(1, 100))
    left.copies.is_holding = True
    left.add("under way", prompt(2, 100))
    while not left.tier._copying or left.scheduler.has_unfinished_requests():
        left.step()
    assert left.scheduler.reset_prefix_cache(reset_connector=True)
    assert not left.tier._copying and left.copies.flushed
    left.copies.is_holding = False
    left.generate("after", prompt(1, 100))
    assert left.hits["after"] == 0 and "salt" in left.session.fields
    right.generate("right", prompt(1, 100))
    assert right.hits["right"] == 96
    right.generate("never named", prompt(2, 100))
    assert right.hits["never named"] == 0
    left.settle()
    left.forget_rows()
    left.generate("own", prompt(1, 100))
    assert left.hits["own"] == 96
    for engine in (left, right):
        engine.settle()
        engine.assert_nothing_is_held()
        engine.assert_no_faults()


def test_a_reset_for_sleep_alone_may_keep_the_namespace(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon, extra={"reset_moves_namespace": False})
    stored(engine, prompt(1, 100))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.generate("awake", prompt(1, 100))
    assert engine.hits["awake"] == 96


def test_after_other_weights_nothing_is_stored_until_the_host_tier_is_reset(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    before = daemon.ready()
    engine.tier.weights_moved(False)
    engine.forget()
    stored(engine, prompt(2, 100))
    assert daemon.ready() == before
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.tier.weights_moved(False)  # where nobody can tell, each reset counts as a change
    stored(engine, prompt(3, 100))
    assert daemon.ready() > before


def test_other_tiers_that_may_hold_kv_of_other_weights_are_refused(
    daemon: FakeDaemon, start: Start, tmp_path: Path
) -> None:
    engine = start(daemon, extra={"secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]})
    assert engine.tier.breaker.is_off
    engine.generate("a", prompt(1, 100))
    assert daemon.ready() == 0


def test_a_request_may_forbid_host_memory(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    engine.forget_rows()
    engine.generate("disks", prompt(1, 100), kv_transfer_params={"kv_load_tiers": [{"medium": "STORAGE"}]})
    assert engine.hits["disks"] == 0
    engine.assert_nothing_is_held()


def test_a_full_pool_stores_nothing_and_says_so(start: Start) -> None:
    engine = start(FakeDaemon(slots=0))
    stored(engine, prompt(1, 100))
    assert engine.stats["forebay:refused_blocks"] == 6
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_chunks_of_a_prompt_do_not_push_out_each_other_for_ever(daemon: FakeDaemon, start: Start) -> None:
    engine, writer = start(daemon, rows=4), start(daemon)
    stored(writer, prompt(1, 200))
    engine.generate("warm", prompt(1, 200))
    assert engine.hits["warm"] == 64, "the end of the prompt is computed"
    engine.settle()
    engine.assert_no_faults()
    engine.assert_nothing_is_held()


def test_a_request_that_runs_again_holds_no_lease(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon, blocks=24, prefix_caching=False, max_tokens_per_step=64)
    prompts = [prompt(10 + at, 90) for at in range(4)]
    stored(engine, *prompts)
    engine.forget_rows()
    requests = [engine.add(f"warm-{at}", tokens, 60) for at, tokens in enumerate(prompts)]
    while any(not request.is_finished() for request in requests):
        engine.step()
        running = {request.request_id for request in engine.scheduler.running}
        leased = engine.tier.manager._leased.items()
        assert not [asked for lookup, asked in leased if asked.request.request_id in running and not lookup.loads]
    assert engine.preemptions


class Late:
    """vLLM's worker as on a GPU: its stores are written only when somebody waits for them."""

    def __init__(self, engine: Engine):
        self.worker: Any = engine.workers[0].connector.connector_worker.worker  # type: ignore[attr-defined]
        self.submit, self.finished = self.worker.submit_store, self.worker.get_finished
        self.queue: list[tuple[Any, ...]] = []
        self.is_silent = False
        self.worker.submit_store = lambda *job: bool(self.queue.append(job) or True)
        self.worker.wait = lambda job_ids: self.write()
        self.worker.get_finished = lambda: [] if self.is_silent else (self.write(), self.finished())[1]

    def write(self) -> None:
        while self.queue:
            self.submit(*self.queue.pop(0))


def at_once(engine: Engine) -> None:
    """Loads of the pool are copied as soon as they are asked for."""
    submit = engine.copies.submit_load
    engine.copies.submit_load = lambda *job: (submit(*job), engine.copies._run_all())


def test_no_load_shares_a_row_with_a_copy_that_a_reset_dropped(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon, extra={"reset_moves_namespace": False})
    stored(engine, prompt(1, 100))
    engine.forget_rows()
    late = Late(engine)
    late.is_silent = True
    at_once(engine)
    request = engine.add("under way", prompt(2, 100), max_tokens=1)
    while not request.is_finished():
        engine.step()
    engine.step()  # the store of what it has computed is with the worker, and not written
    assert late.queue
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    again = engine.add("again", prompt(1, 100))
    engine.step()
    late.is_silent = False
    engine.run(again)
    engine.generate("warm", prompt(1, 100))
    engine.forget_rows()
    engine.generate("later", prompt(1, 100))
    assert engine.hits["later"] == 96
    engine.settle()
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


def test_what_ran_through_a_reset_is_not_stored_however_late_it_comes(daemon: FakeDaemon, start: Start) -> None:
    """It may be of other weights. The engine has dropped its own KV by then, so that alone would say nothing."""
    engine = start(daemon)
    runs = engine.add("runs", prompt(1, 100), max_tokens=20)
    while not runs.output_token_ids:
        engine.step()
    late = Late(engine)
    late.is_silent = True
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    while not runs.is_finished():
        engine.step()
    engine.step()
    assert engine.scheduler.reset_prefix_cache()
    other = engine.add("other", prompt(2, 100))
    engine.step()
    late.is_silent = False
    engine.run(other)
    engine.settle()
    assert not {key[2] for key in daemon.index} & set(runs.block_hashes)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    stored(engine, prompt(1, 100))
    assert {key[2] for key in daemon.index} & set(runs.block_hashes)
    engine.assert_no_faults()


def test_requests_that_run_through_a_sleep_alone_are_stored(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon, extra={"reset_moves_namespace": False})
    runs = engine.add("runs", prompt(1, 100), max_tokens=20)
    while not runs.output_token_ids:
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run(runs)
    stored(engine, prompt(2, 100))
    engine.forget_rows()
    engine.generate("warm", prompt(2, 100))
    assert engine.hits["warm"] == 96


def test_a_block_that_a_window_has_left_is_not_stored_after_a_reset(daemon: FakeDaemon, start: Start) -> None:
    """Neither in the pool nor in vLLM's host tier: it holds another request's KV by then."""
    engine = start(daemon, groups="hybrid", blocks=44, extra={"reset_moves_namespace": False})
    runs = left_a_window(engine)
    daemon.evict_all()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run(runs)
    engine.settle()
    engine.forget()
    engine.generate("again", prompt(1, 150))
    reader = start(daemon, groups="hybrid")
    reader.generate("reads", prompt(1, 150))
    for each in (engine, reader):
        each.settle()
        each.assert_no_faults()
        each.assert_nothing_is_held()


CALLS = ["state", "set_namespace", "lookup", "hint", "reserve", "commit", "abort"]


@pytest.mark.faults
@pytest.mark.parametrize("call", CALLS)
def test_no_exception_reaches_vllm(daemon: FakeDaemon, start: Start, call: str) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    engine.session.faults[call] = RuntimeError("broken")
    for turn in range(12):  # beyond the breaker's limit
        engine.forget_rows()
        engine.generate(f"turn-{turn}", prompt(1 + turn % 2, 100))
    engine.session.faults.clear()
    engine.step()


@pytest.mark.faults
@pytest.mark.parametrize("call", ["submit_load", "submit_store", "finished"])
def test_no_exception_of_a_copy_reaches_vllm(
    daemon: FakeDaemon, start: Start, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    healthy, left = getattr(engine.copies, call), [3]

    def broken_at_first(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("broken")
        return healthy(*args)

    monkeypatch.setattr(engine.copies, call, broken_at_first)
    for turn in range(6):
        engine.forget_rows()
        engine.generate(f"known-{turn}", prompt(1, 100))
        engine.generate(f"new-{turn}", prompt(2 + turn, 100))
    assert engine.tier.breaker.faults == 3 and left == [0]
    engine.settle()
    engine.assert_nothing_is_held()


@pytest.mark.faults
def test_a_fault_between_two_results_loses_neither(
    daemon: FakeDaemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(daemon)
    engine.copies.is_holding = True
    requests = [engine.add(name, prompt(at, 100)) for at, name in enumerate("abc")]
    while len(engine.tier._copying) < 3 or engine.scheduler.has_unfinished_requests():
        engine.step()
    healthy, left = engine.tier.manager.reported, [1]

    def broken_at_first(completed: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("broken")
        healthy(completed)

    monkeypatch.setattr(engine.tier.manager, "reported", broken_at_first)
    engine.copies.is_holding = False
    engine.run(*requests)
    assert left == [0] and engine.tier.breaker.faults == 1
    assert not engine.connector.scheduler.manager._jobs  # type: ignore[attr-defined]


@pytest.mark.faults
def test_a_reset_whose_copies_cannot_be_waited_for_ends_them_all(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    engine.copies.is_holding = True
    request = engine.add("a", prompt(1, 100))
    while not engine.tier._copying or not request.is_finished():
        engine.step()
    copies = engine.copies
    copies.wait = copies.finished = broken  # type: ignore[method-assign]
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert copies.is_shut_down and not engine.tier._copying and engine.tier.breaker.is_off
    engine.generate("b", prompt(1, 100))
    engine.settle()


@pytest.mark.faults
def test_an_end_that_fails_is_said_once_and_ends_the_session(
    daemon: FakeDaemon, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(daemon)
    stored(engine, prompt(1, 100))
    engine.copies.shutdown = broken
    session = engine.session
    with caplog.at_level("ERROR", "vllm.forebay"):
        engine.stop()
    assert session.is_closed
    ours = [record for record in caplog.records if record.name == "vllm.forebay" and record.levelname == "ERROR"]
    assert [record.exc_info is not None for record in ours] == [True]


def test_an_engine_that_forebay_was_off_in_ends_its_session_too(daemon: FakeDaemon, start: Start) -> None:
    engine = start(daemon)
    engine.tier.breaker.switch_off("for a test")
    engine.stop()
    assert engine.session.is_closed


@pytest.mark.faults
def test_a_configuration_that_cannot_be_read_leaves_vllms_host_tier(
    daemon: FakeDaemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.vllm.tier.Settings.parse", broken)
    engine = start(daemon)
    engine.generate("a", prompt(1, 100))
    assert engine.tier.breaker.is_off and not daemon.sessions


# ---- below another connector
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure_policy", ["recompute", "fail"])
def test_below_another_connector_it_serves(daemon: FakeDaemon, start: Start, failure_policy: str) -> None:
    """Whatever that is told of failed loads: what fails between pool and host tier never reaches a request."""
    engine = start(daemon, beside=(SIBLING,), around={"kv_load_failure_policy": failure_policy})
    stored(engine, prompt(1, 100))
    engine.forget_rows()
    engine.copies.fail_loads = 1
    request = engine.add("failed", prompt(1, 100))
    engine.run(request)
    assert engine.hits["failed"] == 0 and len(request.output_token_ids) == 4
    engine.forget_rows()
    engine.generate("warm", prompt(1, 100))
    assert engine.hits["warm"] == 96
    engine.settle()
    engine.assert_no_faults()
    engine.assert_nothing_is_held()


# ---- what is refused
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"top": {"kv_role": "kv_producer"}}, "kv_both"),
        ({"extra": {"tennant": "a"}}, "may be meant as `tenant`"),
    ],
)
def test_what_cannot_be_served_is_vllms_host_tier_alone(
    daemon: FakeDaemon, start: Start, shape: dict[str, Any], reason: str
) -> None:
    engine = start(daemon, **shape)
    engine.generate("cold", prompt(1, 100))
    engine.forget()
    engine.generate("warm", prompt(1, 100))
    assert reason in str(engine.tier.breaker.reason)
    assert daemon.ready() == 0 and not daemon.sessions


def test_chunks_of_a_window_are_refused() -> None:
    from forebay.vllm import compat
    from forebay.vllm.stores import Shape as Group

    config = harness.vllm_config(Shape())
    assert config.kv_transfer_config is not None
    windowed = [Group(0, False, 32, 2, False)]
    reason = compat.unsupported_tiering(config, config.kv_transfer_config, windowed, 2)
    assert reason is not None and "blocks_per_chunk" in reason
    assert compat.unsupported_tiering(config, config.kv_transfer_config, windowed, 1) is None
    assert compat.unsupported_tiering(config, config.kv_transfer_config, [windowed[0]._replace(window=None)], 2) is None
