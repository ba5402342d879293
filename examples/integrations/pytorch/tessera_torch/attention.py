"""The attention function and the mask function "tessera" of transformers' interfaces.

The cache masks by positions: a token sees every token before it, in a sliding layer those of the window. Whatever else a model
asks of its attention is refused before the layer stores anything.
"""
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from .layers import Handed, Latents
from .rows import Padding

NAME = "tessera"
NOT_OURS = ("block_indices", "head_mask", "indices", "position_bias", "score_mod", "sinks")  # they change what a token sees
MASKED_AT_ONCE = 1 << 24  # entries of a mask that are looked at together
NO_CACHE = ("attention of {} has no TesseraCache; expected one; pass past_key_values=TesseraCache(model.config, ...), and give "
            "parts without a cache, like a vision tower, another attention: "
            "attn_implementation={{'text_config': 'tessera', 'vision_config': 'sdpa'}}")


@torch.compiler.disable  # the rest of a model compiles; this decides in Python what the call is
def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
           s_aux=None, **named):
    """The attention function of transformers' interface: [batch, heads, tokens, dim] -> [batch, tokens, heads, dim]."""
    if not isinstance(key, (Handed, Latents)):
        raise ValueError(NO_CACHE.format(type(module).__name__))
    try:
        _check_call(module, query, key, dropout, named)
        value = value.rows if isinstance(value, Latents) else value
        layer = _layer_of(module, key)
        if layer != key.layer:
            if s_aux is not None:
                raise ValueError(f"layer {layer} has sink logits and reads the keys of another; expected one of these alone; "
                                 "use transformers' own cache for this model")
            return key.cache.attend_again(key.layer, query, scaling, softcap, sliding_window), None
        return key.cache.attend(key.layer, query, key.rows, value, attention_mask, scaling, softcap, sliding_window, s_aux), None
    except (ValueError, NotImplementedError):
        key.cache.fail_call()
        raise


def _layer_of(module, key):
    """Whose attention it is. Blocks that several layers pass through do not know (Zamba)."""
    layer = getattr(module, "layer_idx", None)
    return key.layer if layer is None or layer < 0 else layer


def _check_call(module, query, key, dropout, named):
    """Whether attention has only terms that the library's has."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        raise ValueError("gradients are asked for; expected none: a cache is for inference; call under torch.no_grad()")
    layer = _layer_of(module, key)
    if layer != key.layer and not key.cache.plan[layer].reads:
        raise ValueError(f"keys of layer {layer} are those of layer {key.layer}; expected its own, or kv_sharing_modes in the config; "
                         "use transformers' own cache for this model")
    asked = [name for name in NOT_OURS if named.get(name) is not None]
    if asked:
        raise ValueError(f"{asked[0]} is given to attention; expected none: the library's attention has no such term; "
                         "use a model without it")
    if dropout:
        raise ValueError(f"dropout is {dropout}; expected 0: a cache is for inference; call model.eval()")
    if query.shape[2] > 1 and named.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(f"attention of {type(module).__name__} is not causal; expected that no token sees a later one; "
                         "use a causal model")


def padding_of(batch_size, kv_length, q_length=None, q_offset=0, kv_offset=0, cache_position=None,
               mask_function=causal_mask_function, attention_mask=None, config=None, device=None, **_):
    """The mask function of transformers' interface: padding alone, [batch, tokens]; other masks than the cache's are refused.

    Cost: none for the masks of plain models; others are evaluated as transformers evaluates them.
    """
    window = getattr(config, "sliding_window", None)
    known = [causal_mask_function, *([sliding_window_causal_mask_function(window)] if isinstance(window, int) else [])]
    if any(_same(mask_function, one) for one in known):
        return _cut_by_rows(attention_mask, config)
    if cache_position is None:
        cache_position = torch.arange(q_length, device=device) + q_offset
    keys = torch.arange(kv_length, device=cache_position.device) + kv_offset
    for queries in cache_position.split(max(1, MASKED_AT_ONCE // (batch_size * kv_length))):
        entries = [_entries(one, batch_size, queries, keys) for one in (mask_function, *known)]
        matters = _both_real(attention_mask, queries, keys)
        known = [one for one, want in zip(known, entries[1:]) if not bool(((entries[0] != want) & matters).any())]
    if not known:
        raise ValueError("mask of the call is neither causal nor that of a sliding window; expected one of these: blocks that see "
                         "both ways, prefixes and packed texts are not expressed; pass padding alone, [batch, tokens]")
    return _cut_by_rows(attention_mask, config)


def _cut_by_rows(attention_mask, config):
    """Padding as a model wants it: those whose last layers read other layers' keys keep a prompt's last rows of masks alone."""
    if attention_mask is None or "reuse" not in (getattr(config, "kv_sharing_modes", None) or ()):
        return attention_mask
    return attention_mask[:, None, None].as_subclass(Padding)


def _same(a, b):
    """Whether two functions have the same code over the same values."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if not (hasattr(a, "__code__") and hasattr(b, "__code__")):
        return type(a) is type(b) is int and a == b
    cells = lambda function: tuple(cell.cell_contents for cell in function.__closure__ or ())
    return a is b or (a.__code__ is b.__code__ and _same(cells(a), cells(b)))


def _entries(mask_function, batch, queries, keys):
    """[batch, queries, keys]: whether a query sees a key."""
    index = lambda x, *shape: x.reshape(shape)
    seen = mask_function(index(torch.arange(batch, device=keys.device), -1, 1, 1, 1), index(keys.new_zeros(1), 1, 1, 1, 1),
                         index(queries, 1, 1, -1, 1), index(keys, 1, 1, 1, -1))
    return torch.as_tensor(seen, device=keys.device).broadcast_to(batch, 1, len(queries), len(keys))[:, 0]


def _both_real(padding, queries, keys):
    """[batch, queries, keys]: what padding sees, and who sees padding, does not matter."""
    if padding is None:
        return torch.ones((), dtype=torch.bool, device=keys.device)
    real = torch.nn.functional.pad(padding.bool(), (0, max(0, int(keys[-1]) + 1 - padding.shape[1])))
    return real[:, queries, None] & real[:, None, keys]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, padding_of)
