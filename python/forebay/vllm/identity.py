"""Who may share KV with whom: the fields of the namespace.

Holds true: whatever changes the bytes of a block, or what a block's hash stands for, is in a field; two engines with equal
fields compute the same bytes for the same hash. Of vLLM's configuration each field counts that `judged.py` does not
excuse: a section of it is one field here, with a digest of the values behind it, which `values` lists. What cannot be told
apart is not shared: an `IdentityError` says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm import envs

from forebay.vllm import canonical, compat, elsewhere, hub, judged, processor
from forebay.vllm.fingerprint import Choice, Unreadable, chosen, model_files, model_files_of_safetensors
from forebay.vllm.guard import logger
from forebay.vllm.hub import IdentityError
from forebay.vllm.loaded import Changed, Loaded

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.request import Request

# How a rank's slice of a block is put together: the pages of the group's layers, unpadded, in layer order.
FORMAT = "1"
# The same below vLLM's own host tier: a row of that, with what its other groups left there, and the padding.
HOST_FORMAT = "vllm-host-1"

# Say nothing about the computation, and differ between equal models.
_IDLE_CONFIG_KEYS = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "architectures_source"})
# They draft by what stands in the text, and have no layers whose KV would lie in the blocks.
_DRAFTS_WITHOUT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix"})
# Rotary embeddings whose frequencies depend on the longest allowed prompt.
_LENGTH_DEPENDENT_ROPES = ("longrope", "dynamic", "su")


# Digests that an earlier start has kept are there by then: such an engine has its name with its first request.
START_SECONDS = 1.0
# Weights that cannot be read are read again, since a server of files may be away for a while: after the first pause,
# which doubles up to the last.
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 300.0


class Name(Protocol):
    """What blocks are found by, besides their hashes."""

    def fields(self) -> dict[str, str] | None: ...
    def tells_apart(self, request: Request) -> bool: ...
    def close(self) -> None: ...


class Identity:
    """One engine's identity. Made once; waits at most `START_SECONDS` for the weights, which a thread reads.

    `probe` says how this engine's attention backend writes a page, and `weigh` what the weights in its workers come to,
    which is asked where no file tells them; see `probe.py`. `form` is how the bytes of a block are put together.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: OffloadingConfig,
        tenant: str,
        probe: str = "",
        weigh: Callable[[], str | None] = lambda: None,
        form: str = FORMAT,
    ):
        self._vllm_config = vllm_config
        _refuse_what_hashes_do_not_tell(vllm_config, kv_cache_config)
        self._sections = _sections(vllm_config)
        fixed = _fixed_fields(vllm_config, kv_cache_config, config, self._sections, weigh)
        fields = dict(fixed) | {"format": form, "tenant": tenant, "probe": probe}
        self._fields = {name: value for name, value in fields.items() if isinstance(value, str)}
        self._late = {name: value for name, value in fields.items() if isinstance(value, Future)}
        wait(self._late.values(), START_SECONDS)
        self._settle()

    def close(self) -> None:
        """The name is not wanted any more: ends the thread's pauses, without waiting for it."""
        for value in self._late.values():
            value.cancel()

    def fields(self) -> dict[str, str] | None:
        """The namespace's fields; None as long as one is not known.

        That is until the engine core has set its hash root, and until the weights are read.
        """
        self._settle()
        root = None if self._late else compat.hash_root(self._vllm_config)
        if root is None:
            return None
        if root.is_random:
            raise IdentityError(
                f"block hashes by `{root.algorithm}` start from a random root in this process, so nobody could ever find "
                "what it stores; set `--prefix-caching-hash-algo sha256`, or PYTHONHASHSEED to the same value everywhere"
            )
        return self._fields | {"hash": f"{root.algorithm}:{root.digest}"}

    def values(self) -> Iterator[str]:
        """The values behind the digests, a line for each such field: for a person who compares two engines."""
        for name, values in self._sections.items():
            shown = (f"{key}={_shown(name, key, value)}" for key, value in values.items() if value != "null")
            yield f"{name}={canonical.digest(_joined(values))}: {', '.join(shown) or 'nothing'}"

    def tells_apart(self, request: Request) -> bool:
        """Whether the block hashes of this request stand for all that its KV is computed from.

        Without its prefix cache and its processor's cache vLLM spares itself the hashing of images: it names them by a
        counter of the process, whose names come again after a restart for other images. Where it takes the scales of an
        image encoder in FP8 from the images before, what it computes from an image depends on them. Where a prompt mixes
        tokens with embeddings, its hashes do not say which is which. And a session of streamed input takes tokens back
        and gets images later, of which no connector is told.
        """
        media = self._vllm_config.model_config.multimodal_config
        is_hashing_images = self._vllm_config.cache_config.enable_prefix_caching or (
            media is not None and media.mm_processor_cache_gb > 0
        )
        is_scaling_by_history = (
            media is not None and media.mm_encoder_attn_dtype == "fp8" and media.mm_encoder_fp8_scale_path is None
        )
        is_image_told = is_hashing_images and not is_scaling_by_history
        is_mixed = request.prompt_embeds is not None and request.prompt_is_token_ids is not None
        return not request.resumable and not is_mixed and (is_image_told or not request.mm_features)

    def _settle(self) -> None:
        """Takes what has become known. Raises where it became known that it cannot be."""
        for name in [name for name, value in self._late.items() if value.done()]:
            self._fields[name] = self._late[name].result()
            del self._late[name]


class GivenName:
    """Of a host tier that is told nothing of the model: whoever gives the name says with it what the blocks are made by.

    What can be told without the model's configuration counts as well: how vLLM lays out the rows, and its hash root.
    """

    def __init__(self, name: str, config: OffloadingConfig, row_bytes: int, tenant: str):
        self._fields = {
            "engine": f"vllm {compat.release()}",
            "format": f"{HOST_FORMAT}:{row_bytes}",
            "given": name,
            "kv_dtype": config.model.dtype,
            "layout": f"{config.kv_cache_layout}:chunk={config.cache.blocks_per_chunk}:canonical={config.canonical_layout}",
            "parallel": _parallel(config),
            "tenant": tenant,
        }
        for group in config.groups:
            layers = canonical.digest("\0".join(group.layer_names))
            self._fields[f"group.{group.group_id}"] = f"tokens={group.tokens_per_block}:{layers}"

    def fields(self) -> dict[str, str] | None:
        """None until the engine core has set its hash root."""
        root = compat.bare_hash_root()
        return None if root is None else self._fields | {"hash": root.hex()}

    def tells_apart(self, request: Request) -> bool:
        return True

    def close(self) -> None:
        pass


def host_form(kv_cache_config: KVCacheConfig, row_bytes: int) -> str:
    """`form` of the rows of vLLM's host tier: how long they are, and where the layers' pages lie in the memory they come from.

    Layers that share their bytes share a page of the row, and pages that are packed stay so; how many blocks there are does
    not count.
    """
    places = []
    for tensor in kv_cache_config.kv_cache_tensors:
        for at, layer in enumerate(tensor.layers):
            page, rest = divmod(tensor.offset + at * tensor.layer_stride, tensor.block_stride)
            places.append(f"{layer}:{page / kv_cache_config.num_blocks}:{rest}:{tensor.block_stride}")
    return f"{HOST_FORMAT}:{row_bytes}:{canonical.digest(','.join(places))}"


def _refuse_what_hashes_do_not_tell(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises for engines whose blocks are more than what the tokens before them make of them.

    vLLM then turns its own prefix cache off, and hashes blocks for the connector all the same.
    """
    model = vllm_config.model_config
    # Models that have nothing but states are refused by vLLM as an experiment, not for what a block depends on.
    if not model.is_prefix_caching_supported and model.attn_type != "attention_free":
        raise IdentityError("vLLM reuses no prefixes of this model, because its KV depends on more than the prefix")
    groups = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    specs = [spec for group in groups for spec in getattr(group, "kv_cache_specs", {"": group}).values()]
    if any(getattr(spec, "non_causal", False) or hasattr(spec, "rswa_window") for spec in specs):
        raise IdentityError("attention looks ahead in this model, so a block depends on tokens that come after it")


def _fixed_fields(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: OffloadingConfig,
    sections: Mapping[str, Mapping[str, str]],
    weigh: Callable[[], str | None],
) -> Iterator[tuple[str, str | Future[str]]]:
    """All fields but the hash root's, each with what it guards against. A future is of what takes time to find out."""
    model = vllm_config.model_config
    yield "engine", f"vllm {compat.release()}"
    if model.multimodal_config is not None or elsewhere.is_of_transformers(model):
        yield "transformers", compat.transformers_release()
    # For people. No model's name or path, which may be another on each host: what tells models apart follows.
    yield "model", _architecture(model)
    yield "weights", _weights(vllm_config, model, weigh)
    yield "config", _config_digest(model)
    yield "dtype", str(model.dtype).removeprefix("torch.")
    yield "kv_dtype", config.model.dtype
    yield "quantization", str(model.quantization or "none")
    draft = _draft(vllm_config)
    if any(rope in _ropes(some) for some in (model, draft) if some is not None for rope in _LENGTH_DEPENDENT_ROPES):
        yield "max_model_len", str(model.max_model_len)
    if draft is not None:
        # A drafter's layers lie in the same blocks.
        yield "draft", f"{_architecture(draft)}:{_config_digest(draft)}"
        yield "draft_weights", _weights(vllm_config, draft, weigh)
    yield "device", compat.device(vllm_config)
    yield "layout", f"{config.kv_cache_layout or kv_cache_config.kv_cache_layout}:chunk={config.cache.blocks_per_chunk}"
    for group in config.groups:
        yield f"group.{group.group_id}", _group(kv_cache_config, group.group_id, group.tokens_per_block)
    yield "parallel", _parallel(config)
    yield "code", processor.code(model)
    yield "processor", processor.processor(model)
    for name, values in sections.items():
        yield name, canonical.digest(_joined(values))


def _draft(vllm_config: VllmConfig) -> ModelConfig | None:
    """The model that drafts. vLLM gives the target's in its place to those who draft without one."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_MODEL:
        return None
    return speculative.draft_model_config


def _sections(vllm_config: VllmConfig) -> dict[str, dict[str, str]]:
    """Each section of vLLM's configuration with the texts of those of its values that count."""
    found = {field.name: getattr(vllm_config, field.name) for field in dataclasses.fields(vllm_config)}
    counted = {name: section for name, section in found.items() if name not in judged.idle("VllmConfig")}
    counted["multimodal_config"] = vllm_config.model_config.multimodal_config
    if _draft(vllm_config) is None:
        counted["speculative_config"] = None
    sections = {name.lower().removesuffix("_config"): section for name, section in counted.items()}
    return {f"settings.{name}": _section(name, section) for name, section in sections.items()} | {
        "environment": dict(judged.variables())
    }


def _section(name: str, section: object) -> dict[str, str]:
    if section is None:
        return {}
    kind, values = type(section).__qualname__, {name: section}
    if dataclasses.is_dataclass(section):
        names = frozenset(field.name for field in dataclasses.fields(section))
        values = {field: getattr(section, field, None) for field in sorted(names - judged.idle(kind))}
        if kind in judged.COUNTS and (new := sorted(judged.unjudged(kind, names))):
            logger.info(
                "forebay does not know these options of vLLM's `%s`, so engines must have equal values of them: %s",
                kind,
                ", ".join(new),
            )
    texts = {}
    for field, value in values.items():
        try:
            texts[field] = canonical.text(value, judged.idle)
        except canonical.Unstable as error:
            raise IdentityError(f"`{field}` of vLLM's {name} options cannot be compared: {error}") from error
    return texts


def _shown(section: str, key: str, value: str) -> str:
    """Keys to a store are nothing for a log."""
    return canonical.digest(value) if section == "environment" or key in judged.SECRET else value


def _joined(values: Mapping[str, str]) -> str:
    return "\n".join(f"{key}={value}" for key, value in sorted(values.items()))


def _group(kv_cache_config: KVCacheConfig, group_id: int, tokens: int) -> str:
    group = kv_cache_config.kv_cache_groups[group_id]
    spec = group.kv_cache_spec
    # All there is to know of the pages: dtypes, heads and scales, padding, states.
    pages = canonical.digest("\0".join([canonical.text(spec, judged.idle), *group.layer_names]))
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    return (
        f"{type(spec).__name__}:tokens={tokens}:window={window}:page={spec.page_size_bytes}"
        f":layers={len(group.layer_names)}:{pages}"
    )


def _parallel(config: OffloadingConfig) -> str:
    """Always part of the identity: a slot holds the ranks' slices side by side, which is another order of bytes for each

    number of ranks, even where vLLM calls the pages themselves parallelism-free.
    """
    parallel = config.parallel
    shape = f"tp={parallel.tp_size}:pp={parallel.pp_size}:pcp={parallel.pcp_size}:dcp={parallel.dcp_size}"
    return f"{shape}:replicated={int(config.replicated_layout)}"


def _weights(vllm_config: VllmConfig, model: ModelConfig, weigh: Callable[[], str | None]) -> str | Future[str]:
    """A digest of all files of weights, else the revision where a hub names one, else what lies in the workers."""
    if (why := elsewhere.why_elsewhere(model)) is not None:
        raise IdentityError(
            f"the files beside the configuration of model `{model.model}` do not identify its KV: {why}; hint: run "
            "this model without forebay"
        )
    load_format = compat.load_format(vllm_config, model)
    if load_format == "dummy":
        return f"dummy:seed={model.seed}"
    is_own = elsewhere.is_own(module := elsewhere.module_of(model))
    if not is_own or not compat.loads_from_directory(load_format, model):
        if (weight := weigh()) is None:
            what = f"`--load-format {load_format}`" if is_own else f"the class in `{module}`, which is not vLLM's,"
            raise IdentityError(
                f"forebay can identify the weights of {what} neither by files nor in the workers; hint: load the model from "
                "its directory, by a class of vLLM's"
            )
        return f"workers:{load_format}:{weight}"
    if envs.VLLM_USE_MODELSCOPE and not os.path.exists(model.model):
        raise IdentityError(
            f"vLLM takes model `{model.model}` from ModelScope, where forebay cannot see which files it reads; hint: give "
            "the path of its directory as the model"
        )
    cache = vllm_config.load_config.download_dir
    commit = hub.commit(model, cache)
    directories = hub.directories(model.model, commit, cache)
    choose = model_files_of_safetensors if compat.prefers_safetensors(load_format) else model_files
    if not os.path.exists(model.model) and not _hold_weights(directories, choose):
        # A revision says the same as the files, but it is the one of the configuration.
        if commit:
            return f"revision:{commit}"
        raise IdentityError(
            f"model `{model.model}` is neither a path nor known by its revision; hint: pin it with `--revision`, and leave "
            "its directory where it is while the engine starts"
        )
    try:
        loaded = Loaded(model.model, directories, choose, is_commit=not os.path.exists(model.model))
    except Changed as error:
        raise IdentityError(str(error)) from error
    digest: Future[str] = Future()

    def read() -> None:
        pause, said = FIRST_PAUSE_SECONDS, ""
        while not digest.done():
            try:
                told = f"files:{loaded.digest()}"
            except Unreadable as error:
                if said != str(error):
                    said = str(error)
                    logger.warning(
                        "forebay cannot identify the weights of model `%s`, and tries again: %s", model.model, said
                    )
                with contextlib.suppress(futures.TimeoutError, futures.CancelledError):
                    digest.result(pause)
                pause = min(2 * pause, LAST_PAUSE_SECONDS)
            except Changed as error:
                with contextlib.suppress(futures.InvalidStateError):
                    digest.set_exception(IdentityError(str(error)))
            except BaseException as error:  # noqa: BLE001 - raised where the digest is asked for
                with contextlib.suppress(futures.InvalidStateError):
                    digest.set_exception(error)
            else:
                with contextlib.suppress(futures.InvalidStateError):  # the engine ended meanwhile
                    digest.set_result(told)

    threading.Thread(target=read, name="forebay-weights", daemon=True).start()
    return digest


def _hold_weights(directories: list[Path], choose: Choice) -> bool:
    try:
        return bool(directories) and bool(chosen(directories, choose))
    except (OSError, Unreadable):
        return False


def _config_digest(model: ModelConfig) -> str:
    """The model's configuration as it is in force, overrides included: rope, windows, heads, quantisation."""
    try:
        return canonical.digest(canonical.text(_telling(model.hf_config.to_dict())))
    except canonical.Unstable as error:
        raise IdentityError(f"the configuration of model `{model.model}` cannot be compared: {error}") from error


def _telling(config: Any) -> Any:
    """A model's configuration, and those of its parts, without what differs between equal models."""
    if isinstance(config, Mapping):
        return {key: _telling(value) for key, value in config.items() if key not in _IDLE_CONFIG_KEYS}
    return config


def _ropes(model: ModelConfig) -> str:
    config = model.hf_text_config
    ropes = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    return json.dumps(ropes, default=str).lower()


def _architecture(model: ModelConfig) -> str:
    return ",".join(getattr(model.hf_config, "architectures", None) or ["unknown"])
