"""Tiny random models of every causal architecture that the installed transformers has."""
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NO_ATTENTION = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")
ARCHITECTURES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NO_ATTENTION))
VOCABULARY, WINDOW = 320, 24
# What configs call the same number. Every expert sees every token: a choice between experts would turn a rounding into another answer.
SIZES = {
    256: "hidden_size d_model n_embd embed_dim hidden_dim dim word_embed_proj_dim attention_hidden_size mamba_hidden_dim",
    160: "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim d_inner dff shared_intermediate_size "
         "mlp_hidden_size dense_intermediate_size",
    64: "head_dim kv_channels attention_head_dim d_kv v_head_dim moe_intermediate_size q_lora_rank kv_lora_rank expert_ffn_hidden_size "
        "swa_head_dim swa_v_head_dim moe_shared_expert_intermediate_size shared_expert_intermediate_size num_memory_blocks "
        "hidden_size_per_layer_input attention_kv_hidden_size attention_head_size zero_expert_num_placeholder "
        "intermediate_size_mlp lru_width_placeholder o_lora_rank global_head_dim",
    32: "qk_rope_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim "
        "ssm_head_dim conv_dim_placeholder",
    16: "mamba_d_state ssm_state_size state_size mamba_dt_rank adapter_rank index_head_dim_placeholder d_state",
    4: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_decoder_layers num_experts n_routed_experts "
       "num_local_experts moe_num_experts num_attention_heads n_head num_heads n_heads decoder_attention_heads "
       "encoder_attention_heads num_experts_per_tok moe_k top_k_experts moe_topk num_experts_per_token experts_per_token "
       "linear_num_value_heads encoder_num_layers swa_num_attention_heads",
    2: "num_key_value_heads n_kv_heads num_kv_heads multi_query_group_num linear_num_key_heads swa_num_key_value_heads "
       "num_global_key_value_heads mamba_n_groups n_groups_placeholder num_query_groups num_encoder_layers",
    1: "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace decoder_start_token_id moe_layer_start_index "
       "num_dense_layers bos_token_id num_nextn_predict_layers_placeholder",
    0: "pad_token_id num_kv_shared_layers dropout attention_dropout hidden_dropout embd_pdrop attn_pdrop resid_pdrop activation_dropout "
       "hidden_dropout_prob attention_probs_dropout_prob num_nextn_predict_layers layerdrop classifier_dropout "
       "embedding_dropout hidden_dropout attention_pdrop residual_dropout resid_dropout attn_dropout emb_pdrop router_jitter_noise "
       "input_jitter_noise",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_sequence_length seq_length "
         "original_max_position_embeddings_placeholder",
    VOCABULARY: "vocab_size vocab_size_per_layer_input text_vocab_size",
    WINDOW: "sliding_window attention_window_size local_attention window_size swa_window_size",
}
NUMBERS = {name: size for size, names in SIZES.items() for name in names.split()}
NUMBERS["eos_token_id"] = 2
MAMBA = dict(mamba_n_heads=16, mamba_d_head=32, mamba_expand=2)  # heads times their size is the expanded hidden size
HALF_RECURRENT = dict(layer_types=["conv", "full_attention"] * 2)
PAIRS = ["linear_attention", "hybrid"] * 2
# What an architecture demands besides, or what shows more of it.
OVERRIDES = {
    "bailing_hybrid": dict(layer_group_size=2, num_expert_group=1, topk_group=1),
    "bamba": dict(MAMBA, attn_layer_indices=[1, 3]),
    "deepseek_v3": dict(qk_nope_head_dim=128, qk_rope_head_dim=64, head_dim=64, v_head_dim=128),
    "dory": dict(sliding_window=512),
    "falcon_h1": dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_ssm=128),
    "gemma3n_text": dict(num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, laurel_rank=16),
    "gemma4_text": dict(num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=512),
    "gemma4_unified_text": dict(layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=512),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(MAMBA, layer_types=["mamba", "attention"] * 2),
    "jamba": dict(attn_layer_offset=1, attn_layer_period=2, use_mamba_kernels=False),
    "kimi_linear": dict(layer_types=["linear_attention", "full_attention"] * 2),
    "lfm2": HALF_RECURRENT,
    "lfm2_moe": HALF_RECURRENT,
    "mamba2": dict(num_heads=16, head_dim=32),
    "zaya": dict(num_experts_per_tok=1, num_experts=1),
    "xlm": dict(n_words=VOCABULARY, emb_dim=256),
    "xmod": dict(default_language="en_XX"),
    "phimoe": dict(sliding_window=None),
    "qwen4_exp_text": dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=64, indexer_budget=64, indexer_compress_ratio=4,
                           ple_embed_dim=32, ngram_vocab_size_base=320, split_ngram_parts=1),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4), ffn_config=dict(
        ffn_hidden_size=64, moe_num_experts=4, moe_top_k=4)),
    "cohere_compass_text": dict(rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"),
                                                              dict(rope_type="default", rope_theta=1e4))),
    "zamba": dict(num_hidden_layers=6, layers_block_type=["linear_attention", "linear_attention", "hybrid"] * 2, attention_head_dim=128, attention_hidden_size=512, use_mamba_kernels=False),
    "zamba2": dict(layers_block_type=PAIRS, mamba_headdim=32, n_mamba_heads=16, attention_head_dim=128, attention_hidden_size=512),
}
# Of these no tiny model can be made or called, and why.
PARTS = "its config wants those of its other parts, from which no tiny one follows"
NOT_MADE = {
    "blt": "its patches of bytes want a model of their own, whose smallest has 776 M parameters",
    "dory": "transformers' own attention fails in a tiny one whose layers it passes through in loops",
    "dots3_note": "its config names layers by number; its text part is tested",
    "fuyu": "its smallest has 9,408 M parameters",
    "gemma3n": "its image part wants a package of its own; its text part is tested",
    "gemma4_assistant": "it reads the keys of another model",
    "gemma4_unified_assistant": "it reads the keys of another model",
    "got_ocr2": "its image part has 480 M parameters",
    "moshi": PARTS,
    "moss_transcribe_diarize": "its part for sound has 600 M parameters",
    "musicgen": PARTS,
    "musicgen_melody": PARTS,
    "prophetnet": "transformers' own attention fails in a tiny one",
    "qwen4_exp": PARTS + "; its text part is tested",
}
if transformers.__version__.startswith("4."):
    del NOT_MADE["moshi"]
    NOT_MADE |= dict.fromkeys(("emu3", "llama4", "mllama", "phi4_multimodal", "dbrx"), PARTS) | {
        "fuyu": "its smallest has 136 M parameters",
        "jetmoe": "its head dim follows from other numbers than elsewhere",
        "mega": "its states are not a cache's",
        "qdqbert": "it wants a package of its own",
        "speech_to_text_2": "transformers' own code fails in a tiny one",
        "transfo-xl": "its vocabulary is cut into parts of a size of their own",
        "zamba": "transformers' own code fails in a tiny one",
        "zamba2": "transformers' own code fails in a tiny one",
    }


def shrunken(config_class, more):
    """A config of few small layers; so are the configs within it. more: what an architecture demands."""
    known = config_class().to_dict()
    chosen = dict(NUMBERS)
    if "qk_rope_head_dim" in known:  # latent attention: every query head has a key
        chosen.update(head_dim=32, num_key_value_heads=4)
    fitting = {name: float(size) if isinstance(known[name], float) else size for name, size in chosen.items()
               if name in known and not isinstance(known[name], (list, dict))}
    if "is_decoder" in known:
        fitting["is_decoder"] = True
    parts = {name: shrunken(part, {}).to_dict() for name, part in config_class.sub_configs.items()
             if isinstance(known.get(name), dict) and part.__name__ != "AutoConfig"}
    return config_class(**{**fitting, **parts, **more})


def config_of(kind):
    return shrunken(CONFIG_MAPPING[kind], OVERRIDES.get(kind, {}))


def fails_to_be_made(kind):
    """Whether no tiny model of an architecture can be made and called."""
    try:
        config = config_of(kind)
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        if sum(parameter.numel() for parameter in empty.parameters()) > 100e6:
            return True
        randomise(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))(
            torch.full((2, 100), 5), use_cache=True)
    except Exception:
        return True
    return False


def randomise(model):
    """Weights under which attention looks somewhere and layers keep their inputs' size."""
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_(0, module.in_features ** -0.5)
        elif isinstance(module, torch.nn.LayerNorm) and module.bias is not None:
            module.bias.data.normal_(0, 0.2)
        elif isinstance(module, torch.nn.Embedding):
            module.weight.data.normal_(0, 0.5)
    for name, parameter in model.named_parameters():
        if "sink" in name:
            parameter.data.normal_()
        last = name.split(".")[-2] if "." in name else name
        if parameter.dim() == 2 and last in ("q_proj", "k_proj", "query", "key", "q_b_proj", "kv_b_proj"):
            parameter.data.mul_(1.5)
        if not torch.isfinite(parameter).all():
            raise ValueError(f"{name} is not finite")
    return model
