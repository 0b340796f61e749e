"""Weights are told by every byte, read once, and never named while they change."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake import FakeDaemon
from forebay.vllm import fingerprint as module
from forebay.vllm.fingerprint import Unreadable, fingerprint
from harness import Engine, Shape, prompt
from rig import models
from safetensors.numpy import load_file, save_file


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "m"
    shutil.copytree(models.directory(models.LLAMA), directory)
    return directory


@pytest.fixture
def all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this test are young and small, and their digests are kept all the same."""
    monkeypatch.setattr(module, "SETTLED_NS", -(10**18))
    monkeypatch.setattr(module, "KEPT_FROM_BYTES", 0)


def kept_at(home: Path) -> Path:
    [place] = home.glob("forebay/digests-*.json")
    return place


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that are read whole."""
    seen: list[str] = []
    read = module._read

    def noted(file: Path, *more: Any) -> Any:
        seen.append(file.name)
        return read(file, *more)

    monkeypatch.setattr(module, "_read", noted)
    yield seen


def test_one_retrained_row_of_the_embeddings_is_another_model(model: Path) -> None:
    before = fingerprint(model)
    weights = load_file(model / "model.safetensors")
    rows = weights["model.embed_tokens.weight"].copy()
    rows[3] += np.float32(1e-3)  # far from the middle, where samples used to be taken
    save_file(weights | {"model.embed_tokens.weight": rows}, model / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(model) != before


def test_any_byte_of_any_kind_of_file_counts(tmp_path: Path) -> None:
    seen = set()
    contents = (b"", b"x", b"y", b"x" * 7, b"\xff" * 9, b"x" * 100_000, b"x" * 99_999 + b"y")
    for at, (file, content) in enumerate(
        (file, content) for file in ("model.safetensors", "pytorch_model.bin", "m.gguf") for content in contents
    ):
        directory = tmp_path / str(at)
        directory.mkdir()
        (directory / file).write_bytes(content)
        seen.add(fingerprint(directory))
    assert len(seen) == 3 * len(contents)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.json",  # says which shard has which tensor
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
        "quantization_config.json",
        "not_known_yet.json",
    ],
)
def test_what_says_how_weights_are_read_counts(name: str, model: Path) -> None:
    without = fingerprint(model)
    (model / name).write_text('{"a": 1}')
    before = fingerprint(model)
    (model / name).write_text('{"a": 2}')
    assert len({without, before, fingerprint(model)}) == 3


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "generation_config.json", "training_args.bin", "optimizer.pt", "README.md"]
)
def test_what_makes_tokens_or_what_training_left_behind_does_not_count(name: str, model: Path) -> None:
    before = fingerprint(model)
    (model / name).write_text('{"another": 1}')
    assert fingerprint(model) == before


def test_hosts_agree_whatever_path_and_times(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere" / "model.safetensors", ns=(1, 1))
    assert fingerprint(tmp_path / "elsewhere") == fingerprint(model)


def test_no_weights_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="no weights"):
        fingerprint(tmp_path)
    with pytest.raises(Unreadable, match="No such file"):
        fingerprint(tmp_path / "absent")


# ---- the hub's cache -------------------------------------------------------------------------------------------------


def in_hub(tmp_path: Path, content: bytes, name: str) -> Path:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "main"
    for directory in (blobs, snapshot):
        directory.mkdir(parents=True)
    (blobs / name).write_bytes(content)
    os.utime(blobs / name, ns=(10**18, 10**18))
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    return snapshot


def test_a_blob_of_the_hub_that_was_rewritten_and_copied_is_not_what_its_name_says(tmp_path: Path) -> None:
    content = b"w" * 1000
    snapshot = in_hub(tmp_path, content, hashlib.sha256(content).hexdigest())
    before = fingerprint(snapshot)
    (snapshot / "model.safetensors").write_bytes(b"v" * 1000)
    subprocess.run(["cp", "-r", tmp_path / "hub", tmp_path / "copy"], check=True)  # links as new as the blobs
    assert fingerprint(tmp_path / "copy" / "snapshots" / "main") != before


@pytest.mark.usefixtures("all_kept")
def test_the_hubs_cache_is_read_once_and_told_as_the_plain_files_are(tmp_path: Path, reads: list[str]) -> None:
    content = b"w" * 1000
    snapshot = in_hub(tmp_path, content, hashlib.sha256(content).hexdigest())
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "model.safetensors").write_bytes(content)
    assert fingerprint(snapshot) == fingerprint(plain) == fingerprint(snapshot)
    assert len(reads) == 2


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_kept")
def test_weights_are_read_once_and_their_directory_is_left_as_it_is(
    model: Path, cache_home: Path, reads: list[str]
) -> None:
    before = model.stat(), sorted(model.iterdir())
    first = fingerprint(model)
    assert sorted(reads) == ["config.json", "model.safetensors"]
    assert fingerprint(model) == first
    assert len(reads) == 2
    assert kept_at(cache_home).stat().st_mode & 0o077 == 0
    assert (model.stat().st_ctime_ns, sorted(model.iterdir())) == (before[0].st_ctime_ns, before[1])


class _OnAnotherDevice:
    """What `stat` says of a file on a volume that was attached again, or that another host mounts."""

    def __init__(self, seen: os.stat_result, device: int, changed_ns: int = 0):
        self._seen, self.st_dev = seen, device
        self.st_ctime_ns = changed_ns or seen.st_ctime_ns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen, name)


def seen_as(monkeypatch: pytest.MonkeyPatch, look: Callable[[os.stat_result], object]) -> None:
    stat = Path.stat

    def changed(self: Path, **options: Any) -> Any:
        seen = stat(self, **options)
        return look(seen) if self.name == "model.safetensors" else seen

    monkeypatch.setattr(Path, "stat", changed)


@pytest.mark.usefixtures("all_kept")
def test_a_volume_that_is_mounted_again_is_not_read_again(
    model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fingerprint(model)
    seen_as(monkeypatch, lambda seen: _OnAnotherDevice(seen, seen.st_dev + 1))
    assert fingerprint(model) == first
    assert reads.count("model.safetensors") == 1


@pytest.mark.usefixtures("all_kept")
def test_hosts_with_one_cache_directory_keep_each_others_digests(
    model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in (1, 2, 1, 2):  # each has a copy of its own, with other times, under one path
        with monkeypatch.context() as one_host:
            seen_as(one_host, lambda seen, host=host: _OnAnotherDevice(seen, host, seen.st_ctime_ns + host))  # type: ignore[misc]
            fingerprint(model)
    assert reads.count("model.safetensors") == 2


@pytest.mark.usefixtures("all_kept")
def test_what_is_kept_is_limited(
    model: Path, cache_home: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    for _ in range(4):
        (model / "model.safetensors").chmod(0o644)
        fingerprint(model)
    assert len(json.loads(kept_at(cache_home).read_bytes())["files"]) == 3
    fingerprint(model)
    assert reads.count("model.safetensors") == 4


def test_a_stamp_that_the_builder_of_an_image_chose_is_not_believed(
    model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_FROM_BYTES", 0)
    os.utime(model / "model.safetensors", ns=(10**9, 10**9))
    seen_as(monkeypatch, lambda seen: _OnAnotherDevice(seen, seen.st_dev, 10**9))
    for _ in range(2):
        fingerprint(model)
    assert reads.count("model.safetensors") == 2


@pytest.mark.usefixtures("all_kept")
def test_weights_written_anew_are_read_anew_though_their_times_are_set_back(model: Path, reads: list[str]) -> None:
    file = model / "model.safetensors"
    seen = file.stat()
    first = fingerprint(model)
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x01")
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert fingerprint(model) != first
    assert reads.count("model.safetensors") == 2


def test_what_was_just_written_is_not_kept(model: Path, reads: list[str]) -> None:
    os.utime(model / "model.safetensors")
    fingerprint(model)
    fingerprint(model)
    assert reads.count("model.safetensors") == 2


@pytest.mark.usefixtures("all_kept")
@pytest.mark.parametrize(
    "harm",
    [
        lambda kept: kept.write_bytes(b""),
        lambda kept: kept.write_bytes(kept.read_bytes()[:-9]),
        lambda kept: kept.write_bytes(b"[1]"),
        lambda kept: kept.write_bytes(b"[" * 200_000),
        lambda kept: kept.write_bytes(b'{"format": 2, "files": [5]}'),
        lambda kept: kept.write_text(_forged(kept, check=False)),
        lambda kept: (kept.write_text(_forged(kept, check=True)), kept.chmod(0o666)),
        lambda kept: (kept.rename(kept.with_name("other")), kept.symlink_to("other")),
        lambda kept: (kept.unlink(), kept.mkdir()),
        lambda kept: (kept.unlink(), os.mkfifo(kept)),
    ],
    ids=["empty", "torn", "list", "deep", "no digests", "flipped", "open to others", "link", "directory", "fifo"],
)
def test_digests_that_are_damaged_or_not_ours_are_made_anew(
    harm: Callable[[Path], object], model: Path, cache_home: Path, reads: list[str]
) -> None:
    first = fingerprint(model)
    harm(kept_at(cache_home))
    assert fingerprint(model) == first
    assert reads.count("model.safetensors") == 2


def _forged(kept: Path, *, check: bool) -> str:
    content = json.loads(kept.read_bytes())
    for entry in content["files"]:
        entry[0] = "0" * 64
    if check:
        content["sha256"] = hashlib.sha256(json.dumps(content["files"]).encode()).hexdigest()
    return json.dumps(content)


@pytest.mark.usefixtures("all_kept")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_digests_that_somebody_else_left_are_not_believed(model: Path, cache_home: Path, reads: list[str]) -> None:
    first = fingerprint(model)
    kept = kept_at(cache_home)
    kept.write_text(_forged(kept, check=True))
    os.chown(kept, 12345, 12345)
    assert fingerprint(model) == first
    assert reads.count("model.safetensors") == 2


@pytest.mark.usefixtures("all_kept")
def test_without_a_place_to_keep_digests_weights_are_read_at_each_start(
    model: Path, cache_home: Path, reads: list[str]
) -> None:
    cache_home.write_bytes(b"a file, and no directory")
    before = sorted(model.iterdir())
    assert fingerprint(model) == fingerprint(model)
    assert reads.count("model.safetensors") == 2
    assert sorted(model.iterdir()) == before


def test_a_file_that_changes_while_it_is_read_is_read_again_and_then_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model / "model.safetensors"
    writes = iter(range(100))
    left = 2

    def went_on(reading: object, size: int) -> None:
        nonlocal left
        if left > 0 and size > 4096:
            left -= 1
            os.utime(file, ns=(0, next(writes)))

    expected = fingerprint(model)
    monkeypatch.setattr(module._Reading, "went_on", went_on)
    assert fingerprint(model) == expected  # twice while it was read, and then no more
    left = 1 << 30
    with pytest.raises(Unreadable, match="changes while it is read"):
        fingerprint(model)


def test_a_file_of_which_only_owners_and_links_change_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, expected = model / "model.safetensors", fingerprint(model)
    changed = file.stat().st_ctime_ns
    went_on = module._Reading.went_on

    def chmod(reading: module._Reading, size: int) -> None:
        went_on(reading, size)
        nonlocal changed
        end = time.monotonic() + 20
        while changed == file.stat().st_ctime_ns and time.monotonic() < end:
            file.chmod(0o644)
        changed = file.stat().st_ctime_ns

    monkeypatch.setattr(module._Reading, "went_on", chmod)
    assert fingerprint(model) == expected


def test_a_file_that_is_written_with_its_times_set_back_while_it_is_read_is_not_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model / "model.safetensors"
    seen, turns = file.stat(), iter(range(100))

    def write(reading: object, size: int) -> None:
        if size > 4096:
            with file.open("r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(bytes([next(turns)]))
            os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))

    monkeypatch.setattr(module._Reading, "went_on", write)
    with pytest.raises(Unreadable, match="changes while it is read"):
        fingerprint(model)


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_until_the_weights_are_read_the_engine_is_as_without_cache(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    Engine(daemon, monkeypatch, Shape(engine_id="first")).generate("cold", prompt(1, 100))
    may_read = threading.Event()

    def slow(*paths: Path, **how: Any) -> str:
        assert may_read.wait(60)
        return fingerprint(*paths, **how)

    monkeypatch.setattr("forebay.vllm.identity.START_SECONDS", 0.0)
    monkeypatch.setattr("forebay.vllm.loaded.fingerprint", slow)
    engine = Engine(daemon, monkeypatch, Shape(engine_id="second"))
    blocks = daemon.ready()
    engine.generate("early", prompt(1, 100))
    engine.generate("other", prompt(2, 100))
    assert engine.hits == {"early": 0, "other": 0}
    assert daemon.ready() == blocks and engine.session.namespace is None
    may_read.set()
    until = time.monotonic() + 60
    while engine.session.namespace is None and time.monotonic() < until:
        engine.connector.has_pending_push_work()
    engine.forget()
    engine.generate("late", prompt(1, 100))
    assert engine.hits["late"] == 96
    engine.assert_nothing_is_held()
    engine.assert_no_faults()


@pytest.mark.faults
def test_weights_that_cannot_be_read_for_a_while_are_read_again(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(["input/output error", "it changes while it is read"])

    def troubled(*paths: Path, **how: Any) -> str:
        if trouble := next(left, None):
            raise Unreadable(trouble)
        return fingerprint(*paths, **how)

    monkeypatch.setattr("forebay.vllm.identity.START_SECONDS", 0.0)
    monkeypatch.setattr("forebay.vllm.identity.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("forebay.vllm.loaded.fingerprint", troubled)
    engine = Engine(daemon, monkeypatch)
    until = time.monotonic() + 60
    while engine.session.namespace is None and time.monotonic() < until:
        engine.connector.has_pending_push_work()
    engine.generate("cold", prompt(1, 100))
    engine.forget()
    engine.generate("warm", prompt(1, 100))
    assert engine.hits["warm"] == 96
    engine.assert_no_faults()


@pytest.mark.faults
def test_nobody_reads_the_weights_of_an_engine_that_has_ended(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    def unreadable(*paths: Path, **how: Any) -> str:
        readers.append(threading.current_thread())
        raise Unreadable("gone")

    monkeypatch.setattr("forebay.vllm.identity.START_SECONDS", 0.0)
    monkeypatch.setattr("forebay.vllm.identity.FIRST_PAUSE_SECONDS", 1e6)
    monkeypatch.setattr("forebay.vllm.loaded.fingerprint", unreadable)
    engine = Engine(daemon, monkeypatch)
    until = time.monotonic() + 60
    while not readers and time.monotonic() < until:
        time.sleep(0.001)
    engine.connector.manager.shutdown()
    readers[0].join(60)
    assert len(readers) == 1 and not readers[0].is_alive()
