"""What one worker can be asked of itself: how its attention backend writes a page, and whether its weights are still the same.

Holds true: nothing here touches the KV cache, the weights or any other state of the engine; nothing raises; what it takes
in memory is a page of each kind and a piece of a tensor at a time. The functions are sent to vLLM's workers by name.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
import vllm

from forebay.vllm import compat
from forebay.vllm.guard import logger

# A model has a handful of kinds of layers; a hundred kinds would be something else that nobody foresaw.
MAX_KINDS = 64
# The daemon takes 2 KiB for all fields together.
MAX_FIELD = 320
ROW_BYTES = 8 << 10


# ---- how a page is written
# ------------------------------------------------------------------------------------------------


def pages_of(core: Any | None) -> str:
    """The field of the namespace: what all workers of this engine core say of their pages."""
    if core is None:
        return "unprobed:no engine core"
    try:
        ranks = compat.on_workers(core, probe)
        told = ranks[0] if len(set(ranks)) == 1 else "|".join(ranks)
    except Exception as error:  # noqa: BLE001 - the engine goes on without it
        told = _unprobed("workers", error)
    if "unprobed" in told:
        logger.info("forebay cannot see how this engine writes a page, and uses names and versions instead: %s", told)
    # Namespaces are short; whoever wants the whole finds it in the log.
    logger.debug("forebay probed the pages: %s", told)
    return told if len(told) <= MAX_FIELD else f"{told[:MAX_FIELD]}:{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def probe(worker: Any) -> str:
    """One page of each kind of layer, written with known K and V by the engine's own backend: names and a digest.

    Where a backend cannot be made to write, its name and version stand for its bytes. Some milliseconds.
    """
    try:
        kinds = dict(itertools.islice(_kinds(worker), MAX_KINDS))
    except Exception as error:  # noqa: BLE001 - the engine goes on without it
        return _unprobed("worker", error)
    told = sorted({_tell(worker, layer) for layer in kinds.values()})
    return "+".join(told)


def _kinds(worker: Any) -> Iterator[tuple[object, Any]]:
    """The layers with a KV cache; one of each backend, shape, order and type is enough."""
    for layer in reversed(compat.layers_with_cache(worker)):
        cache = layer.kv_cache
        if isinstance(cache, torch.Tensor):
            order = tuple(_order(cache)), tuple(cache.shape[1:]), cache.dtype
            yield (_backend(layer), order, getattr(layer, "kv_cache_dtype", "")), layer
        else:
            yield _backend(layer), layer


def _tell(worker: Any, layer: Any) -> str:
    name = _backend(layer)
    try:
        cache = layer.kv_cache
        if not isinstance(cache, torch.Tensor) or cache.device.type != "cpu":
            # Forebay copies nothing from other devices yet, and a mistake there could not be caught.
            raise TypeError("its cache is no tensor on a cpu")
        page = _empty_like(cache)
        compat.write_kv(worker, layer, page.view, _known)
        written = page.storage
        if not bool(written.any()):
            raise ValueError("it wrote nothing")
        shape = f"{tuple(page.view.shape)}:{page.view.stride()}:{cache.dtype}"
        return f"{name}:{hashlib.sha256(shape.encode() + written.numpy().tobytes()).hexdigest()[:16]}"
    except Exception as error:  # noqa: BLE001 - the engine goes on without it
        return _unprobed(name, error)


def _unprobed(name: str, error: Exception) -> str:
    return f"{name}:unprobed:{vllm.__version__}:{type(error).__name__}"


def _backend(layer: Any) -> str:
    what = type(getattr(layer, "impl", layer))
    return f"{what.__module__}.{what.__qualname__}"


class _Page:
    """Two blocks in memory of their own, in the order of dimensions that the engine's cache has."""

    def __init__(self, view: torch.Tensor, storage: torch.Tensor):
        self.view = view
        self.storage = storage  # all bytes, as they lie


def _order(cache: torch.Tensor) -> list[int]:
    strides: tuple[int, ...] = cache.stride()
    return sorted(range(cache.dim()), key=lambda at: (-strides[at], at))


def _empty_like(cache: torch.Tensor) -> _Page:
    shape, order = (2, *cache.shape[1:]), _order(cache)
    strides, size = [0] * cache.dim(), 1
    for at in reversed(order):
        strides[at] = size
        size *= shape[at]
    storage = torch.zeros(size * cache.element_size(), dtype=torch.uint8)
    return _Page(storage.view(cache.dtype).as_strided(shape, strides), storage)


def _known(*shape: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    """Numbers between -2 and 2 in which no two neighbours, tokens or heads are alike; the same on every machine."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return (((count * 2_654_435_761 + salt) % 4093).double() / 1024 - 2).to(dtype).view(shape)


# ---- whether weights are the same
# --------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """What a worker's weights come to."""

    digest: str
    is_whole: bool  # False where some are kept in a form of a kernel's own that cannot be read


def weight_of(core: Any | None) -> str | None:
    """A digest of what all workers of this engine core have loaded, whatever it was loaded from.

    None where it cannot be told: a kernel has a form of its own of some weights, or a worker does not answer.
    """
    try:
        weights = [] if core is None else compat.on_workers(core, weigh)
    except Exception:  # noqa: BLE001 - the engine goes on without it
        logger.exception("forebay cannot ask the workers for their weights")
        return None
    if not weights or not all(weight is not None and weight.is_whole for weight in weights):
        return None
    return hashlib.sha256("\n".join(weight.digest for weight in weights).encode()).hexdigest()[:32]


@torch.no_grad()
def weigh(worker: Any) -> Weight | None:
    """Other weights weigh otherwise. None where they cannot be read just now, as in the middle of an update.

    Guards against accidents, not against intent. Reads all weights once where they are: some GB/s on a CPU.
    """
    try:
        if not compat.are_weights_here(worker):
            return None
        sums, is_whole = hashlib.sha256(), True
        for at, model in enumerate(compat.models(worker)):
            for name, module in model.named_modules():
                for own, tensor in _own_tensors(module):
                    text = f"{at}.{name}.{own}:{tuple(tensor.shape)}:{tensor.dtype}:{_sum(tensor)}"
                    sums.update(text.encode() + b"\0")
                    if not tensor.numel() and isinstance(tensor, torch.nn.Parameter):
                        is_whole = False
                        sums.update(repr(_serials(module)).encode())
        return Weight(sums.hexdigest()[:32], is_whole)
    except Exception:  # noqa: BLE001 - the engine goes on without it
        return None


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that are saved with them: the others are caches, which the model fills as it runs."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


# Functions that hold weights in themselves, by the order in which they were first seen.
_seen: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
_counter = itertools.count()


def _serials(module: torch.nn.Module) -> list[int]:
    """A layer on a CPU gives its weights away to a function, which is made anew with other weights and never altered."""
    functions = [value for value in vars(module).values() if isinstance(value, FunctionType | partial)]
    return [_seen.setdefault(function, next(_counter)) for function in functions]


def _sum(tensor: torch.Tensor) -> list[int]:
    """The tensor as a table of 64-bit words: each row's and each column's sum counts, by its place, modulo 2^64.

    Two plain sums are four times as fast as a product for each word: 3 GB/s on one core.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // ROW_BYTES * ROW_BYTES
    table = raw[:whole].view(torch.int64).view(-1, ROW_BYTES // 8)
    sums = [_weighted(table.sum(0)), _weighted(table.sum(1))] if whole else []
    return [*sums, *raw[whole:].tolist()]


def _weighted(sums: torch.Tensor) -> int:
    numbers = torch.arange(1, sums.numel() + 1, dtype=torch.int64, device=sums.device) * -7_046_029_254_386_353_131
    factors = (numbers ^ (numbers >> 29)) * -4_658_895_280_553_007_687 | 1
    return int((sums * factors).sum())
