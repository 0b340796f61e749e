"""`EngineSession` and `WorkerEngine` together, against the real daemon."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest
from forebay import EngineSession, ForebayError
from harness import SECONDS, Engine, Group, Model, Rank, hashes, numbers, words
from rig.daemon import Daemon
from rig.process import wait_until

FULL = Group(0, ((0, 1000), (1, 3000)))


def expected(engine: Engine, group: Group, blocks: list[int]) -> list[list[bytes]]:
    return [[rank.block(group, block) for block in blocks] for rank in engine.workers]


def stored_and_loaded(engine: Engine, group: Group) -> None:
    """Stores blocks 1, 5, 3 and loads them into 9, 2, 11 of cleared tensors."""
    keys = hashes(f"group {group.group}", 3)
    before = expected(engine, group, [1, 5, 3])
    engine.store(group, keys, [1, 5, 3])
    for rank in engine.workers:
        rank.clear()
    ticket = engine.hit(keys, group.group)
    reports = engine.load(group, ticket, [9, 2, 11])
    rank_bytes = sum(page for _, page in group.refs)
    assert reports == [(True, 3 * rank_bytes)] * engine.ranks
    assert expected(engine, group, [9, 2, 11]) == before
    for rank in engine.workers:
        untouched = [block for block in range(rank.model.rows) if block not in (9, 2, 11)]
        assert all(not any(rank.block(group, block)) for block in untouched), "other blocks were written"
        assert not any(rank.padding()), "bytes between pages were written"


def test_a_block_comes_back_where_it_is_wanted(sockets: Path) -> None:
    with Engine(sockets) as engine:
        stored_and_loaded(engine.wait_ready(), FULL)
        assert engine.session.stats()["stored"] == 3


def test_each_rank_gets_its_own_slice(sockets: Path) -> None:
    with Engine(sockets, ranks=2) as engine:
        stored_and_loaded(engine.wait_ready(), FULL)


def test_groups_of_different_shape_share_tensors_and_a_job(sockets: Path) -> None:
    wide, narrow = Group(0, ((0, 1000), (1, 3000))), Group(3, ((1, 512),), attention="windowed")
    with Engine(sockets, Model(groups=(wide, narrow))) as engine:
        engine.wait_ready()
        for group in (wide, narrow):
            stored_and_loaded(engine, group)
            engine.workers[0].fill(2)
        slots = {group.group: engine.reserve(group.group, 2) for group in (wide, narrow)}
        job = [(0, *slots[0], words([1, 2]), 0), (3, *slots[3], words([3, 4]), 0)]
        assert engine.copy("store", engine.session.pool, job) == [(True, 2 * 4000 + 2 * 512)]
        engine.commit(wide, hashes("w", 2), *slots[0])
        engine.commit(narrow, hashes("n", 2), *slots[3])
        ticket = engine.session.lookup([(0, hashes("w", 2)), (3, hashes("n", 2)), (3, [])])
        assert ticket.poll(SECONDS)
        assert [ticket.states(0), ticket.states(1), ticket.states(2)] == [b"\1\1", b"\1\1", b""]


def test_a_replicated_group_is_stored_by_the_first_rank_and_loaded_by_all(sockets: Path) -> None:
    group = Group(0, ((0, 1000),), is_replicated=True)
    with Engine(sockets, Model(groups=(group,)), ranks=2) as engine:
        engine.wait_ready()
        first, second = engine.workers
        keys = hashes("replicated", 1)
        slots = engine.reserve(0, 1)
        reports = engine.copy("store", engine.session.pool, [(0, *slots, words([4]), 0)])
        assert reports == [(True, 1000), (True, 0)]
        engine.commit(group, keys, *slots)
        assert engine.session.stats()["stored"] == 1
        wanted = first.block(group, 4)
        assert wanted != second.block(group, 4)
        engine.load(group, engine.hit(keys), [7])
        assert [first.block(group, 7), second.block(group, 7)] == [wanted, wanted]


def test_chunks_of_several_blocks_can_be_entered_in_the_middle(sockets: Path) -> None:
    with Engine(sockets, Model(blocks_per_chunk=3)) as engine:
        engine.wait_ready()
        [rank] = engine.workers
        keys = hashes("chunk", 2)
        engine.store(FULL, keys, [1, 2, 3, 4, 5, 6])
        wanted = [rank.block(FULL, block) for block in range(1, 7)]
        rank.clear()
        ticket = engine.hit(keys)
        assert engine.load(FULL, ticket, [11, 12, 13, 14], skipped=2) == [(True, 4 * 4000)]
        assert [rank.block(FULL, block) for block in range(11, 15)] == wanted[2:]
        assert not any(rank.block(FULL, 10)), "a skipped block was written"
        rank.clear()
        assert engine.load(FULL, ticket, [8, 9, 10, 11], skipped=1) == [(True, 4 * 4000)]
        assert [rank.block(FULL, block) for block in range(8, 12)] == wanted[1:5], "and left before the end"


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_chunk_stored_in_part_is_no_block(sockets: Path, skipped: int) -> None:
    with Engine(sockets, Model(blocks_per_chunk=2)) as engine:
        engine.wait_ready()
        slots = engine.reserve(0, 1)
        assert engine.copy("store", engine.session.pool, [(0, *slots, words([1]), skipped)]) == [(False, 0)]
        engine.commit(FULL, hashes("part", 1), *slots)
        assert engine.session.stats()["incomplete"] == 1


def test_a_commit_without_a_copy_is_incomplete(sockets: Path) -> None:
    with Engine(sockets, ranks=2) as engine:
        engine.wait_ready()
        slots = engine.reserve(0, 1)
        engine.workers[0].worker.submit_store(1, engine.session.pool, [(0, *slots, words([1]), 0)])
        assert engine.workers[0].finish(1) == (True, 4000)
        engine.commit(FULL, hashes("half", 1), *slots)
        assert engine.session.stats()["incomplete"] == 1
        assert engine.look_up(hashes("half", 1)).states(0) == b"\0"


def test_a_slot_that_changed_hands_is_neither_written_for_good_nor_loaded(sockets: Path) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        keys = hashes("a", 1)
        engine.store(FULL, keys, [1])
        ticket = engine.hit(keys)
        stale = words([numbers(ticket.generations(0))[0] + 1])
        assert engine.copy("load", ticket.pool, [(0, ticket.slots(0), stale, words([2]), 0)]) == [(False, 0)]
        slots, generations = engine.reserve(0, 1)
        stale = words([numbers(generations)[0] + 1])
        assert engine.copy("store", engine.session.pool, [(0, slots, stale, words([2]), 0)]) == [(False, 0)]
        engine.commit(FULL, hashes("b", 1), slots, generations)
        assert engine.session.stats()["incomplete"] == 1


def test_jobs_for_a_pool_that_is_not_mapped_fail_at_once(sockets: Path, tmp_path: Path) -> None:
    job = [(0, words([0]), words([1]), words([1]), 0)]
    with Engine(sockets) as engine:
        engine.wait_ready()
        assert engine.copy("load", b"\7" * 16, job) == [(False, 0)]
    nobody = Rank(tmp_path, "engine", 0, 1, Model(), 1)
    nobody.worker.submit_store(5, b"\7" * 16, job)
    assert nobody.finish(5) == (False, 0)
    wait_until("the reason is known", lambda: "cannot reach" in (nobody.worker.reason() or ""), SECONDS)
    assert nobody.worker.state() == "connecting"


def test_jobs_outside_tensors_or_pool_fail_and_touch_nothing(sockets: Path) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        [rank] = engine.workers
        engine.store(FULL, hashes("a", 1), [1])
        ticket = engine.hit(hashes("a", 1))
        before = [bytes(buffer) for buffer in rank.buffers]
        good = (ticket.slots(0), ticket.generations(0))
        beyond = (words([2**32 - 1]), good[1], 1)
        for slots, generations, block in [(*good, rank.model.rows), (*good, 2**32 - 1), beyond]:
            assert engine.copy("load", ticket.pool, [(0, slots, generations, words([block]), 0)]) == [(False, 0)]
        assert [bytes(buffer) for buffer in rank.buffers] == before


def test_lists_that_do_not_fit_together_are_mistakes(sockets: Path) -> None:
    with Engine(sockets, Model(blocks_per_chunk=2)) as engine:
        engine.wait_ready()
        [rank] = engine.workers
        one, two = words([1]), words([1, 2])
        too_few_blocks = (0, two, two, two, 0)
        too_many_blocks = (0, one, one, words([1, 2, 3]), 0)
        no_generation = (0, one, b"", two, 0)
        no_number = (0, b"\0", one, one, 0)
        unknown_group = (9, one, one, two, 0)
        skip_of_nothing = (0, b"", b"", b"", 1)
        skip_of_all = (0, one, one, b"", 1)
        skip_of_more = (0, two, two, one, 2)
        lists = [too_few_blocks, too_many_blocks, no_generation, no_number, unknown_group]
        for job in [*lists, skip_of_nothing, skip_of_all, skip_of_more]:
            with pytest.raises(ForebayError) as raised:
                rank.worker.submit_load(1, engine.session.pool, [job])
            assert raised.value.kind == "invalid"
        assert rank.worker.finished() == [], "a refused job is not reported"
        assert rank.worker.wait([1, 99], 0.0), "unknown jobs count as finished"
        with pytest.raises(ForebayError):
            engine.session.commit(0, hashes("a", 2), None, one, one)


def test_tensors_and_refs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    bad = [
        Model(groups=(Group(0, ((2, 100),)),)),
        Model(groups=(Group(0, ((0, 1001),)),)),
        Model(groups=(Group(0, ()),)),
        Model(groups=(FULL, FULL)),
        Model(pages=(5000,), groups=(Group(0, ((0, 5000),)),)),
        Model(blocks_per_chunk=0),
    ]
    for model in bad:
        with pytest.raises(ForebayError) as raised:
            Rank(tmp_path, "engine", 0, 1, model, 1)
        assert raised.value.kind == "invalid", model
    with pytest.raises(ForebayError):
        Rank(tmp_path, "engine", 2, 2, Model(), 1)
    with pytest.raises(ForebayError):
        EngineSession(str(tmp_path), "", 1, incarnation=bytes(range(16)))
    with pytest.raises(ForebayError):
        EngineSession(str(tmp_path), "engine", 1, incarnation=bytes(16))


def test_an_engine_that_starts_before_its_daemon_is_ready_soon_after_it(daemon: Daemon, sockets: Path) -> None:
    daemon.drain()
    with Engine(sockets) as engine:
        [rank] = engine.workers
        wait_until("both know", lambda: "cannot reach" in (rank.worker.reason() or ""), SECONDS)
        assert engine.look_up(hashes("a", 1)).has_failed()
        daemon.start()
        stored_and_loaded(engine.wait_ready(), FULL)


def test_a_rank_the_daemon_refuses_says_why(sockets: Path) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        odd = Rank(sockets, engine.engine_id, 1, 2, engine.model, 1)
        wait_until("it is refused", lambda: odd.worker.state() == "refused", SECONDS)
        assert "number of ranks" in (odd.worker.reason() or ""), odd.worker.reason()
        stored_and_loaded(engine, FULL)
        odd.worker.shutdown()


def test_lookups_miss_until_all_ranks_are_attached_and_after_one_left(sockets: Path) -> None:
    with Engine(sockets, ranks=2) as engine:
        engine.wait_ready()
        engine.workers[1].worker.shutdown()
        wait_until("the loss is known", lambda: engine.session.state() == "attaching", SECONDS)
        assert engine.look_up(hashes("a", 1)).has_failed()
        assert engine.session.pool == b"" and engine.session.reserve(0, 1) == (b"", b"")
        assert engine.workers[1].worker.state() == "closed"
        engine.workers[1] = Rank(sockets, "engine", 1, 2, engine.model, 1)
        stored_and_loaded(engine.wait_ready(), FULL)


def test_a_killed_daemon_costs_nothing_that_was_stored_or_leased(sockets: Path, daemon: Daemon) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        [rank] = engine.workers
        keys = hashes("a", 2)
        engine.store(FULL, keys, [1, 2])
        wanted = rank.block(FULL, 1)
        held = engine.hit(keys[:1])
        taken, generations = engine.reserve(0, 1)
        pool = engine.session.pool
        assert engine.copy("store", pool, [(0, taken, generations, words([3]), 0)]) == [(True, 4000)]
        daemon.kill()
        wait_until("the loss is known", lambda: engine.session.state() == "connecting", SECONDS)
        assert engine.look_up(keys).has_failed()
        rank.clear()
        assert engine.load(FULL, held, [7]) == [(True, 4000)], "what is leased can be loaded without a daemon"
        assert rank.block(FULL, 7) == wanted
        engine.session.commit(0, hashes("late", 1), None, taken, generations)

        daemon.start()
        engine.wait_ready()
        assert engine.session.pool == pool
        wait_until("the commit is delivered", lambda: engine.session.stats()["queued"] == 0, SECONDS)
        stats = engine.session.stats()
        assert (stats["stored"], stats["lost"], stats["reconnects"]) == (3, 0, 1)
        rank.clear()
        assert engine.load(FULL, held, [5]) == [(True, 4000)]
        assert rank.block(FULL, 5) == wanted
        engine.hit([*keys, *hashes("late", 1)])
        held.release()
        stored_and_loaded(engine, FULL)


def test_a_replaced_pool_is_mapped_and_the_old_one_s_jobs_fail(sockets: Path, daemon: Daemon) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        keys = hashes("a", 1)
        engine.store(FULL, keys, [1])
        held = engine.hit(keys)
        old = engine.session.pool
        taken = engine.reserve(0, 1)
        daemon.kill()
        daemon.drop_pool()
        daemon.start()
        wait_until("the new pool is there", lambda: engine.session.pool not in (b"", old), SECONDS)
        engine.wait_ready()
        assert engine.load(FULL, held, [7]) == [(False, 0)]
        engine.commit(FULL, hashes("b", 1), *taken)
        assert engine.session.stats()["lost"] == 1
        assert engine.look_up(keys).states(0) == b"\0"
        stored_and_loaded(engine, FULL)


def test_a_pool_that_grew_over_a_restart_is_mapped_anew_and_keeps_its_blocks(sockets: Path, daemon: Daemon) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        keys = hashes("a", 2)
        engine.store(FULL, keys, [1, 2])
        pool = engine.session.pool
        daemon.kill()
        daemon.capacity_bytes *= 2
        daemon.start()
        wait_until("the engine is back", lambda: engine.session.stats()["reconnects"] == 1, SECONDS)
        engine.wait_ready()
        assert engine.session.pool == pool
        [rank] = engine.workers
        wanted = rank.block(FULL, 1)
        rank.clear()
        assert engine.load(FULL, engine.hit(keys), [7, 8]) == [(True, 8000)]
        assert rank.block(FULL, 7) == wanted
        rank.fill(3)
        stored_and_loaded(engine, FULL)


def test_a_frozen_daemon_costs_a_few_deadlines_and_then_nothing(sockets: Path, daemon: Daemon) -> None:
    with Engine(sockets, deadline=0.5) as engine:
        engine.wait_ready()
        keys = hashes("a", 1)
        engine.store(FULL, keys, [1])
        daemon.freeze()
        tickets = [engine.session.lookup([(0, keys)]) for _ in range(3)]
        assert all(ticket.poll(SECONDS) and ticket.has_failed() for ticket in tickets)
        wait_until("the breaker opens", lambda: engine.session.stats()["breaker_open"] == 1, SECONDS)
        for _ in range(100):
            ticket = engine.session.lookup([(0, keys)])
            assert ticket.poll(0.0) and ticket.has_failed()
        daemon.thaw()
        engine.wait_ready()
        engine.hit(keys)
        assert engine.session.stats()["leases_held"] <= 1


def test_waiting_for_an_answer_lets_other_threads_run(sockets: Path, daemon: Daemon) -> None:
    with Engine(sockets, deadline=2.0) as engine:
        engine.wait_ready()
        daemon.freeze()
        ticket = engine.session.lookup([(0, hashes("a", 1))])
        waited = []

        def wait() -> None:
            begun = time.monotonic()
            ticket.poll(SECONDS)
            waited.append(time.monotonic() - begun)

        thread = threading.Thread(target=wait)
        thread.start()
        last, longest_gap = time.monotonic(), 0.0
        while thread.is_alive():
            now = time.monotonic()
            last, longest_gap = now, max(longest_gap, now - last)
        daemon.thaw()
        assert longest_gap < waited[0] / 2, "this thread stood still while the other one waited"


def test_an_idle_engine_uses_no_processor(sockets: Path) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        wait_until("the stock shrinks", lambda: engine.session.stats()["reserved_stock"] == 4, SECONDS)
        begun, used = time.monotonic(), time.process_time()
        threading.Event().wait(1.0)
        assert time.process_time() - used < 0.05 * (time.monotonic() - begun)


def test_slots_that_an_idle_engine_gives_back_are_no_lost_blocks() -> None:
    with Daemon() as daemon, Engine(daemon.start().socket.parent) as engine:
        engine.wait_ready()
        engine.session.abort(FULL.group, *engine.reserve(FULL.group, 1))
        wait_until("the stock shrinks", lambda: engine.session.stats()["reserved_stock"] == 4, SECONDS)
        wait_until(
            "the daemon has the slots", lambda: daemon.metrics()["forebay_pool_reserved_bytes"] <= 4 * 4096, SECONDS
        )
        assert daemon.metrics()['forebay_unstored_blocks_total{reason="aborted"}'] == 1


@pytest.mark.parametrize(("mib", "groups", "group_bytes"), [(64, 2, 262144), (32, 3, 131072), (256, 3, 524288)])
def test_each_group_gets_slots_of_a_share_that_is_too_small_for_the_stock(
    mib: int, groups: int, group_bytes: int
) -> None:
    model = Model(
        pages=(group_bytes,), stride=group_bytes, groups=tuple(Group(at, ((0, group_bytes),)) for at in range(groups))
    )
    with (
        Daemon(capacity_bytes=mib << 20) as daemon,
        Engine(daemon.start().socket.parent, model, stock_blocks=64) as engine,
    ):
        engine.wait_ready()
        even = (mib << 20) // 4 // group_bytes // groups
        taken = {}
        for group in reversed(model.groups):
            taken[group.group] = engine.reserve(group.group, even - 2)
        for number, slots in taken.items():
            engine.session.abort(number, *slots)


def test_a_step_of_many_seconds_leaves_slots_for_the_next_one(sockets: Path) -> None:
    """A scheduler takes slots when a step begins, and commits them after it: an engine between the two is not idle."""
    with Engine(sockets) as engine:
        engine.wait_ready()
        of_step = engine.reserve(FULL.group, 16)
        wait_until("the stock is full", lambda: engine.session.stats()["reserved_stock"] >= 16, SECONDS)
        threading.Event().wait(2.5)
        of_next = engine.session.reserve(FULL.group, 16)
        assert len(of_next[0]) == 4 * 16
        engine.session.abort(FULL.group, *of_step)
        engine.session.abort(FULL.group, *of_next)


def test_another_namespace_does_not_see_the_first_one_s_blocks(sockets: Path) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        keys = hashes("a", 1)
        engine.store(FULL, keys, [1])
        engine.name("model-b")
        engine.wait_ready()
        assert engine.look_up(keys).states(0) == b"\0"
        engine.name("model-a")
        engine.wait_ready()
        engine.hit(keys)


@pytest.mark.parametrize("length", [1, 16, 31, 32])
def test_a_mask_gives_blocks_names_of_their_own_and_of_the_same_length(sockets: Path, length: int) -> None:
    """The daemon knows the masked names alone, which are worked out here by another SHA-256."""
    mask, other = b"m" * 32, b"o" * 32
    plain = [hash_[:length] for hash_ in hashes("adapted", 3)]
    begun = hashlib.sha256(b"forebay: a block of this adapter" + mask)
    masked = []
    for hash_ in plain:
        one = begun.copy()
        one.update(hash_)
        masked.append(one.digest()[:length])
    with Engine(sockets) as engine:
        engine.wait_ready()
        for at, predecessor in ((0, None), (1, plain[0]), (2, plain[1])):
            slots, generations = engine.reserve(0, 1)
            engine.copy("store", engine.session.pool, [(0, slots, generations, words([at]), 0)])
            engine.session.commit(0, [plain[at]], predecessor, slots, generations, mask)
        wait_until("the commits are acknowledged", lambda: engine.session.stats()["queued"] == 0, SECONDS)
        assert engine.session.stats()["orphan"] == 0
        states = []
        for keys, given in ((plain, mask), (masked, None), (plain, None), (plain, other), (masked, mask)):
            ticket = engine.session.lookup([(0, keys)], given)
            assert ticket.poll(SECONDS)
            states.append(ticket.states(0))
        assert states == [b"\1\1\1"] * 2 + [b"\0\0\0"] * 3


@pytest.mark.parametrize("length", [0, 33, 100])
def test_a_mask_makes_no_hash_of_what_is_none(sockets: Path, length: int) -> None:
    with Engine(sockets) as engine:
        for mask in (None, b"m" * 32):
            with pytest.raises(ForebayError, match="32 bytes"):
                engine.session.lookup([(0, [b"x" * length])], mask)
        with pytest.raises(ForebayError, match="a mask has 32 bytes"):
            engine.session.lookup([(0, hashes("a", 1))], b"m" * length)


def test_two_engines_share_what_one_stored(sockets: Path) -> None:
    with Engine(sockets, engine_id="one", seed=1) as one, Engine(sockets, engine_id="two", seed=50) as two:
        one.wait_ready()
        two.wait_ready()
        keys = hashes("shared", 4)
        one.store(FULL, keys, [1, 2, 3, 4])
        two.load(FULL, two.hit(keys), [5, 6, 7, 8])
        assert expected(two, FULL, [5, 6, 7, 8]) == expected(one, FULL, [1, 2, 3, 4])


def test_engines_of_another_shape_under_the_same_name_are_refused(sockets: Path) -> None:
    other = Model(groups=(Group(0, ((0, 500),)),))
    with Engine(sockets, engine_id="one") as one:
        one.wait_ready()
        two = Engine(sockets, other, engine_id="two")
        wait_until("it is refused", lambda: two.session.state() == "refused", SECONDS)
        assert two.session.reason()
        assert two.look_up(hashes("a", 1)).has_failed()
        two.name("model-of-its-own")
        two.wait_ready().close()


def test_a_worker_that_is_shut_down_reports_what_comes_later_as_failed(sockets: Path) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        [rank] = engine.workers
        pool = engine.session.pool
        rank.worker.shutdown()
        rank.worker.submit_load(3, pool, [(0, words([0]), words([1]), words([1]), 0)])
        assert rank.finish(3) == (False, 0)
        rank.worker.shutdown()


def test_a_closed_session_misses_and_can_be_closed_again(sockets: Path) -> None:
    with Engine(sockets) as engine:
        engine.wait_ready()
        engine.session.close()
        assert engine.session.state() == "closed"
        assert engine.look_up(hashes("a", 1)).has_failed()
        engine.session.close()


def test_an_engine_of_many_blocks_gets_each_of_them_back(sockets: Path) -> None:
    rows = 600
    model = Model(pages=(8192,), stride=8192, groups=(Group(0, ((0, 8192),)),), rows=rows)
    with Engine(sockets, model, stock_blocks=256) as engine:
        engine.wait_ready()
        [rank] = engine.workers
        [group] = model.groups
        keys = hashes("many", rows)
        blocks = list(range(rows))
        wanted = [rank.block(group, block) for block in blocks]
        engine.store(group, keys, blocks)
        rank.clear()
        assert engine.load(group, engine.hit(keys), blocks[::-1]) == [(True, rows * 8192)]
        assert [rank.block(group, block) for block in blocks[::-1]] == wanted


def test_what_waiting_requests_will_ask_for_outlives_the_rest_until_they_are_met(sockets: Path) -> None:
    page = 1 << 20  # the pool has room for 64 of them
    model = Model(pages=(page,), stride=page, groups=(Group(0, ((0, page),)),))
    with Engine(sockets, model, stock_blocks=4) as engine:
        engine.wait_ready()
        [group] = model.groups
        names = iter(range(1000))

        def store_others() -> None:
            for _ in range(30):
                engine.store(group, hashes(f"other {next(names)}", 4), [0, 1, 2, 3])

        def are_ready(keys: list[bytes]) -> list[bool]:
            return [state == 1 for state in engine.look_up(keys).states(0)]

        wanted, plain = hashes("wanted", 8), hashes("plain", 8)
        engine.store(group, plain, list(range(8)))
        engine.store(group, wanted, list(range(8)))
        engine.session.hint(7, [(0, wanted)])
        store_others()
        assert not any(are_ready(plain)), "the pool is not full"
        assert all(are_ready(wanted))
        engine.session.withdraw_hint(7)
        store_others()
        assert not any(are_ready(wanted))
