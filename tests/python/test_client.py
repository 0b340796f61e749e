"""`forebay.Client` against the real daemon."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forebay
import numpy as np
import pytest
import torch
from forebay import Client, ForebayError
from forebay.vllm.session import describe
from forebay.vllm.settings import Settings
from harness import hashes
from rig.daemon import Daemon
from rig.engine import clean_env
from rig.process import wait_until
from rig.stores import Valkey

BLOCK = 5000


def blocks(name: str, count: int, first: int = 0, size: int = BLOCK) -> list[tuple[bytes, bytes]]:
    keys = hashes(name, count, first)
    return [(key, (key * (size // 32 + 1))[:size]) for key in keys]


@pytest.fixture(params=[16 << 20, 0], ids=["memory", "messages"])
def client(sockets: Path, request: pytest.FixtureRequest) -> Client:
    return Client(str(sockets), deadline=20.0, memory_bytes=request.param)


def test_the_package_needs_nothing_but_itself() -> None:
    assert forebay.__version__.count(".") == 2
    public = {
        "Client",
        "EngineSession",
        "ForebayError",
        "Store",
        "Ticket",
        "WorkerEngine",
        "__version__",
        "find_sockets",
    }
    assert set(forebay.__all__) == public


def test_blocks_come_back_as_they_were_put(client: Client) -> None:
    namespace = client.open_namespace({"model": "a"}, {0: BLOCK})
    stored = blocks("a", 5)
    assert client.put(namespace, 0, stored) == ["stored"] * 5
    keys = [key for key, _ in stored]
    unknown = hashes("nobody", 1)
    assert client.get(namespace, 0, [keys[3], *unknown, keys[0]]) == [stored[3][1], None, stored[0][1]]
    assert client.lookup(namespace, 0, [*keys, *unknown]) == [True] * 5 + [False]
    assert client.lookup(namespace, 0, tuple(keys)) == [True] * 5


def test_blocks_of_a_new_size_find_room_in_a_pool_full_of_others() -> None:
    with Daemon(capacity_bytes=256 << 20) as daemon:
        daemon.start()
        with Client(str(daemon.socket.parent), deadline=20.0) as client:
            large = client.open_namespace({"model": "large"}, {0: 1 << 20})
            for number in range(300):
                assert client.put(large, 0, blocks(f"large {number}", 1, size=1 << 20)) == ["stored"]
            for size in (64 << 10, 128 << 10, 5000):
                small = client.open_namespace({"model": f"small {size}"}, {0: size})
                assert client.put(small, 0, blocks("small", 3, size=size)) == ["stored"] * 3


@pytest.mark.parametrize("policy", ["default", "lru"])
@pytest.mark.parametrize("memory_bytes", [16 << 20, 0], ids=["memory", "messages"])
@pytest.mark.parametrize(("size", "length"), [(64 << 10, 64), (256 << 10, 72)], ids=["one call", "three calls"])
def test_prompts_that_were_got_are_evicted_from_their_end(
    policy: str, memory_bytes: int, size: int, length: int
) -> None:
    with Daemon(capacity_bytes=16 * size * length, pool={"policy": policy}) as daemon:
        daemon.start()
        with Client(str(daemon.socket.parent), deadline=20.0, memory_bytes=memory_bytes) as client:
            names = client.open_namespace({"model": "order"}, {0: size})
            prompts = [blocks(f"prompt {number}", length, size=size) for number in range(16)]
            for prompt in prompts:
                client.put(names, 0, prompt)
            for prompt in prompts:
                keys = [key for key, _ in prompt]
                assert client.get(names, 0, keys) == [data for _, data in prompt]
            # Less than a prompt, so that a part of one stays.
            client.put(names, 0, blocks("another", length // 3, size=size))
            there = ["".join("x" if has else "." for has in found(client, names, prompt)) for prompt in prompts]
    evicted = sum(states.count(".") for states in there)
    assert 0 < evicted < len(prompts) * length, there
    assert all("." not in states.rstrip(".") for states in there), there


def found(client: Client, names: int, prompt: list[tuple[bytes, bytes]]) -> list[bool]:
    """Each block by itself, as a lookup ends at the first that is missing."""
    return [client.lookup(names, 0, [key])[0] for key, _ in prompt]


def test_blocks_may_be_arrays_tensors_and_views(client: Client) -> None:
    namespace = client.open_namespace({"model": "arrays"}, {0: 64})
    keys = hashes("arrays", 4)
    array, tensor = np.arange(16, dtype=np.float32).reshape(4, 4), torch.randn(4, 8).bfloat16()
    values = [array, tensor, memoryview(bytes(range(64))), bytearray(b"x" * 64)]
    assert client.put(namespace, 0, list(zip(keys, values, strict=True))) == ["stored"] * 4
    assert client.get(namespace, 0, keys[:1]) == [array.tobytes()]
    into = [np.zeros((4, 4), dtype=np.float32), torch.zeros(4, 8, dtype=torch.bfloat16), bytearray(64), bytearray(64)]
    unknown = hashes("nobody", 1)
    assert client.get_into(namespace, 0, [*keys[:3], *unknown], into) == [True, True, True, False]
    assert np.array_equal(into[0], array) and torch.equal(into[1], tensor) and into[2:] == [bytes(range(64)), bytes(64)]
    for buffers in ([bytearray(63)], [bytearray(64)] * 2):
        with pytest.raises(ForebayError, match="buffer"):
            client.get_into(namespace, 0, keys[:1], buffers)


def test_a_client_finds_its_daemon_and_ends_with_its_block(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_SOCKET", str(sockets / "forebay.sock"))
    assert Path(forebay.find_sockets()) == sockets
    with Client() as client:
        assert client.inspect()["capacity_bytes"]
    with pytest.raises(ForebayError, match="closed"):
        client.inspect()


# Mounts of its own: another `/etc` with nothing but the daemon's configuration in it, and a `/run` without a daemon.
OTHER_ETC = ["unshare", "--map-root-user", "--mount", "sh", "-c"]


@pytest.mark.parametrize(
    ("make", "variables", "found"),
    [
        ("printf '[socket]\\ndirectory = \"/run/in-file\"' > FILE", {}, "/run/in-file"),
        ("printf '[socket]\\ndirectory = \"/run/in-file\"' > FILE", {"FOREBAY_SOCKET": "/run/first"}, "/run/first"),
        ("printf '[socket]\\ndirectory = \"/run/in-file\"' > FILE", {"FOREBAY_CONFIG": ""}, "/run/forebay"),
        ("printf '[socket' > FILE", {}, "/run/forebay"),
        ("mkfifo FILE", {}, "/run/forebay"),
        ("ln -s /nowhere FILE", {}, "/run/forebay"),
    ],
)
def test_a_program_finds_its_daemon_where_the_configuration_says(
    make: str, variables: dict[str, str], found: str
) -> None:
    mounts = "mount -t tmpfs none /etc && mount -t tmpfs none /run"
    script = f'{mounts} && {make.replace("FILE", "/etc/forebay.toml")} && exec "$@"'
    code = "import forebay; print(forebay.find_sockets())"
    argv = [*OTHER_ETC, script, "sh", sys.executable, "-c", code]
    env = clean_env() | {"XDG_RUNTIME_DIR": "/nowhere"} | variables
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, found), done.stderr


def test_outcomes_tell_what_became_of_each_block(client: Client) -> None:
    namespace = client.open_namespace({"model": "a"}, {0: BLOCK})
    first, second = blocks("a", 1), blocks("a", 1, 1)
    assert client.put(namespace, 0, second, predecessor=first[0][0]) == ["orphan"]
    assert client.put(namespace, 0, first) == ["stored"]
    assert client.put(namespace, 0, second, predecessor=first[0][0]) == ["stored"]
    assert client.put(namespace, 0, first) == ["duplicate"]


def test_what_exceeds_a_message_travels_in_parts(client: Client) -> None:
    size = 3 << 20
    namespace = client.open_namespace({"model": "a"}, {7: size})
    stored = blocks("a", 7, size=size)
    assert client.put(namespace, 7, stored) == ["stored"] * 7
    assert client.get(namespace, 7, [key for key, _ in stored]) == [data for _, data in stored]


def test_a_client_may_use_more_namespaces_than_its_session_keeps(client: Client) -> None:
    # The daemon keeps 256 for a session.
    names = [client.open_namespace({"model": str(number)}, {0: 64}) for number in range(300)]
    key = hashes("same", 1)
    for number, namespace in enumerate(names):
        assert client.put(namespace, 0, [(key[0], number.to_bytes(64))]) == ["stored"]
    into = bytearray(64)
    for number, namespace in enumerate(names):
        assert client.get(namespace, 0, key) == [number.to_bytes(64)]
        assert client.get_into(namespace, 0, key, [into]) == [True] and into == number.to_bytes(64)
        assert client.lookup(namespace, 0, [*key, *hashes("nobody", 1)]) == [True, False]

    def ask(first: int) -> list[int]:
        order = [*range(first, len(names), 3), *range(first)]
        return [number for number in order if client.get(names[number], 0, key) != [number.to_bytes(64)]]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, [0, 1, 2, 150])) == [[]] * 4


FORKING = """
import os, sys, time
from pathlib import Path
from harness import Engine, hashes
from forebay import Client, ForebayError, Store

client, store = Client(sys.argv[1], deadline=20.0), Store("file://" + sys.argv[2], {"model": "a"}, 64)
namespace, key = client.open_namespace({"model": "a"}, {0: 64}), hashes("a", 1)
client.put(namespace, 0, [(key[0], bytes(64))])
engine = Engine(Path(sys.argv[1])).wait_ready()
ticket = engine.session.lookup([(0, hashes("b", 3))])
start = time.monotonic()
child = os.fork()
if child == 0:
    try:
        client.get(namespace, 0, key)
    except ForebayError as error:
        assert error.kind == "unavailable" and error.hint, error
    else:
        os._exit(1)
    if sys.argv[3] == "closes":
        client.close(), store.close(), engine.session.close(), engine.workers[0].worker.shutdown()
    sys.exit(0)
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
    assert time.monotonic() < start + 30, "the child hangs"
    time.sleep(0.01)
assert ended[1] == 0, ended
assert client.get(namespace, 0, key) == [bytes(64)]
assert ticket.poll(20.0) and not ticket.has_failed()
engine.store(engine.model.groups[0], hashes("b", 3), [0, 1, 2])
assert store.lookup(key).result(20.0) == [False]
store.close()
print("end")
"""


@pytest.mark.parametrize("how", ["ends", "closes"])
def test_a_forked_child_ends_in_silence_and_leaves_its_parent_alone(sockets: Path, tmp_path: Path, how: str) -> None:
    argv = [sys.executable, "-c", FORKING, str(sockets), str(tmp_path), how]
    env = clean_env() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("end\n"), done.stdout + done.stderr


def test_clients_share_and_namespaces_separate(client: Client, sockets: Path) -> None:
    stored = blocks("a", 1)
    client.put(client.open_namespace({"model": "a"}, {0: BLOCK}), 0, stored)
    other = Client(str(sockets))
    keys = [key for key, _ in stored]
    assert other.lookup(other.open_namespace({"model": "a"}, {0: BLOCK}), 0, keys) == [True]
    assert other.lookup(other.open_namespace({"model": "b"}, {0: BLOCK}), 0, keys) == [False]


def test_a_client_outlives_its_daemon_and_finds_its_blocks_again(client: Client, daemon: Daemon) -> None:
    namespace = client.open_namespace({"model": "a"}, {0: BLOCK})
    stored = blocks("a", 3)
    client.put(namespace, 0, stored)
    keys = [key for key, _ in stored]
    daemon.kill()
    with pytest.raises(ForebayError) as raised:
        client.get(namespace, 0, keys)
    assert raised.value.kind == "unavailable"
    assert raised.value.hint is not None and "forebay serve" in raised.value.hint
    assert str(raised.value).endswith(f"; hint: {raised.value.hint}")
    daemon.start()
    found: list[bytes | None] = []

    def is_found() -> bool:
        found[:] = client.get(namespace, 0, keys)
        return None not in found

    wait_until("the recovered blocks are verified", is_found, 20)
    assert found == [data for _, data in stored]


def test_inspect_shows_what_there_is(client: Client) -> None:
    namespace = client.open_namespace({"model": "a", "tenant": "blue"}, {0: BLOCK})
    client.put(namespace, 0, blocks("a", 2))
    seen = client.inspect()
    [shown] = seen["namespaces"]
    assert shown["fields"] == {"model": "a", "tenant": "blue"}
    assert shown["groups"] == [{"group": 0, "block_bytes": BLOCK, "ready_blocks": 2}]
    assert seen["capacity_bytes"] == 64 << 20 and len(str(seen["pool_id"])) == 32
    assert seen["policy"] == "default" and seen["version"] == forebay.__version__


def test_an_engines_log_names_the_pools_size_its_place_and_the_namespace(client: Client, sockets: Path) -> None:
    fields = {"model": "a", "tenant": "blue"}
    client.open_namespace(fields, {0: BLOCK})
    [shown] = client.inspect()["namespaces"]
    settings = Settings(socket=str(sockets))
    assert describe(settings, fields) == f"64 MiB at {sockets}, namespace {shown['namespace_id']}"
    assert describe(settings, {"model": "b"}) == f"64 MiB at {sockets}"
    assert describe(Settings(socket="/nowhere"), fields) == "a pool at /nowhere"


def test_what_a_user_may_get_wrong_is_an_error_with_a_hint(client: Client) -> None:
    namespace = client.open_namespace({"model": "a"}, {0: BLOCK})
    wrong: list[Callable[[], object]] = [
        lambda: client.open_namespace({"model": "a"}, {0: 0}),
        lambda: client.get(namespace, 0, [b"one", b"another"]),
        lambda: client.purge(namespace_id="79e8"),
        lambda: client.purge(namespace_id="79e"),
    ]
    for call in wrong:
        with pytest.raises(ForebayError) as raised:
            call()
        assert raised.value.kind == "invalid" and raised.value.hint


def test_purge_takes_a_namespace_or_a_tenant(client: Client) -> None:
    namespace = client.open_namespace({"model": "a", "tenant": "blue"}, {0: BLOCK})
    keys = [key for key, _ in blocks("a", 2)]
    client.put(namespace, 0, blocks("a", 2))
    [shown] = client.inspect()["namespaces"]
    unknown = client.purge(tenant="red")
    assert unknown["purged_blocks"] == 0 and unknown["namespace_ids"] == []
    purged = client.purge(namespace_id=shown["namespace_id"])
    assert purged["purged_blocks"] == 2 and purged["namespace_ids"] == [shown["namespace_id"]]
    assert client.lookup(namespace, 0, keys) == [False, False]
    client.put(namespace, 0, blocks("a", 2))
    assert client.purge(tenant="blue")["purged_blocks"] == 2
    for bad in ({}, {"tenant": "blue", "namespace_id": "00"}, {"namespace_id": "xyz"}, {"namespace_id": "123"}):
        with pytest.raises(ForebayError) as raised:
            client.purge(**bad)
        assert raised.value.kind == "invalid"


def test_mistakes_raise_with_their_kind(client: Client) -> None:
    namespace = client.open_namespace({"model": "a"}, {0: BLOCK})
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: client.open_namespace({"model": "a"}, {0: BLOCK + 1}), "invalid"),
        (lambda: client.open_namespace({"Model!": "a"}, {0: BLOCK}), "invalid"),
        (lambda: client.open_namespace({"model": "huge"}, {0: 16 << 20}), "unsupported"),
        (lambda: client.put(namespace, 0, [(hashes("a", 1)[0], b"short")]), "invalid"),
        (lambda: client.get(namespace, 1, hashes("a", 1)), "invalid"),
        (lambda: client.get(namespace + 9, 0, hashes("a", 1)), "invalid"),
        (lambda: client.get(namespace, 0, [b"x" * 33]), "invalid"),
        (lambda: client.get(namespace, 0, [b"x", b"xy"]), "invalid"),
    ]
    for mistake, kind in mistakes:
        with pytest.raises(ForebayError) as raised:
            mistake()
        assert raised.value.kind == kind, raised.value
    with pytest.raises(TypeError):
        client.get(namespace, 0, ["text"])  # type: ignore[list-item]


def test_a_closed_client_says_so(client: Client) -> None:
    client.close()
    client.close()
    with pytest.raises(ForebayError, match="closed"):
        client.inspect()


def test_without_a_daemon_a_call_fails_soon_and_says_where_it_looked(tmp_path: Path) -> None:
    client = Client(str(tmp_path))
    with pytest.raises(ForebayError, match=str(tmp_path)) as raised:
        client.inspect()
    assert raised.value.kind == "unavailable"


def test_a_frozen_daemon_is_a_timeout(sockets: Path, daemon: Daemon) -> None:
    client = Client(str(sockets), deadline=0.3)

    def is_connected() -> bool:
        """On a busy machine the first answers may be later than that."""
        with contextlib.suppress(ForebayError):
            return bool(client.inspect())
        return False

    wait_until("the client is connected", is_connected, 20)
    daemon.freeze()
    with pytest.raises(ForebayError) as raised:
        client.inspect()
    assert raised.value.kind == "timeout"
    daemon.thaw()
    client = Client(str(sockets), deadline=20.0)
    client.inspect()


def test_redis_is_asked_for_what_comes_up_from_a_disk_before_the_bytes_are_sent() -> None:
    size, count, room = 1 << 20, 40, 16
    with (
        Valkey().start() as store,
        Daemon(
            capacity_bytes=room * size,
            ssd_bytes=256 << 20,
            ssd_admission="all",
            tiers=store.sections,
            unit_bytes=2 << 20,
        ) as daemon,
    ):
        daemon.start()
        client = Client(str(daemon.socket.parent), deadline=20.0)
        namespace = client.open_namespace({"model": "a"}, {0: size})
        stored = blocks("a", count, size=size)

        def counted(name: str) -> float:
            return daemon.metrics()[f"forebay_tier_{name}"]

        def get_all() -> None:
            for key, block in stored:
                wait_until("it is there", lambda key=key, block=block: client.get(namespace, 0, [key]) == [block], 30)

        for place, block in enumerate(stored):
            assert client.put(namespace, 0, [block]) == ["stored"]
            wait_until(
                f"the disk has {place + 1}", lambda end=place + 1: counted('stored_blocks_total{tier="ssd"}') == end, 30
            )
        get_all()
        wait_until("redis has them", lambda: counted('stored_blocks_total{tier="redis"}') == count, 30)
        loaded = counted('promoted_bytes_total{tier="ssd"}')
        get_all()
        assert counted('promoted_bytes_total{tier="ssd"}') >= loaded + (count - room) * size
        asked = 'operations_total{tier="redis",op="touch",outcome="done"}'
        wait_until("redis was asked", lambda: counted(asked) >= count - room, 30)
        assert counted('stored_blocks_total{tier="redis"}') == count


def test_blocks_that_fit_into_no_segment_of_the_disk_are_told_of_once() -> None:
    size = 1 << 20
    with Daemon(capacity_bytes=16 << 20, ssd_bytes=64 << 20, ssd_admission="all", unit_bytes=2 << 20) as daemon:
        daemon.start()
        client = Client(str(daemon.socket.parent), deadline=20.0)
        namespace = client.open_namespace({"model": "a"}, {0: size})
        # A disk that has refused a block is not offered those behind it in the prompt. So each of these is a prompt of
        # its own.
        for prompt in "abc":
            assert client.put(namespace, 0, blocks(prompt, 1, size=size)) == ["stored"]
        failed = 'forebay_tier_unwritten_blocks_total{tier="ssd",reason="failed"}'
        wait_until("the disk has refused them", lambda: daemon.metrics().get(failed, 0) >= 3, 30)
        log = (daemon.directory / "daemon.log").read_text()
        told = [line for line in log.splitlines() if "blocks are too long for the tier" in line]
        assert len(told) == 1, log
        assert f"length_bytes={size}" in told[0], told
        assert "tier.ssd.segment_bytes" in told[0], told
