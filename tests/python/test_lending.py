"""`forebay.Client` with its payloads through lent memory: the same bytes as through messages, whatever happens."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from forebay import Client, ForebayError
from harness import hashes
from rig.daemon import Daemon
from rig.process import wait_until

MIB = 1 << 20


def payload(seed: str, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def lent_bytes(daemon: Daemon) -> int:
    """What all clients lend now, as the daemon says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/metrics", timeout=20) as page:
        lines = page.read().decode().splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith("forebay_lent_bytes{"))


def move_much(client: Client, name: int, group: int = 0) -> tuple[bytes, bytes]:
    """So much that the client lends, if it can; a block of it."""
    keys, values = hashes("much", 8), [payload(f"much {at}", MIB) for at in range(8)]
    client.put(name, group, list(zip(keys, values, strict=True)))
    return keys[7], values[7]


def test_a_client_lends_when_it_has_moved_much_and_says_so(sockets: Path, daemon: Daemon) -> None:
    with Client(str(sockets)) as lending, Client(str(sockets), memory_bytes=0) as plain:
        for client in (plain, lending):
            name = client.open_namespace({"model": "way"}, {0: 4096, 1: MIB})
            small, large = hashes("way small", 1)[0], hashes("way large", 1)[0]
            client.put(name, 0, [(small, payload("small", 4096))])
            client.put(name, 1, [(large, payload("large", MIB))])
            assert client.get(name, 0, [small]) == [payload("small", 4096)]
            assert client.get(name, 1, [large]) == [payload("large", MIB)]
            assert client.lookup(name, 0, [small]) == [True]
            assert "messages" in repr(client)
            assert lent_bytes(daemon) == 0, "little was moved"
            key, data = move_much(client, name, 1)
            assert client.get(name, 1, [key]) == [data]
        assert "shared memory" in repr(lending) and "messages" in repr(plain)
        assert lent_bytes(daemon) == 16 * MIB
    assert "closed" in repr(lending)
    wait_until("the memory is given back", lambda: lent_bytes(daemon) == 0, 20.0)


def test_memory_that_the_daemon_has_given_back_is_lent_anew() -> None:
    """The client still has it, and calls as before."""
    limits = {"limits": {"idle_seconds": 1}}
    with Daemon(capacity_bytes=64 * MIB, tiers=limits) as daemon, Client(str(daemon.start().socket.parent)) as client:
        name = client.open_namespace({"model": "idle"}, {0: MIB})
        key, data = move_much(client, name)
        assert lent_bytes(daemon) == 16 * MIB
        wait_until("the memory is given back", lambda: lent_bytes(daemon) == 0, 20.0)
        assert "shared memory" in repr(client), "the client does not know yet"
        assert client.get(name, 0, [key]) == [data]
        move_much(client, name)
        assert lent_bytes(daemon) == 16 * MIB
        assert client.get(name, 0, [key]) == [data]
        assert "shared memory" in repr(client)


class Relay:
    """A socket in front of another: it passes bytes, and no descriptors."""

    def __init__(self, path: Path, behind: Path) -> None:
        self.behind = behind
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                front, _ = self.listener.accept()
            except OSError:
                return
            back = socket.socket(socket.AF_UNIX)
            back.connect(str(self.behind))
            for source, target in ((front, back), (back, front)):
                threading.Thread(target=self.pass_on, args=(source, target), daemon=True).start()

    @staticmethod
    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.mark.parametrize("socket_is", ["absent", "silent", "a relay"])
def test_blocks_travel_in_messages_where_no_memory_can_be_lent(sockets: Path, daemon: Daemon, socket_is: str) -> None:
    """As in a container that sees one socket only, or through a program that passes the bytes of the other."""
    attach, hidden = sockets / "attach.sock", sockets / "hidden.sock"
    attach.rename(hidden)
    relay = Relay(attach, hidden) if socket_is == "a relay" else None
    silent = socket.socket(socket.AF_UNIX)
    if socket_is == "silent":
        silent.bind(str(attach))
        silent.listen()
    with Client(str(sockets), deadline=4.0) as client:
        name = client.open_namespace({"model": "no memory"}, {0: MIB})
        key, data = move_much(client, name)
        assert client.get(name, 0, [key]) == [data]
        assert "copies through messages: " in repr(client)
    silent.close()
    if relay:
        relay.close()
    assert lent_bytes(daemon) == 0


def test_a_client_that_cannot_lend_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    """And its blocks travel nevertheless."""
    limits = {"limits": {"lent_bytes_per_user": MIB}}
    with Daemon(capacity_bytes=64 * MIB, tiers=limits) as daemon, Client(str(daemon.start().socket.parent)) as late:
        name = late.open_namespace({"model": "why"}, {0: MIB})
        key, data = move_much(late, name)
        assert late.get(name, 0, [key]) == [data]
        move_much(late, name)
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
    for _ in range(3):
        client.put(name, 0, [(new_key, new)])
    assert "shared memory" in repr(client)
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
