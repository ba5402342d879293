"""What a cache must give, in double and by other algorithms than the library's.

The attention "oracle" is eager attention that notes queries, keys and values of each layer, and in steps sees of each kv_head the
positions that it is told. Scores of snapkv and expected_attention follow from what it noted.
"""
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

SINKS = 4  # first tokens that expected_attention always keeps


class Record:
    """Of each layer in its order: q, k, v of the last call, the scale, whether it slides, and whose keys it reads."""

    def __init__(self):
        self.layers, self.makes_nothing = [], False
        self.visible = {}  # by layer: [sequences, kv_heads, tokens], what steps see

    def clear(self):
        self.layers = []

    def watch(self, model):
        """Every call of the model is noted anew."""
        model.register_forward_pre_hook(lambda *_: self.clear())


RECORD = Record()


def oracle(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None, s_aux=None,
           **_):
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    owner = next((i for i, layer in enumerate(RECORD.layers) if layer["key"] is key), len(RECORD.layers))
    RECORD.layers.append(dict(
        q=query, key=key, v=value, scale=scale, softcap=softcap, sinks=s_aux, slides=sliding_window is not None, owner=owner))
    if RECORD.makes_nothing:  # then queries depend on their positions alone
        return value.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, 1).mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if attention_mask is not None:
        logits = logits + attention_mask[..., :key.shape[-2]]
    if query.shape[2] == 1 and owner in RECORD.visible:
        seen = RECORD.visible[owner][..., :key.shape[2]]
        logits = logits.masked_fill(~seen.repeat_interleave(group, 1)[:, :, None], -torch.inf)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.reshape(1, -1, 1, 1).expand(len(logits), -1, logits.shape[2], 1)], -1)
    weights = logits.softmax(-1)[..., :key.shape[-2]]
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("oracle", oracle)
AttentionMaskInterface.register("oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def grouped(x, kv_heads):
    """[q_heads, ...] -> [kv_heads, group, ...]"""
    return x.reshape(kv_heads, x.shape[0] // kv_heads, *x.shape[1:])


def snapkv_scores(layer, row, window, pool=7):
    """[kv_heads, tokens] of one sequence: what the last `window` queries look at, pooled; the window's own tokens are infinite."""
    q, k = layer["q"][row].double(), layer["key"][row].double()
    n = k.shape[1]
    rows = grouped(q[:, -window:], len(k))
    logits = torch.einsum("hgid,hjd->hgij", rows, k) * layer["scale"]
    if layer["softcap"]:
        logits = layer["softcap"] * torch.tanh(logits / layer["softcap"])
    later = torch.arange(n)[None] > torch.arange(n - window, n)[:, None]
    logits = logits.masked_fill(later, -torch.inf)
    if layer["sinks"] is not None:
        sinks = layer["sinks"].double().reshape(len(k), -1, 1, 1)
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
    mass = logits.softmax(-1).sum((1, 2))[:, :n - window]
    padded = torch.nn.functional.pad(mass, (pool // 2, pool // 2), value=-torch.inf)
    pooled = padded.unfold(1, pool, 1).amax(-1)
    return torch.cat([pooled, torch.full((len(k), window), torch.inf, dtype=pooled.dtype)], 1)


def expected_scores(layer, row, turned_back, mean_turn):
    """[kv_heads, tokens] of one sequence. turned_back [tokens, dim, dim] takes a query to what it is at position 0; mean_turn
    [dim, dim] takes that to its mean over the positions to come."""
    q, k, v = layer["q"][row].double(), layer["key"][row].double(), layer["v"][row].double()
    first = torch.einsum("htd,tde->hte", q, turned_back)[:, SINKS:] @ mean_turn  # the mean and the covariance turn with the queries
    mean = first.mean(1)
    centred = first - mean[:, None]
    spread = torch.einsum("hgtd,hjd->hgtj", grouped(centred, len(k)), k).square().mean(2)  # k' C k without C
    along = torch.einsum("hgd,hjd->hgj", grouped(mean, len(k)), k)
    logits = along * layer["scale"] + spread * layer["scale"] ** 2 / 2
    weights = torch.zeros_like(logits)
    weights[..., SINKS:] = logits[..., SINKS:].softmax(-1)
    scores = weights.mean(1) * v.norm(dim=-1)
    scores[:, :SINKS] = torch.inf
    return scores


def wrong_positions(kept, scores, budget, tolerance):
    """A sentence about a head whose kept positions are not those of the best scores, ties and rounding aside; None if all are."""
    for head, (positions, own) in enumerate(zip(kept, scores)):
        chosen = torch.zeros(len(own), dtype=torch.bool)
        chosen[positions.long()] = True
        if int(chosen.sum()) != budget or len(positions) != budget:
            return f"head {head} keeps {len(positions)} of {budget}"
        cut = own.topk(budget).values[-1]
        slack = tolerance * own[own.isfinite()].max()
        if (own[~chosen] > cut + slack).any() or (own[chosen] < cut - slack).any():
            best = set(own.topk(budget).indices.tolist())
            return f"head {head} keeps {sorted(set(positions.tolist()) - best)} in place of {sorted(best - set(positions.tolist()))}"
    return None
