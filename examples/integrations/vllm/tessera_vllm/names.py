"""Names of vLLM that are no promise of it, and on which this package relies. A name that is missing is refused here,
in a sentence, rather than found out by a wrong answer."""
import importlib
import inspect

VERSION = "0.32.0"
# (module, what it has, parameters that it takes by these names)
NEEDED = (
    ("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry._ensure_registered", ()),
    ("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry.register", ("uniform_type_base_spec",)),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager._remove_blocks_in_range",
     ("request_id", "first_block", "last_block")),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.remove_skipped_blocks",
     ("processed_computed_tokens", "num_prompt_tokens")),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.find_longest_cache_hit",
     ("block_hashes", "max_length")),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.cache_blocks", ("request", "num_tokens")),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.get_num_blocks_to_allocate",
     ("request_id", "num_tokens", "new_computed_blocks", "apply_admission_cap")),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager._get_num_evictable_blocks", ()),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.pop_blocks_for_free", ("request_id",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler._reserve_prefill_lookahead",
     ("request", "num_computed_tokens", "num_new_tokens")),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request", ("request",)),
    ("vllm.v1.attention.backend", "AttentionBackend.customize_spec", ("spec",)),
    ("vllm.v1.attention.backend", "CommonAttentionMetadata.replace", ()),
    ("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa", ("dtype", "block_size", "head_size", "kv_cache_dtype")),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder.build", ("common_attn_metadata",)),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder._set_isa_to_layers", ("layer_names",)),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl.do_kv_cache_update",
     ("layer", "key", "value", "kv_cache", "slot_mapping")),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl.forward",
     ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")),
    ("vllm._custom_ops", "cpu_attn_get_scheduler_metadata",
     ("num_reqs", "num_heads", "num_kv_heads", "head_dim", "seq_lens", "dtype", "query_start_loc", "causal",
      "sliding_window_size", "isa", "enable_kv_split", "dynamic_causal", "kv_cache_dtype")),
    ("vllm._custom_ops", "cpu_attention_with_kv_cache",
     ("query", "key_cache", "value_cache", "output", "query_start_loc", "seq_lens", "scale", "causal", "alibi_slopes",
      "sliding_window", "block_table", "softcap", "scheduler_metadata", "s_aux", "dynamic_causal", "k_scale", "v_scale",
      "kv_cache_dtype")),
    ("vllm.config", "VllmConfig.use_v2_model_runner", ()),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.execute_model", ("scheduler_output",)),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.determine_available_memory", ()),
    ("vllm.v1.worker.gpu_input_batch", "InputBatch.req_ids", ()),
    ("vllm.v1.worker.gpu_input_batch", "CachedRequestState", ()),
)


def check():
    """Errors: ValueError, if this vLLM is another one, or has no such names."""
    import vllm
    version = vllm.__version__.split("+")[0]
    if version != VERSION:
        raise ValueError(f"tessera: the version of vLLM is {version}; expected {VERSION}; install that version, or "
                         "uninstall tessera-vllm: it relies on names that are no promise of vLLM")
    for module, path, parameters in NEEDED:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name, None)
        missing = [name for name in parameters if found is None or name not in inspect.signature(found).parameters]
        if found is None or missing:
            what = "missing" if found is None else "without " + ", ".join(missing)
            raise ValueError(f"tessera: {module}.{path} is {what}; expected it as vLLM {VERSION} has it; "
                             "install that version")
