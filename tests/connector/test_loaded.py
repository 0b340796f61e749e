"""A digest names an engine only where the files are those that its workers loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forebay.vllm import loaded
from forebay.vllm.fingerprint import Unreadable, fingerprint, model_files
from forebay.vllm.loaded import Changed, Loaded

BEGAN_NS = loaded.began_ns


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def model(place: Path, weights: bytes) -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(weights)
    os.utime(place / "model.safetensors", ns=(10**18, 10**18))
    return place


def of(*places: Path, is_commit: bool = False) -> Loaded:
    return Loaded("m", list(places), model_files, is_commit=is_commit)


def overwrite(one: Path, other: Path) -> None:
    """As `cp -p` does, which keeps the time of writing and cannot keep that of change."""
    seen = (one / "model.safetensors").stat()
    while (one / "model.safetensors").stat().st_ctime_ns == seen.st_ctime_ns:
        shutil.copy2(other / "model.safetensors", one / "model.safetensors")


def rename_over(one: Path, other: Path) -> None:
    (other / "model.safetensors").rename(one / "model.safetensors")


def copy_anew(one: Path, other: Path) -> None:
    shutil.rmtree(one)
    shutil.copytree(other, one)


def rename_directory(one: Path, other: Path) -> None:
    one.rename(one.with_name("gone"))
    other.rename(one)


def rename_parent(one: Path, other: Path) -> None:
    rename_directory(one.parent, other.parent)


def rename_parent_and_make_an_entry(one: Path, other: Path) -> None:
    """Whose time is then that of the last entry."""
    rename_parent(one, other)
    (one.parent / ".ready").touch()


def vanish(one: Path, other: Path) -> None:
    (one / "model.safetensors").unlink()


CHANGES = [overwrite, rename_over, copy_anew, rename_directory, rename_parent, rename_parent_and_make_an_entry, vanish]
Change = Callable[[Path, Path], None]


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change_after_they_were_loaded_name_nobody(change: Change, tmp_path: Path) -> None:
    one, other = model(tmp_path / "a" / "m", b"one"), model(tmp_path / "b" / "m", b"two")
    before = of(one)
    change(one, other)
    with pytest.raises(Changed, match="(changed|vanished) after they were loaded.*hint"):
        before.digest()


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change_while_they_are_read_name_nobody(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = model(tmp_path / "a" / "m", b"one"), model(tmp_path / "b" / "m", b"two")

    def late(*paths: Path, **how: object) -> str:
        change(one, other)
        return fingerprint(*paths)

    monkeypatch.setattr(loaded, "fingerprint", late)
    with pytest.raises(Changed):
        of(one).digest()


def test_a_link_behind_a_link_that_leads_elsewhere_names_nobody(tmp_path: Path) -> None:
    one, other = model(tmp_path / "a", b"one"), model(tmp_path / "b", b"one")
    (tmp_path / "inner").symlink_to(one)
    (tmp_path / "outer").symlink_to("inner")
    before = of(tmp_path / "outer")
    assert before.digest() == fingerprint(one)
    (tmp_path / "inner").unlink()
    (tmp_path / "inner").symlink_to(other)
    with pytest.raises(Changed):
        before.digest()


def test_files_that_cannot_be_read_for_a_while_are_named_once_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = model(tmp_path / "a", b"one")
    before = of(one)
    with monkeypatch.context() as away:

        def broken(*_: object) -> None:
            raise OSError("stale file handle")

        away.setattr(loaded, "look", broken)
        with pytest.raises(Unreadable, match="stale"):
            before.digest()
    assert before.digest() == fingerprint(one)


@pytest.mark.parametrize("change", CHANGES[:-1])
def test_files_that_change_between_the_start_and_the_end_of_loading_name_nobody(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = model(tmp_path / "a" / "m", b"one"), model(tmp_path / "b" / "m", b"two")
    time.sleep(0.03)  # the clock of files must have gone on since
    began = time.time_ns()
    monkeypatch.setattr(loaded, "began_ns", lambda: began)
    assert of(one).digest() == fingerprint(one)
    change(one, other)
    with pytest.raises(Changed, match="changed after this engine began.*hint: restart"):
        of(one)


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def begin() -> None:
        time.sleep(0.05)  # the clock of files must have gone on since, and must go on
        began_ns = time.time_ns()
        monkeypatch.setattr(loaded, "began_ns", lambda: began_ns)
        time.sleep(0.05)

    return begin


def test_the_parent_of_a_link_that_was_exchanged_names_nobody(began: Callable[[], None], tmp_path: Path) -> None:
    for name in ("current", "next"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m").symlink_to(model(tmp_path / "store" / name, name.encode()))
    began()
    of(tmp_path / "current" / "m")
    rename_directory(tmp_path / "current", tmp_path / "next")
    with pytest.raises(Changed, match="changed after this engine began"):
        of(tmp_path / "current" / "m")


def test_the_directory_behind_linked_files_that_was_exchanged_names_nobody(
    began: Callable[[], None], tmp_path: Path
) -> None:
    """As in a snapshot of the hub, whose files are links into a store."""
    files = [model(tmp_path / name, name.encode()) for name in ("blobs", "others")]
    (tmp_path / "m").mkdir()
    for file in files[0].iterdir():
        (tmp_path / "m" / file.name).symlink_to(file)
    began()
    before = of(tmp_path / "m")
    rename_directory(*files)
    with pytest.raises(Changed, match="changed after this engine began"):
        of(tmp_path / "m")
    with pytest.raises(Changed, match="changed after they were loaded"):
        before.digest()


def test_what_happens_beside_a_model_and_above_it_does_not_count(began: Callable[[], None], tmp_path: Path) -> None:
    one = model(tmp_path / "all" / "m", b"one")
    began()
    model(tmp_path / "all" / "another", b"two")
    for entry in ("all/m/README.md", "all/third"):
        before = of(one)
        (tmp_path / entry).touch()
        assert before.digest() == fingerprint(one)
        began()


def test_files_that_were_exchanged_and_put_back_name_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may have been read in between."""
    one, other = model(tmp_path / "a", b"one"), model(tmp_path / "b", b"two")
    before = of(one)

    def meanwhile(*paths: Path, **how: object) -> str:
        time.sleep(0.05)
        rename_directory(one, other)
        digest = fingerprint(*paths)
        one.rename(other)
        one.with_name("gone").rename(one)
        return digest

    monkeypatch.setattr(loaded, "fingerprint", meanwhile)
    with pytest.raises(Changed):
        before.digest()


def test_a_file_that_is_there_for_a_while_is_not_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(tmp_path / "a", b"one")
    before = of(one)

    def meanwhile(*paths: Path, **how: object) -> str:
        time.sleep(0.05)
        (one / "more.safetensors").touch()
        digest = fingerprint(*paths)
        (one / "more.safetensors").unlink()
        return digest

    with monkeypatch.context() as busy:
        busy.setattr(loaded, "fingerprint", meanwhile)
        with pytest.raises(Unreadable, match="come and go"):
            before.digest()
    assert before.digest() == fingerprint(one)


def test_files_of_a_clock_ahead_are_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, behind_ns = model(tmp_path / "a", b"one"), time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(loaded, "began_ns", lambda: behind_ns)
    monkeypatch.setattr(loaded.time, "time_ns", lambda: behind_ns)
    with pytest.raises(Changed, match="future of this host's clock.*hint: bring the clocks"):
        of(one)


def test_a_commit_of_the_hub_may_come_while_the_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "began_ns", lambda: 0)
    one, other = model(tmp_path / "a", b"one"), model(tmp_path / "b", b"two")
    fresh = of(one, is_commit=True)
    assert fresh.digest() == fingerprint(one)
    overwrite(one, other)
    with pytest.raises(Changed):
        fresh.digest()


def test_weights_and_configuration_in_two_caches_of_the_hub_are_named_as_in_one(tmp_path: Path) -> None:
    one = model(tmp_path / "a", b"one")
    weights = model(tmp_path / "b", b"one")
    (weights / "config.json").rename(tmp_path / "config.json")
    assert of(weights, one).digest() == of(one).digest()


def test_files_that_are_gone_when_loading_is_over_name_nobody(tmp_path: Path) -> None:
    with pytest.raises(Changed, match="hint"):
        of(tmp_path / "gone")


BEGAN = "from forebay.vllm.loaded import began_ns; print(began_ns())"
PAUSE_AND_LOAD_PLUGINS = "import time; time.sleep(0.2); from forebay import vllm; vllm.register(); "
IN_A_CHILD = "import multiprocessing.process; multiprocessing.process._parent_process = object(); "


@pytest.mark.parametrize(
    ("code", "earliest_s", "latest_s"),
    [
        (BEGAN, -0.05, 0.1),
        (PAUSE_AND_LOAD_PLUGINS + BEGAN, 0.2, 60),
        (PAUSE_AND_LOAD_PLUGINS + IN_A_CHILD + BEGAN, -0.05, 0.1),
    ],
    ids=["without-plugins", "first-process", "child"],
)
def test_an_engine_begins_before_it_reads_anything(code: str, earliest_s: float, latest_s: float) -> None:
    """Files that are written right before the first process is started are those that the engine reads."""
    before = time.time_ns()
    told = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert before + earliest_s * 1e9 <= told <= min(before + latest_s * 1e9, time.time_ns())


@pytest.mark.parametrize("loads_plugins", [False, True])
def test_a_clock_that_was_stepped_ahead_hides_no_change(
    loads_plugins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loads_plugins:
        now = (time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        monkeypatch.setattr("forebay.vllm.registered_ns", now)
    one, real = model(tmp_path / "a", b"one"), time.time_ns
    monkeypatch.setattr(loaded, "began_ns", BEGAN_NS)
    monkeypatch.setattr(loaded.time, "time_ns", lambda: real() + 3600 * 10**9)
    with pytest.raises(Changed, match="changed after this engine began"):
        of(one)
