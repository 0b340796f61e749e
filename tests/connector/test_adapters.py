"""Requests of an adapter share blocks where the workers' weights are known, and are left out everywhere else.

The files are real; vLLM's scheduler runs over them, and only the daemon is a fake. Whatever vLLM would compute with other
weights must find nothing: a hit then would be a wrong token.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake import FakeDaemon
from forebay.vllm import adapters, fingerprint, stores
from forebay.vllm.adapters import Adapter, Adapters
from forebay.vllm.signature import TICK_NS
from harness import Engine, Shape, prompt
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

DEADLINE = 20.0


@pytest.fixture
def make(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Engine]:
    return lambda name: Engine(daemon, monkeypatch, Shape(engine_id=name, adapters=True))


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.001)


def write(directory: Path, content: bytes) -> None:
    """New weights, old enough not to be taken for a change that came after the next request."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(content)
    until(lambda: time.time_ns() > max(weights.stat().st_ctime_ns, directory.stat().st_ctime_ns) + 2 * TICK_NS)


def adapter(engine: Engine, request: LoRARequest) -> Adapter:
    known = engine.connector.manager._adapters
    assert known is not None
    return known._known[request.lora_name, request.lora_path]


def looked_at(engine: Engine, request: LoRARequest) -> bool:
    """Whether the thread is done with it, and what it found."""
    until(lambda: not adapter(engine, request).is_queued)
    until(lambda: adapter(engine, request).is_lost or adapter(engine, request).mask is not None)
    return adapter(engine, request).mask is not None


def tell(engine: Engine, request: LoRARequest) -> None:
    """Makes the adapter known, by a request that is left out."""
    engine.generate("unknown", prompt(99, 40), lora_request=request)
    assert looked_at(engine, request)
    engine.forget()


def hits(engine: Engine, name: str, request: LoRARequest | None) -> int:
    engine.forget()
    engine.generate(name, prompt(1, 100), lora_request=request)
    return engine.hits[name]


def test_an_adapter_shares_with_itself_until_its_weights_change(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path
) -> None:
    sql = LoRARequest("sql", 1, str(tmp_path / "sql"))
    found = []
    for turn, content in enumerate([b"first", b"first", b"retrained"]):
        write(tmp_path / "sql", content)
        engine = make(str(turn))
        tell(engine, sql)
        found.append((hits(engine, "adapted", sql), hits(engine, "plain", None)))
        engine.generate("longer", prompt(1, 100) + prompt(2, 60), lora_request=sql)
        engine.assert_nothing_is_held()
        engine.assert_no_faults()
    assert found == [(0, 0), (96, 96), (0, 96)]
    assert set(daemon.outcomes) == {"stored"}


def test_equal_weights_in_another_place_or_under_another_id_are_the_same(tmp_path: Path) -> None:
    masks = []
    for at, (place, content) in enumerate([("a/sql", b"one"), ("b/sql", b"one"), ("c/sql", b"two")]):
        write(tmp_path / place, content)
        known = Adapters(LoRAConfig(), can_hear=True)
        one = known.asked_for(LoRARequest("sql", at + 1, str(tmp_path / place)))
        assert one is not None
        until(lambda one=one: one.mask is not None)  # type: ignore[misc]
        masks.append(one.mask)
        known.close()
    assert masks[0] == masks[1] != masks[2]
    assert all(len(mask) == 32 for mask in masks if mask)


def test_how_the_engine_applies_adapters_counts_and_how_many_fit_does_not(tmp_path: Path) -> None:
    write(tmp_path, b"weights")
    masks = []
    for config in (LoRAConfig(), LoRAConfig(max_loras=3, max_cpu_loras=9), LoRAConfig(max_lora_rank=32)):
        known = Adapters(config, can_hear=True)
        one = known.asked_for(LoRARequest("sql", 1, str(tmp_path)))
        assert one is not None
        until(lambda one=one: one.mask is not None)  # type: ignore[misc]
        masks.append(one.mask)
    assert masks[0] == masks[1] != masks[2]


def test_the_scheduler_opens_no_file_of_an_adapter(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path
) -> None:
    write(tmp_path, b"weights")
    mine, opened = threading.get_ident(), []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(str(tmp_path)):
            opened.append(threading.get_ident())

    sys.addaudithook(audit)
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path))
    engine.generate("first", prompt(1, 100), lora_request=sql)
    assert mine not in opened
    assert looked_at(engine, sql)
    hits(engine, "second", sql)  # the first may have come too early to be stored
    assert hits(engine, "third", sql) == 96
    assert opened and mine not in opened


def test_requests_are_left_out_while_the_digest_is_on_its_way(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, b"weights")
    gate, original = threading.Event(), adapters.fingerprint

    def slow(*paths: Path, **how: Any) -> str:
        assert gate.wait(DEADLINE)
        return original(*paths, **how)

    monkeypatch.setattr(adapters, "fingerprint", slow)
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path))
    running = engine.add("running", prompt(1, 100), max_tokens=10, lora_request=sql)
    while not running.num_output_tokens:
        engine.step()
    gate.set()
    assert looked_at(engine, sql)
    engine.run(running)  # its first blocks were not stored, so that its last ones are of no use
    assert daemon.lookups == 0 and daemon.ready() == 0
    assert hits(engine, "next", sql) == 0
    assert daemon.lookups == 1 and daemon.ready() == 6
    engine.assert_nothing_is_held()


def test_an_adapter_that_cannot_be_read_is_neither_looked_up_nor_stored(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path
) -> None:
    engine, gone = make("engine"), LoRARequest("gone", 1, str(tmp_path / "nowhere"))
    engine.generate("a", prompt(1, 100), lora_request=gone)
    until(lambda: adapter(engine, gone).trouble is not None)
    engine.generate("b", prompt(1, 100), lora_request=gone)
    assert daemon.lookups == 0 and daemon.ready() == 0
    engine.assert_no_faults()


def test_weights_that_are_replaced_in_place_are_never_found_again(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path
) -> None:
    write(tmp_path, b"first")
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path))
    tell(engine, sql)
    assert [hits(engine, name, sql) for name in "ab"] == [0, 96]
    write(tmp_path, b"second")
    again = LoRARequest("sql", 1, str(tmp_path), load_inplace=True)
    stored = daemon.ready()
    assert hits(engine, "reloads", again) == 0
    assert hits(engine, "c", sql) == 0
    assert daemon.ready() == stored
    engine.assert_nothing_is_held()


def test_files_that_change_while_in_use_exclude_their_adapter_for_good(
    make: Callable[[str], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads an adapter anew when it had no room for it: which weights it has is not known any more."""
    monkeypatch.setattr(adapters, "LOOK_AGAIN_SECONDS", 0.0)
    write(tmp_path, b"first")
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path))
    tell(engine, sql)
    assert [hits(engine, name, sql) for name in "ab"] == [0, 96]
    write(tmp_path, b"second")
    engine.generate("looks", prompt(2, 40), lora_request=sql)
    until(lambda: adapter(engine, sql).is_lost)
    write(tmp_path, b"first")
    assert hits(engine, "c", sql) == 0


def test_what_was_computed_is_named_only_after_a_look_that_began_later(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may drop an adapter and read it again for the next request, less than a second after the last look."""
    monkeypatch.setattr(adapters, "LOOK_AGAIN_SECONDS", 1e9)
    write(tmp_path / "sql", b"first")
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path / "sql"))
    tell(engine, sql)
    assert [hits(engine, name, sql) for name in "ab"] == [0, 96]
    stored = daemon.ready()
    write(tmp_path / "sql", b"other")
    engine.generate("reads again", prompt(2, 100), lora_request=sql)
    assert daemon.ready() == stored and adapter(engine, sql).is_lost
    engine.assert_nothing_is_held()


def test_blocks_without_an_adapter_do_not_wait_for_a_look_at_one(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "sql", b"first")
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path / "sql"))
    tell(engine, sql)
    gate, known = threading.Event(), engine.connector.manager._adapters
    assert known is not None
    told = known._told
    # Longer than any stall of the machine: a gate that opens by itself lets a look through.
    monkeypatch.setattr(known, "_told", lambda one: gate.wait(20 * DEADLINE) and told(one))
    running = engine.add("adapted", prompt(1, 100), lora_request=sql)
    while not running.is_finished():
        engine.step()
    plain = engine.add("plain", prompt(2, 100))
    while not plain.is_finished():
        engine.step()
    assert daemon.ready() == 6  # of the plain one
    gate.set()
    engine.run()
    assert daemon.ready() == 12
    engine.assert_nothing_is_held()


def test_a_slow_digest_of_another_adapter_holds_no_stores(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sql", "big"):
        write(tmp_path / name, name.encode())
    sql, big = (LoRARequest(name, at, str(tmp_path / name)) for at, name in enumerate(("sql", "big"), start=1))
    engine = make("engine")
    tell(engine, sql)
    gate, original = threading.Event(), adapters.fingerprint

    def slow(path: Path, **how: Any) -> str:
        assert path != tmp_path / "big" or gate.wait(DEADLINE)
        return original(path, **how)

    monkeypatch.setattr(adapters, "fingerprint", slow)
    stored = daemon.ready()
    engine.generate("big", prompt(98, 40), lora_request=big)
    engine.generate("sql", prompt(1, 100), lora_request=sql)
    assert daemon.ready() == stored + 6 and not engine.connector.has_pending_push_work()
    gate.set()
    assert looked_at(engine, big)


def test_a_look_that_hangs_holds_slots_for_a_while_only(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file server that is away."""
    monkeypatch.setattr(stores, "LOOK_SECONDS", 0.2)
    write(tmp_path / "sql", b"first")
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path / "sql"))
    tell(engine, sql)
    gate, original, ready = threading.Event(), adapters._signature, daemon.ready()
    monkeypatch.setattr(adapters, "_signature", lambda *way: gate.wait(DEADLINE) and original(*way))
    engine.generate("hangs", prompt(1, 100), lora_request=sql)
    until(lambda: engine.step() is None and not engine.connector.has_pending_push_work())
    assert daemon.ready() == ready
    engine.assert_nothing_is_held()
    gate.set()
    assert looked_at(engine, sql)
    assert [hits(engine, name, sql) for name in "ab"] == [0, 96]


def test_what_a_trainer_leaves_beside_an_adapter_does_not_count(tmp_path: Path) -> None:
    masks = []
    for at, more in enumerate(
        [(), ("trainer_state.json", "rng_state_0.pth", "optimizer.pt", "tokenizer.json", "x.json")]
    ):
        write(tmp_path / str(at), b"weights")
        for name in more:
            (tmp_path / str(at) / name).write_bytes(b"{}")
        write(tmp_path / str(at), b"weights")
        known = Adapters(LoRAConfig(), can_hear=True)
        one = known.asked_for(LoRARequest("sql", at + 1, str(tmp_path / str(at))))
        assert one is not None
        until(lambda one=one: one.mask is not None)  # type: ignore[misc]
        masks.append(one.mask)
        known.close()
    assert masks[0] == masks[1]


def test_files_that_changed_between_loading_and_looking_tell_nothing(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "sql", b"first")
    gate, original = threading.Event(), adapters._directory

    def slow(path: str) -> Path:
        assert gate.wait(DEADLINE)
        return original(path)

    monkeypatch.setattr(adapters, "_directory", slow)
    for change in ("in place", "link"):
        gate.clear()
        engine = make(change)
        path = tmp_path / change
        path.symlink_to(tmp_path / "sql")
        moved = LoRARequest(change, 1, str(path))
        engine.generate("a", prompt(1, 100), lora_request=moved)
        if change == "in place":
            write(tmp_path / "sql", b"second")
        else:  # to files that are older than the request
            path.unlink()
            path.symlink_to(tmp_path / "sql")
        gate.set()
        assert not looked_at(engine, moved)


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adapters]:
    monkeypatch.setattr(adapters, "LOOK_AGAIN_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known = Adapters(LoRAConfig(), can_hear=True)
    yield known
    known.close()


def found(known: Adapters, request: LoRARequest) -> bytes | None:
    """The adapter's mask after one more look."""
    one = known.asked_for(request)
    assert one is not None
    until(lambda: not one.is_queued and (one.is_lost or one.mask is not None))
    return one.mask


def test_engines_that_digest_an_adapter_leave_it_to_others(
    known: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -(10**18))
    monkeypatch.setattr(fingerprint, "KEPT_FROM_BYTES", 0)
    write(tmp_path / "sql", b"weights")
    sql, gate = LoRARequest("sql", 1, str(tmp_path / "sql")), threading.Event()
    late = Adapters(LoRAConfig(), can_hear=True)
    told = late._told
    monkeypatch.setattr(late, "_told", lambda one: gate.wait(DEADLINE) and told(one))
    heard = late.asked_for(sql)
    mask = found(known, sql)  # reads the files, and keeps their digests
    gate.set()
    assert heard is not None and mask is not None and found(late, sql) == mask
    late.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.chmod(0o640),
        lambda file: os.chown(file, os.getuid(), os.getgid()),
        lambda file: os.link(file, file.parent.with_name("backup")),
    ],
    ids=["mode", "owner", "link"],
)
def test_an_adapter_of_which_no_byte_changed_keeps_its_name(
    change: Callable[[Path], object], known: Adapters, tmp_path: Path
) -> None:
    write(tmp_path / "sql", b"weights")
    file, sql = tmp_path / "sql" / "adapter_model.safetensors", LoRARequest("sql", 1, str(tmp_path / "sql"))
    mask, seen = found(known, sql), file.stat()
    change(file)
    assert file.stat().st_ctime_ns != seen.st_ctime_ns
    one = known.asked_for(sql)
    assert one is not None
    until(lambda: one.signature is not None and file.stat().st_ctime_ns == one.signature.places[file].changed_ns)
    assert mask is not None and found(known, sql) == mask


def roll_out_file(place: Path) -> None:
    (place / "sql" / "adapter_model.safetensors").rename(place / "kept")
    (place / "other" / "adapter_model.safetensors").rename(place / "sql" / "adapter_model.safetensors")


def roll_back_file(place: Path) -> None:
    (place / "sql" / "adapter_model.safetensors").rename(place / "other" / "adapter_model.safetensors")
    (place / "kept").rename(place / "sql" / "adapter_model.safetensors")


def roll_out_directory(place: Path) -> None:
    (place / "sql").rename(place / "kept")
    (place / "other").rename(place / "sql")


def roll_back_directory(place: Path) -> None:
    (place / "sql").rename(place / "other")
    (place / "kept").rename(place / "sql")
    (place / "sql" / ".ready").touch()


@pytest.mark.parametrize(
    ("out", "back"),
    [
        (roll_out_file, roll_back_file),
        (roll_out_directory, roll_back_directory),
        (lambda place: roll_out_directory(place.parent), lambda place: roll_back_directory(place.parent)),
    ],
    ids=["file", "directory", "parent"],
)
def test_an_adapter_that_was_rolled_out_and_back_is_lost(
    out: Callable[[Path], None], back: Callable[[Path], None], make: Callable[[str], Engine], tmp_path: Path
) -> None:
    """The workers may have read the others in between, and have them for as long as they have room."""
    for place, content in (("sql/sql", b"first"), ("sql/other", b"other"), ("other/sql", b"other")):
        write(tmp_path / place, content)
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path / "sql" / "sql"))
    tell(engine, sql)
    time.sleep(2 * TICK_NS / 1e9)
    out(tmp_path / "sql")
    back(tmp_path / "sql")
    engine.generate("computed", prompt(1, 100), lora_request=sql)
    until(lambda: adapter(engine, sql).is_lost)
    engine.assert_nothing_is_held()


def test_entries_beside_an_adapter_and_above_it_change_nothing(known: Adapters, tmp_path: Path) -> None:
    write(tmp_path / "all" / "sql", b"weights")
    sql = LoRARequest("sql", 1, str(tmp_path / "all" / "sql"))
    mask = found(known, sql)
    one = known.asked_for(sql)
    assert one is not None
    for entry in ("all/sql/README.md", "all/another", "another"):
        time.sleep(2 * TICK_NS / 1e9)
        (tmp_path / entry).touch()
        number = known.look_again(one)
        until(lambda number=number: one.answered >= number)  # type: ignore[misc]
    assert mask is not None and one.mask == mask


def test_what_was_computed_while_times_of_change_moved_is_not_stored(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may have been written in place, and written back with their old times."""
    monkeypatch.setattr(adapters, "LOOK_AGAIN_SECONDS", 1e9)
    write(tmp_path / "sql", b"first")
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path / "sql"))
    tell(engine, sql)
    stored = daemon.ready()
    (tmp_path / "sql" / "adapter_model.safetensors").chmod(0o640)
    engine.generate("meanwhile", prompt(1, 100), lora_request=sql)
    assert daemon.ready() == stored and not adapter(engine, sql).is_lost
    assert [hits(engine, name, sql) for name in "ab"] == [0, 96]
    engine.assert_nothing_is_held()


def test_weights_that_are_written_with_their_times_set_back_lose_their_name(known: Adapters, tmp_path: Path) -> None:
    write(tmp_path / "sql", b"first")
    file, sql = tmp_path / "sql" / "adapter_model.safetensors", LoRARequest("sql", 1, str(tmp_path / "sql"))
    assert found(known, sql) is not None
    seen = file.stat()
    file.write_bytes(b"other")
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    one = known.asked_for(sql)
    assert one is not None
    until(lambda: one.is_lost)


@pytest.mark.parametrize("prefetch_ns", [0, 3600 * 10**9], ids=["same clock", "files ahead"])
def test_an_adapter_is_told_that_a_server_loads_as_soon_as_it_is_there(
    prefetch_ns: int, known: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "new", b"weights")
    monkeypatch.setattr(adapters, "time", clock(-prefetch_ns))
    (tmp_path / "new").rename(tmp_path / "sql")
    sql = LoRARequest("sql", 1, str(tmp_path / "sql"))
    known.loading(sql)
    assert found(known, sql) is not None


@pytest.mark.parametrize("change", ["file", "directory", "fewer files"])
@pytest.mark.parametrize("behind_ns", [0, 3600 * 10**9], ids=["same clock", "files behind"])
def test_what_changes_after_a_server_loads_it_is_not_told_whatever_the_clock(
    behind_ns: int, change: str, known: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not_told_after(change, known.loading, known, tmp_path, behind_ns, monkeypatch)


@pytest.mark.parametrize("change", ["file", "directory", "fewer files"])
def test_what_changes_after_a_request_came_is_not_told(
    change: str, known: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not_told_after(change, known.asked_for, known, tmp_path, 0, monkeypatch)


def test_a_file_system_that_counts_in_seconds_hides_no_change(
    known: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def in_seconds(self: Path, **options: Any) -> Any:
        seen = stat(self, **options)
        names = ("st_mode", "st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
        whole = {name: getattr(seen, name) for name in names}
        return SimpleNamespace(**whole | {"st_ctime_ns": seen.st_ctime_ns // 10**9 * 10**9})

    def hear(request: LoRARequest) -> None:
        monkeypatch.setattr(Path, "stat", in_seconds)
        known.asked_for(request)

    assert not_told_after("file", hear, known, tmp_path, 0, monkeypatch)


def clock(off_ns: int) -> SimpleNamespace:
    return SimpleNamespace(time_ns=lambda: time.time_ns() + off_ns, monotonic=time.monotonic)


def not_told_after(
    change: str,
    hear: Callable[[LoRARequest], object],
    known: Adapters,
    tmp_path: Path,
    behind_ns: int,
    monkeypatch: pytest.MonkeyPatch,
) -> bool:
    gate, told = threading.Event(), known._told
    # Longer than any stall of the machine: a gate that opens by itself lets a look through.
    monkeypatch.setattr(known, "_told", lambda one: gate.wait(20 * DEADLINE) and told(one))
    for name in ("sql", "other"):
        write(tmp_path / name, name.encode())
    (tmp_path / "sql" / "adapter_model.bin").write_bytes(b"what no worker reads beside the others")
    write(tmp_path / "sql", b"sql")
    monkeypatch.setattr(adapters, "time", clock(behind_ns))
    sql = LoRARequest("sql", 1, str(tmp_path / "sql"))
    hear(sql)
    if change == "file":
        (tmp_path / "sql" / "adapter_model.safetensors").write_bytes(b"two")
    elif change == "directory":
        (tmp_path / "sql").rename(tmp_path / "old")
        (tmp_path / "other").rename(tmp_path / "sql")
    else:
        (tmp_path / "sql" / "adapter_model.safetensors").unlink()
    gate.set()
    return found(known, sql) is None


def test_of_two_adapters_with_one_id_neither_is_told(make: Callable[[str], Engine], tmp_path: Path) -> None:
    """vLLM's workers go by the id: they would run the second with the weights of the first."""
    for name in "ab":
        write(tmp_path / name, name.encode())
    first, second = (LoRARequest(name, 1, str(tmp_path / name)) for name in "ab")
    engine = make("engine")
    tell(engine, first)
    assert [hits(engine, name, first) for name in "ab"] == [0, 96]
    assert hits(engine, "c", second) == 0
    assert adapter(engine, first).is_lost and adapter(engine, second).is_lost
    assert hits(engine, "d", first) == 0


def test_adapters_of_one_name_with_other_paths_are_told_apart(make: Callable[[str], Engine], tmp_path: Path) -> None:
    engine = make("engine")
    found = []
    for number, place in enumerate("ab", start=1):
        write(tmp_path / place, place.encode())
        one = LoRARequest("sql", number, str(tmp_path / place))
        tell(engine, one)
        found += [hits(engine, f"cold {place}", one), hits(engine, f"warm {place}", one)]
    assert found == [0, 96, 0, 96]


def load(engine: Engine, request: LoRARequest) -> None:
    """As the server does for an adapter that no request asked for yet."""
    workers = SimpleNamespace(add_lora=lambda request: True)
    assert EngineCore.add_lora(SimpleNamespace(model_executor=workers), request)  # type: ignore[arg-type]


def test_an_adapter_that_a_server_loads_is_known_before_its_first_request(
    make: Callable[[str], Engine], tmp_path: Path
) -> None:
    write(tmp_path, b"weights")
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path))
    load(engine, sql)
    assert looked_at(engine, sql)
    assert [hits(engine, name, sql) for name in "ab"] == [0, 96]


def test_a_server_that_loads_from_the_same_path_again_loses_the_adapter_and_from_another_does_not(
    make: Callable[[str], Engine], tmp_path: Path
) -> None:
    for name in "ab":
        write(tmp_path / name, name.encode())
    old, new = (LoRARequest("sql", 1, str(tmp_path / name)) for name in "ab")
    engine = make("engine")
    load(engine, old)
    assert looked_at(engine, old)
    assert [hits(engine, name, old) for name in "ab"] == [0, 96]
    load(engine, LoRARequest("sql", 1, str(tmp_path / "b"), load_inplace=True))
    assert adapter(engine, old).is_lost  # requests that still run with it mix both
    assert looked_at(engine, new)
    assert [hits(engine, name, new) for name in "cd"] == [0, 96]
    load(engine, LoRARequest("sql", 1, str(tmp_path / "b"), load_inplace=True))
    assert adapter(engine, new).is_lost
    assert hits(engine, "e", new) == 0


def test_files_are_looked_at_anew_before_a_second_id_of_an_adapter_is_told(
    make: Callable[[str], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a server unloads an adapter and loads it again: the workers read the files again."""
    monkeypatch.setattr(adapters, "LOOK_AGAIN_SECONDS", 1e9)
    write(tmp_path, b"first")
    engine = make("engine")
    one, two = (LoRARequest("sql", number, str(tmp_path)) for number in (1, 2))
    tell(engine, one)
    assert [hits(engine, name, one) for name in "ab"] == [0, 96]
    write(tmp_path, b"second")
    assert hits(engine, "c", two) == 0
    assert not looked_at(engine, two)


def test_adapters_beyond_the_limit_are_left_out(
    make: Callable[[str], Engine], daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 1)
    for name in "ab":
        write(tmp_path / name, name.encode())
    first, second = (LoRARequest(name, at, str(tmp_path / name)) for at, name in enumerate("ab", start=1))
    engine = make("engine")
    tell(engine, first)
    assert [hits(engine, name, first) for name in "ab"] == [0, 96]
    lookups = daemon.lookups
    assert hits(engine, "c", second) == 0
    assert daemon.lookups == lookups
    known = engine.connector.manager._adapters
    assert known is not None and len(known._known) == len(known._loaded) == 1


def test_where_vllm_cannot_be_heard_no_adapter_is_told(tmp_path: Path) -> None:
    write(tmp_path, b"weights")
    one = Adapters(LoRAConfig(), can_hear=False).asked_for(LoRARequest("sql", 1, str(tmp_path)))
    assert one is not None and one.is_lost


def test_a_queue_of_adapted_requests_is_told_under_their_names_once_and_in_small_parts(
    make: Callable[[str], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fake import masked
    from forebay.vllm import manager

    monkeypatch.setattr(manager, "KEYS_TOLD", 3)
    monkeypatch.setattr(manager, "KEYS_TOLD_IN_A_STEP", 6)
    write(tmp_path, b"weights")
    engine, sql = make("engine"), LoRARequest("sql", 1, str(tmp_path))
    running = engine.add("running", prompt(1, 900), max_tokens=60)
    engine.step()
    queue = [engine.add(str(at), prompt(at, 100), lora_request=sql) for at in range(2, 12)]
    assert looked_at(engine, sql)
    told = []
    for _ in range(4):
        engine.step()
        told.append(len(engine.session.waiting))
    mask = adapter(engine, sql).mask
    assert mask is not None
    assert told == [2, 4, 6, 8]
    assert next(iter(engine.session.waiting.values())) == {0: masked(queue[0].block_hashes[:3], mask)}
    engine.run(running, *queue)
    engine.assert_nothing_is_held()
