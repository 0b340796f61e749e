"""`forebay.Store` on a real Valkey and in a real directory: what is dumped is loaded, and what is not there is said so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forebay import ForebayError, Store
from rig.stores import Valkey

FIELDS = {"model": "m", "layout": "l"}
BLOCK_BYTES = 64 << 10
SECONDS = 60.0


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey().start() as server:
        yield server


@pytest.fixture(params=["valkey", "directory"])
def url(request: pytest.FixtureRequest, valkey: Valkey, tmp_path: Path) -> str:
    return f"unix://{valkey.socket}" if request.param == "valkey" else f"file://{tmp_path}"


def hashes(test: str, count: int) -> list[bytes]:
    return [f"{test} {at}".encode()[-32:] for at in range(count)]


def test_what_one_store_dumps_another_loads(url: str) -> None:
    keys = hashes("one another", 200)
    blocks = [os.urandom(BLOCK_BYTES - at) for at in range(200)]
    with Store(url, FIELDS, BLOCK_BYTES) as store:
        assert store.dump(keys, blocks).result(SECONDS) == ["stored"] * 200
    with Store(url, FIELDS, BLOCK_BYTES) as store:
        assert store.lookup(keys).result(SECONDS) == [True] * 200
        buffers = [bytearray(len(block)) for block in blocks]
        assert store.load(keys, buffers).result(SECONDS) == ["loaded"] * 200
    assert buffers == blocks


def test_a_missing_key_costs_its_own_block_and_no_other(url: str) -> None:
    keys = hashes("missing", 9)
    blocks = [bytes([at]) * 1000 for at in range(9)]
    with Store(url, FIELDS, BLOCK_BYTES) as store:
        store.dump(keys[:4] + keys[5:], blocks[:4] + blocks[5:]).result(SECONDS)
        assert store.lookup(keys).result(SECONDS) == [True] * 4 + [False] + [True] * 4
        buffers = [bytearray(b"\xee" * 1000) for _ in keys]
        assert store.load(keys, buffers).result(SECONDS) == ["loaded"] * 4 + ["absent"] + ["loaded"] * 4
    assert buffers[4] == b"\xee" * 1000
    assert buffers[5:] == blocks[5:]


def test_other_fields_and_groups_are_other_blocks(url: str) -> None:
    keys = hashes("fields", 2)
    with Store(url, FIELDS, BLOCK_BYTES) as store, Store(url, FIELDS | {"tenant": "t"}, BLOCK_BYTES) as other:
        store.dump(keys, [b"a" * 100, b"b" * 100]).result(SECONDS)
        assert other.lookup(keys).result(SECONDS) == [False, False]
        assert store.lookup(keys, group=1).result(SECONDS) == [False, False]


def test_a_buffer_of_another_length_is_not_filled(url: str) -> None:
    (key,) = hashes("length", 1)
    with Store(url, FIELDS, BLOCK_BYTES) as store:
        store.dump([key], [b"x" * 5000]).result(SECONDS)
        short = bytearray(4999)
        assert store.load([key], [short]).result(SECONDS) != ["loaded"]
    assert short == bytes(4999)


def test_coroutines_wait_for_many_batches_at_once(url: str) -> None:
    async def main(store: Store) -> list[list[str]]:
        batches = [hashes(f"batch {at}", 20) for at in range(10)]
        dumps = [store.dump(keys, [key * 100 for key in keys]) for keys in batches]
        return await asyncio.gather(*map(asyncio.wrap_future, dumps))

    with Store(url, FIELDS, BLOCK_BYTES) as store:
        assert asyncio.run(main(store)) == [["stored"] * 20] * 10


def test_wait_says_whether_all_are_done(url: str) -> None:
    with Store(url, FIELDS, BLOCK_BYTES) as store:
        futures = [store.lookup(hashes("wait", 5)) for _ in range(5)]
        assert store.wait(futures, SECONDS)
        assert store.fileno() >= 0


def test_a_frozen_server_costs_the_deadline_and_no_more() -> None:
    keys = hashes("frozen", 3)
    with Valkey().start() as server, Store(f"unix://{server.socket}", FIELDS, BLOCK_BYTES, deadline=0.5) as store:
        store.dump(keys, [b"x" * 1000] * 3).result(SECONDS)
        server.freeze()
        buffers = [bytearray(1000) for _ in keys]
        assert "loaded" not in store.load(keys, buffers).result(SECONDS)
        with pytest.raises(ForebayError, match="could not be asked"):
            store.lookup(keys).result(SECONDS)
        server.thaw()
        assert buffers == [bytes(1000)] * 3


def test_an_absent_server_is_unavailable_and_found_when_it_comes() -> None:
    with Valkey() as server, Store(f"unix://{server.socket}", FIELDS, BLOCK_BYTES, deadline=2) as store:
        outcome = store.dump([b"k"], [b"v" * 100]).result(SECONDS)
        assert outcome[0] in ("unavailable", "timeout")
        server.start()
        outcomes = iter(lambda: store.dump([b"k"], [b"v" * 100]).result(SECONDS), ["stored"])
        assert sum(1 for _ in outcomes) < 100


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("ftp://host", {}, "redis"),
        ("file:///nowhere/at/all", {}, "director"),
        ("redis://localhost", {"colour": 1}, "colour"),
        ("redis://localhost", {"connections": 0}, "connections"),
    ],
)
def test_what_cannot_be_right_is_said_at_once(url: str, options: dict[str, int], says: str) -> None:
    with pytest.raises(ForebayError) as raised:
        Store(url, FIELDS, BLOCK_BYTES, **options)
    assert says in str(raised.value)


def test_buffers_that_do_not_fit_are_refused(url: str) -> None:
    with Store(url, FIELDS, BLOCK_BYTES) as store:
        with pytest.raises(ForebayError, match="longer than a block"):
            store.dump([b"k"], [bytes(BLOCK_BYTES + 1)])
        with pytest.raises(BufferError):
            store.load([b"k"], [bytes(100)])
        with pytest.raises(ForebayError, match="one buffer for each"):
            store.dump([b"k"], [])
        assert store.dump([], []).result(SECONDS) == []


def test_a_closed_store_ends_its_futures() -> None:
    with Valkey().start() as server:
        store = Store(f"unix://{server.socket}", FIELDS, BLOCK_BYTES, deadline=60)
        server.freeze()
        future = store.lookup([b"k"])
        store.close()
        store.close()
        with pytest.raises(ForebayError, match="closed"):
            future.result(SECONDS)
        with pytest.raises(ForebayError, match="closed"):
            store.lookup([b"k"])
