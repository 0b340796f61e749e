"""Bytes that change in the living pool: no load and no `get` hands them out, and the block can be stored again.

The harm is done through the pool's files, as a bit that flips in memory or a process that scribbles would.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forebay import Client
from harness import SECONDS, Engine, Group, Model, hashes, numbers
from rig.daemon import Daemon
from rig.process import wait_until

PAGE = 4096
FULL = Group(0, ((0, 1000), (1, 3000)))
CHUNKED = Model(blocks_per_chunk=4)
BLOCK = 4000


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Without the scrub, which would find before the others what is to be found by them."""
    with Daemon(capacity_bytes=64 << 20, pool={"scrub_bytes_per_second": 0}) as daemon:
        yield daemon.start()


def flip(daemon: Daemon, slot: int, at: int) -> None:
    """Flips a bit of the pool's bytes, while the daemon runs."""
    [path] = daemon.pool_directory.rglob("data")
    with path.open("r+b", buffering=0) as data:
        offset = slot * PAGE + at
        byte = os.pread(data.fileno(), 1, offset)
        os.pwrite(data.fileno(), bytes([byte[0] ^ 4]), offset)


def corrupt(daemon: Daemon, found_by: str) -> float:
    return daemon.metrics()[f'forebay_corrupt_blocks_total{{found_by="{found_by}"}}']


def wait_found(daemon: Daemon, found_by: str) -> None:
    wait_until(f"the daemon drops what a {found_by} found", lambda: corrupt(daemon, found_by) == 1, SECONDS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_byte_that_flipped_in_the_living_pool_fails_its_load_and_the_next_store_is_taken(
    daemon: Daemon, sockets: Path, ranks: int
) -> None:
    keys = hashes("rot", 3)
    with Engine(sockets, ranks=ranks) as engine:
        engine.wait_ready().store(FULL, keys, [1, 2, 3])
        ticket = engine.hit(keys)
        # The last byte of the last rank's slice of the second block.
        flip(daemon, numbers(ticket.slots(0))[1], ranks * BLOCK - 1)
        reports = engine.load(FULL, ticket, [4, 5, 6])
        assert [is_whole for is_whole, _ in reports] == [True] * (ranks - 1) + [False]
        wait_found(daemon, "load")
        ticket.release()
        assert engine.look_up(keys).states(0) == b"\1\0\0", "the block is a miss, and so is what follows it"
        engine.store(FULL, keys[1:2], [2], predecessor=keys[0])
        assert engine.session.stats()["stored"] == 4, "the store of a block that was rotten is taken"
        assert engine.load(FULL, engine.hit(keys), [4, 5, 6]) == [(True, 3 * BLOCK)] * ranks
        assert engine.workers[0].block(FULL, 5) == engine.workers[0].block(FULL, 2)
    assert daemon.metrics()["forebay_corrupt_blocks_total"] == 1


@pytest.mark.parametrize("flipped", range(4))
def test_a_load_of_a_part_of_a_slot_is_compared_as_a_whole(daemon: Daemon, sockets: Path, flipped: int) -> None:
    [key] = hashes("part", 1)
    with Engine(sockets, CHUNKED) as engine:
        engine.wait_ready().store(FULL, [key], [1, 2, 3, 4])
        ticket = engine.hit([key])
        assert engine.load(FULL, ticket, [6, 7], skipped=1) == [(True, 2 * BLOCK)]
        assert engine.workers[0].block(FULL, 6) == engine.workers[0].block(FULL, 2)
        flip(daemon, numbers(ticket.slots(0))[0], flipped * BLOCK + 7)
        assert engine.load(FULL, ticket, [6, 7], skipped=1)[0][0] is False
        wait_found(daemon, "load")


def test_get_returns_no_byte_that_flipped_and_the_next_put_is_taken(daemon: Daemon, sockets: Path) -> None:
    client = Client(str(sockets), deadline=20.0)
    namespace = client.open_namespace({"model": "a"}, {0: BLOCK})
    [first, second] = [(key, (key * 125)[:BLOCK]) for key in hashes("get", 2)]
    assert client.put(namespace, 0, [first, second]) == ["stored"] * 2
    with (next(daemon.pool_directory.rglob("data"))).open("rb") as data:
        slot = data.read().index(first[1]) // PAGE
    flip(daemon, slot, 17)
    assert client.get(namespace, 0, [first[0], second[0]]) == [None, second[1]]
    assert corrupt(daemon, "get") == 1
    assert client.put(namespace, 0, [first]) == ["stored"]
    assert client.get(namespace, 0, [first[0]]) == [first[1]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_no_worker_of_this_daemon_stored_can_be_loaded_and_is_compared(ranks: int) -> None:
    """After a restart, of a pool whose birth records are not there; then from the disk, after the pool was dropped."""
    keys = hashes("old", 3)
    with Daemon(
        capacity_bytes=64 << 20, ssd_bytes=64 << 20, ssd_admission="all", pool={"scrub_bytes_per_second": 0}
    ) as daemon:
        daemon.start()
        with Engine(daemon.socket.parent, ranks=ranks) as engine:
            engine.wait_ready().store(FULL, keys, [1, 2, 3])
            for loss in ("births", "pool"):
                daemon.wait_for("the blocks are on the disk", lambda seen: seen["tiers"][0]["blocks"] == 3)
                daemon.kill()
                if loss == "births":
                    [path] = daemon.pool_directory.rglob("birth")
                    size = path.stat().st_size
                    os.truncate(path, 0)
                    os.truncate(path, size)
                else:
                    daemon.drop_pool()
                daemon.start()
                engine.wait_ready()
                ticket = engine.hit(keys)
                assert engine.load(FULL, ticket, [4, 5, 6]) == [(True, 3 * BLOCK)] * ranks, loss
                assert engine.workers[-1].block(FULL, 6) == engine.workers[-1].block(FULL, 3)
                ticket.release()
            assert daemon.metrics()['forebay_tier_promotions_total{tier="ssd",outcome="ready"}'] == 3
            ticket = engine.hit(keys)
            flip(daemon, numbers(ticket.slots(0))[2], ranks * BLOCK - 1)
            assert engine.load(FULL, ticket, [4, 5, 6])[-1][0] is False
            wait_found(daemon, "load")
            ticket.release()
            # The disk has it whole.
            assert engine.load(FULL, engine.hit(keys), [4, 5, 6]) == [(True, 3 * BLOCK)] * ranks


def test_whoever_cries_wolf_drops_no_block_and_its_birth_is_written_anew(daemon: Daemon, sockets: Path) -> None:
    keys = hashes("wolf", 1)
    with Engine(sockets) as engine:
        engine.wait_ready().store(FULL, keys, [1])
        ticket = engine.hit(keys)
        # The block is whole, and what is said of it is not.
        [path] = daemon.pool_directory.rglob("birth")
        with path.open("r+b", buffering=0) as births:
            os.pwrite(births.fileno(), b"\0" * 8, numbers(ticket.slots(0))[0] * 16)
        assert engine.load(FULL, ticket, [2])[0][0] is False
        wait_until("it is compared", lambda: daemon.metrics()["forebay_suspected_blocks_total"] == 1, SECONDS)
        again = engine.hit(keys)
        assert engine.load(FULL, again, [2]) == [(True, BLOCK)]
        assert daemon.metrics()["forebay_corrupt_blocks_total"] == 0


def test_a_generation_that_rots_fails_one_load_and_is_put_right(daemon: Daemon, sockets: Path) -> None:
    keys = hashes("number", 2)
    with Engine(sockets) as engine:
        engine.wait_ready().store(FULL, keys, [1, 2])
        ticket = engine.hit(keys)
        [path] = daemon.pool_directory.rglob("generation")
        with path.open("r+b", buffering=0) as generations:
            at = PAGE + numbers(ticket.slots(0))[1] * 4
            [byte] = os.pread(generations.fileno(), 1, at)
            os.pwrite(generations.fileno(), bytes([byte ^ 4]), at)
        assert engine.load(FULL, ticket, [3, 4])[0][0] is False
        ticket.release()
        wait_until("it is compared", lambda: daemon.metrics()["forebay_suspected_blocks_total"] == 1, SECONDS)
        assert engine.load(FULL, engine.hit(keys), [3, 4]) == [(True, 2 * BLOCK)]
        assert engine.workers[0].worker.corrupt_loads() == 0
        assert daemon.metrics()["forebay_corrupt_blocks_total"] == 0


@pytest.mark.parametrize("where", ["daemon", "worker"])
def test_comparing_loads_can_be_switched_off(where: str) -> None:
    pool = {"verify_loads": where != "daemon", "scrub_bytes_per_second": 0}
    with Daemon(capacity_bytes=64 << 20, pool=pool) as daemon:
        daemon.start()
        keys = hashes("off", 1)
        with Engine(daemon.socket.parent, verify=where != "worker") as engine:
            engine.wait_ready().store(FULL, keys, [1])
            ticket = engine.hit(keys)
            flip(daemon, numbers(ticket.slots(0))[0], 5)
            assert engine.load(FULL, ticket, [2]) == [(True, BLOCK)]
            assert engine.workers[0].worker.corrupt_loads() == 0
