"""How RoPE turns queries and keys in a model's layers: for methods that turn queries back.

transformers has no fact to ask for it: which elements make a pair, and in which layers, stands in each architecture's code. So
architectures are listed here, and tests/test_rope.py measures them by what their layers do. Others are refused.
"""
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STEADY = ("linear", "llama3", "yarn")  # kinds of RoPE whose speeds do not change with the length of the text
# Element d of a head turns with element d + dim / 2 in every layer, or in every layer but those that have no RoPE.
HALVES = frozenset("""
    apertus arcee bitnet cohere2 cwm exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text gpt_oss granite granitemoe
    hunyuan_v1_dense jais2 llama minimax_m2 ministral ministral3 mistral mixtral olmo olmo2 olmo3 olmoe phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
    seed_oss smollm3 solar_open starcoder2 vaultgemma""".split())
SLIDING_ALONE = ("cohere2", "exaone4", "exaone_moe")  # full layers have no RoPE; those of cohere2 that slide turn neighbours


def speeds(config, dim):
    """Radians per position of each pair of elements, [dim / 2]; 0 where layers have no RoPE.

    config: of the model's text part. Layers that slide may turn otherwise: methods choose in the others.
    Errors: ValueError where the layers that choose do not all turn whole heads in halves at steady speeds.
    """
    kind = config.model_type
    if kind not in HALVES:
        _refuse(f"of the architecture '{kind}' is not known")
    layers = _layers_with_rope(config)
    if not any(layers):
        return [0.0] * (dim // 2)
    if not all(layers):
        _refuse(f"is missing in layer {layers.index(False)} and turns in layer {layers.index(True)}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = {} if "full_attention" not in rope else {"layer_type": "full_attention"}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    form = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if theta is None:
        _refuse("has no rope_theta in the config")
    if part not in (None, 1, 1.0):
        _refuse(f"turns {part} of each head")
    if form == "default":
        return [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if form not in STEADY:
        _refuse(f"is of the type '{form}', whose speeds change with the length of the text")
    result = ROPE_INIT_FUNCTIONS[form](config, torch.device("cpu"), **by_layer)[0].tolist()
    return result if len(result) == dim // 2 else _refuse(f"turns {2 * len(result)} of {dim} elements of each head")


def _layers_with_rope(config):
    """Of each layer in which methods choose, whether it has RoPE."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    chosen = [layer for layer, kind in enumerate(kinds) if kind != "sliding_attention"]
    if config.model_type in SLIDING_ALONE and (config.model_type == "cohere2" or config.sliding_window is not None):
        return [False for _ in chosen]
    turns = getattr(config, "no_rope_layers", None)  # 1 where a layer has RoPE, in spite of the name
    return [turns is None or bool(turns[layer]) for layer in chosen]


def _refuse(what):
    raise ValueError(f"RoPE of the model {what}; expected the same in every layer that does not slide, over whole heads, element "
                     "d with element d + head_dim / 2; the method turns queries back by it: use another method")
