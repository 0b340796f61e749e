"""Layers with a sliding window: of a prompt that lies on a disk or in a store, only the last blocks come up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forebay import EngineSession, ForebayError, Ticket
from harness import SECONDS, Engine, Group, Model, hashes
from rig.daemon import Daemon
from rig.process import wait_until

FULL = Group(0, ((0, 1000), (1, 3000)))
WINDOWED = Group(3, ((1, 512),), attention=2)
UNTOLD = Group(3, ((1, 512),), attention="windowed")
COUNT = 12
MISS, READY, LEFT_OUT = b"\0", b"\1", b"\3"


@pytest.fixture(params=["disk", "directory"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    below = (
        {"ssd_bytes": 64 << 20, "ssd_admission": "all"}
        if request.param == "disk"
        else {"tiers": {"tier.fs": {"directories": [str(tmp_path / "shared")], "capacity_bytes": 64 << 20}}}
    )
    (tmp_path / "shared").mkdir()
    with Daemon(capacity_bytes=64 << 20, pool={"scrub_bytes_per_second": 0}, **below) as daemon:
        yield daemon.start()


def model(windowed: Group) -> Model:
    return Model(groups=(FULL, windowed))


def store(engine: Engine, windowed: Group, full: int, of_window: list[int]) -> None:
    """A prompt of COUNT blocks, of which the first `full` are there of one group, and some of the other."""
    engine.wait_ready().store(FULL, hashes("f", COUNT)[:full], list(range(full)))
    for at in of_window:
        engine.store(windowed, hashes("w", COUNT)[at : at + 1], [at])


def lose_pool(daemon: Daemon, blocks: int) -> None:
    """The pool is gone when its blocks are below it."""
    wait_until("the blocks are below the pool", lambda: tiered(daemon, "stored_blocks") == blocks, SECONDS)
    daemon.kill()
    daemon.drop_pool()
    daemon.start()


def settled(engine: Engine, groups: list[tuple[int, list[bytes]]]) -> Ticket:
    ticket = engine.session.lookup(groups)
    assert ticket.poll(SECONDS)
    wait_until(
        "nothing is promoting",
        lambda: all(b"\2" not in ticket.states(position) for position in range(len(groups))),
        SECONDS,
    )
    return ticket


def looked_up_below(engine: Engine, daemon: Daemon, windowed: Group, of_window: list[int]) -> Ticket:
    """Of the prompt of `store`, once nothing of it is in the pool: the answer."""
    store(engine, windowed, 8, of_window)
    lose_pool(daemon, 8 + len(of_window))
    engine.wait_ready()
    return settled(engine, [(0, hashes("f", COUNT)), (3, hashes("w", COUNT))])


def promoted(daemon: Daemon) -> float:
    return tiered(daemon, "promotions", 'outcome="ready"')


def tiered(daemon: Daemon, what: str, label: str = "") -> float:
    """Blocks that went to the tier, or came from it."""
    name = f"forebay_tier_{what}_total{{"
    return sum(value for key, value in daemon.metrics().items() if key.startswith(name) and label in key)


def test_only_the_window_at_the_end_of_the_prefix_comes_up(daemon: Daemon) -> None:
    with Engine(daemon.socket.parent, model(WINDOWED)) as engine:
        ticket = looked_up_below(engine, daemon, WINDOWED, list(range(COUNT)))
        assert ticket.states(0) == READY * 8 + MISS * 4
        states = ticket.states(1)
        assert states[:8] == LEFT_OUT * 6 + READY * 2
        # A disk's blocks are known. Of a store, the window at the end that the prefix might have had comes up too.
        assert states[8:] in (MISS * 4, MISS * 2 + READY * 2, LEFT_OUT * 2 + READY * 2)
        assert promoted(daemon) in (10, 12)
        # Whoever needs another one asks for it.
        before = promoted(daemon)
        ticket = settled(engine, [(3, hashes("w", COUNT)[:6])])
        assert ticket.states(0) == READY * 6
        assert promoted(daemon) == before + 6


def test_a_window_with_a_hole_is_passed_over(daemon: Daemon) -> None:
    with Engine(daemon.socket.parent, model(WINDOWED)) as engine:
        keys = hashes("w", COUNT)
        states = looked_up_below(engine, daemon, WINDOWED, [1, 2, 3, 5, 7]).states(1)
        # A disk's blocks are known; a store is asked for a window that it may have, and lacks it.
        if states.startswith(LEFT_OUT * 3):
            assert states[6:8] == MISS + READY
            states = settled(engine, [(3, keys[:6])]).states(0)
            assert states == MISS + READY * 3 + MISS + READY
        else:
            assert states[2:8] == READY * 2 + MISS + READY + MISS + READY


def test_without_the_length_of_a_window_all_of_it_comes_up(daemon: Daemon) -> None:
    with Engine(daemon.socket.parent, model(UNTOLD)) as engine:
        ticket = looked_up_below(engine, daemon, UNTOLD, list(range(COUNT)))
        assert ticket.states(1) == READY * COUNT
        assert promoted(daemon) == 8 + COUNT


def test_a_prompt_longer_than_the_promises_share_comes_with_the_window_at_its_end(tmp_path: Path) -> None:
    """A prefix without its window is of no use to an engine."""
    keys, of_window = hashes("long", 500), hashes("w", 500)
    with Daemon(
        capacity_bytes=16 << 20, ssd_bytes=64 << 20, ssd_admission="all", pool={"promise_share": 0.1}
    ) as daemon:
        daemon.start()
        with Engine(daemon.socket.parent, model(WINDOWED)) as engine:
            engine.wait_ready()
            for at in range(0, 500, 10):
                before = keys[at - 1] if at else None
                engine.store(FULL, keys[at : at + 10], list(range(10)), before)
                engine.store(WINDOWED, of_window[at : at + 10], list(range(10)))
            lose_pool(daemon, 1000)
            engine.wait_ready()
            tickets = [settled(engine, [(0, keys), (3, of_window)])]
            tickets.append(settled(engine, [(0, keys), (3, of_window)]))
            for ticket in tickets:
                states = ticket.states(0)
                prefix = len(states) - len(states.lstrip(READY))
                assert 350 < prefix < 410, "409 blocks may be promised"
                assert ticket.states(1)[prefix - 2 : prefix] == READY * 2
                assert ticket.states(1).count(READY) < 20


def usable(ticket: Ticket, window: int) -> int:
    """Blocks of the longest prefix whose window is ready too."""
    full, windowed = ticket.states(0), ticket.states(1)
    prefix = len(full) - len(full.lstrip(READY))
    ends = range(prefix, 0, -1)
    return next((end for end in ends if windowed[max(0, end - window) : end] == READY * min(window, end)), 0)


def test_a_request_that_stops_waiting_has_the_window_of_half_of_what_has_come_up(tmp_path: Path) -> None:
    """The prefix takes four seconds."""
    keys, of_window = hashes("slow", 400), hashes("w", 400)
    shared = {"directories": [str(tmp_path)], "capacity_bytes": 64 << 20}
    with Daemon(capacity_bytes=64 << 20, tiers={"tier.fs": shared}) as daemon:
        daemon.start()
        with Engine(daemon.socket.parent, model(WINDOWED)) as engine:
            engine.wait_ready()
            for at in range(0, 400, 10):
                engine.store(FULL, keys[at : at + 10], list(range(10)), keys[at - 1] if at else None)
                engine.store(WINDOWED, of_window[at : at + 10], list(range(10)))
            daemon.tiers = {"tier.fs": shared | {"load_bytes_per_second": 400_000, "load_deadline_ms": 60_000}}
            lose_pool(daemon, 800)
            engine.wait_ready()
            ticket = engine.session.lookup([(0, keys), (3, of_window)])
            assert ticket.poll(SECONDS)
            wait_until("some of it is up", lambda: ticket.states(0).count(READY) >= 150, SECONDS)
            ticket.stop_waiting()
            ready = ticket.states(0).count(READY)
            assert ready / 3 <= usable(ticket, 2) <= ready < 400


def test_blocks_of_the_window_that_are_in_the_pool_stay_while_the_prefix_comes_up() -> None:
    """The pool is full, and the prefix needs nearly all of it."""
    block, count = 32 << 10, 240
    full, windowed = Group(0, ((0, block),)), Group(3, ((1, block),), attention=8)
    other = Group(5, ((0, block),), attention="windowed")
    of_model = Model(pages=(block, block), stride=block, groups=(full, windowed, other))
    keys, of_window, others = hashes("f", count), hashes("w", count), hashes("o", 472)
    with Daemon(capacity_bytes=16 << 20, ssd_bytes=256 << 20, ssd_admission="all") as daemon:
        daemon.start()
        with Engine(daemon.socket.parent, of_model, stock_blocks=16) as engine:
            engine.wait_ready()
            for at in range(0, count, 16):
                engine.store(full, keys[at : at + 16], list(range(16)), keys[at - 1] if at else None)
            wait_until("the prefix is on the disk", lambda: tiered(daemon, "stored_blocks") == count, SECONDS)
        daemon.kill()
        daemon.drop_pool()
        daemon.ssd_admission = "second_sighting"
        daemon.start()
        with Engine(daemon.socket.parent, of_model, engine_id="b", stock_blocks=8) as engine:
            engine.wait_ready()
            for at in range(0, len(others), 8):
                if at == 88:
                    engine.store(windowed, of_window[-8:], list(range(8)))
                engine.store(other, others[at : at + 8], list(range(8)))
            ticket = settled(engine, [(0, keys), (3, of_window)])
            assert (ticket.states(0), ticket.states(1)[-8:]) == (READY * count, READY * 8)


def test_a_request_that_waits_has_its_window_brought_up(daemon: Daemon) -> None:
    with Engine(daemon.socket.parent, model(WINDOWED)) as engine:
        store(engine, WINDOWED, 8, list(range(COUNT)))
        lose_pool(daemon, 8 + COUNT)
        engine.wait_ready()
        groups = [(0, hashes("f", COUNT)), (3, hashes("w", COUNT))]
        engine.session.hint(1, groups)
        wait_until("the prefix is up", lambda: promoted(daemon) == 10, SECONDS)
        ticket = engine.session.lookup(groups)
        assert ticket.poll(SECONDS)
        assert ticket.states(1) == LEFT_OUT * 6 + READY * 2 + MISS * 4
        assert promoted(daemon) == 10


def test_a_window_has_a_block_at_least(sockets: Path) -> None:
    session = EngineSession(str(sockets), "engine", 1, incarnation=b"1" * 16)
    with session, pytest.raises(ForebayError, match="a window has one block at least"):
        session.set_namespace({"model": "m"}, [(0, 0, 16, False)])
    with session, pytest.raises(ForebayError, match="`full`, `windowed`, or a number of blocks"):
        session.set_namespace({"model": "m"}, [(0, "half", 16, False)])  # type: ignore[list-item]
