"""A digest of weights on disk, over every byte of them.

Holds true: two digests are equal only if configuration and weights are, byte for byte, as far as SHA-256 tells things apart.
A digest does not depend on paths or times, so that hosts agree on it. What was read once is kept by the file's identity
(size, times, inode, device) and read again when one of these differs; a file that changes while it is read is never named.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from forebay.vllm.guard import logger

# A read this long is worth a switch of threads; SHA-256 runs outside the interpreter's lock.
READ_BYTES = 4 << 20
# Files that are read at once: four fill a fast disk, and half of the processors stay with the engine.
MAX_READERS = 4
# A file that keeps changing is being written: after so many readings it is given up.
READINGS = 3
# A file younger than this may change again without another time stamp: its digest is not kept.
SETTLED_NS = 2_000_000_000
# The first line in the log comes after so many seconds of reading, the others so many apart.
QUIET_SECONDS = 1.0
PROGRESS_SECONDS = 30.0
# Less is read again faster than it is worth a file on the disk.
KEPT_FROM_BYTES = 4 << 20
# The digests of one directory take a few KB.
MAX_KEPT_BYTES = 4 << 20

KEPT_FILE = ".forebay-digests.json"
_FORMAT = 1
# Each JSON file may say how weights are read, as the index says which shard has which tensor and `quantize_config.json` what
# its numbers mean, unless it is known to say something else: these make tokens, which the block hashes tell, ...
_OTHER_JSON = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "generation_config.json",  # ... this one says how to sample, ...
        KEPT_FILE,  # ... and this one is our own.
    }
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
# What a trainer leaves beside the weights. vLLM goes by the same ends of names.
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


class Unreadable(Exception):
    """The weights cannot be told."""


def fingerprint(path: Path) -> str:
    """Digest of a model's or adapter's directory, or of its one file.

    Reads what no hub has named and no earlier call has read, at one to two GB/s a file: call it on a thread of its own.
    Raises `Unreadable`.
    """
    try:
        present = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        files = [path] if path.is_file() else [file for file in present if _is_weights(file.name)]
        if not files:
            raise Unreadable(f"no weights in `{path}`")
        configs = [file for file in present if file.name.endswith(".json") and file.name not in _OTHER_JSON]
        digests = _digests([*configs, *files], path if path.is_dir() else path.parent)
    except OSError as error:
        raise Unreadable(str(error)) from error
    whole = hashlib.sha256(b"forebay-weights-2")
    for file in (*configs, *files):
        whole.update(f"\0{file.name}\0{digests[file]}".encode())
    return whole.hexdigest()[:32]


def _is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS) and not name.endswith(_NO_WEIGHTS)


# ---- one file -----------------------------------------------------------------------------------------------------------


def _named_by_hub(file: Path) -> str | None:
    """The digest that is a blob's name in the hub's cache.

    Small files go by git's hash there, which is not the content's alone; and a blob that was written after its link was
    made is no longer what its name says.
    """
    if not file.is_symlink():
        return None
    blob = file.resolve()
    is_sha256 = len(blob.name) == 64 and set(blob.name) <= set("0123456789abcdef")
    if blob.parent.name != "blobs" or not is_sha256 or blob.stat().st_mtime_ns > file.lstat().st_mtime_ns:
        return None
    return blob.name


Stamp = tuple[int, ...]


def _stamp(file: Path) -> Stamp:
    """Differs once a file was written, replaced or moved here. The change time cannot be set back as the other can."""
    seen = file.stat()
    return seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino, seen.st_dev


def _read(file: Path, progress: Callable[[int], None]) -> tuple[str, Stamp]:
    """The whole file's digest, and what the file was all the while."""
    for _ in range(READINGS):
        before, digest = _stamp(file), hashlib.sha256()
        with file.open("rb", buffering=0) as opened:
            while chunk := opened.read(READ_BYTES):
                digest.update(chunk)
                progress(len(chunk))
        if _stamp(file) == before:
            return digest.hexdigest(), before
    raise Unreadable(f"`{file}` changes while it is read")


# ---- all files of a directory ---------------------------------------------------------------------------------------------


def _digests(files: list[Path], directory: Path) -> dict[Path, str]:
    digests = {file: name for file in files if (name := _named_by_hub(file))}
    kept = _load_kept(directory)
    for file in files:
        entry = kept.get(file.name)
        if file not in digests and entry is not None and entry[1:] == list(_stamp(file)):
            digests[file] = str(entry[0])
    missing = [file for file in files if file not in digests]
    if missing:
        size = sum(file.stat().st_size for file in missing)
        reading = _Reading(directory, size)
        read = dict(zip(missing, _on_threads(lambda file: _read(file, reading.went_on), missing), strict=True))
        reading.ended()
        digests |= {file: digest for file, (digest, _) in read.items()}
        now = time.time_ns()
        settled: dict[str, list[str | int]] = {
            file.name: [digest, *stamp] for file, (digest, stamp) in read.items() if max(stamp[1:3]) < now - SETTLED_NS
        }
        if settled and size >= KEPT_FROM_BYTES:
            _keep(directory, {name: kept[name] for name in kept if (directory / name).exists()} | settled)
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
                "" if self._has_spoken else "; until it knows them all, it stores and loads no KV of theirs",
            )
            self._has_spoken = True

    def ended(self) -> None:
        if self._has_spoken:
            logger.info(
                "forebay knows the weights in `%s` after %.1f s", self._directory, time.monotonic() - self._began
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


# ---- what was read before -------------------------------------------------------------------------------------------------

Kept = Mapping[str, list[str | int]]  # by file name: digest and stamp


def _load_kept(directory: Path) -> dict[str, list[str | int]]:
    """What this user or root has kept; whatever is damaged, foreign or open to others counts as nothing."""
    kept: dict[str, list[str | int]] = {}
    for place in _places(directory):
        with contextlib.suppress(OSError, ValueError, TypeError):
            kept |= _parse(_trusted_bytes(place))
    return kept


def _trusted_bytes(place: Path) -> bytes:
    descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        seen = os.fstat(descriptor)
        is_ours = seen.st_uid in (0, os.geteuid()) and not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not is_ours or not stat.S_ISREG(seen.st_mode) or seen.st_size > MAX_KEPT_BYTES:
            raise ValueError(f"`{place}` is not ours")
        return opened.read(MAX_KEPT_BYTES)


def _parse(text: bytes) -> dict[str, list[str | int]]:
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("files"), dict):
        raise ValueError("another format")
    body = json.dumps(content["files"], sort_keys=True).encode()
    if content.get("sha256") != hashlib.sha256(body).hexdigest():
        raise ValueError("damaged")
    return {str(name): list(entry) for name, entry in content["files"].items()}


def _keep(directory: Path, kept: Kept) -> None:
    """Beside the files, or in the user's cache directory where that cannot be written."""
    body = json.dumps(kept, sort_keys=True)
    text = json.dumps({"format": _FORMAT, "sha256": hashlib.sha256(body.encode()).hexdigest(), "files": kept})
    for place in _places(directory):
        with contextlib.suppress(OSError):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(place, text)
            return


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


def _places(directory: Path) -> Iterable[Path]:
    yield directory / KEPT_FILE
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):  # without a home directory there is no place
        name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]
        yield Path(home) / "forebay" / f"digests-{name}.json"
