"""Who may share KV with whom: the fields of the namespace.

Holds true: whatever changes the bytes of a block, or what a block's hash stands for, is in a field; two engines with equal
fields compute the same bytes for the same hash. What cannot be told apart is not shared: an `IdentityError` says why.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.vllm import compat
from forebay.vllm.fingerprint import Unreadable, fingerprint
from forebay.vllm.guard import logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

# How a rank's slice of a block is put together: the pages of the group's layers, unpadded, in layer order.
FORMAT = "1"

# Say nothing about the computation, and differ between equal models.
_IDLE_CONFIG_KEYS = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "architectures_source"})
# Rotary embeddings whose frequencies depend on the longest allowed prompt.
_LENGTH_DEPENDENT_ROPES = ("longrope", "dynamic", "su")


class IdentityError(Exception):
    """Blocks of this engine cannot be named so that others may trust the names."""


class Identity:
    """One engine's identity. Made once; reads the headers and samples of the weights, some milliseconds on a local disk."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadingConfig, tenant: str):
        self._vllm_config = vllm_config
        self._fields = dict(_fixed_fields(vllm_config, kv_cache_config, config)) | {"tenant": tenant}
        self._adapters: dict[tuple[int, str], Mask | None] = {}

    def fields(self) -> dict[str, str] | None:
        """The namespace's fields; None as long as vLLM's hash root is not set, which is until the engine core is made."""
        root = compat.hash_root(self._vllm_config)
        if root is None:
            return None
        if root.is_random:
            raise IdentityError(
                f"block hashes by `{root.algorithm}` start from a random root in this process, so nobody could ever find "
                "what it stores; set `--prefix-caching-hash-algo sha256`, or PYTHONHASHSEED to the same value everywhere"
            )
        return self._fields | {"hash": f"{root.algorithm}:{root.digest}"}

    def adapter_mask(self, request: LoRARequest) -> Mask | None:
        """Turns the engine's hashes into those of this adapter's weights; None if these cannot be told.

        vLLM hashes an adapter's name and path, behind which other weights may lie tomorrow. The first request of an
        adapter reads its header and samples.
        """
        if request.load_inplace:  # new weights under the same name, while requests with the old ones may still run
            return None
        adapter = (request.lora_int_id, request.lora_path)
        if adapter not in self._adapters:
            self._adapters[adapter] = _adapter_mask(request)
        return self._adapters[adapter]


Mask = Callable[[bytes], bytes]


def _adapter_mask(request: LoRARequest) -> Mask | None:
    try:
        digest = fingerprint(_directory(request.lora_path, None))
    except Unreadable as error:
        logger.warning("forebay does not cache requests of adapter `%s`: %s", request.lora_name, error)
        return None
    # Exclusive or keeps hashes as distinct as they were and as long, and costs no second hashing.
    pad = hashlib.sha256(digest.encode()).digest()

    def mask(block_hash: bytes) -> bytes:
        size = len(block_hash)
        return (int.from_bytes(block_hash) ^ int.from_bytes(pad[:size])).to_bytes(size)

    return mask


def _fixed_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadingConfig
) -> Iterator[tuple[str, str]]:
    """All fields but the hash root's, each with what it guards against."""
    model = vllm_config.model_config
    yield "engine", "vllm"
    yield "format", FORMAT
    yield "model", _short_name(model.model)
    yield "weights", _weights(vllm_config, model)
    yield "config", _config_digest(model)
    yield "dtype", str(model.dtype).removeprefix("torch.")
    yield "kv_dtype", config.model.dtype
    yield "quantization", str(model.quantization or "none")
    if any(rope in _ropes(model) for rope in _LENGTH_DEPENDENT_ROPES):
        yield "max_model_len", str(model.max_model_len)
    speculative = vllm_config.speculative_config
    if speculative is not None and (draft := getattr(speculative, "draft_model_config", None)) is not None:
        # A drafter's layers lie in the same blocks.
        yield "draft", f"{_short_name(draft.model)}:{_weights(vllm_config, draft)}:{_config_digest(draft)}"
    yield "device", compat.device(vllm_config)
    yield "layout", f"{config.kv_cache_layout or kv_cache_config.kv_cache_layout}:chunk={config.cache.blocks_per_chunk}"
    for group in config.groups:
        yield f"group.{group.group_id}", _group(kv_cache_config, group.group_id, group.tokens_per_block)
    yield "parallel", _parallel(config)


def _group(kv_cache_config: KVCacheConfig, group_id: int, tokens: int) -> str:
    group = kv_cache_config.kv_cache_groups[group_id]
    spec = group.kv_cache_spec
    layers = hashlib.sha256("\0".join(group.layer_names).encode()).hexdigest()[:16]
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    return (
        f"{type(spec).__name__}:tokens={tokens}:window={window}:page={spec.page_size_bytes}"
        f":layers={len(group.layer_names)}:{layers}"
    )


def _parallel(config: OffloadingConfig) -> str:
    """Always part of the identity: a slot holds the ranks' slices side by side, which is another order of bytes for each

    number of ranks, even where vLLM calls the pages themselves parallelism-free.
    """
    parallel = config.parallel
    shape = f"tp={parallel.tp_size}:pp={parallel.pp_size}:pcp={parallel.pcp_size}:dcp={parallel.dcp_size}"
    partition = os.environ.get("VLLM_PP_LAYER_PARTITION", "") if parallel.pp_size > 1 else ""
    return f"{shape}:replicated={int(config.replicated_layout)}" + (f":layers={partition}" if partition else "")


def _weights(vllm_config: VllmConfig, model: ModelConfig) -> str:
    """The revision where a hub names one, else a digest of what lies in the directory."""
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    if load_format == "dummy":
        return f"dummy:seed={model.seed}"
    if not os.path.exists(model.model):
        if commit := getattr(model.hf_config, "_commit_hash", None):
            return f"revision:{commit}"
        raise IdentityError(f"the revision of model `{model.model}` is not known; pin it with `--revision`")
    try:
        return f"files:{fingerprint(_directory(model.model, model.revision))}"
    except Unreadable as error:
        raise IdentityError(f"cannot tell the weights of model `{model.model}`: {error}") from error


def _directory(model: str, revision: str | None) -> Path:
    """Where the files are: the path itself, or the snapshot in the hub's cache."""
    if os.path.exists(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        for name in ("adapter_config.json", "config.json"):
            found = try_to_load_from_cache(model, name, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
    except ValueError:  # not even a name on the hub
        pass
    raise Unreadable(f"`{model}` is neither a path nor in the hub's cache")


def _config_digest(model: ModelConfig) -> str:
    """The model's configuration as it is in force, overrides included: rope, windows, heads, quantisation."""
    config: Mapping[str, Any] = model.hf_config.to_dict()
    telling = {key: value for key, value in config.items() if key not in _IDLE_CONFIG_KEYS}
    return hashlib.sha256(json.dumps(telling, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _ropes(model: ModelConfig) -> str:
    config = model.hf_text_config
    ropes = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    return json.dumps(ropes, default=str).lower()


def _short_name(model: str) -> str:
    """A local directory goes by its last name, since hosts mount it in different places."""
    return Path(model).resolve().name if os.path.exists(model) else model
