"""Reads a pool's files as docs/formats/pool.md draws them, with nothing of Forebay's code, and complains.

    python -m torture.reader DIRECTORY_OF_POOL [DIRECTORY_OF_RECORDS]

Holds true: a slot counts only if its entry and its generation are the same before and after its bytes were read, so the
files may be in use; when nobody changes the table, each complaint is about the files as they are.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torture import crc64
from torture.content import PAGE_BYTES, SPACES, Slice, Space
from torture.records import Purges, now

ENTRIES_AT, ENTRY_BYTES = 1 << 20, 128
UNITS_AT, UNITS = 20_480, 65_536
GENERATIONS_AT = 4096
NAMESPACES, NAMESPACE_BYTES = 1024, 16 << 10
MAX_RANKS = 64
RESERVED, READY = b"SERV", b"REDY"
GIB_PAGES = (1 << 30) // PAGE_BYTES


@dataclass(frozen=True)
class Slot:
    page: int
    pages: int
    entry: int
    unit: int  # of its extent
    word: int

    def range(self) -> range:
        return range(self.page, self.page + self.pages)


@dataclass(frozen=True)
class Block:
    """A slot that is ready: its entry's content, and its bytes."""

    slot: Slot
    generation: int
    namespace: bytes
    group: int
    hash: bytes
    checksum: int
    data: bytes
    looked: int


@dataclass
class Report:
    complaints: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Files:
    """The five files of a pool, to be read only."""

    def __init__(self, pool: Path) -> None:
        # In the directory, or in the tmpfs mounted at `mnt` inside it.
        place = pool / "mnt" if (pool / "mnt" / "table").exists() else pool
        paths = {name: place / name for name in ("table", "generation", "data", "birth", "namespace")}
        if not paths["data"].exists():
            paths["data"] = _huge(pool)
        self.table, self.generation, self.data, self.birth, self.namespace = (
            os.open(path, os.O_RDONLY) for path in paths.values()
        )
        # A hugetlbfs cannot be read by `pread` where it has holes; a mapping reads the bytes where they are.
        self.mapped = mmap.mmap(self.data, 0, prot=mmap.PROT_READ)

    def bytes(self, page: int, length: int) -> bytes:
        return self.mapped[page * PAGE_BYTES : page * PAGE_BYTES + length]

    def close(self) -> None:
        self.mapped.close()
        for file in (self.table, self.generation, self.data, self.birth, self.namespace):
            os.close(file)


def _huge(pool: Path) -> Path:
    """`forebay-<device>-<inode>` on a hugetlbfs."""
    place = pool.stat()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    names = [
        Path(mount[1]) / f"forebay-{place.st_dev:x}-{place.st_ino:x}" for mount in mounts if mount[2] == "hugetlbfs"
    ]
    return next(name for name in names if name.exists())


class Reader:
    def __init__(self, pool: Path, purges: Purges | None = None) -> None:
        self.files = Files(pool)
        self.purges = purges
        self.report = Report()

    def read(self, most: int | None = None, chance: random.Random | None = None) -> Report:
        """All slots, or so many of them."""
        try:
            self._header()
            slots = list(self._slots())
            self._apart(slots)
            self.report.counts["slots"] = len(slots)
            if most is not None and chance is not None:
                slots = chance.sample(slots, min(most, len(slots)))
            blocks = [block for slot in slots if (block := self._block(slot)) is not None]
            # After the blocks: a namespace is there before its first block is.
            spaces = self._spaces()
            keys = Counter((block.namespace, block.group, block.hash) for block in blocks)
            # While a block moves to another slot it is in both: see `Rebalancing` of docs/tiers/pool.md.
            self.report.counts["twice"] = sum(count - 1 for count in keys.values())
            self._judge(blocks, spaces)
        finally:
            self.files.close()
        return self.report

    def _complain(self, complaint: str) -> None:
        self.report.complaints.append(complaint)

    def _header(self) -> None:
        header = os.pread(self.files.table, 4096, 0)
        magic, version, state, _, unit_bytes, _ = struct.unpack_from("<8sI4s16sII", header)
        (checksum,) = struct.unpack_from("<Q", header, 40)
        if (magic, version, state) != (b"FOREBAYT", 2, b"LIVE"):
            self._complain(f"the table begins with {magic!r}, version {version}, state {state!r}")
        if crc64.checksum(header[:12] + bytes(4) + header[16:40]) != checksum:
            self._complain("the table's header does not match its checksum")
        self.units, self.epoch, self.ceiling = (self._echoed(header, at) for at in (48, 56, 64))
        self.unit_pages = unit_bytes // PAGE_BYTES
        generation = os.pread(self.files.generation, 32, 0)
        if generation[:8] != b"FOREBAYG" or generation[16:32] != header[16:32]:
            self._complain("the generations are not of this pool")

    def _echoed(self, header: bytes, at: int) -> int:
        number, complement = struct.unpack_from("<II", header, at)
        if number ^ complement != 0xFFFFFFFF:
            self._complain(f"the word at {at} of the header is not echoed: {number:#x} {complement:#x}")
        return int(number)

    def _slots(self) -> Iterator[Slot]:
        words = self._words()
        # A change of extents takes several words.
        while words != (words := self._words()):
            pass
        until = 0
        for unit, word in enumerate(words):
            if word == 0:
                continue
            pages, units, proof = word & 0xFFFFFFFF, word >> 32 & 0xFFFF, word >> 48
            summed = crc64.checksum(struct.pack("<IQ", unit, word & (1 << 48) - 1)) & 0xFFFF
            if summed != proof or pages == 0 or units == 0 or units & units - 1:
                self._complain(f"unit {unit} has the word {word:#018x}, which is none")
                continue
            first, end = unit * self.unit_pages, (unit + units) * self.unit_pages
            if (
                unit < until
                or unit % units
                or unit + units > self.units
                or first // GIB_PAGES != (end - 1) // GIB_PAGES
            ):
                self._complain(f"the extent of {units} units at unit {unit} overlaps another, or lies where none may")
            until = max(until, unit + units)
            for k in range((end - first) // pages):
                yield Slot(first + k * pages, pages, first + k, unit, word)

    def _words(self) -> tuple[int, ...]:
        return struct.unpack(f"<{self.units}Q", os.pread(self.files.table, 8 * self.units, UNITS_AT))

    def _is_still(self, slot: Slot) -> bool:
        """Whether it is a slot: its extent may have been given to slots of another size."""
        return os.pread(self.files.table, 8, UNITS_AT + 8 * slot.unit) == slot.word.to_bytes(8, "little")

    def _apart(self, slots: list[Slot]) -> None:
        pages: Counter[int] = Counter()
        entries = Counter(slot.entry for slot in slots)
        for slot in slots:
            pages.update(slot.range())
        if shared := [page for page, count in pages.items() if count > 1]:
            self._complain(f"{len(shared)} pages are in two slots, as page {shared[0]}")
        if shared := [entry for entry, count in entries.items() if count > 1]:
            self._complain(f"{len(shared)} entries are of two slots, as entry {shared[0]}")

    def _spaces(self) -> dict[bytes, Space]:
        """By Forebay's id; the fields that its record holds say which it is."""
        spaces = {}
        for number in range(NAMESPACES):
            record = os.pread(self.files.namespace, NAMESPACE_BYTES, number * NAMESPACE_BYTES)
            if record[:8] != b"1PRESENT":
                continue
            descriptor, layout = struct.unpack_from("<II", record, 32)
            if crc64.checksum(record[16 : 64 + descriptor + layout]) != int.from_bytes(record[8:16], "little"):
                self.report.counts["torn_namespaces"] += 1
                continue
            fields = dict(line.split("=", 1) for line in record[64 : 64 + descriptor].decode().splitlines())
            for space in SPACES:
                if space.fields == fields:
                    spaces[record[16:32]] = space
        return spaces

    def _entry(self, slot: Slot) -> tuple[bytes, int]:
        entry = os.pread(self.files.table, ENTRY_BYTES, ENTRIES_AT + slot.entry * ENTRY_BYTES)
        return entry, int.from_bytes(os.pread(self.files.generation, 4, GENERATIONS_AT + 4 * slot.page), "little")

    def _block(self, slot: Slot) -> Block | None:
        looked = now()
        entry, published = self._entry(slot)
        generation, state = struct.unpack_from("<I4s", entry)
        namespace, name, name_bytes, group, length, checksum = struct.unpack_from("<16s32sHHIQ", entry, 24)
        data = self.files.bytes(slot.page, min(length, slot.pages * PAGE_BYTES)) if state == READY else b""
        again = self._entry(slot)
        # The holders may change while a block is read; the rest changes with its generation or its state.
        same = [(what[:8], what[24:], number) for what, number in ((entry, published), again)]
        if same[0] != same[1] or not self._is_still(slot):
            self.report.counts["changed"] += 1
            return None
        if again[0][:8] == bytes(8):
            self.report.counts["free"] += 1
            return None
        if state == RESERVED and generation == published:
            self.report.counts["reserved"] += 1
            self.report.counts["reserved_by_daemon"] += again[0][8:24] == bytes(16)
            return None
        if state != READY or generation != published:
            self.report.counts["torn"] += 1
            return None
        sealed = struct.pack("<II", slot.page, generation) + again[0][24:120]
        if crc64.checksum(sealed) != int.from_bytes(again[0][120:128], "little"):
            self._complain(f"the entry of slot {slot.page} is ready and does not match its checksum: {again[0].hex()}")
            return None
        if not 1 <= name_bytes <= 32 or any(name[name_bytes:]) or not 0 < length <= slot.pages * PAGE_BYTES:
            self._complain(f"the entry of slot {slot.page} is ready and cannot be: {again[0].hex()}")
            return None
        if generation >= self.ceiling:
            # The ceiling may have been raised since the header was read.
            self._header()
            if generation >= self.ceiling:
                self._complain(f"slot {slot.page} has generation {generation}, above the ceiling {self.ceiling}")
        self.report.counts["ready"] += 1
        return Block(slot, generation, namespace, group, name[:name_bytes], checksum, data, looked)

    def _judge(self, blocks: list[Block], spaces: dict[bytes, Space]) -> None:
        shapes: dict[int, list[Block]] = {}
        for block in blocks:
            shapes.setdefault(len(block.data), []).append(block)
        for same in shapes.values():
            for block, checksum in zip(same, crc64.checksums([block.data for block in same]), strict=True):
                if checksum != block.checksum:
                    self._complain(f"slot {block.slot.page} does not match the checksum of its entry")
        slices: dict[int, list[tuple[Block, int, bytes]]] = {}
        for block in blocks:
            space = spaces.get(block.namespace)
            group = space.group(block.group) if space else None
            if space is None or group is None or len(block.data) != space.ranks * group.slice_bytes:
                self._complain(
                    f"slot {block.slot.page} has a block of {len(block.data)} bytes of an unknown namespace or group"
                )
                continue
            stores = set()
            for rank in range(space.ranks):
                piece = block.data[rank * group.slice_bytes : (rank + 1) * group.slice_bytes]
                store, complaint = Slice(space, group, rank, block.hash).judge(piece)
                if complaint:
                    self._complain(f"slot {block.slot.page}, generation {block.generation}: {complaint}")
                stores.add(store)
                slices.setdefault(len(piece), []).append((block, rank, piece))
                self.report.counts["pages"] += -(-len(piece) // PAGE_BYTES)
            if len(stores) > 1:
                self._complain(
                    f"slot {block.slot.page} has slices of several stores: {[hex(store) for store in stores]}"
                )
            for store in stores:
                if self.purges and (late := self.purges.complaint(space, store, block.looked)):
                    self._complain(f"slot {block.slot.page}: {late}")
        for pieces in slices.values():
            sums = crc64.checksums([piece for _, _, piece in pieces])
            for (block, rank, piece), checksum in zip(pieces, sums, strict=True):
                self._born(block, rank, len(piece), checksum, spaces[block.namespace].ranks)

    def _born(self, block: Block, rank: int, length: int, checksum: int, ranks: int) -> None:
        unit, inside = divmod(block.slot.page, self.unit_pages)
        at = ((unit * MAX_RANKS + rank) * self.unit_pages + inside) * 16
        record = os.pread(self.files.birth, 16, at)
        if record == struct.pack("<QII", checksum, length, block.generation):
            return
        if self._entry(block.slot)[1] != block.generation:
            self.report.counts["changed"] += 1
            return
        # A block of several slices that a tier promoted is ready before the daemon has verified it.
        if ranks > 1 and int.from_bytes(record[12:], "little") != block.generation:
            self.report.counts["unrecorded"] += 1
            return
        self._complain(f"slot {block.slot.page}, rank {rank}: the birth record {record.hex()} is not of its slice")


def main() -> None:
    purges = Purges(Path(sys.argv[2])) if len(sys.argv) > 2 else None
    report = Reader(Path(sys.argv[1]), purges).read()
    print(dict(report.counts), *report.complaints, sep="\n")
    sys.exit(1 if report.complaints else 0)


if __name__ == "__main__":
    main()
