"""Which fields of vLLM's configuration tell two caches apart, and why the others do not.

Holds true: a field counts unless it stands in `IDLE` under a reason. So a field that a newer vLLM brings counts until
somebody judges it: engines then share too little, and never what differs. A test walks the fields of the installed vLLM
and fails on one that is neither in `COUNTS` nor in `IDLE`. The two hold the fields of vLLM 0.32 and 0.33.

What changes the rounding alone does not count where vLLM itself changes it from one step to the next: the size of a
batch, the graph that was compiled for that size, the road that a sum over ranks takes. A kernel that an operator names
counts: some compute in number formats of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from vllm import envs

Fields = Mapping[str, str]  # reason or section, and its fields with spaces between

# By class: the fields that are left out, under the reason; a section of `VllmConfig` with all that is in it.
IDLE: Mapping[str, Fields] = {
    "VllmConfig": {
        "what its fields decide is in fields of our own": "device_config quant_config kv_transfer_config",
        "decides which tokens are computed in which step": "scheduler_config performance_mode",
        "decides how the same operations are fused, compiled and launched": "compilation_config optimization_level",
        "decides where the weights and tables lie": "offload_config engram_config",
        "is in the names of its adapters' blocks": "lora_config",
        "comes after the last layer": "watermark_config structured_outputs_config reasoning_config",
        "is reported, counted, logged or sent": "aux_output_config observability_config logging_config profiler_config"
        " kv_events_config",
        "carries what comes out of the encoder, which the model decides": "ec_transfer_config ec_manager_config",
        "carries new weights, which move the namespace when they come": "weight_transfer_config",
        "is about the process": "instance_id shutdown_timeout watchdog_config",
    },
    "ModelConfig": {
        "is a place; what lies there is in the fields `weights`, `config` and `code`": "model hf_config_path",
        "is in the field `config` with what came of it": "hf_config hf_text_config hf_overrides",
        "names the weights, which are in the field `weights`": "revision",
        "makes tokens, which the block hashes tell": "tokenizer tokenizer_revision skip_tokenizer_init"
        " io_processor_plugin renderer_num_workers",
        "is in the field `max_model_len` where the rope depends on it": "max_model_len spec_target_max_model_len",
        "comes after the last layer": "seed max_logprobs logprobs_mode use_fp64_gumbel return_sampling_mask"
        " enable_trace_replay logits_processors generation_config override_generation_config pooler_config",
        "decides how the same operations are launched": "enforce_eager disable_cascade_attn",
        "is about access and names of the API": "served_model_name hf_token allowed_local_media_path"
        " allowed_media_domains enable_prompt_embeds",
        "is about memory that is given back and taken again": "enable_sleep_mode sleep_preserve_parameter_names"
        " sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
        "permits and does not choose": "allow_deprecated_quantization",
        "is a section of its own": "multimodal_config",
    },
    "CacheConfig": {
        "decides how much memory there is, and not what it holds": "gpu_memory_utilization num_gpu_blocks_override"
        " num_gpu_blocks num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes"
        " kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks",
        "decides what the engine keeps for itself": "enable_prefix_caching prefix_cache_retention_interval",
        "is in the field `hash`": "prefix_caching_hash_algo",
        "says who chose the size of the blocks": "user_specified_block_size _block_size_resolved",
        "follows from the groups and the sizes of their blocks": "effective_attention_block_size"
        " cache_hit_alignment_tokens",
    },
    "ParallelConfig": {
        "numbers replicas, each of which computes the same": "data_parallel_size data_parallel_size_local"
        " data_parallel_rank data_parallel_rank_local data_parallel_index data_parallel_backend"
        " data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval enable_elastic_ep elastic_ep_max_dp_size"
        " disable_nccl_for_dp_synchronization",
        "numbers the ranks, whose slices lie side by side": "rank world_size node_rank nnodes",
        "is an address, a port or a place": "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port"
        " _data_parallel_master_port_list _coord_store_port master_addr master_port placement_group ray_runtime_env"
        " ray_workers_use_nsight numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids",
        "is about processes": "distributed_executor_backend max_parallel_loading_workers _api_process_count"
        " _api_process_rank distributed_timeout_seconds cpu_distributed_timeout_seconds enable_fault_tolerance"
        " fault_tolerance_config enable_ep_weight_filter enable_shm_tensor_arena",
        "sums the same by another road": "disable_custom_all_reduce dcp_comm_backend",
        "decides which rank holds an expert": "enable_eplb eplb_config expert_placement_strategy",
        "decides how steps overlap": "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold",
        "comes after the last layer": "enable_batch_sharded_sampling",
        "says who chose the interleaving": "_allow_auto_resolve_cp_interleave_size",
    },
    "AttentionConfig": {
        "decides how much memory there is": "sparse_mla_prefill_workspace_factor",
    },
    "SpeculativeConfig": {
        "is the engine's own, which counts by itself": "target_model_config target_parallel_config",
        "is in the field `draft`": "model revision",
        "decides how the same operations are launched": "enforce_eager",
        "decides how much is drafted and what is taken of it": "num_speculative_tokens_per_batch_size"
        " rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification"
        " draft_sample_method dspark_draft_topk prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth"
        " suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob"
        " fly_entropy_threshold fly_entropy_top_k fly_window_size xpress_topc",
        "is in the field `max_model_len` where the rope depends on it": "max_model_len",
    },
    "MultiModalConfig": {
        "decides how much is taken and kept": "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type"
        " mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb skip_mm_profiling",
        "permits and does not choose": "enable_mm_embeds allow_missing_mm_embeddings",
        "is in the prompt's tokens": "interleave_mm_strings",
        "is about processes": "mm_tensor_ipc",
        "is in the field `processor` with the file's content": "mm_encoder_fp8_scale_path",
        "is written and not read": "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
    },
    "LoadConfig": {
        "is a place on this host": "download_dir device pt_load_map_location",
        "decides how the same bytes are read": "safetensors_load_strategy safetensors_prefetch_num_threads"
        " safetensors_prefetch_block_size use_tqdm_on_load",
    },
    "KernelConfig": {
        "is the same operation in the same number format": "ir_op_priority",
        "warms up": "enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup"
        " enable_jit_warmup",
    },
    "MambaSpec": {
        "is how many blocks a request has beside": "num_speculative_blocks num_prefill_checkpoint_blocks",
    },
}

# By class: the fields that were looked at and count. Read by the test alone, and to name what nobody has judged.
COUNTS: Mapping[str, str] = {
    "VllmConfig": "model_config cache_config parallel_config attention_config mamba_config kernel_config"
    " speculative_config load_config diffusion_config additional_config",
    "ModelConfig": "model_weights runner convert tokenizer_mode trust_remote_code dtype is_submodel_config"
    " word_embeddings_untied_by_checkpoint code_revision quantization quantization_config disable_sliding_window"
    " config_format model_class_overrides model_impl",
    "CacheConfig": "block_size kv_cache_layout prefix_match_unit hash_block_size cache_dtype is_attention_free"
    " sliding_window kv_cache_dtype_skip_layers mamba_page_size_padded skip_page_size_padded mamba_block_size"
    " mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint"
    " replayssm_buffer_len use_replayssm use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay",
    "ParallelConfig": "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size"
    " decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dcp_q_replicate"
    " is_moe_model enable_hc_sp enable_expert_parallel all2all_backend worker_cls worker_extension_cls",
    "AttentionConfig": "backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version"
    " flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph"
    " use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization"
    " indexer_kv_dtype indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa flex_attn_block_m"
    " flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size indexer_tp_shard_min_rows"
    " minimax_m3_indexer_cp trtllm_ragged_backend",
    "SpeculativeConfig": "num_speculative_tokens method draft_tensor_parallel_size tensor_parallel_size quantization"
    " moe_backend attention_backend kv_cache_dtype code_revision index_share_for_mtp_iteration"
    " disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab"
    " parallel_drafting draft_model_config draft_parallel_config draft_load_config disable_lookahead_block_hashes"
    " draft_lm_head_quantization",
    "MultiModalConfig": "language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize"
    " mm_hasher_algorithm mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype"
    " video_pruning_rate video_pruning_method",
    "LoadConfig": "load_format model_loader_extra_config ignore_patterns",
    "KernelConfig": "moe_backend sparse_indexer_topk_backend linear_backend linear_backend_per_quant monokernel",
    "MambaConfig": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
}

# Values of the environment, and these options, may hold keys to a store: a log shows their digests.
SECRET = frozenset({"model_loader_extra_config", "additional"})

# A variable counts if vLLM knows it, it is set, and it stands in no line below; vLLM has some 300 of them. Others of
# the same prefix are nobody's choice of how to compute: Kubernetes sets `VLLM_SERVICE_HOST` for a service called
# `vllm`, and vLLM itself a random `VLLM_DIST_IDENT` for its workers. What vLLM sets among those it knows follows from
# its options and the machine, so it counts as what it is: in force.
IDLE_VARIABLES: Fields = {
    "is a place, an address or a number of this process": "VLLM_ASSETS_CACHE VLLM_CACHE_ROOT VLLM_CONFIG_ROOT"
    " VLLM_CUDA_COMPATIBILITY_PATH VLLM_CUDART_SO_PATH VLLM_DEBUG_DUMP_PATH VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT"
    " VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT"
    " VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_LORA_RESOLVER_CACHE_DIR VLLM_MEDIA_CACHE"
    " VLLM_MODEL_REDIRECT_PATH VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIXL_SIDE_CHANNEL_HOST"
    " VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_P2P_SIDE_CHANNEL_HOST"
    " VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PORT VLLM_PROCESS_NAME_PREFIX VLLM_RAY_BUNDLE_INDICES"
    " VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RPC_BASE_PATH VLLM_RUST_FRONTEND_PATH VLLM_TUNED_CONFIG_FOLDER"
    " VLLM_XLA_CACHE_PATH VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS",
    "says where the image comes from": "VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL"
    " VLLM_DOCKER_BUILD_CONTEXT VLLM_IMAGE_TAG",
    "keeps or makes anew what was compiled from the same operations": "VLLM_DISABLE_COMPILE_CACHE",
    "logs, counts or looks": "VLLM_CONFIGURE_LOGGING VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS"
    " VLLM_DEBUG_WORKSPACE VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK"
    " VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM"
    " VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_NO_USAGE_STATS"
    " VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER"
    " VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_MOONCAKE_STORE_TIER_LOG"
    " VLLM_NVTX_SCOPES_FOR_PROFILING",
    "is about the API or access to it": "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    " VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_API_KEY VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION"
    " VLLM_USE_MODELSCOPE VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENABLE_RESPONSES_API_STORE"
    " VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS"
    " VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_URL_ALLOW_REDIRECTS"
    " VLLM_ENFORCE_STRICT_TOOL_CALLING",
    "refuses what is larger, or leaves it out with its tokens": "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES"
    " VLLM_MAX_AUDIO_DECODE_DURATION_S",
    "makes tokens, which the block hashes tell, or comes after the last layer": "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS"
    " VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_SYSTEM_START_DATE VLLM_USE_FLASHINFER_SAMPLER VLLM_XGRAMMAR_CACHE_MB",
    "waits": "VLLM_AUDIO_FETCH_TIMEOUT VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    " VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT"
    " VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
    " VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S"
    " VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS",
    "is about processes, threads and memory": "VLLM_CPU_CI_ENV VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU"
    " VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"
    " VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_USE_V2_MODEL_RUNNER"
    " VLLM_WORKER_MULTIPROC_METHOD VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MQ_MAX_CHUNK_BYTES_MB"
    " VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
    " VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS"
    " VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH",
}
# Of the libraries below vLLM, those that choose a number format.
_OTHER_VARIABLES = frozenset(
    {
        "DNNL_DEFAULT_FPMATH_MODE",
        "NVIDIA_TF32_OVERRIDE",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    }
)


def idle(class_name: str) -> frozenset[str]:
    """The fields of a class that do not count."""
    return _idle_fields.get(class_name, frozenset())


def unjudged(class_name: str, names: frozenset[str]) -> frozenset[str]:
    """Of a class's fields, those that nobody has looked at yet."""
    return names - idle(class_name) - frozenset(COUNTS.get(class_name, "").split())


def variables() -> Iterator[tuple[str, str]]:
    """The variables of this process's environment that count, in order."""
    known = {name for name in envs.environment_variables if name.startswith("VLLM_")}
    for name in sorted((known - _idle_variables | _OTHER_VARIABLES) & os.environ.keys()):
        yield name, os.environ[name]


def _words(fields: Fields) -> frozenset[str]:
    return frozenset(name for names in fields.values() for name in names.split())


_idle_fields = {name: _words(fields) for name, fields in IDLE.items()}
_idle_variables = _words(IDLE_VARIABLES)
