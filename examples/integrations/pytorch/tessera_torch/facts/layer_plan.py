"""What each layer of a model keeps, and which layers are alike."""
import dataclasses

from transformers import cache_utils

OURS = {"full_attention": False, "sliding_attention": True, "hybrid": False, "hybrid_sliding": True}  # and whether it slides
UNFIT = {"minimax": "takes no cache but its own", "mpt": "takes no attention but its own",
         "recurrent_gemma": "keeps its states in the model", "xlm-prophetnet": "takes no prompts into a cache"}
HYBRID = ("falcon_h1",)  # of transformers 4, which does not name their layers
NO_LENGTH = 1 << 20  # tokens of a conversation at most, where neither the config nor the caller says
RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
# Numbers of a layer by which its keys, values and queries have their shape.
SHAPE = ("head_dim", "num_key_value_heads", "num_attention_heads", "v_head_dim")
# Where a config has one of these, layers that slide have a shape of their own.
OF_SLIDING = ("swa_head_dim", "swa_num_key_value_heads", "swa_num_attention_heads", "num_swa_key_value_heads", "swa_v_head_dim")
SINKS_OF_SLIDING = ("mimo_v2_flash",)  # the other layers have no sink logits


@dataclasses.dataclass(frozen=True)
class Layer:
    """type: as transformers names it, "dummy" where nothing is stored; window: of a layer that slides, else 0; states: recurrent
    ones beside or in place of keys; shape: equal for layers whose rows are of one shape; reads: whether it reads another layer's keys."""
    type: str
    window: int = 0
    states: int = 0
    shape: tuple = ()
    reads: bool = False

    @property
    def stores(self):
        return self.type in OURS


def layers_of(config):
    """Every layer of a model. Errors: ValueError where one keeps what neither the library nor transformers' own layers have."""
    if config.is_encoder_decoder:
        raise ValueError("model is an encoder with a decoder; expected a decoder alone: attention to the encoder has no cache "
                         "here; use transformers' own cache")
    if getattr(config, "cross_attention_layers", None):
        raise ValueError("layers of the model attend to images alone; expected that each attends to the text: attention across has no "
                         "cache here; use transformers' own cache")
    if config.model_type in UNFIT:
        raise ValueError(f"architecture is {config.model_type}, which {UNFIT[config.model_type]}; expected one that takes a "
                         "transformers.Cache and attention from outside; use transformers' own cache")
    modes = getattr(config, "kv_sharing_modes", None)
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if modes is None and (shared or getattr(config, "use_cla", False)):
        layers = f"the last {shared} layers of the model" if shared else "layers of the model"
        raise ValueError(f"{layers} read keys and values of other layers; expected that each has its own, or kv_sharing_modes in "
                         "the config; use transformers' own cache for this model, or a newer transformers")
    types = _types(config)
    layers = [_layer(config, *one, mode) for *one, mode in zip(*types, modes or [None] * len(types[0]))]
    if not any(layer.stores for layer in layers):
        raise ValueError("layers of the model keep no keys and values; expected at least one that does; use transformers' own cache")
    return layers


def _types(config):
    """Of each layer its type, what transformers makes its part of a cache from, and its own config."""
    if hasattr(cache_utils, "get_layer_types_and_kwargs"):
        types, given = cache_utils.get_layer_types_and_kwargs(config)
        if isinstance(given, dict):  # older versions (5.17, 5.20): of all layers; layers that share another's keys are left out
            types = list(types) + ["dummy"] * (config.num_hidden_layers - len(types))
            given = [{"sliding_window": None, **given} for _ in types]
        return types, given, getattr(config, "per_layer_config", None) or [config] * len(types)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if config.model_type in HYBRID:
        types = ["hybrid"] * config.num_hidden_layers
    if types is None:  # Mistral of transformers 4: all of them slide or none
        types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return types, [{"sliding_window": window} if kind in OURS and OURS[kind] else {} for kind in types], [config] * len(types)


def _layer(config, kind, given, own, mode):
    if kind not in OURS and kind not in RECURRENT and kind != "dummy":
        raise ValueError(f"layer type is {kind}; expected {', '.join(OURS)}, {', '.join(RECURRENT[:2])} or one without attention; "
                         "the library expresses no other")
    states = given.get("number_of_states", 1) if kind in RECURRENT else 0
    if states and not hasattr(cache_utils, "LinearAttentionLayer"):
        raise ValueError(f"layer type is {kind}, whose states this transformers keeps in a cache of the model's own; expected "
                         "full_attention or sliding_attention; install transformers==5.24.*")
    slides = OURS.get(kind, False)
    shape = tuple(getattr(own, name, None) for name in SHAPE)
    if config.model_type in SINKS_OF_SLIDING or any(getattr(config, name, None) is not None for name in OF_SLIDING):
        shape += (slides,)
    return Layer(kind, given["sliding_window"] or 0 if slides else 0, states, shape, mode == "reuse")
