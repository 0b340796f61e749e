"""The files of a model that the workers have loaded, and their digest.

Holds true: a digest is that of the files which were loaded. They are looked at when loading is over, must not have changed
since this engine began to start, and must look the same before and after they are read. What the hub's cache keeps under
the name of a commit is what that commit says, so it may have come while the engine loaded it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import NamedTuple

from forebay import vllm
from forebay.vllm.fingerprint import Choice, Unreadable, chosen, fingerprint
from forebay.vllm.signature import SECOND_NS, Seen, Signature, look

_HINT = "hint: restart the engine when its files no longer change"


class Changed(Exception):
    """The files are not known to be those that were loaded, and never will be in this process."""


class Loaded:
    """Made when the workers have loaded the model, which is in these directories. Raises `Changed`."""

    def __init__(self, model: str, directories: list[Path], choose: Choice, *, is_commit: bool):
        self._model, self._directories, self._choose = model, directories, choose
        try:
            self._signatures, changed_ns = self._look()
        except (OSError, Unreadable) as error:
            raise Changed(
                f"forebay cannot read the files of model `{model}` after they were loaded: {error}; {_HINT}"
            ) from error
        if not is_commit:
            _refuse_late(f"the files of model `{model}`", changed_ns)

    def digest(self) -> str:
        """Reads what no earlier call has read. Raises `Unreadable`, after which another try may do, or `Changed`."""
        before = self._compare()
        try:
            digest = fingerprint(*self._directories, choose=self._choose)
        except Unreadable:
            self._compare()
            raise
        if before != self._compare():
            raise Unreadable(f"entries of `{self._directories[0]}` come and go while its files are read")
        return digest

    def _compare(self) -> list[Seen]:
        """The directories with the files, if those are what was loaded."""
        try:
            signatures, _ = self._look()
        except (FileNotFoundError, NotADirectoryError, Unreadable) as error:
            raise Changed(
                f"the files of model `{self._model}` vanished after they were loaded: {error}; {_HINT}"
            ) from error
        except OSError as error:
            raise Unreadable(str(error)) from error
        if not all(one.is_same(other) for one, other in zip(self._signatures, signatures, strict=True)):
            raise Changed(f"the files of model `{self._model}` changed after they were loaded; {_HINT}")
        return [one.places[one.home] for one in signatures]

    def _look(self) -> tuple[list[Signature], int]:
        files = chosen(self._directories, self._choose)
        looks = [look(str(one), one, [f for f in files if one in (f, f.parent)]) for one in self._directories]
        return [signature for signature, _ in looks], max(changed_ns for _, changed_ns in looks)


class Part(NamedTuple):
    """A small file that the engine has read, of a model's code or configuration."""

    file: Path
    home: Path  # the directory whose other entries count too, or the file itself
    is_commit: bool  # whether a commit of the hub says what is in it

    def look(self) -> Signature:
        """Raises `Changed` and `OSError`."""
        signature, changed_ns = look(str(self.file), self.home, [self.file])
        if not self.is_commit:
            _refuse_late(f"`{self.file}`, which the engine reads at its start, or the directory with it", changed_ns)
        return signature


def _refuse_late(what: str, changed_ns: int) -> None:
    if changed_ns < began_ns():
        return
    if changed_ns > time.time_ns() + SECOND_NS:
        raise Changed(
            f"{what} changed in the future of this host's clock, so nobody can tell whether that was before they were "
            "loaded; hint: bring the clocks of this host and of the file server to the same time, and restart the engine"
        )
    raise Changed(f"{what} changed after this engine began to start; {_HINT}")


def began_ns() -> int:
    """When this engine began to start, at the latest; by the clock of this host, however that was stepped since.

    A process that vLLM started has what its parent read, so it began with the process. The first process of an engine reads
    nothing of a model before it loads vLLM's plugins: so files may be written right before the engine is started.
    """
    since = vllm.registered_ns
    if since is None or multiprocessing.parent_process() is not None:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        began_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    else:
        began_ns = since[1]
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - began_ns
    return min(time.time_ns() - age_ns, vllm.IMPORTED_NS if since is None else since[0])
