"""A digest of weights on disk that is cheap enough for every engine start.

Holds true: the digest covers the configuration, small files whole, and of larger ones the size, the safetensors header, and
512 bytes from the middle of each of up to `MAX_SAMPLES` tensors, so that weights trained anew have another digest although
shapes and sizes agree. It does not depend on paths or times, so that hosts agree on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# One read each; 4,096 of them take a fifth of a second even where a read takes 50 us.
MAX_SAMPLES = 4096
SAMPLE_BYTES = 512
# What does not come with a header is sampled in this many places, unless it is small enough to be read whole.
PLAIN_SAMPLES = 64
WHOLE_BYTES = 4 << 20
# A header is a list of tensors: the largest published ones have a few MB.
MAX_HEADER_BYTES = 256 << 20

_CONFIGS = ("config.json", "adapter_config.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")


class Unreadable(Exception):
    """The weights cannot be told."""


def fingerprint(path: Path) -> str:
    """Digest of a model's directory, or of its one file."""
    try:
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.name.endswith(_WEIGHTS))
        if not files:
            raise Unreadable(f"no weights in `{path}`")
        digest = hashlib.sha256(b"forebay-weights-1")
        for config in (path / name for name in _CONFIGS):
            if config.is_file():
                digest.update(config.read_bytes())
        budget = max(PLAIN_SAMPLES, MAX_SAMPLES // len(files))
        for file in files:
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
            _add(digest, file, budget)
    except OSError as error:
        raise Unreadable(str(error)) from error
    return digest.hexdigest()[:32]


def _add(digest: hashlib._Hash, file: Path, budget: int) -> None:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size <= WHOLE_BYTES:
            digest.update(opened.read())
            return
        if file.suffix == ".safetensors" and (header := _header(opened, size)) is not None:
            digest.update(header)
            middles = list(_tensor_middles(header))
        else:
            middles = [size * at // PLAIN_SAMPLES for at in range(PLAIN_SAMPLES)]
        for middle in middles[:: len(middles) // budget + 1]:
            digest.update(os.pread(opened.fileno(), SAMPLE_BYTES, middle))


def _header(opened: BinaryIO, size: int) -> bytes | None:
    count = int.from_bytes(os.pread(opened.fileno(), 8, 0), "little")
    return os.pread(opened.fileno(), count, 8) if count <= min(size - 8, MAX_HEADER_BYTES) else None


def _tensor_middles(header: bytes) -> Iterator[int]:
    """Where the middle of each tensor is in the file."""
    try:
        tensors = json.loads(header)
        spans = [entry["data_offsets"] for name, entry in sorted(tensors.items()) if name != "__metadata__"]
        for start, end in spans:
            yield 8 + len(header) + start + max(0, (end - start) // 2 - SAMPLE_BYTES // 2)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"a safetensors header makes no sense: {error}") from error
