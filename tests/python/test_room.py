"""Blocks of two sizes in a small pool: a lookup for whose blocks nothing can make room is answered."""

from __future__ import annotations

import time

from forebay import Ticket
from harness import SECONDS, Engine, Group, Model, hashes
from rig.daemon import Daemon
from rig.process import wait_until

SMALL = Group(0, ((0, 64 << 10),), attention="windowed")
LARGE = Group(0, ((1, 512 << 10),))
POOL_BYTES = 8 << 20
OF_POOL = POOL_BYTES // (64 << 10)
HELD = 100
READY, NOT_YET = b"\1", b"\2"


def engine(daemon: Daemon, group: Group) -> Engine:
    pages = (64 << 10, 512 << 10)
    model = Model(pages=pages, stride=max(pages), groups=(group,))
    name = f"of {group.refs[0][1]}"
    return Engine(daemon.socket.parent, model, engine_id=name, namespace=name, stock_blocks=1)


def settled(engine: Engine, keys: list[bytes]) -> Ticket:
    ticket = engine.look_up(keys)
    wait_until("nothing is promoting", lambda: NOT_YET not in ticket.states(0), SECONDS)
    return ticket


def test_a_lookup_that_lacks_room_ends_by_itself() -> None:
    """Each piece of memory holds a block that is leased, so none can go to the other size."""
    large, small = hashes("large", 2), hashes("small", OF_POOL)
    with Daemon(
        capacity_bytes=POOL_BYTES,
        unit_bytes=2 << 20,
        ssd_bytes=64 << 20,
        ssd_admission="all",
        pool={"promise_share": 1.0, "scrub_bytes_per_second": 0},
    ) as daemon:
        daemon.start()
        with engine(daemon, LARGE) as first:
            first.wait_ready()
            for at, key in enumerate(large):
                first.store(LARGE, [key], [at], large[at - 1] if at else None)
            stored = "forebay_tier_stored_blocks_total"
            wait_until("the blocks are on the disk", lambda: daemon.metrics().get(stored) == len(large), SECONDS)
        daemon.kill()
        daemon.drop_pool()
        daemon.start()
        with engine(daemon, SMALL) as holder:
            holder.wait_ready()
            for key in small:
                holder.store(SMALL, [key], [0])
            # Fewer than all, or promises would be over their limit.
            held = settled(holder, small[-HELD:])
            assert held.states(0) == READY * HELD
            with engine(daemon, LARGE) as asker:
                asker.wait_ready()
                begun = time.monotonic()
                assert settled(asker, large).states(0).count(READY) == 0
                assert time.monotonic() - begun > 0.4, "blocks may move out of the way"
                held.release()
                wait_until("there is room", lambda: settled(asker, large).states(0) == READY * 2, SECONDS)


def test_a_size_gets_memory_beside_pieces_that_wait_for_their_holders() -> None:
    """In a pool without tiers. Each unit has a leased block when the other size comes, and later one has none."""
    units, unit_bytes = 8, 2 << 20
    per_unit = unit_bytes // (64 << 10)
    small = hashes("small", units * per_unit)
    with Daemon(capacity_bytes=units * unit_bytes, unit_bytes=unit_bytes) as daemon:
        daemon.start()
        with engine(daemon, SMALL) as holder:
            holder.wait_ready()
            for key in small:
                holder.store(SMALL, [key], [0])
            held = [holder.hit([small[unit * per_unit + per_unit // 2]]) for unit in range(units)]
            with engine(daemon, LARGE) as asker:
                asker.wait_ready()
                begun = time.monotonic()
                while time.monotonic() - begun < 2:
                    assert asker.session.reserve(0, 1)[0] == b""
                    time.sleep(0.01)
                # The youngest unit does not drain: at most four do.
                held[-1].release()
                asker.reserve(0, 1)
