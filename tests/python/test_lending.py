"""`forebay.Client` with its payloads through lent memory: the same bytes as through messages, whatever happens."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from forebay import Client, ForebayError
from harness import hashes
from rig.daemon import Daemon

MIB = 1 << 20


def payload(seed: str, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def test_a_client_says_how_its_blocks_travel(sockets: Path) -> None:
    with Client(str(sockets)) as lending, Client(str(sockets), memory_bytes=0) as plain:
        for client in (lending, plain):
            assert "messages" in repr(client)
            client.open_namespace({"model": "way"}, {0: 4096})
        assert "shared memory" in repr(lending) and "messages" in repr(plain)
    assert "closed" in repr(lending)


def test_a_client_that_cannot_lend_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    """And its blocks travel nevertheless."""
    limits = {"limits": {"lent_bytes_per_user": MIB}}
    with Daemon(capacity_bytes=64 * MIB, tiers=limits) as daemon, Client(str(daemon.start().socket.parent)) as late:
        name = late.open_namespace({"model": "why"}, {0: 4096})
        key, data = hashes("why", 1)[0], payload("why", 4096)
        assert late.put(name, 0, [(key, data)]) == ["stored"]
        assert late.get(name, 0, [key]) == [data]
        assert "messages" in repr(late) and "too much memory" in repr(late)
    said = [record.getMessage() for record in caplog.records if record.name == "forebay"]
    assert len(said) == 1 and "too much memory" in said[0], said


@pytest.mark.parametrize("size", [1, 65 * MIB, MIB + 1])
def test_memory_of_an_odd_size_is_refused(sockets: Path, size: int) -> None:
    with pytest.raises(ForebayError, match="cannot have this size"):
        Client(str(sockets), memory_bytes=size)


@pytest.mark.parametrize("seed", range(4))
def test_both_ways_store_and_find_the_same(sockets: Path, seed: int) -> None:
    dice = random.Random(seed)
    sizes = {group: dice.choice([1, 63, 4096, 5000, MIB, 3 * MIB + 7]) for group in range(3)}
    ways = [Client(str(sockets), deadline=20.0, memory_bytes=size) for size in (16 * MIB, MIB, 0)]
    names = [client.open_namespace({"model": f"ways {seed}"}, sizes) for client in ways]
    for group, size in sizes.items():
        count = dice.randint(1, 12)
        keys = hashes(f"ways {seed} {group}", count)
        values = [payload(f"{seed} {group} {at}", size) for at in range(count)]
        way = dice.randrange(len(ways))
        stored = ways[way].put(names[way], group, list(zip(keys, values, strict=True)))
        assert stored == ["stored"] * count, f"seed {seed}"
        asked = dice.choices(range(count), k=count) + [None]
        wanted = [keys[at] if at is not None else hashes("nobody", 1)[0] for at in asked]
        right = [values[at] if at is not None else None for at in asked]
        for client, name in zip(ways, names, strict=True):
            assert client.get(name, group, wanted) == right, f"seed {seed}"
            buffers = [bytearray(b"u" * size) for _ in wanted]
            assert client.get_into(name, group, wanted, buffers) == [value is not None for value in right]
            assert buffers[-1] == b"u" * size, "what was not found is unchanged"
            assert [bytes(buffer) for buffer in buffers[:-1]] == right[:-1], f"seed {seed}"


def test_threads_share_a_client(sockets: Path) -> None:
    client = Client(str(sockets), deadline=20.0)
    name = client.open_namespace({"model": "threads"}, {0: 70_000})
    failed: list[str] = []

    def run(thread: int) -> None:
        for turn in range(20):
            keys = hashes(f"threads {thread} {turn}", 3)
            values = [payload(f"{thread} {turn} {at}", 70_000) for at in range(3)]
            client.put(name, 0, list(zip(keys, values, strict=True)))
            if client.get(name, 0, keys) != values:
                failed.append(f"{thread} {turn}")

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed


def both_ways(sockets: Path, key: bytes, size: int) -> list[bytes | None]:
    found = []
    for memory_bytes in (16 * MIB, 0):
        with Client(str(sockets), deadline=20.0, memory_bytes=memory_bytes) as client:
            found += client.get(client.open_namespace({"model": "late"}, {0: size}), 0, [key])
    return found


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_call_that_was_given_up_changes_no_later_block(sockets: Path, daemon: Daemon, call: str) -> None:
    """The daemon serves it when it continues: from memory, and to memory, that nobody uses any more."""
    size = 4 * MIB
    old_key, new_key = hashes(f"late {call}", 2)
    old, new = payload(f"old {call}", size), payload(f"new {call}", size)
    client = Client(str(sockets), deadline=2.0)
    name = client.open_namespace({"model": "late"}, {0: size})
    client.put(name, 0, [(new_key, new)])
    if call == "get":
        client.put(name, 0, [(old_key, old)])
    given_up: dict[str, Callable[[], object]] = {
        "put": lambda: client.put(name, 0, [(old_key, old)]),
        "get": lambda: client.get(name, 0, [old_key]),
    }
    daemon.freeze()
    try:
        with pytest.raises(ForebayError, match="did not answer in time"):
            given_up[call]()
    finally:
        daemon.thaw()
    for _ in range(20):
        buffer = bytearray(size)
        assert client.get_into(name, 0, [new_key], [buffer]) == [True]
        assert buffer == new
    assert "shared memory" in repr(client)
    assert both_ways(sockets, new_key, size) == [new, new]
    assert all(found in (old, None) for found in both_ways(sockets, old_key, size))
