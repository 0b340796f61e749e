"""Where the files of a model are: in its directory, or in the caches of the hub.

Holds true: a file of the hub is the one of the commit that was loaded; where that is not known, it is told as an error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# The full name of a commit.
_COMMIT = re.compile("[0-9a-f]{40}")


class IdentityError(Exception):
    """Blocks of this engine cannot be named so that others may trust the names."""


def commit(model: ModelConfig, cache: str | None = None) -> str | None:
    """The commit of a hub's model that was loaded, where it is known; the weights may be in a cache of their own.

    Raises `IdentityError` where the branch moved after the configuration was read, and vLLM did not keep to its commit.
    """
    if os.path.exists(model.model):
        return None
    if _COMMIT.fullmatch(revision := resolved(model.revision) or ""):
        return revision
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit or model.hf_config_path not in (None, model.model):
        return None
    # The branch, and not a file of its snapshot: some files of that may not be there.
    branch = model.revision or "main"
    refs = [place / "refs" / branch for place in repositories(model.model, cache)]
    if (moved := next((ref for ref in map(_text, refs) if ref not in (None, commit)), None)) is not None:
        raise IdentityError(
            f"revision `{branch}` of model `{model.model}` is {commit} in the configuration and {moved} in a cache of the "
            "hub: the branch moved while the engine started, or that cache is older; hint: restart the engine, or pin a "
            "commit with `--revision`"
        )
    return str(commit)


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise IdentityError(f"cannot read which commit a branch is at: {error}") from error


def resolved(revision: str | None) -> str | None:
    """The commit that vLLM made of a branch at its start, in releases that do so."""
    return getattr(revision, "resolved", None) or revision


def directories(model: str, commit: str | None, cache: str | None) -> list[Path]:
    """Where the files are: the path itself, or the snapshots in the caches of the hub, that of the weights first."""
    if os.path.exists(model):
        return [Path(model)]
    if commit is None:
        return []
    snapshots = [place / "snapshots" / commit for place in repositories(model, cache)]
    return [snapshot for snapshot in snapshots if snapshot.is_dir()]


def repositories(model: str, cache: str | None) -> list[Path]:
    """Where the caches of the hub have this model, that of the weights first."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=model, repo_type="model")
    return [
        place / folder for place in dict.fromkeys(Path(place) for place in (cache, constants.HF_HUB_CACHE) if place)
    ]


def file(model: str, name: str, revision: str | None) -> Path | None:
    """A file of a model, where it is there: in the model's directory, or in the hub's cache."""
    if os.path.exists(model):
        return path if (path := Path(model) / name).is_file() else None
    return _cached(model, name, revision)


def _cached(model: str, name: str, revision: str | None) -> Path | None:
    """A file in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, name, revision=revision)
    except ValueError:  # not even a name on the hub
        return None
    return Path(found) if isinstance(found, str) else None
