"""How RoPE turns queries and keys in a model's layers: for methods that turn queries back.

transformers has no fact to ask for it: which elements make a pair, and in which layers, stands in each architecture's code. So
architectures are listed here, and tests measure them by what their layers do. Others are refused.
"""
import dataclasses

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STEADY = ("linear", "llama3", "yarn", "proportional")  # kinds of RoPE whose speeds do not change with the length of the text
# Element d of the part that turns makes a pair with element d + half of it.
HALVES = frozenset("""
    afmoe apertus apertus1p5_text arcee aria_text axk1 bailing_hybrid bamba bitnet cohere_compass_text cwm dbrx deepseek_v3 dots1
    emu3_text_model exaone exaone4 exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm4_moe glm4_moe_lite gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna lara_mini lfm2
    lfm2_moe lfm3 llama longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
    modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe
    qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm
    starcoder2 vaultgemma youtu zamba2 zaya""".split())
# Element 2d makes a pair with element 2d + 1.
NEIGHBOURS = frozenset("cohere cohere2 cohere2_moe deepseek_v2 ernie4_5 ernie4_5_moe glm glm4 helium gptj codegen".split())
PLACES = frozenset("qwen3_5_text qwen3_5_moe_text qwen4_exp_text".split())  # turn by places where the model sees images
BACKWARDS = ("nanochat",)  # turns the other way
NO_ROPE = frozenset("jamba kimi_linear nemotron_h zamba".split())  # attention turns nothing
SLIDING_ALONE = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "lara_mini")  # full layers have no RoPE


@dataclasses.dataclass(frozen=True)
class Turn:
    """How the queries of a layer turn: in `pairs`, "halves" or "neighbours", of the elements from `first` on, speeds [pairs] in radians
    per position; what is behind them does not turn."""
    pairs: str = "halves"
    speeds: tuple = ()
    first: int = 0

    def speeds_of(self, dim):
        """[dim / 2] for elements in the order of `order_of`."""
        return [*self.speeds, *[0.0] * (dim // 2 - len(self.speeds))]

    def order_of(self, dim):
        """The elements of a head so that element d makes a pair with element d + dim / 2; None where they lie so."""
        count = len(self.speeds)
        if count == 0 or (self.pairs == "halves" and 2 * count == dim):
            return None
        turned = torch.arange(self.first, self.first + 2 * count)
        a, b = turned.chunk(2) if self.pairs == "halves" else (turned[::2], turned[1::2])
        still = torch.tensor([d for d in range(dim) if not self.first <= d < self.first + 2 * count], dtype=torch.long)
        return torch.cat([a, still[:dim // 2 - count], b, still[dim // 2 - count:]])


def turn_of(config, layer):
    """config: of the model's text part; layer: by its number. Errors: ValueError where it is not known."""
    kind = config.model_type
    if kind not in HALVES | NEIGHBOURS | NO_ROPE:
        _refuse(f"of the architecture '{kind}' is not known")
    if kind in NO_ROPE or not _has_rope(config, layer):
        return Turn()
    speeds = _speeds(config, layer)
    if kind in BACKWARDS:
        speeds = tuple(-speed for speed in speeds)
    first = config.qk_nope_head_dim if hasattr(config, "qk_rope_head_dim") else 0
    return Turn("halves" if kind in HALVES else "neighbours", speeds, first)


def check_places(config):
    """Of a model that sees images, too. Errors: ValueError where RoPE turns by places in them."""
    if config.model_type in PLACES or (getattr(config, "rope_parameters", None) or {}).get("mrope_section") is not None:
        _refuse("turns by places in images")


def _has_rope(config, layer):
    if config.model_type in SLIDING_ALONE and (not config.model_type.startswith("exaone") or config.sliding_window is not None):
        return False  # methods choose in full layers alone
    if getattr(config, "position_embedding_type", "rope") not in ("rope", "absolute") or not getattr(config, "use_mem_rope", True):
        return False
    if (getattr(config, "rope_parameters", None) or {}).get(_type_of(config, layer), True) is None:
        return False
    turns = getattr(config, "no_rope_layers", None)  # 1 where a layer has RoPE, in spite of the name
    return turns is None or bool(turns[layer])


def _type_of(config, layer):
    types = getattr(config, "layer_types", None)
    return types[layer] if types else "full_attention"


def _speeds(config, layer):
    own = config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config
    dim = getattr(own, "qk_rope_head_dim", None) or getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    name = _type_of(config, layer)
    by_layer = {"layer_type": name} if name in rope else {}
    rope = rope.get(name, rope)
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    if config.model_type in ("codegen", "gptj"):
        return tuple(1e4 ** (-2 * i / config.rotary_dim) for i in range(config.rotary_dim // 2))
    form = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1
    if theta is None:
        _refuse("has no rope_theta in the config")
    if form == "default":
        count = int(dim * part)
        if count % 2:
            _refuse(f"turns {count} elements of each head, an odd number")
        return tuple(theta ** (-2 * i / count) for i in range(count // 2))
    if form not in STEADY:
        _refuse(f"is of the type '{form}', whose speeds change with the length of the text")
    return tuple(ROPE_INIT_FUNCTIONS[form](own, torch.device("cpu"), **by_layer)[0].tolist())


def _refuse(what):
    raise ValueError(f"RoPE of the model {what}; expected an architecture that facts/rope.py lists, whose pairs turn at steady speeds; "
                     "the method turns queries back by it: use another method")
