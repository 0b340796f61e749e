"""Stores are named in the order they were made, once all workers are done, and never after a reset."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from forebay.vllm import stores as module
from forebay.vllm.stores import Run, Shape, Store, Stores, split_into_runs
from vllm.v1.kv_offload.base import make_offload_key

HASHES = [bytes([at]) * 32 for at in range(1, 13)]


class Recorder:
    """A session that writes down what is named and what is given back."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes]] = []
        self.masks: list[bytes | None] = []

    def commit(
        self, group: int, hashes: list[bytes], predecessor: Any, slots: bytes, generations: bytes, mask: bytes | None
    ) -> None:
        self.calls.append(("commit", slots))
        self.masks.append(mask)

    def abort(self, group: int, slots: bytes, generations: bytes) -> None:
        self.calls.append(("abort", slots))


def store(serial: int) -> Store:
    slots = serial.to_bytes(4, "little")
    return Store(serial, [make_offload_key(HASHES[serial], 0)], [Run(0, [HASHES[serial]], None, slots, b"gen.")])


def calls(recorder: Recorder) -> list[tuple[str, int]]:
    return [(name, int.from_bytes(slots, "little")) for name, slots in recorder.calls]


def make(count: int) -> tuple[Recorder, Stores]:
    recorder = Recorder()
    stores = Stores(recorder, lambda adapter: adapter.asked)  # type: ignore[arg-type]
    for serial in range(count):
        stores.add(store(serial))
    return recorder, stores


def test_a_store_waits_for_those_before_it() -> None:
    recorder, stores = make(3)
    stores.finish(2)
    stores.finish(1)
    assert calls(recorder) == []
    stores.finish(0)
    assert calls(recorder) == [("commit", 0), ("commit", 1), ("commit", 2)]
    assert len(stores) == 0


def test_a_dropped_store_holds_nobody_up() -> None:
    recorder, stores = make(3)
    stores.finish(1)
    stores.drop(0)
    assert calls(recorder) == [("abort", 0), ("commit", 1)]
    assert not stores.is_known(store(0).keys[0], since=0)


def test_after_a_reset_what_was_under_way_is_given_back_when_it_is_over() -> None:
    recorder, stores = make(2)
    stores.reset()
    assert calls(recorder) == []
    stores.add(store(2))
    for serial in (0, 1, 2):
        stores.finish(serial)
    assert calls(recorder) == [("abort", 0), ("abort", 1), ("commit", 2)]


def test_a_stale_store_does_not_make_a_new_one_of_the_same_block_unknown() -> None:
    _, stores = make(1)
    stores.reset()
    again = Store(7, store(0).keys, store(0).runs)
    stores.add(again)
    stores.finish(0)
    assert stores.is_known(again.keys[0], since=0)


def test_a_block_is_known_from_its_store_until_a_later_question() -> None:
    _, stores = make(1)
    key = store(0).keys[0]
    assert stores.is_known(key, since=stores.now)
    before = stores.now
    stores.finish(0)
    assert stores.is_known(key, since=before)
    assert not stores.is_known(key, since=stores.now)  # whoever asks now is told by the daemon


def test_memory_of_stored_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_KEYS", 3)
    _, stores = make(10)
    assert len(stores._known) <= 4


def run_of(shape: Shape, positions: list[int]) -> list[tuple[list[int], bytes | None, bytes]]:
    keys = [make_offload_key(HASHES[at], shape.group) for at in positions]
    slots = b"".join(at.to_bytes(4, "little") for at in positions)
    where = {hash_: at for at, hash_ in enumerate(HASHES)}
    runs = split_into_runs(shape, keys, slots, slots, HASHES, where)
    assert all(run.slots == run.generations for run in runs)
    return [([HASHES.index(h) for h in run.hashes], run.predecessor, run.slots) for run in runs]


def place(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


@pytest.mark.parametrize(
    ("hashes_per_block", "positions", "expected"),
    [
        (1, [], []),
        (1, [0, 1, 2], [([0, 1, 2], None)]),
        (1, [3, 4], [([3, 4], 2)]),
        (1, [0, 1, 5, 6, 9], [([0, 1], None), ([5, 6], 4), ([9], 8)]),
        (2, [1, 3, 5], [([1, 3, 5], None)]),
        (2, [5, 9], [([5], 3), ([9], 7)]),
        (4, [7, 9], [([7], 3), ([9], 7)]),  # a partial tail: its predecessor is the last whole block
        (4, [2], [([2], None)]),
    ],
)
def test_runs_are_neighbours_with_the_block_before_them(
    hashes_per_block: int, positions: list[int], expected: list[tuple[list[int], int | None]]
) -> None:
    shape = Shape(0, None, 16 * hashes_per_block, hashes_per_block, False)
    assert run_of(shape, positions) == [
        (run, None if before is None else HASHES[before], place(*run)) for run, before in expected
    ]


class Looked:
    """An adapter at which one look was asked for."""

    mask: bytes | None = b"o" * 32
    asked, answered, doubted, is_lost = 1, 0, 0, False


@pytest.mark.parametrize(("mask", "call"), [(b"m" * 32, "commit"), (None, "abort")])
def test_blocks_go_by_the_mask_that_their_adapter_has_when_they_are_there(mask: bytes | None, call: str) -> None:
    recorder, stores = make(0)
    adapter = Looked()
    adapted = replace(store(1), adapter=adapter)  # type: ignore[arg-type]
    stores.add(adapted)
    adapter.mask = mask
    stores.finish(1)
    assert stores.settle() and not calls(recorder)  # a look at its files is under way
    adapter.answered = 1
    assert not stores.settle()
    assert calls(recorder) == [(call, 1)]
    assert recorder.masks == ([mask] if mask else [])
    assert stores.is_known(adapted.keys[0], 0) == (mask is not None)
