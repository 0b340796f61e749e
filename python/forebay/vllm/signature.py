"""A look at files without reading them: one `stat` for each file, link and directory.

Holds true: between two equal signatures no file was written, replaced, renamed or removed, and no link or directory on the
way to it led elsewhere. `look` says besides when something of that was last seen to change, by the clock of the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# The clock of files lags behind by up to a tick, which is 10 ms at most; some file systems count in seconds.
TICK_NS = 20_000_000
SECOND_NS = 1_000_000_000
# Links behind links on one way; Linux follows no more.
MAX_LINKS = 40


class Signature(NamedTuple):
    """What changes when the files do, or a link on the way to them."""

    directory: Path
    inode: tuple[int, int]  # of the directory, behind its device
    files: tuple[tuple[str, int, int, int, int, int], ...]  # device, inode, size, time of writing, time of change

    def but_changed(self) -> Signature:
        """Without the times of change."""
        return self._replace(files=tuple((*seen[:-1], 0) for seen in self.files))


def look(path: str, directory: Path, files: Sequence[Path]) -> tuple[Signature, int]:
    """What the files in the directory are, to which the path leads, and when they last changed (nanoseconds, at the latest).

    Raises `OSError`.
    """
    ways = [Path(os.path.join(os.getcwd(), os.path.expanduser(path))), *(file for file in files if file.is_symlink())]
    links = list(dict.fromkeys(link for way in ways for link in _links(way)))
    looks = [(place, place.lstat()) for place in links] + [(file, file.stat()) for file in files]
    # Files that are gone, and a directory that was put in the place of another, show in the directory's own times alone.
    home = directory.stat()
    seen = tuple((str(place), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for place, at in looks)
    times = [home.st_ctime_ns, *(at.st_ctime_ns for _, at in looks), *_moved(directory)]
    return Signature(directory, (home.st_dev, home.st_ino), seen), max(map(_latest, times))


def _links(way: Path) -> Iterator[Path]:
    """Each symbolic link on the way, those behind other links included."""
    at, left, found = Path(), list(reversed(way.parts)), 0
    while left:
        part = left.pop()
        at = at.parent if part == ".." else at / part
        if part != ".." and at.is_symlink():
            found += 1
            if found > MAX_LINKS:
                raise OSError(f"too many links on the way to `{way}`")
            yield at
            left += reversed(Path(os.readlink(at)).parts)
            at = at.parent


def _moved(directory: Path) -> Iterator[int]:
    """When directories above were renamed. What is made or removed in a directory moves both of its times; a name one."""
    for parent in directory.resolve().parents:
        at = parent.stat()
        if at.st_ctime_ns > at.st_mtime_ns:
            yield at.st_ctime_ns


def _latest(changed_ns: int) -> int:
    """When a change of this time was at the latest, by a clock that agrees with that of files."""
    return changed_ns + (TICK_NS if changed_ns % SECOND_NS else SECOND_NS)
