"""Digests of the code that comes with a model, and of the files that configure its processor of images.

Invariant: two engines with equal digests run the same code, and make the same input of the same image, sound or video.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.vllm import canonical, hub
from forebay.vllm.hub import IdentityError
from forebay.vllm.loaded import Changed, Part

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Files that a model's processor of images, sound and video reads, beside the model's own configuration.
_FILES = (
    "image_processor_config.json",
    "params.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "video_preprocessor_config.json",
)
# The keys of the tokenizer's file that choose the processor. The rest affects tokens, which block hashes identify.
_TOKENIZER_FILE, _TOKENIZER_KEYS = "tokenizer_config.json", ("auto_map", "processor_class")
_CHANGES = "a file of the model's configuration changes while it is read; hint: restart the engine"
# A reference to code: a class in a module of this repository or another one.
_REFERENCE = re.compile(r'"((?:[^"]*--)?[\w.]+)\.\w+"')


def code(model: ModelConfig) -> str:
    """Digest of the code that comes with the model and is run; code from a hub is read in the hub's cache."""
    if not model.trust_remote_code:
        return "none"
    folders = {Path(model.model): False} if os.path.isdir(model.model) else {}
    for home, revision, reference in _references(model):
        repository, _, module = reference.rpartition("--")
        revision = model.code_revision or (None if repository else revision)
        if (file := hub.file(repository or home, f"{module}.py", revision)) is not None:
            folders[file.parent] = not os.path.exists(repository or home)
    parts = [Part(file, folder, is_commit) for folder, is_commit in folders.items() for file in folder.glob("*.py")]
    return _digest_of(sorted(parts, key=lambda part: part.file.name))


def processor(model: ModelConfig) -> str:
    """Digest of the files that choose and configure the processor of images, sound and video."""
    media = model.multimodal_config
    if media is None:
        return "none"
    scales = media.mm_encoder_fp8_scale_path
    scaled = [Part(Path(scales), Path(scales), is_commit=False)] if scales else []
    chosen = sorted(_choice(part) for _, part in _parts(model, (_TOKENIZER_FILE,)))
    return _digest_of([part for _, part in _parts(model, _FILES)] + scaled, chosen)


def _places(model: ModelConfig) -> list[tuple[str, str | None]]:
    """Where the processor's files are: beside the model's, and beside the tokenizer's if that is elsewhere."""
    place = (model.model, hub.commit(model) or model.revision)
    if (model.tokenizer or model.model, model.tokenizer_revision) == (model.model, model.revision):
        return [place]
    return list(dict.fromkeys([place, (model.tokenizer or model.model, hub.resolved(model.tokenizer_revision))]))


def _parts(model: ModelConfig, names: Sequence[str]) -> list[tuple[tuple[str, str | None], Part]]:
    """The files with these names that exist, each with its place."""
    found = [(place, hub.file(place[0], name, place[1])) for place in _places(model) for name in names]
    return [(place, Part(file, file.parent, not os.path.exists(place[0]))) for place, file in found if file is not None]


def _choice(tokenizer: Part) -> str:
    """The part of the tokenizer's file that chooses the processor."""
    read = _json(tokenizer)
    return canonical.text({key: read[key] for key in _TOKENIZER_KEYS if key in read})


def _references(model: ModelConfig) -> Iterator[tuple[str, str | None, str]]:
    """The code that the files of model, tokenizer and processor name: (place, revision, name)."""
    maps = [(_places(model)[0], getattr(model.hf_config, "auto_map", None) or {})]
    for place, part in _parts(model, (*_FILES, _TOKENIZER_FILE)):
        maps += [(place, found) for found in _auto_maps(_json(part))]
    for (home, revision), found in maps:
        for reference in _REFERENCE.findall(json.dumps(found, default=str)):
            yield home, revision, reference


def _auto_maps(read: Any) -> Iterator[Any]:
    """All values of `auto_map`, at every level."""
    for key, value in read.items() if isinstance(read, Mapping) else ():
        yield from [value] if key == "auto_map" else _auto_maps(value)


def _json(part: Part) -> Mapping[str, Any]:
    try:
        before = part.look()
        read = json.loads(part.file.read_bytes())
        is_same = before.is_same(part.look())
    except (OSError, ValueError, Changed) as error:
        raise IdentityError(f"cannot read the model's configuration files: {error}") from error
    if not is_same:
        raise IdentityError(_CHANGES)
    return read if isinstance(read, Mapping) else {}


def _digest_of(parts: Sequence[Part], beside: Sequence[str] = ()) -> str:
    try:
        before = [part.look() for part in parts]
        lines = [f"{part.file.name} {hashlib.sha256(part.file.read_bytes()).hexdigest()}" for part in parts]
        after = [part.look() for part in parts]
    except (OSError, Changed) as error:
        raise IdentityError(f"cannot read the model's configuration files: {error}") from error
    if not all(one.is_same(other) for one, other in zip(before, after, strict=True)):
        raise IdentityError(_CHANGES)
    return canonical.digest("\n".join([*lines, *beside]))
