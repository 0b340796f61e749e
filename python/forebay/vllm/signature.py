"""Looks at files without reading them: one `lstat` for each file, and for each directory and link on the path to it.

Invariant: if two looks are equal, then between them no file was written, replaced, renamed or removed, and no link or
directory on the path to it led elsewhere, not even for a while. `look` also returns when one of these last changed, by
the clock of the files.

A rename sets the change time of the renamed entry and that of its directory, and nobody can set these times back. So if
only one of the two times differs, it was no rename: the directory got another entry, or a mode changed. A mount changes
no times.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# The clock of files is late by up to a tick, which is 10 ms at most; some file systems count in seconds.
TICK_NS = 20_000_000
SECOND_NS = 1_000_000_000
# Links to links on one path; Linux follows no more.
MAX_LINKS = 40
# A look counts if the one after it is equal; among this many looks two are equal, whatever else happens nearby.
LOOKS = 10


class Seen(NamedTuple):
    """One file, directory or link."""

    kind: int
    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int


class Signature(NamedTuple):
    """A value that changes when the files change, or an entry on the path to them."""

    directory: Path
    home: Path  # the directory's path without links
    files: tuple[Path, ...]  # as `home`
    places: Mapping[Path, Seen]  # files, directories and links, by path without links

    def is_same(self, later: Signature) -> bool:
        """Whether nothing happened to the files in between."""
        return self.is_same_but_changed(later) and all(self.places[file] == later.places[file] for file in self.files)

    def is_same_but_changed(self, later: Signature) -> bool:
        """As `is_same`, but a file's change time alone may differ, as after a new owner, mode or hard link."""
        is_alike = (self.directory, self.home, self.files, self.places.keys()) == (
            (later.directory, later.home, later.files, later.places.keys())
        )
        return is_alike and not any(self._is_other(place, later) for place in self.places)

    def is_in_seconds(self) -> bool:
        """Whether a file system counts in seconds: a file can change twice within one, and look the same."""
        return any(seen.changed_ns % SECOND_NS == 0 for seen in self.places.values() if not stat.S_ISDIR(seen.kind))

    def _is_other(self, place: Path, later: Signature) -> bool:
        before, after = self.places[place], later.places[place]
        known = slice(3) if stat.S_ISDIR(before.kind) else slice(5)  # a directory's size and time go with its entries
        is_renamed = self._is_changed(place, later) and self._is_changed(place.parent, later)
        return before[known] != after[known] or is_renamed and place != place.parent

    def _is_changed(self, place: Path, later: Signature) -> bool:
        return self.places[place].changed_ns != later.places[place].changed_ns


def look(path: str, directory: Path, files: Sequence[Path]) -> tuple[Signature, int]:
    """The signature of the files in the directory to which `path` leads, and the latest time of a change (nanoseconds).

    Raises `OSError`.
    """
    signature = _look(path, directory, files)
    for _ in range(LOOKS):  # during a rename, only one of the two times may have changed yet
        before, signature = signature, _look(path, directory, files)
        if before == signature:
            return signature, _latest_of(signature)
    raise OSError(f"the path to `{directory}` changes while it is examined")


def _look(path: str, directory: Path, files: Sequence[Path]) -> Signature:
    places: dict[Path, Seen] = {}
    _walk(Path(os.path.expanduser(path)), places)
    home, found = _walk(directory, places), tuple(_walk(file, places) for file in files)
    return Signature(directory, home, found, places)


def _latest_of(signature: Signature) -> int:
    places = signature.places
    # Files that are gone show only in the times of their directory. The root cannot be renamed.
    times = [places[place].changed_ns for place in (signature.home, *signature.files)]
    times += [min(seen.changed_ns, places[at.parent].changed_ns) for at, seen in places.items() if at != at.parent]
    return max(map(_latest, times))


def _walk(way: Path, places: dict[Path, Seen]) -> Path:
    """Records each entry on the path, and those that links lead to. Returns the path without links."""
    at, left, links = Path(), list(reversed((Path.cwd() / way).parts)), 0
    while left:
        part = left.pop()
        at = at.parent if part == ".." else at / part
        if at not in places:
            places[at] = _see(at)
        if stat.S_ISLNK(places[at].kind):
            links += 1
            if links > MAX_LINKS:
                raise OSError(f"too many links on the path to `{way}`")
            left += reversed(Path(os.readlink(at)).parts)
            at = at.parent
    return at


def _see(place: Path) -> Seen:
    at = place.lstat()
    return Seen(stat.S_IFMT(at.st_mode), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)


def _latest(changed_ns: int) -> int:
    """The latest moment that a file's clock would record as this time."""
    return changed_ns + (TICK_NS if changed_ns % SECOND_NS else SECOND_NS)
