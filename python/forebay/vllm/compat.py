"""Everything that depends on vLLM's version. It tests for names that exist, not for a version number.

Invariant: the rest of the package uses vLLM only through its documented connector and offloading interfaces, and
through this file; `missing` names what an installed vLLM lacks.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from weakref import WeakSet

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from forebay.vllm.names import SPEC, SPEC_MODULE, TIER, TIER_MODULE
from forebay.vllm.settings import TIERING_OPTIONS, VLLM_OPTIONS, own, passed_on
from forebay.vllm.stores import Shape

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        GroupOffloadConfig,
        OffloadingConnectorScheduler,
    )
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingManager, ReqContext
    from vllm.v1.outputs import KVConnectorOutput

SCHEDULER = KVConnectorRole.SCHEDULER

# Slots in stock: 512 blocks of 16 tokens are a step of 8,192 tokens, vLLM's usual largest. More would be memory that no
# engine uses.
MAX_STOCK_BLOCKS = 512

Slots = TypeVar("Slots")


# ---- configuration
# ----------------------------------------------------------------------------------------------------


def complete(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> tuple[VllmConfig, list[str]]:
    """A copy of the configuration for vLLM's part of the connector, and the options that were removed from it.

    vLLM reads the spec's name in the front end, the scheduler and the workers. The engine's own configuration does not
    change: everything in one process shares it, and each reader must find the same options and warn of the same ones.
    """
    extra, warnings = _passed_on(vllm_config, kv_cache_config, VLLM_OPTIONS)
    filled = {
        "spec_name": SPEC,
        "spec_module_path": SPEC_MODULE,
        # Drawn once for each start of an engine, before its processes are: all of them have the same, whatever
        # executor starts them and whoever chose the engine's id.
        "incarnation": vllm_config.instance_id,
        # Before it sleeps, an engine waits for its device alone, and then unmaps the tensors.
        "may_sleep": vllm_config.model_config.enable_sleep_mode,
    }
    return _with_extra(vllm_config, extra | filled), warnings


def complete_tiering(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> tuple[VllmConfig, list[str]]:
    """The same for vLLM's own host tier with Forebay's pool as the first tier below it."""
    assert vllm_config.kv_transfer_config is not None
    extra, warnings = _passed_on(vllm_config, kv_cache_config, TIERING_OPTIONS)
    settings = own(extra)
    theirs = {key: value for key, value in extra.items() if key not in settings}
    tier = settings | {"type": TIER, "module_path": TIER_MODULE}
    tiers = [tier, *theirs.get("secondary_tiers", ())]
    return _with_extra(
        vllm_config, {"spec_name": "TieringOffloadingSpec"} | theirs | {"secondary_tiers": tiers}
    ), warnings


def _passed_on(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None, options: Mapping[str, str | None]
) -> tuple[dict[str, Any], list[str]]:
    assert vllm_config.kv_transfer_config is not None
    extra, warnings = passed_on(vllm_config.kv_transfer_config.kv_connector_extra_config, options)
    if kv_cache_config is not None and len(kv_cache_config.kv_cache_groups) > 1:
        for key in ("blocks_per_chunk", "block_size"):
            if extra.pop(key, None) is not None:
                warnings.append(f"`{key}` is ignored: it needs a model with one kv cache group")
    return extra, warnings


def _with_extra(vllm_config: VllmConfig, extra: dict[str, Any]) -> VllmConfig:
    completed = copy.copy(vllm_config)
    completed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    assert completed.kv_transfer_config is not None
    completed.kv_transfer_config.kv_connector_extra_config = extra
    return completed


def _callers(name: str = "self") -> Iterator[Any]:
    """The objects whose methods are running in this thread, the innermost first; vLLM passes them to nobody. With
    `"cls"`, the classes whose class methods are running."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals.get(name)
        frame = frame.f_back


def has_side_by_side_layers(connector: type[KVConnectorBase_V1]) -> bool:
    """Whether to ask vLLM for a KV cache in which all layers of a block lie side by side: on NVIDIA GPUs, which copy such
    a block in one piece. Not as a child of `MultiConnector`: it ends the engine if two children ask for different
    layouts."""
    from vllm.platforms import current_platform

    asking = (asker for asker in _callers("cls") if isinstance(asker, type))
    is_alone = all(issubclass(connector, asker) for asker in asking if issubclass(asker, KVConnectorBase_V1))
    return bool(is_alone and current_platform.is_cuda())


def transfers(connector: KVConnectorBase_V1, vllm_config: VllmConfig) -> list[KVTransferConfig]:
    """Our transfer configuration, and those of the connectors that make ours; vLLM's scheduler uses the last.

    `MultiConnector` gives each child its own configuration, which has no reference to the engine's. So this function
    searches the callers for the connectors; each has its configuration before it makes others.
    """
    own = vllm_config.kv_transfer_config
    assert own is not None
    makers = [caller for caller in _callers() if isinstance(caller, KVConnectorBase_V1) and caller is not connector]
    return [own, *(maker._kv_transfer_config for maker in makers if maker._kv_transfer_config is not own)]


def unsupported(vllm_config: VllmConfig, transfer: KVTransferConfig) -> str | None:
    """Why Forebay cannot serve this engine, None if it can. `transfer` is what vLLM's scheduler uses."""
    if absent := missing():
        return f"this vLLM lacks {', '.join(absent)}; vLLM 0.32 or newer is needed"
    if (spans := _spans_hosts(vllm_config)) is not None:
        return spans
    if (role := _unsafe_role(transfer)) is not None:
        return role
    if transfer.kv_load_failure_policy != "recompute":
        return (
            f"`{transfer.kv_connector}` has `kv_load_failure_policy` `{transfer.kv_load_failure_policy}`, with which a load "
            "that fails ends its request\n"
            f'hint: write `"kv_load_failure_policy":"recompute"` beside `"kv_connector":"{transfer.kv_connector}"`'
        )
    return None


def unsupported_tiering(
    vllm_config: VllmConfig, transfer: KVTransferConfig, shapes: Sequence[Shape], chunk: int
) -> str | None:
    """Why Forebay cannot be a tier of this engine. A failure between pool and host tier never reaches a request."""
    if absent := missing():
        return f"this vLLM lacks {', '.join(absent)}; vLLM 0.32 or newer is needed"
    if chunk > 1 and not all(shape.is_full for shape in shapes):
        return (
            "vLLM stores chunks of a sliding window with some of their blocks missing\n"
            "hint: leave out `blocks_per_chunk` and `block_size`"
        )
    return _spans_hosts(vllm_config) or _unsafe_role(transfer)


def _spans_hosts(vllm_config: VllmConfig) -> str | None:
    parallel = vllm_config.parallel_config
    hosts = getattr(parallel, "nnodes_within_dp", 1)
    if hosts > 1:
        return f"the engine spans {hosts} hosts, and each host's pool holds the slices of its own ranks only"
    if str(parallel.distributed_executor_backend).lower() == "ray" and parallel.world_size > _local_devices():
        return "the engine has more ranks than this host has devices, so it spans hosts"
    return None


def _unsafe_role(transfer: KVTransferConfig) -> str | None:
    if transfer.is_kv_consumer:
        return None
    return (
        f"with `kv_role` `{transfer.kv_role}` vLLM may hand a block to a load while a step still writes it\n"
        'hint: write `"kv_role":"kv_both"` into --kv-transfer-config'
    )


def _local_devices() -> int:
    from vllm.platforms import current_platform

    return int(current_platform.device_count())


# ---- scheduler side ------------------------------------------------------------------------------------------------


def group_shapes(scheduler: OffloadingConnectorScheduler, *, is_replicated: bool) -> list[Shape]:
    """The groups as vLLM's offloading scheduler sees them."""
    return [
        Shape(
            group=group.group_idx,
            window=_window(group, min(other.tokens_per_chunk for other in scheduler.config.kv_group_configs)),
            tokens_per_block=group.tokens_per_chunk,
            hashes_per_block=group.hashes_per_chunk,
            is_replicated=is_replicated,
        )
        for group in scheduler.config.kv_group_configs
    ]


def _window(group: GroupOffloadConfig, tokens: int) -> int | None:
    """`tokens` are those of the smallest chunk of all groups."""
    window = group.sliding_window_size_in_chunks
    if window is None:
        return None
    # Of a draft model's group vLLM looks up a chunk behind the prefix, too: the daemon had better look at all.
    if getattr(group, "is_eagle_group", False):
        return 0
    # A prefix may end inside a chunk, a token before the end of a smaller one.
    reach = getattr(group, "load_window_size_in_chunks", None)
    return reach(tokens - 1) if reach else window + 1


def stock_blocks(vllm_config: VllmConfig, shapes: Sequence[Shape], *, is_prompt_only: bool) -> int:
    """Slots of each group to keep ready: as many as one step can fill.

    These are the blocks of the step's tokens, and one more for each request that may have begun a block in an earlier
    step: each request that generates, if generated blocks are stored, and each prompt that is computed in parts, of
    which there is usually one.
    """
    scheduler = vllm_config.scheduler_config
    tokens = scheduler.max_num_batched_tokens
    has_one_part = is_prompt_only and not scheduler.long_prefill_token_threshold
    begun = 1 if has_one_part else min(tokens, scheduler.max_num_seqs)
    return min(MAX_STOCK_BLOCKS, tokens // min(shape.tokens_per_block for shape in shapes) + begun)


def jobs_with_slots(metadata: KVConnectorMetadata, kind: type[Slots]) -> Iterator[tuple[int, Slots, bool]]:
    """Every job of a step, loads first: its slots, and whether it reads them."""
    assert isinstance(metadata, OffloadingConnectorMetadata)
    for job_id, job in metadata.load_jobs.items():
        assert isinstance(job.src_spec, kind)
        yield job_id, job.src_spec, True
    for job_id, job in metadata.store_jobs.items():
        assert isinstance(job.dst_spec, kind)
        yield job_id, job.dst_spec, False


def generated_tokens(output: SchedulerOutput) -> int:
    """How many tokens of a step are not prompt tokens: those of requests that have already generated some."""
    cached = output.scheduled_cached_reqs
    generating = (name for name, count in zip(cached.req_ids, cached.num_output_tokens, strict=True) if count)
    return sum(output.num_scheduled_tokens[name] for name in generating)


def new_tokens(output: SchedulerOutput) -> int:
    """How many tokens of a step are of prompts of which no more were computed or loaded before than the step computes."""
    cached = output.scheduled_cached_reqs
    begun = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
    starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    starts += [(name, start) for name, start, generated in begun if not generated]
    counts = ((output.num_scheduled_tokens[name], start) for name, start in starts)
    return sum(count for count, start in counts if count >= start)


def completed_jobs(connector_output: KVConnectorOutput) -> Mapping[int, int]:
    """How many workers report each job in this step."""
    metadata = connector_output.kv_connector_worker_meta
    return metadata.completed_jobs if isinstance(metadata, OffloadingWorkerMetadata) else {}


def jobs_under_way(scheduler: OffloadingConnectorScheduler) -> Mapping[int, int]:
    """vLLM's own jobs, and how many workers have yet to report each."""
    return {job_id: job.pending_count for job_id, job in scheduler._jobs.items()}


def forget_left_windows(scheduler: OffloadingConnectorScheduler) -> None:
    """To be called before a reset of the cache. After a reset, vLLM stores the KV of running requests once more.

    This keeps vLLM from storing a block again that was stored and that the sliding window has left since: vLLM still
    knows the block's number, but the block may hold another request's KV by then.
    """
    for status in scheduler._req_status.values():
        for group in scheduler._sliding_window_groups:
            state = status.group_states[group]
            stored = state.next_stored_chunk_idx * scheduler.config.blocks_per_chunk
            state.block_ids[:stored] = [0] * min(stored, len(state.block_ids))


def may_load_from_host(context: ReqContext) -> bool:
    """Whether the request's own options (`kv_load_tiers`) let it load from host memory."""
    from vllm.v1.kv_offload.base import Locality, Medium

    return context.load_tier_filter.allows(Medium.CPU, Locality.LOCAL)


Tier = TypeVar("Tier")


def tier_of(manager: OffloadingManager, kind: type[Tier]) -> Tier:
    """The tier of this kind below vLLM's host tier. Raises if the requested spec makes none."""
    found = [tier for tier in getattr(manager, "secondary_tiers", ()) if isinstance(tier, kind)]
    if not found:
        raise ValueError("`spec_name` must be `TieringOffloadingSpec`, or a class that derives from it")
    return found[0]


def tier_count(manager: OffloadingManager) -> int:
    """How many tiers are below vLLM's host tier."""
    return len(getattr(manager, "secondary_tiers", ()))


def key_positions(context: ReqContext) -> Mapping[bytes, int]:
    """The keys of a request that vLLM has named so far, each with the number of tokens up to its end."""
    return cast("Mapping[bytes, int]", context._offload_key_positions)


def new_stats() -> OffloadingConnectorStats:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    return OffloadingConnectorStats()


# ---- adapters ------------------------------------------------------------------------------------------------------


class HearsOfAdapters(Protocol):
    """Those to call before the engine core of this process makes its workers load an adapter."""

    def adapter_loads(self, request: LoRARequest) -> None: ...


_hearers: WeakSet[HearsOfAdapters] = WeakSet()


def hear_of_adapters(hearer: HearsOfAdapters) -> bool:
    """Registers for adapters that a server loads without a request. False if this vLLM has no place for that."""
    from vllm.v1.engine.core import EngineCore

    add_lora = getattr(EngineCore, "add_lora", None)
    if add_lora is None:
        return False
    if not hasattr(add_lora, "__wrapped__"):

        @functools.wraps(add_lora)
        def tell(self: EngineCore, lora_request: LoRARequest) -> bool:
            for each in list(_hearers):
                each.adapter_loads(lora_request)
            return bool(add_lora(self, lora_request))

        EngineCore.add_lora = tell  # type: ignore[method-assign]
    _hearers.add(hearer)
    return True


# ---- metadata for the workers --------------------------------------------------------------------------------------


@dataclass
class LostLoads(OffloadingConnectorMetadata):
    """A step without jobs, and the requests whose load will never come."""

    requests: frozenset[str] = frozenset()


def metadata_without_jobs(lost: frozenset[str]) -> OffloadingConnectorMetadata:
    return LostLoads(load_jobs={}, store_jobs={}, jobs_to_flush=None, requests=lost)


def lost_loads(metadata: KVConnectorMetadata | None) -> frozenset[str]:
    return metadata.requests if isinstance(metadata, LostLoads) else frozenset()


# ---- identity ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HashRoot:
    """How this process names blocks."""

    algorithm: str
    digest: str  # of two chained blocks of fixed tokens
    is_random: bool


def hash_root(vllm_config: VllmConfig) -> HashRoot | None:
    """Runs the engine's own hash with its current root; None if the engine core has not set it yet."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    if not hasattr(kv_cache_utils, "NONE_HASH"):
        return None
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    hash_function = get_hash_fn_by_name(algorithm)
    first = kv_cache_utils.hash_block_tokens(hash_function, None, range(16), (("cache_salt", "forebay"),))
    second = kv_cache_utils.hash_block_tokens(hash_function, first, range(16, 32), None)
    seed = os.environ.get("PYTHONHASHSEED") or getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    is_random = seed is None or bytes(hash_function(seed)) != kv_cache_utils.NONE_HASH
    return HashRoot(algorithm, second.hex(), is_random)


def bare_hash_root() -> bytes | None:
    """Where the chains of block hashes of this process begin; None if the engine core has not set it yet."""
    from vllm.v1.core import kv_cache_utils

    root = getattr(kv_cache_utils, "NONE_HASH", None)
    return None if root is None else bytes(root)


def release() -> str:
    """vLLM's minor release, within which KV is assumed to be the same; between releases, the whole version."""
    return _minor(str(importlib.import_module("vllm.version").__version__))


def transformers_release() -> str:
    """As `release`, for Transformers, which prepares the input of images and runs models that vLLM has no class for."""
    return _minor(str(importlib.import_module("transformers").__version__))


def _minor(name: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(name)
    except InvalidVersion:
        return name
    return str(version) if version.is_prerelease else f"{version.major}.{version.minor}"


def device(vllm_config: VllmConfig) -> str:
    """What determines how an attention backend orders a page's bytes, besides the layout's name."""
    from vllm.platforms import current_platform

    backend = getattr(vllm_config.attention_config.backend, "name", "auto")
    if current_platform.is_cpu():
        return f"cpu:{platform.machine()}:{_cpu_kernels(vllm_config)}:{backend}"
    return f"{current_platform.device_type}:{current_platform.get_device_capability()}:{backend}"


def _cpu_kernels(vllm_config: VllmConfig) -> str:
    """The CPU attention's instruction set: some pack keys in an order of their own."""
    try:
        kernels = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        model, cache = vllm_config.model_config, vllm_config.cache_config
        return str(kernels._get_attn_isa(model.dtype, cache.block_size, model.get_head_size()))
    except (ImportError, AttributeError):
        return "unknown"


# ---- the workers, seen from the scheduler --------------------------------------------------------------------------

# vLLM's own calls for new weights after which more calls follow.
WEIGHTS_UNDER_WAY = frozenset({"start_weight_update", "start_draft_weight_update", "update_weights"})
# vLLM's own calls after which the weights are new.
WEIGHTS_LOADED = frozenset({"reload_weights", "load_model", "finish_weight_update"})


def engine_core() -> Any | None:
    """The engine core whose constructor is making this connector, None if there is none.

    Whatever users do to the workers passes through the engine core. vLLM passes it to no connector, so this function
    searches the callers. For the probe alone, the handshake between workers and scheduler would be enough; but below
    `MultiConnector`, all children get the handshake of one child only.
    """
    kind = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)
    return next((caller for caller in _callers() if kind is not None and isinstance(caller, kind)), None)


def on_workers(core: Any, function: Callable[[Any], Any]) -> list[Any]:
    """The function's result for each worker, by rank. The workers must be idle."""
    return list(core.model_executor.collective_rpc(function))


# vLLM's formats whose loaders read the files of the model's directory; `npcache` reads its own copy.
_READ_THE_DIRECTORY = frozenset(
    ("auto", "fastsafetensors", "hf", "instanttensor", "mistral", "pt", "safetensors")
    + ("runai_streamer", "runai_streamer_sharded", "sharded_state")
)


def load_format(vllm_config: VllmConfig, model: ModelConfig) -> str:
    """The format by which this model is loaded: a drafter may have one of its own."""
    speculative = vllm_config.speculative_config
    own = getattr(speculative, "draft_load_config", None) if model is not vllm_config.model_config else None
    config = own or vllm_config.load_config
    return str(getattr(config.load_format, "value", config.load_format))


def loads_from_directory(name: str, model: ModelConfig) -> bool:
    """Whether the loader of this format reads the files of the model's directory: a plugin's may read anything.

    A plugin may also replace one of vLLM's loaders. For a model in object storage, the directory has only files that
    describe the model, and `model_weights` says where the weights are.
    """
    if getattr(model, "model_weights", ""):
        return False
    package = "vllm.model_executor.model_loader"
    loader = getattr(sys.modules.get(package), "_LOAD_FORMAT_TO_MODEL_LOADER", {}).get(name)
    return name in _READ_THE_DIRECTORY and (loader is None or loader.__module__.startswith(f"{package}."))


def prefers_safetensors(name: str) -> bool:
    """Whether this format's loader, which reads directories, takes other files only if there are no safetensors."""
    return name != "pt"


def weights_are_asleep(core: Any) -> bool:
    """Whether reading the weights would touch memory that was freed."""
    return "weights" in getattr(core.model_executor, "sleeping_tags", ())


def holds_kv(kv_cache_manager: KVCacheManager) -> bool:
    """Whether requests or the engine's own prefix cache hold any KV."""
    pools = {manager.block_pool for manager in kv_cache_manager.coordinator.single_type_managers}
    return any(
        pool.num_gpu_blocks - pool.get_num_free_blocks() > 1 or len(pool.cached_block_hash_to_block) for pool in pools
    )


# ---- one worker, seen from itself ------------------------------------------------------------------------------------


def models(worker: Any) -> list[torch.nn.Module]:
    """The model and its drafter, if there is one."""
    return [model for model in (worker.get_model(), worker.get_draft_model()) if model is not None]


def are_weights_here(worker: Any) -> bool:
    """Whether the weights are in memory; in a sleeping engine they are not."""
    backend = getattr(worker, "_sleep_mode_backend", None)
    return backend is None or backend.state() == "RUNNING"


def layers_with_cache(worker: Any) -> list[Any]:
    """All layers that own KV or states."""
    context = worker.model_runner.vllm_config.compilation_config.static_forward_context
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    return [context[name] for group in groups for name in group.layer_names]


def write_kv(worker: Any, layer: Any, pages: torch.Tensor, known: Callable[..., torch.Tensor]) -> None:
    """Makes the layer's backend write a block of known K and V into the second of these pages, as the model does."""
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    is_latent, update = isinstance(layer, MLAAttention), layer.impl.do_kv_cache_update
    runner = worker.model_runner
    spec = layer.get_kv_cache_spec(runner.vllm_config)
    # The kernel's blocks may be smaller than the manager's.
    tokens = spec.block_size * runner.kv_cache_config.num_blocks // layer.kv_cache.shape[0]
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64)
    dtype = runner.vllm_config.model_config.dtype
    with torch.inference_mode():
        if is_latent:
            latent = known(tokens, layer.kv_lora_rank, dtype=dtype, salt=1)
            rope = known(tokens, 1, layer.qk_rope_head_dim, dtype=dtype, salt=2)
            update(latent, rope, pages, slots, layer.kv_cache_dtype, layer._k_scale)
        else:
            key = known(tokens, layer.num_kv_heads, layer.head_size, dtype=dtype, salt=1)
            value = known(tokens, layer.num_kv_heads, layer.head_size_v, dtype=dtype, salt=2)
            update(layer, key, value, pages, slots)


def missing() -> list[str]:
    """What Forebay needs and this vLLM does not have."""
    return [what for what, is_there in _needs() if not is_there]


def _needs() -> Iterator[tuple[str, bool]]:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.kv_offload import base
    from vllm.v1.outputs import KVConnectorOutput

    for name in (
        "get_transfer_results",
        "get_finished",
        "request_finished_all_groups",
        "reset_cache",
        "on_new_request",
    ):
        yield f"OffloadingConnector.{name}", callable(getattr(OffloadingConnector, name, None))
    for name in ("lookup", "prepare_load", "prepare_store", "on_schedule_end", "get_load_source"):
        yield f"OffloadingManager.{name}", callable(getattr(base.OffloadingManager, name, None))
    for name in ("group_idx", "tokens_per_chunk", "hashes_per_chunk", "sliding_window_size_in_chunks"):
        yield f"GroupOffloadConfig.{name}", name in scheduler.GroupOffloadConfig._fields
    submit = inspect.signature(base.OffloadingWorker.submit_load).parameters
    yield "OffloadingWorker.submit_load", list(submit)[:4] == ["self", "job_id", "src_spec", "dst_spec"]
    yield "KVConnectorOutput.failed_recving", "failed_recving" in inspect.signature(KVConnectorOutput).parameters
    fields = inspect.signature(OffloadingConnectorMetadata).parameters
    yield "OffloadingConnectorMetadata.load_jobs", {"load_jobs", "store_jobs", "jobs_to_flush"} <= set(fields)
    yield (
        "OffloadingWorkerMetadata.completed_jobs",
        "completed_jobs" in inspect.signature(OffloadingWorkerMetadata).parameters,
    )


__all__ = [
    "SCHEDULER",
    "WEIGHTS_LOADED",
    "WEIGHTS_UNDER_WAY",
    "CacheHitSource",
    "HashRoot",
    "KVConnectorTransferResults",
    "are_weights_here",
    "bare_hash_root",
    "complete",
    "complete_tiering",
    "completed_jobs",
    "device",
    "engine_core",
    "forget_left_windows",
    "generated_tokens",
    "group_shapes",
    "hash_root",
    "hear_of_adapters",
    "holds_kv",
    "jobs_under_way",
    "jobs_with_slots",
    "key_positions",
    "layers_with_cache",
    "load_format",
    "loads_from_directory",
    "lost_loads",
    "may_load_from_host",
    "metadata_without_jobs",
    "missing",
    "models",
    "new_stats",
    "new_tokens",
    "on_workers",
    "prefers_safetensors",
    "release",
    "stock_blocks",
    "tier_count",
    "tier_of",
    "transfers",
    "unsupported",
    "unsupported_tiering",
    "weights_are_asleep",
    "write_kv",
]
