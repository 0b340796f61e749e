"""A digest of weights on disk, over every byte of them.

Holds true: two digests are equal only if configuration and weights are, byte for byte, as far as SHA-256 tells things apart.
A digest does not depend on paths or times, so that hosts agree on it. What was read once is kept in the user's cache by the
file's stamp (size, times, inode) and read again when one of these differs; a file that changes while it is read is never
named. The directory of the weights is only read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forebay.vllm.guard import logger

# A read this long is worth a switch of threads; SHA-256 runs outside the interpreter's lock.
READ_BYTES = 4 << 20
# Files that are read at once: four fill a fast disk, and half of the processors stay with the engine.
MAX_READERS = 4
# A file that keeps changing is being written: after so many readings it is given up.
READINGS = 3
# A file younger than this may change again without another time stamp: its digest is not kept. Some file systems count
# in seconds, and a server's clock may be behind this host's.
SETTLED_NS = 60_000_000_000
# The first line in the log comes after so many seconds of reading, the others so many apart.
QUIET_SECONDS = 1.0
PROGRESS_SECONDS = 30.0
# Less is read again faster than it is worth a file on the disk.
KEPT_FROM_BYTES = 4 << 20
# The digests of one directory take a few KB a host that has it; the oldest make room.
MAX_KEPT = 8192
MAX_KEPT_BYTES = 4 << 20

_FORMAT = 2
# Each JSON file may say how weights are read, as the index says which shard has which tensor and `quantize_config.json`
# what its numbers mean, unless it is known to say something else: these make tokens, which the block hashes tell, ...
_OTHER_JSON = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "special_tokens_map.json",
        "tekken.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "image_processor_config.json",  # ... these make inputs of images, which is a field of its own, ...
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "generation_config.json",  # ... this one says how to sample, ...
        "trainer_state.json",  # ... these say how training and its tests went, ...
        "all_results.json",
        "eval_results.json",
        "predict_results.json",
        "test_results.json",
        "train_results.json",
        ".forebay-digests.json",  # ... and an earlier Forebay wrote this one.
    }
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
# What a trainer leaves beside the weights. vLLM goes by the same ends of names, and reads no `.pth` that a trainer
# names so.
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_RANDOM_STATES = re.compile(r"rng_state(_\d+)?\.pth")

# The same weights once more, of which vLLM reads none where there are safetensors. Other files beside those may be read
# by a model's own code, as the heads of some embedding models are.
_OTHER_FORMATS = re.compile(r".*\.gguf|pytorch_model(-\d+-of-\d+)?\.bin|pytorch_model\.bin\.index\.json")

# Of the names of all files, those that count.
Choice = Callable[[Sequence[str]], list[str]]


# The files of an adapter that say how its weights are read.
_ADAPTER_CONFIGS = frozenset({"adapter_config.json", "config.json"})


class Unreadable(Exception):
    """The weights cannot be told."""


def model_files(names: Sequence[str]) -> list[str]:
    """What may be read of a model, by whatever loader: configurations first."""
    return [*filter(_is_config, names), *filter(_is_weights, names)]


def model_files_of_safetensors(names: Sequence[str]) -> list[str]:
    """What is read by loaders that take weights of another format only where there are no safetensors."""
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    return [name for name in model_files(names) if not (has_safetensors and _OTHER_FORMATS.fullmatch(name))]


def adapter_files(names: Sequence[str]) -> list[str]:
    """What vLLM reads of an adapter. It takes other files of weights only where there are no safetensors."""
    has_safetensors = "adapter_model.safetensors" in names
    idle = ("adapter_model.bin", "adapter_model.pt") if has_safetensors else ()
    return [name for name in model_files(names) if name not in idle and (_is_weights(name) or name in _ADAPTER_CONFIGS)]


def chosen(paths: Sequence[Path], choose: Choice) -> list[Path]:
    """The files that count, of directories that together hold a model or an adapter; or its one file.

    Raises `Unreadable` where none holds weights, and `OSError`.
    """
    if len(paths) == 1 and paths[0].is_file():
        return list(paths)
    present = {file.name: file for path in reversed(paths) for file in path.iterdir() if file.is_file()}
    files = [present[name] for name in choose(sorted(present))]
    if all(_is_config(file.name) for file in files):
        raise Unreadable(f"no weights in `{paths[0]}`")
    return files


def fingerprint(*paths: Path, choose: Choice = model_files) -> str:
    """Digest of a model's or adapter's directories, or of its one file.

    Reads what no earlier call has read, at one to two GB/s a file: call it on a thread of its own.
    Raises `Unreadable`.
    """
    try:
        files = chosen(paths, choose)
        digests = _digests(files, paths[0] if paths[0].is_dir() else paths[0].parent)
    except OSError as error:
        raise Unreadable(str(error)) from error
    whole = hashlib.sha256(b"forebay-weights-2")
    for file in files:
        whole.update(b"\0%b\0%b" % (os.fsencode(file.name), digests[file].encode()))
    return whole.hexdigest()[:32]


def _is_config(name: str) -> bool:
    return name.endswith(".json") and name not in _OTHER_JSON


def _is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS) and not name.endswith(_NO_WEIGHTS) and not _RANDOM_STATES.fullmatch(name)


# ---- one file
# -----------------------------------------------------------------------------------------------------------


Stamp = tuple[int, ...]


def _stamp(file: Path) -> Stamp:
    """Differs once a file was written, replaced or moved here. The change time cannot be set back as the other can.

    The device is no part of it: its number is another after each mount. Two files that agree in inode and change time, to
    the nanosecond, are on two copies of one file system, and neither was touched since.
    """
    seen = file.stat()
    return seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino


def _is_kept(stamp: Stamp, now: int) -> bool:
    """Whether the stamp will differ after the next change.

    Images of file systems give out the time of writing for that of change, in whole seconds which whoever built them
    chose: two models of one size may have one stamp there.
    """
    _, written, changed, _ = stamp
    is_chosen = written == changed and changed % 1_000_000_000 == 0
    return max(written, changed) < now - SETTLED_NS and not is_chosen


def _read(file: Path, progress: Callable[[int], None]) -> tuple[str, Stamp]:
    """The whole file's digest, and what the file was before.

    Where nothing but the time of change moves, as with each new owner or link, two equal readings in a row tell it as well.
    """
    last: tuple[str, Stamp] | None = None
    for _ in range(READINGS):
        before, digest = _stamp(file), hashlib.sha256()
        with file.open("rb", buffering=0) as opened:
            while chunk := opened.read(READ_BYTES):
                digest.update(chunk)
                progress(len(chunk))
        after, read = _stamp(file), digest.hexdigest()
        seen = {_but_changed(stamp) for stamp in (before, after, *(last or ())[1:])}
        if after == before or (last is not None and last[0] == read and len(seen) == 1):
            return read, before
        last = read, before
    raise Unreadable(f"`{file}` changes while it is read")


def _but_changed(stamp: Stamp) -> Stamp:
    size, written, _, inode = stamp
    return size, written, inode


# ---- all files of a directory
# ---------------------------------------------------------------------------------------------


def _digests(files: list[Path], directory: Path) -> dict[Path, str]:
    kept = _load_kept(directory)
    digests = {file: digest for file in files if (digest := kept.get((file.name, *_stamp(file))))}
    missing = [file for file in files if file not in digests]
    if missing:
        size = sum(file.stat().st_size for file in missing)
        reading = _Reading(directory, size)
        read = dict(zip(missing, _on_threads(lambda file: _read(file, reading.went_on), missing), strict=True))
        reading.ended()
        digests |= {file: digest for file, (digest, _) in read.items()}
        now = time.time_ns()
        fresh: Kept = {(file.name, *stamp): digest for file, (digest, stamp) in read.items() if _is_kept(stamp, now)}
        if fresh and size >= KEPT_FROM_BYTES:
            _keep(directory, fresh)
    return digests


class _Reading:
    """Says in the log what takes so long, and nothing of what takes less than a second."""

    def __init__(self, directory: Path, size: int):
        self._directory, self._size = directory, size
        self._began = time.monotonic()
        self._says_at = self._began + QUIET_SECONDS
        self._read = 0
        self._has_spoken = False
        self._lock = threading.Lock()

    def went_on(self, size: int) -> None:
        with self._lock:
            self._read += size
            if (now := time.monotonic()) < self._says_at:
                return
            self._says_at = now + PROGRESS_SECONDS
            logger.info(
                "forebay has read %.1f of %.1f GB of the weights in `%s`%s",
                self._read / 1e9,
                self._size / 1e9,
                self._directory,
                "" if self._has_spoken else "; until it has read them all, it stores and loads no KV",
            )
            self._has_spoken = True

    def ended(self) -> None:
        if self._has_spoken:
            logger.info(
                "forebay has read the weights in `%s` in %.1f s", self._directory, time.monotonic() - self._began
            )


def _on_threads(work: Callable[[Path], tuple[str, Stamp]], files: list[Path]) -> list[tuple[str, Stamp]]:
    """The work on each file, a few at a time. The threads end with the process, however much is left to read."""
    results: dict[int, tuple[str, Stamp] | Exception] = {}
    left: Iterator[tuple[int, Path]] = iter(enumerate(files))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                at, file = next(left, (-1, None))
            if file is None:
                return
            try:
                results[at] = work(file)
            except Exception as error:  # noqa: BLE001 - raised again below
                results[at] = error

    readers = max(1, min(MAX_READERS, len(files), len(os.sched_getaffinity(0)) // 2))
    threads = [threading.Thread(target=run, name="forebay-weights", daemon=True) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [result for result in results.values() if isinstance(result, Exception)]
    if failed:
        raise failed[0]
    return [result for _, result in sorted(results.items()) if not isinstance(result, Exception)]


# ---- what was read before
# -------------------------------------------------------------------------------------------------

Kept = dict[tuple[str | int, ...], str]  # the digest by file name and stamp, the oldest first


def _load_kept(directory: Path) -> Kept:
    """What this user or root has kept; whatever is damaged, foreign or open to others counts as nothing."""
    place = _place(directory)
    if place is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            return _parse(_trusted_bytes(place))
    return {}


def _trusted_bytes(place: Path) -> bytes:
    descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        seen = os.fstat(descriptor)
        is_ours = seen.st_uid in (0, os.geteuid()) and not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not is_ours or not stat.S_ISREG(seen.st_mode) or seen.st_size > MAX_KEPT_BYTES:
            raise ValueError(f"`{place}` is not a file that only this user can change")
        return opened.read(MAX_KEPT_BYTES)


def _parse(text: bytes) -> Kept:
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("files"), list):
        raise ValueError("another format")
    if content.get("sha256") != hashlib.sha256(json.dumps(content["files"]).encode()).hexdigest():
        raise ValueError("damaged")
    return {tuple(stamp): str(digest) for digest, *stamp in content["files"]}


def _keep(directory: Path, fresh: Kept) -> None:
    """Beside what others have kept of this directory meanwhile: a host that shares the user's cache has other stamps.

    Of two that do so in the same moment one is lost, and reads again at its next start.
    """
    place = _place(directory)
    if place is None:
        _say_unkept("there is no home directory")
        return
    old = {key: digest for key, digest in _load_kept(directory).items() if key not in fresh}
    files = [[digest, *key] for key, digest in (old | fresh).items()][-MAX_KEPT:]
    checked = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(place, json.dumps({"format": _FORMAT, "sha256": checked, "files": files}))
    except OSError as error:
        _say_unkept(str(error))


@functools.cache
def _say_unkept(why: str) -> None:
    logger.info(
        "forebay cannot keep the digests of weights, and reads the weights again at the next start: %s; "
        "hint: set XDG_CACHE_HOME to a directory that is kept",
        why,
    )


def _write(place: Path, text: str) -> None:
    descriptor, draft = tempfile.mkstemp(prefix=".forebay-", dir=place.parent)
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(text)
        os.replace(draft, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def kept_folder() -> Path | None:
    """In the user's cache; none without a home directory."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "forebay" if os.path.isabs(home) else None


def _place(directory: Path) -> Path | None:
    """In the user's cache: what lies beside the weights is the business of those who share them."""
    if (folder := kept_folder()) is None:
        return None
    name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]
    return folder / f"digests-{name}.json"
