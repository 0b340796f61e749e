"""Questions and answers of one request, without vLLM's scheduler: partial tails, late answers, what comes up later."""

from __future__ import annotations

import time

import pytest
from fake import NONE, READY, FakeDaemon, FakeEngine, FakeSession, FakeTicket, masked
from forebay.vllm.lookup import Lookup
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, make_offload_key

HASHES = [bytes([at]) * 32 for at in range(1, 9)]


@pytest.fixture
def session(daemon: FakeDaemon) -> FakeSession:
    session = FakeSession(daemon, "e", 1)
    FakeEngine(daemon, "e", 0, [], [(0, False, []), (3, False, [])], 1)
    session.set_namespace({"model": "m"}, [(0, "full", 16, False), (3, "windowed", 32, False)])
    return session


def store(session: FakeSession, group: int, hashes: list[bytes]) -> None:
    slots, generations = session.reserve(group, len(hashes))
    for at in range(len(hashes)):
        number = int.from_bytes(slots[4 * at : 4 * at + 4], "little")
        session.daemon.slots[number].births[0] = session.daemon.slots[number].generation
    session.commit(group, hashes, None, slots, generations)


def key(group: int, at: int) -> OffloadKey:
    return make_offload_key(HASHES[at], group)


def test_keys_are_answered_by_group(session: FakeSession) -> None:
    store(session, 0, HASHES[:3])
    store(session, 3, HASHES[1:2])
    lookup = Lookup(session, [(0, HASHES[:4]), (3, HASHES[1:4:2])], None, deadline=1)
    assert lookup.poll(0, now=0)
    assert [lookup.result(key(0, at)).name for at in range(4)] == ["HIT", "HIT", "HIT", "MISS"]
    assert [lookup.result(key(3, at)).name for at in (1, 3)] == ["HIT", "MISS"]
    assert lookup.pool == session.daemon.pool
    places = lookup.places([key(3, 1)])
    assert places is not None
    assert session.daemon.slots[int.from_bytes(places[0], "little")].key == (session.namespace, 3, HASHES[1])
    whole = lookup.places([key(0, at) for at in range(3)])
    assert whole == tuple(map(b"".join, zip(*(lookup.places([key(0, at)]) or () for at in range(3)), strict=True)))
    assert lookup.places([key(3, 3)]) is None
    assert lookup.places([key(0, 2), key(0, 3)]) is None
    lookup.release()
    lookup.release()
    assert session.daemon.leased == 0
    assert lookup.result(key(0, 0)) is LookupResult.MISS
    assert lookup.places([key(0, 0)]) is None
    assert lookup.is_resident(key(0, 0)) and not lookup.is_resident(key(0, 3))


def test_what_was_left_out_of_a_window_is_asked_for_if_a_block_behind_it_does_not_come(session: FakeSession) -> None:
    session.set_namespace({"model": "m"}, [(0, "full", 16, False), (3, 2, 16, False)])
    store(session, 0, HASHES[:6])
    store(session, 3, HASHES[:6])
    session.daemon.promotions = 1
    lookup = Lookup(session, [(0, HASHES), (3, HASHES)], None, deadline=9)
    assert lookup.poll(0, now=1)
    names = ["HIT_PENDING", "HIT_PENDING", "MISS", "MISS"]
    assert [lookup.result(key(3, at)).name for at in (4, 5, 6, 7)] == names
    assert not lookup.ask_more()
    assert lookup.progress() == (1, 8 / 12, 0), "four of sixteen keys are left out"
    session.daemon.evict((session.namespace, 3, HASHES[4]))
    assert lookup.poll(0, now=1)
    # As vLLM asks, from the end.
    assert [lookup.result(key(3, at)).name for at in (5, 4, 3, 2)] == ["HIT", "MISS", "RETRY", "RETRY"]
    assert lookup.missing == 2 + 3
    assert lookup.ask_more() and lookup.poll(0, now=1)
    assert session.tickets[-1].groups == [(3, [HASHES[2], HASHES[3]])], "in prefix order"
    assert [lookup.result(key(3, at)).name for at in (5, 4, 3, 2)] == ["HIT", "MISS", "HIT", "HIT"]
    places = lookup.places([key(3, 2), key(3, 3)])
    assert places is not None and len(places[0]) == 8
    assert session.daemon.leased == 6 + 1 + 2
    lookup.release()


def test_if_a_second_batch_leads_to_others_that_were_left_out_all_of_them_are_asked_for(session: FakeSession) -> None:
    """As vLLM does where the window of one group has a hole, which moves the end for another group."""
    FakeEngine(session.daemon, "f", 0, [], [(0, False, []), (3, False, []), (4, False, [])], 1)
    session.set_namespace({"model": "n"}, [(0, "full", 16, False), (3, 2, 16, False), (4, 2, 16, False)])
    for group in (0, 3, 4):
        store(session, group, HASHES)
    session.daemon.promotions = 1
    lookup = Lookup(session, [(0, HASHES), (3, HASHES), (4, HASHES)], None, deadline=9)
    assert lookup.poll(0, now=1)
    session.daemon.evict((session.namespace, 4, HASHES[6]))
    assert lookup.poll(0, now=1)
    assert [lookup.result(key(3, at)).name for at in (7, 6)] == ["HIT", "HIT"]
    assert [lookup.result(key(4, at)).name for at in (7, 6, 5, 5)] == ["HIT", "MISS", "RETRY", "RETRY"]
    assert lookup.ask_more() and lookup.poll(0, now=1)
    assert session.tickets[-1].groups == [(4, [HASHES[5]])], "each once"
    assert [lookup.result(key(4, at)).name for at in (5, 4)] == ["HIT", "RETRY"]
    assert lookup.result(key(3, 5)) is LookupResult.RETRY
    assert lookup.ask_more() and lookup.poll(0, now=1)
    assert session.tickets[-1].groups == [(3, HASHES[:6]), (4, HASHES[:5])], "all that was left out"
    assert [lookup.result(key(4, at)).name for at in range(8)] == ["HIT"] * 6 + ["MISS", "HIT"]
    assert [lookup.result(key(3, at)).name for at in range(8)] == ["HIT"] * 8
    assert lookup.result(make_offload_key(b"?" * 32, 3)) is LookupResult.MISS
    assert not lookup.ask_more()


def test_what_the_daemon_puts_off_is_not_counted_as_awaited(session: FakeSession) -> None:
    store(session, 0, HASHES[:4])
    store(session, 3, HASHES[:4])
    session.daemon.promotions = 1
    session.daemon.promoted = {HASHES[3]}
    lookup = Lookup(session, [(0, HASHES[:4]), (3, HASHES[:4])], None, deadline=9, put_off={3})
    assert lookup.poll(0, now=0.5)
    assert lookup.result(key(3, 3)) is LookupResult.HIT_PENDING
    assert lookup.progress() == (0.5, 0.25, 0.0)
    assert lookup.poll(0, now=0.6)
    assert not lookup.is_promoting and lookup.progress() == (0.5, 0.25, 0.25)


def test_keys_that_were_not_asked_for_are_asked_in_one_second_batch(session: FakeSession) -> None:
    store(session, 0, HASHES[:5])
    lookup = Lookup(session, [(0, HASHES[:3])], None, deadline=1)
    assert lookup.poll(0, now=0)
    assert not lookup.ask_more()
    assert lookup.result(key(0, 4)) is LookupResult.RETRY
    assert lookup.result(key(3, 4)) is LookupResult.RETRY
    assert lookup.ask_more()
    assert not lookup.ask_more()
    session.daemon.is_frozen = True
    assert not lookup.poll(0, now=0)
    session.daemon.is_frozen = False
    assert lookup.poll(0, now=0)
    assert lookup.result(key(0, 4)) is LookupResult.HIT
    assert lookup.result(key(3, 4)) is LookupResult.MISS
    assert lookup.result(key(0, 7)) is LookupResult.MISS  # a third batch there is not
    assert session.daemon.lookups == 2
    assert session.daemon.leased == 4
    with_tail = lookup.places([key(0, 1), key(0, 2), key(0, 4)])
    assert with_tail is not None and len(with_tail[0]) == len(with_tail[1]) == 12
    assert with_tail[0][8:] == (lookup.places([key(0, 4)]) or (b"",))[0]
    assert lookup.places([key(0, 2), key(3, 4)]) is None
    lookup.release()
    assert session.daemon.leased == 0


def test_what_comes_up_is_told_without_another_question_and_is_leased_with_the_rest(session: FakeSession) -> None:
    store(session, 0, HASHES[:4])
    session.daemon.promotions = 2
    session.daemon.promoted = {HASHES[2], HASHES[3]}
    lookup = Lookup(session, [(0, HASHES[:4])], None, deadline=1)
    assert lookup.poll(0, now=0.1)
    assert [lookup.result(key(0, at)).name for at in range(4)] == ["HIT", "HIT", "HIT_PENDING", "HIT_PENDING"]
    assert session.daemon.leased == 2 and lookup.places([key(0, 1), key(0, 2)]) is None
    session.daemon.promoted = {HASHES[3]}
    session.daemon.is_frozen = True
    assert lookup.poll(0, now=0.2)  # the old answer holds until more is known
    assert lookup.progress() == (0.1, 0.5, 0.0)
    session.daemon.is_frozen = False
    assert lookup.poll(0, now=0.3)
    assert [lookup.result(key(0, at)).name for at in (2, 3)] == ["HIT", "HIT_PENDING"]
    assert lookup.progress() == (0.1, 0.5, 0.25)
    assert lookup.poll(0, now=0.4)
    assert not lookup.is_promoting and lookup.result(key(0, 3)) is LookupResult.HIT
    places = lookup.places([key(0, at) for at in range(4)])
    assert places is not None and NONE not in places[0]
    assert session.daemon.leased == 4
    assert session.daemon.lookups == 1
    lookup.release()
    assert session.daemon.leased == 0


def test_what_vanishes_while_it_comes_up_is_a_miss(session: FakeSession) -> None:
    store(session, 0, HASHES[:3])
    session.daemon.promotions = 1
    lookup = Lookup(session, [(0, HASHES[:3])], None, deadline=1)
    assert lookup.poll(0, now=0)
    session.daemon.evict_all()
    assert lookup.poll(0, now=0.1)
    assert lookup.result(key(0, 0)) is LookupResult.MISS and not lookup.is_promoting


def test_a_daemon_that_is_lost_while_keys_come_up_leaves_misses_and_no_lease(session: FakeSession) -> None:
    store(session, 0, HASHES[:3])
    session.daemon.promotions = 1
    session.daemon.promoted = {HASHES[2]}
    lookup = Lookup(session, [(0, HASHES[:3]), (3, HASHES[:1])], None, deadline=1)
    assert lookup.poll(0, now=0)
    session.daemon.is_up = False
    assert lookup.poll(0, now=0.5)
    assert [lookup.result(key(0, at)).name for at in range(3)] == ["HIT", "HIT", "MISS"]
    assert not lookup.is_promoting and not lookup.is_late
    lookup.release()
    assert session.daemon.leased == 0


def test_what_is_ready_at_the_deadline_counts(session: FakeSession) -> None:
    store(session, 0, HASHES[:3])
    lookup = Lookup(session, [(0, HASHES[:3])], None, deadline=1)
    assert lookup.poll(0, now=0)
    assert lookup.poll(0, now=5)
    assert not lookup.is_late
    assert lookup.result(key(0, 2)) is LookupResult.HIT


def test_an_answer_that_nobody_looked_at_counts_after_the_deadline(session: FakeSession) -> None:
    store(session, 0, HASHES[:3])
    lookup = Lookup(session, [(0, HASHES[:3])], None, deadline=1)
    assert lookup.poll(0.5, now=5)
    assert not lookup.is_late
    assert [lookup.result(key(0, at)).name for at in range(3)] == ["HIT", "HIT", "HIT"]
    lookup.release()
    assert session.daemon.leased == 0


def test_a_last_look_does_not_wait(session: FakeSession) -> None:
    session.daemon.is_frozen = True
    lookup = Lookup(session, [(0, HASHES[:3])], None, deadline=1)
    assert lookup.poll(0.5, now=1)
    assert lookup.is_late
    assert session.daemon.waits == [0.0]


def test_time_in_which_nobody_asked_is_no_waiting(session: FakeSession) -> None:
    store(session, 0, HASHES[:3])
    session.daemon.promotions = 3
    lookup = Lookup(session, [(0, HASHES[:3])], None, deadline=1)
    assert lookup.poll(0, now=0.5)
    assert lookup.progress() == (0.5, 1.0, 0.0)
    lookup.skip(60)
    assert lookup.poll(0, now=60.9)
    assert lookup.is_promoting and lookup.progress() == (60.5, 1.0, 0.0)
    assert lookup.poll(0, now=61)
    assert lookup.is_late
    assert session.tickets[-1].states(0) == bytes(3)  # the daemon promotes nothing more for it
    lookup.release()


def test_an_unanswered_lookup_gives_its_lease_back_when_the_answer_comes(session: FakeSession) -> None:
    store(session, 0, HASHES[:3])
    session.daemon.is_frozen = True
    lookup = Lookup(session, [(0, HASHES[:3])], None, deadline=1)
    assert not lookup.poll(0, now=0)
    lookup.release()
    session.daemon.is_frozen = False
    assert session.tickets[-1].poll(0)
    assert session.daemon.leased == 0


def test_answers_from_two_pools_are_of_no_use(session: FakeSession) -> None:
    store(session, 0, HASHES[:3])
    lookup = Lookup(session, [(0, HASHES[:2])], None, deadline=1)
    assert lookup.poll(0, now=0)
    session.daemon.replace_pool()
    lookup.result(key(0, 2))
    assert lookup.ask_more() and lookup.poll(0, now=0)
    assert lookup.pool == b""


def test_a_tail_without_an_answer_leaves_the_leases_of_the_rest(session: FakeSession) -> None:
    store(session, 0, HASHES[:3])
    lookup = Lookup(session, [(0, HASHES[:2])], None, deadline=1)
    assert lookup.poll(0, now=0)
    session.daemon.is_frozen = True
    lookup.result(key(0, 2))
    assert lookup.ask_more() and not lookup.poll(0, now=0.5) and lookup.poll(0, now=2)
    assert lookup.result(key(0, 1)) is LookupResult.HIT
    assert lookup.pool == session.daemon.pool and lookup.places([key(0, 0), key(0, 1)]) is not None


def test_a_tail_alone_may_come_up(session: FakeSession) -> None:
    store(session, 0, HASHES[:1])
    session.daemon.promotions = 3
    session.daemon.promoted = {HASHES[0]}
    lookup = Lookup(session, [(0, [])], None, deadline=1)
    assert lookup.poll(0, now=0)
    lookup.result(key(0, 0))
    assert lookup.ask_more() and lookup.poll(0, now=0.1) and lookup.is_promoting
    assert lookup.progress() == (0.1, 1.0, 0.0)


def test_masked_hashes_are_asked_for_and_plain_ones_answered(session: FakeSession) -> None:
    mask = b"m" * 32
    store(session, 0, masked(HASHES[:1], mask))
    lookup = Lookup(session, [(0, HASHES[:2])], mask, deadline=1)
    assert lookup.poll(0, now=0)
    assert lookup.result(key(0, 0)) is LookupResult.HIT
    assert lookup.result(key(0, 1)) is LookupResult.MISS


def test_keys_with_gaps_have_their_own_places(session: FakeSession) -> None:
    store(session, 0, HASHES)
    lookup = Lookup(session, [(0, HASHES)], None, deadline=1)
    assert lookup.poll(0, now=0)
    some = [key(0, at) for at in (0, 2, 3, 7)]
    assert lookup.places(some) == tuple(map(b"".join, zip(*(lookup.places([one]) or () for one in some), strict=True)))
    assert lookup.places([key(0, 0), key(0, 2), make_offload_key(b"?" * 32, 0)]) is None


def test_a_long_prompt_with_a_gap_holds_no_step(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's host tier may have any chunk of a prompt, and the places of the others are asked for in one job."""
    count = 16_384
    hashes = [at.to_bytes(32, "big") for at in range(count)]
    all_ready = bytes([READY]) * count, b"slot" * count, b"gene" * count, bytes(count)
    monkeypatch.setattr(FakeTicket, "_answer", lambda ticket, _: setattr(ticket, "_answers", [all_ready]))
    lookup = Lookup(session, [(0, hashes)], None, deadline=1)
    assert lookup.poll(0, now=0)
    begun = time.thread_time()
    places = lookup.places([make_offload_key(hash_, 0) for hash_ in hashes if hash_ != hashes[count // 2]])
    assert places == (b"slot" * (count - 1), b"gene" * (count - 1))
    assert time.thread_time() - begun < 0.5, "the time grows with the square of the prompt's length"
