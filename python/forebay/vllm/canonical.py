"""One text for one value, in every process and on every host.

Holds true: equal values have equal texts, and different values of what vLLM's configuration is made of have different
ones. No text depends on the order of a set, on an address in memory or on where a host keeps its files. A value without
such a text is an `Unstable`.
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
    """A value cannot be written down so that another process would write the same."""


def text(value: object, skipped: Callable[[str], frozenset[str]] = lambda _: frozenset()) -> str:
    """A readable text. `skipped` gives the fields to leave out of a dataclass, by the name of its class."""
    return _text(value, skipped, MAX_DEPTH)


def digest(text: str) -> str:
    """16 hexadecimal digits: enough to tell apart what nobody forges, and short enough to compare by eye."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    if isinstance(value, (int, float, str)):  # a subclass of these, which adds nothing that is kept
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
    """Classes and functions go by the name under which any process finds them; a method has an object beside."""
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, (type, ModuleType)):
        raise Unstable(f"`{getattr(value, '__qualname__', value)}` belongs to an object of this process")
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name or module == "__main__":
        raise Unstable(f"a `{type(value).__qualname__}` has no name that another process knows")
    return f"{module}.{name}"
