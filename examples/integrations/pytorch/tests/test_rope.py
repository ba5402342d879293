"""How RoPE turns is asked of small random models: what their layers do to queries at several positions."""
import pytest
import torch
import transformers
from tessera_torch import TesseraCache, rope
from transformers import AttentionInterface

DIM = 64
SIZES = dict(hidden_size=2 * DIM, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=DIM,
             vocab_size=64, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
queries = []


def nothing(module, query, *_, **__):
    """An attention that answers zeros: what a layer reads does not depend on positions, what it asks does by RoPE alone."""
    queries.append(query[0, :, -1].double())
    return torch.zeros_like(query.transpose(1, 2)), None


AttentionInterface.register("nothing", nothing)


def asked(model, position):
    """The query of one token at a position, by layer: [heads, dim]."""
    queries.clear()
    with torch.no_grad():
        model(torch.tensor([[5]]), position_ids=torch.tensor([[position]]), use_cache=False)
    return list(queries)


def measured(model):
    """Of each layer the speeds [dim / 2], 0 without RoPE; None where it turns other pairs."""
    first, second, far = (asked(model, position) for position in (0, 1, 37))
    result = []
    for here, there, beyond in zip(first, second, far):
        pairs = [torch.complex(*q.chunk(2, -1)) for q in (here, there, beyond)]
        speed = (pairs[1] / pairs[0]).angle().mean(0)
        turned = pairs[0] * torch.polar(torch.ones_like(speed), 37 * speed)
        fits = torch.allclose(turned, pairs[2], rtol=1e-3, atol=1e-4 * pairs[0].abs().max().item())
        result.append(speed if fits else None)
    return result


def model_of(config):
    torch.manual_seed(1)
    return transformers.AutoModel.from_config(config, attn_implementation="nothing").eval()


def config_of(kind, **more):
    names = {"gemma3_text": "Gemma3TextConfig", "gpt_oss": "GptOssConfig"}
    named = getattr(transformers, names.get(kind) or "".join(map(str.capitalize, kind.split("_"))) + "Config", None)
    if named is None:
        pytest.skip(f"this transformers has no {kind}")
    return named(**{**SIZES, **more})
