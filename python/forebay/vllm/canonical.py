"""One text per value, the same in every process and on every host.

Invariants: equal values have equal texts. Different values of the types in vLLM's configuration have different
texts. No text depends on the order of a set, on an address in memory or on where a host keeps its files. A value
without such a text raises `Unstable`.
"""

from __future__ import annotations

import dataclasses
import enum
import fractions
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from types import ModuleType
from typing import Any

# Configurations nest a few levels; a value that contains itself would never end.
MAX_DEPTH = 32


class Unstable(Exception):
    """The value has no text that another process would write identically."""


def text(value: object, skipped: Callable[[str], frozenset[str]] = lambda _: frozenset()) -> str:
    """A readable text. `skipped` gives the fields to leave out of a dataclass, by the name of its class."""
    return _text(value, skipped, MAX_DEPTH)


def digest(text: str) -> str:
    """16 hexadecimal digits: enough to distinguish values that nobody forges, and short enough to compare by eye."""
    # Names of files need not be UTF-8.
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _text(value: Any, skipped: Callable[[str], frozenset[str]], depth: int) -> str:
    if depth == 0:
        raise Unstable("it is nested too deeply")

    def inner(some: object) -> str:
        return _text(some, skipped, depth - 1)

    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return json.dumps(value)
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if isinstance(value, (bytes, bytearray)):
        return f"bytes({bytes(value).hex()})"
    if isinstance(value, (int, float, str)):  # a subclass of these, without additional state that is kept
        return json.dumps(kind.__mro__[-2](value))
    if isinstance(value, fractions.Fraction) or (kind.__module__ == "torch" and kind.__name__ in ("dtype", "device")):
        return str(value)
    if isinstance(value, PurePath):
        raise Unstable(f"`{value}` is a path of this host")
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "to_dict"):
        names = sorted({field.name for field in dataclasses.fields(value)} - skipped(kind.__qualname__))
        return f"{kind.__qualname__}({', '.join(f'{name}={inner(getattr(value, name, None))}' for name in names)})"
    if not isinstance(value, type) and callable(getattr(value, "to_dict", None)):  # transformers' configurations
        return f"{kind.__qualname__}({inner(value.to_dict())})"
    if isinstance(value, Mapping):
        pairs = sorted((inner(key), inner(some)) for key, some in value.items())
        return f"{{{', '.join(f'{key}: {some}' for key, some in pairs)}}}"
    if isinstance(value, AbstractSet):
        return f"{{{', '.join(sorted(map(inner, value)))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(inner, value))}]"
    return _name_of(value)


def _name_of(value: Any) -> str:
    """Classes and functions are written by their import name; a method also depends on its object."""
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, (type, ModuleType)):
        raise Unstable(f"`{getattr(value, '__qualname__', value)}` belongs to an object of this process")
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name or module == "__main__":
        raise Unstable(f"a `{type(value).__qualname__}` has no name that another process knows")
    return f"{module}.{name}"
