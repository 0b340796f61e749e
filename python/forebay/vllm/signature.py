"""A look at files without reading them: one `lstat` for each file, and each directory and link on the way to it.

Holds true: between two looks that are the same no file was written, replaced, renamed or removed, and no link or directory on
the way to it led elsewhere, not even for a while. `look` says besides when something of that was last seen to change, by the
clock of the files.

A rename moves the time of change of what is renamed and that of the directory it is in, and nobody can set those back. So
one of the two alone is something else: another entry beside it, or another mode. Mounts move no times.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# The clock of files lags behind by up to a tick, which is 10 ms at most; some file systems count in seconds.
TICK_NS = 20_000_000
SECOND_NS = 1_000_000_000
# Links behind links on one way; Linux follows no more.
MAX_LINKS = 40
# Two looks in a row that agree are one; among so many there are two, however much goes on beside the files.
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
    """What changes when the files do, or something on the way to them."""

    directory: Path
    home: Path  # where the directory is, behind all links
    files: tuple[Path, ...]  # as `home`
    places: Mapping[Path, Seen]  # the files, and all directories and links on the ways, by paths without links

    def is_same(self, later: Signature) -> bool:
        """Whether nothing happened to the files in between."""
        return self.is_same_but_changed(later) and all(self.places[file] == later.places[file] for file in self.files)

    def is_same_but_changed(self, later: Signature) -> bool:
        """The same, but for times of change that nothing else explains: files may have another owner, mode or link."""
        is_alike = (self.directory, self.home, self.files, self.places.keys()) == (
            (later.directory, later.home, later.files, later.places.keys())
        )
        return is_alike and not any(self._is_other(place, later) for place in self.places)

    def is_in_seconds(self) -> bool:
        """Whether a file system counts in seconds, in one of which a file may change and look the same."""
        return any(seen.changed_ns % SECOND_NS == 0 for seen in self.places.values() if not stat.S_ISDIR(seen.kind))

    def _is_other(self, place: Path, later: Signature) -> bool:
        before, after = self.places[place], later.places[place]
        known = slice(3) if stat.S_ISDIR(before.kind) else slice(5)  # a directory's size and time go with its entries
        is_renamed = self._is_changed(place, later) and self._is_changed(place.parent, later)
        return before[known] != after[known] or is_renamed and place != place.parent

    def _is_changed(self, place: Path, later: Signature) -> bool:
        return self.places[place].changed_ns != later.places[place].changed_ns


def look(path: str, directory: Path, files: Sequence[Path]) -> tuple[Signature, int]:
    """What the files in the directory are, to which the path leads, and when they last changed (nanoseconds, at the latest).

    Raises `OSError`.
    """
    signature = _look(path, directory, files)
    for _ in range(LOOKS):  # in the middle of a rename it shows at one of the two places alone
        before, signature = signature, _look(path, directory, files)
        if before == signature:
            return signature, _latest_of(signature)
    raise OSError(f"what is on the way to `{directory}` changes while it is looked at")


def _look(path: str, directory: Path, files: Sequence[Path]) -> Signature:
    places: dict[Path, Seen] = {}
    _walk(Path(os.path.expanduser(path)), places)
    home, found = _walk(directory, places), tuple(_walk(file, places) for file in files)
    return Signature(directory, home, found, places)


def _latest_of(signature: Signature) -> int:
    places = signature.places
    # Files that are gone show in the directory's own times alone. The root has no name that could move.
    times = [places[place].changed_ns for place in (signature.home, *signature.files)]
    times += [min(seen.changed_ns, places[at.parent].changed_ns) for at, seen in places.items() if at != at.parent]
    return max(map(_latest, times))


def _walk(way: Path, places: dict[Path, Seen]) -> Path:
    """Sees each place on the way, those behind links included. Where it leads."""
    at, left, links = Path(), list(reversed((Path.cwd() / way).parts)), 0
    while left:
        part = left.pop()
        at = at.parent if part == ".." else at / part
        if at not in places:
            places[at] = _see(at)
        if stat.S_ISLNK(places[at].kind):
            links += 1
            if links > MAX_LINKS:
                raise OSError(f"too many links on the way to `{way}`")
            left += reversed(Path(os.readlink(at)).parts)
            at = at.parent
    return at


def _see(place: Path) -> Seen:
    at = place.lstat()
    return Seen(stat.S_IFMT(at.st_mode), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)


def _latest(changed_ns: int) -> int:
    """When a change of this time was at the latest, by a clock that agrees with that of files."""
    return changed_ns + (TICK_NS if changed_ns % SECOND_NS else SECOND_NS)
