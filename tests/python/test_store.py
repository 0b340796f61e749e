"""`forebay.Store` on a real Valkey and in a real directory: what is dumped is loaded, and what is not there is said so."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from forebay import ForebayError, Store
from rig.paths import forebay_binary
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
    blocks = [os.urandom(BLOCK_BYTES) for _ in range(200)]
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
    with Store(url, FIELDS, 1000) as store:
        store.dump(keys[:4] + keys[5:], blocks[:4] + blocks[5:]).result(SECONDS)
        assert store.lookup(keys).result(SECONDS) == [True] * 4 + [False] + [True] * 4
        buffers = [bytearray(b"\xee" * 1000) for _ in keys]
        assert store.load(keys, buffers).result(SECONDS) == ["loaded"] * 4 + ["absent"] + ["loaded"] * 4
    assert buffers[4] == b"\xee" * 1000
    assert buffers[5:] == blocks[5:]


def test_a_url_that_names_no_store_is_refused_with_those_that_do(tmp_path: Path) -> None:
    for url in ["s3://bucket", "localhost", "http://me:secret@cache"]:
        with pytest.raises(ForebayError) as raised:
            Store(url, FIELDS, BLOCK_BYTES)
        assert "secret" not in str(raised.value)
        assert raised.value.hint and all(kind in raised.value.hint for kind in ["redis://", "unix://", "file://"])
    with pytest.raises(ForebayError, match="relative") as raised:
        Store("file://some/place", FIELDS, BLOCK_BYTES)
    assert raised.value.hint and f"file://{Path.cwd()}/some/place" in raised.value.hint
    with pytest.raises(ForebayError) as raised:
        Store(f"file://{tmp_path}/missing", FIELDS, BLOCK_BYTES)
    assert raised.value.hint and "mkdir" in raised.value.hint and "daemon" not in str(raised.value)


def test_other_fields_and_groups_are_other_blocks(url: str) -> None:
    keys = hashes("fields", 2)
    with Store(url, FIELDS, 100) as store, Store(url, FIELDS | {"tenant": "t"}, 100) as other:
        store.dump(keys, [b"a" * 100, b"b" * 100]).result(SECONDS)
        assert other.lookup(keys).result(SECONDS) == [False, False]
        assert store.lookup(keys, group=1).result(SECONDS) == [False, False]


def test_a_buffer_of_another_length_is_not_filled(url: str) -> None:
    (key,) = hashes("length", 1)
    with Store(url, FIELDS, 5000) as store, Store(url, FIELDS, 4999) as other:
        store.dump([key], [b"x" * 5000]).result(SECONDS)
        short = bytearray(4999)
        assert other.load([key], [short]).result(SECONDS) == ["invalid"], "the block is not damaged"
    assert short == bytes(4999)


def secret_file(directory: Path, text: str) -> str:
    path = directory / f"secret-{text[:8]}"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)


def test_blocks_are_found_by_who_has_their_secret(valkey: Valkey, tmp_path: Path) -> None:
    ours, theirs = secret_file(tmp_path, "ours" * 8), secret_file(tmp_path, "theirs" * 6)
    (shared := tmp_path / "shared").mkdir()
    keys = hashes("secret", 3)
    blocks = [os.urandom(1000) for _ in keys]
    for url in (f"unix://{valkey.socket}", f"file://{shared}"):
        with Store(url, FIELDS, 1000, secret_file=ours) as store:
            assert store.dump(keys, blocks).result(SECONDS) == ["stored"] * 3
        buffers = [bytearray(1000) for _ in keys]
        with Store(url, FIELDS, 1000) as store:
            assert store.load(keys, buffers).result(SECONDS) == ["absent"] * 3
        with Store(url, FIELDS, 1000, secret_file=ours) as store:
            assert store.lookup(keys).result(SECONDS) == [True] * 3
            assert store.load(keys, buffers).result(SECONDS) == ["loaded"] * 3
            assert buffers == blocks
        with Store(url, FIELDS, 1000, secret_file=theirs) as store:
            assert store.load(keys, buffers).result(SECONDS) == ["corrupt"] * 3


def test_a_secret_that_is_none_is_refused_and_never_repeated(url: str, tmp_path: Path) -> None:
    open_to_all = secret_file(tmp_path, "open" * 8)
    os.chmod(open_to_all, 0o666)
    for file in (secret_file(tmp_path, "short"), secret_file(tmp_path, ""), str(tmp_path / "none"), open_to_all):
        with pytest.raises(ForebayError) as raised:
            Store(url, FIELDS, 1000, secret_file=file)
        assert raised.value.hint and "short" not in str(raised.value).replace("too short", "").replace(file, "")


def test_a_password_comes_from_a_file(tmp_path: Path) -> None:
    with Valkey(password="s3cret").start() as server:
        url = f"unix://{server.socket}"
        for whole in (url, f"unix://default@{server.socket}"):
            with Store(whole, FIELDS, 4, password_file=secret_file(tmp_path, "s3cret")) as store:
                assert store.dump([b"k"], [b"four"]).result(SECONDS) == ["stored"]
        with Store(url, FIELDS, 4, deadline=1) as store:
            assert store.dump([b"k"], [b"four"]).result(SECONDS) != ["stored"]


def test_coroutines_wait_for_many_batches_at_once(url: str) -> None:
    async def main(store: Store) -> list[list[str]]:
        batches = [hashes(f"batch {at}", 20) for at in range(10)]
        dumps = [store.dump(keys, [(key * 100)[:800] for key in keys]) for keys in batches]
        return await asyncio.gather(*map(asyncio.wrap_future, dumps))

    with Store(url, FIELDS, 800) as store:
        assert asyncio.run(main(store)) == [["stored"] * 20] * 10


def test_wait_says_whether_all_are_done(url: str) -> None:
    with Store(url, FIELDS, BLOCK_BYTES) as store:
        futures = [store.lookup(hashes("wait", 5)) for _ in range(5)]
        assert store.wait(futures, SECONDS)
        assert store.fileno() >= 0


def test_a_frozen_server_costs_the_deadline_and_no_more() -> None:
    keys = hashes("frozen", 3)
    with Valkey().start() as server, Store(f"unix://{server.socket}", FIELDS, 1000, deadline=0.5) as store:
        store.dump(keys, [b"x" * 1000] * 3).result(SECONDS)
        server.freeze()
        buffers = [bytearray(1000) for _ in keys]
        assert "loaded" not in store.load(keys, buffers).result(SECONDS)
        with pytest.raises(ForebayError, match="did not answer") as raised:
            store.lookup(keys).result(SECONDS)
        assert raised.value.kind in ("timeout", "unavailable") and str(server.socket) in str(raised.value)
        assert raised.value.hint and raised.value.hint in str(raised.value)
        server.thaw()
        assert buffers == [bytes(1000)] * 3


def test_an_absent_server_is_unavailable_and_found_when_it_comes() -> None:
    with Valkey() as server, Store(f"unix://{server.socket}", FIELDS, 100, deadline=2) as store:
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
        for size in (0, BLOCK_BYTES - 1, BLOCK_BYTES + 1):
            with pytest.raises(ForebayError, match="not as long as a block"):
                store.dump([b"k"], [bytes(size)])
        with pytest.raises(BufferError):
            store.load([b"k"], [bytes(BLOCK_BYTES)])
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


def test_the_error_of_an_absent_server_names_the_server_and_the_cause() -> None:
    with Valkey() as server, Store(f"unix://{server.socket}", FIELDS, 100, deadline=1) as store:
        future = store.lookup([b"k"])
        with pytest.raises(ForebayError, match="did not answer") as raised:
            future.result(SECONDS)
    text = str(raised.value)
    assert str(server.socket) in text and "o such file" in text and "hint: check that the store runs" in text


def test_a_wrong_password_is_the_hint_and_not_the_network(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("wrong")
    file.chmod(0o600)
    server = Valkey("right").start()
    with server, Store(f"unix://{server.socket}", FIELDS, 100, deadline=1, password_file=str(file)) as store:
        future = store.lookup([b"k"])
        with pytest.raises(ForebayError, match="WRONGPASS") as raised:
            future.result(SECONDS)
    assert raised.value.hint and "correct the user and the password" in raised.value.hint


def test_a_directory_of_the_other_kind_is_told_by_the_name_of_the_option(tmp_path: Path) -> None:
    with Store(f"file://{tmp_path}", FIELDS, 100) as store:
        store.dump([b"k"], [bytes(100)]).result(SECONDS)
    with pytest.raises(ForebayError, match="is sharded") as raised:
        Store(f"file://{tmp_path}", FIELDS, 100, shard_folders=False)
    assert raised.value.hint and "set `shard_folders` to `True`, or use another" in raised.value.hint


def test_tensors_and_arrays_are_dumped_and_loaded_as_their_bytes(url: str) -> None:
    keys = hashes("tensors", 2)
    blocks = [torch.randn(4, 8).bfloat16(), torch.arange(32, dtype=torch.int16).reshape(8, 4)]
    with Store(url, FIELDS, 64) as store:
        assert store.dump(keys, blocks).result(SECONDS) == ["stored"] * 2
        tensor, array = torch.zeros(4, 8, dtype=torch.bfloat16), np.zeros((8, 4), dtype=np.int16)
        assert store.load(keys, [tensor, array]).result(SECONDS) == ["loaded"] * 2
        assert torch.equal(tensor, blocks[0]) and np.array_equal(array, blocks[1].numpy())
        with pytest.raises(BufferError, match="one after another"):
            store.dump(keys[:1], [torch.zeros(8, 8, dtype=torch.int16)[:, :4]])
        with pytest.raises(ForebayError, match="not in host memory"):
            store.dump(keys[:1], [torch.zeros(16, device="meta")])


# Options of a store, by the URL's kind, and the section of the daemon's configuration that has the same.
SECTIONS = {"Redis": "tier.redis", "a directory": "tier.fs"}
# An option in place of a key that has more values.
OTHER_NAMES = {"cluster": ("mode", "single")}
# Keys that say what a daemon does with a tier, or that a program gives in the URL or by `deadline`.
OF_DAEMONS = {
    "tier.redis": "urls mode sentinel_master sentinel_user sentinel_password sentinel_password_file "
    "sentinel_tls admission load_bytes_per_second store_bytes_per_second load_deadline_ms connect_timeout_ms "
    "operation_timeout_ms certificate_file key_file server_name",
    "tier.fs": "directories admission max_age_seconds load_bytes_per_second store_bytes_per_second load_deadline_ms "
    "timeout_ms",
}


def documented_options(kind: str) -> dict[str, str | None]:
    """The options that the docstring of `Store` lists for a kind of store, each with its default if it names one."""
    text = " ".join((Store.__doc__ or "").split())
    listed = text.split(f"f {kind}: ")[1].split(". ")[0]
    return dict(re.findall(r"`(\w+)`(?: \(\"?([^\")]*)\"?\))?", listed))


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_stores_options_are_the_keys_of_its_tier(kind: str) -> None:
    section, options = SECTIONS[kind], documented_options(kind)
    shown = subprocess.run(
        [forebay_binary(), "config", "--json"], env={}, check=True, capture_output=True, timeout=SECONDS
    )
    keys = {
        name.removeprefix(section + "."): entry["value"]
        for name, entry in json.loads(shown.stdout).items()
        if name.startswith(section + ".")
    }
    for name, default in options.items():
        if name in OTHER_NAMES:
            key, value = OTHER_NAMES[name]
            assert keys[key] == value, f"`{section}.{key}` has another default than `{name}`"
        elif default:
            assert plain(keys[name]) == plain(default), f"`{name}` has another default than `{section}.{name}`"
    rest = set(keys) - set(options)
    assert rest == set(OF_DAEMONS[section].split()), "a key of the tier is neither an option nor a daemon's alone"


def plain(value: object) -> str:
    """A default as both sides write it: `1 MiB` is `1MiB`, and `True` is `true`."""
    return str(value).replace(" ", "").lower()


def test_a_store_takes_each_option_that_it_lists_and_no_other(tmp_path: Path, valkey: Valkey) -> None:
    (shared := tmp_path / "shared").mkdir()
    urls = {"Redis": f"unix://{valkey.socket}", "a directory": f"file://{shared}"}
    values = {"connections": 2, "threads": 1, "key_prefix": "p:", "value_bytes": 1 << 20, "ttl_seconds": 60}
    values |= {"ca_file": "/etc/ssl/certs/ca-certificates.crt", "cluster": False, "streams": 2, "buffers": 4}
    values |= {"io_direct": False, "fsync": "data", "capacity_bytes": 1 << 30, "shard_folders": True}
    secret = secret_file(tmp_path, "x" * 32)
    values |= {"read_only": False, "secret_file": secret, "password_file": secret}
    assert set(values) == {name for kind in SECTIONS for name in documented_options(kind)}
    for kind, url in urls.items():
        for name in values:
            if name in documented_options(kind):
                Store(url, FIELDS, 1000, **{name: values[name]}).close()
            else:
                with pytest.raises(ForebayError, match=f"no option `{name}`"):
                    Store(url, FIELDS, 1000, **{name: values[name]})
