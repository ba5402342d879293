"""How RoPE turns is asked of small random models: what their layers do to queries at several positions."""
import pytest
import torch
import transformers
from tessera_torch import TesseraCache
from tessera_torch.facts import rope
from transformers import AttentionInterface

DIM = 64
SIZES = dict(hidden_size=2 * DIM, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
             head_dim=DIM, vocab_size=64, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2)
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
    try:
        return transformers.AutoModel.from_config(config, attn_implementation="nothing").eval()
    except KeyError:  # has classes of its own for each attention
        pytest.skip(f"{config.model_type} of this transformers takes no attention from outside")


def config_of(kind, **more):
    """None where this transformers has no such architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    experts = dict(num_local_experts=2, num_experts=2, num_experts_per_tok=2) if kind in (
        "exaone_moe", "flex_olmo", "gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
        "solar_open") else {}
    if kind not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[kind](**{**SIZES, **experts, **more})


@pytest.mark.parametrize("kind", sorted(rope.HALVES))
def test_speeds_are_what_layers_do(kind):
    """Of every architecture that is listed: in each layer in which methods choose, the speeds or none."""
    windows = (*rope.SLIDING_ALONE, "gemma2", "gemma3_text", "gpt_oss", "ministral", "olmo3", "smollm3")
    slides = dict(sliding_window=16, layer_types=SLIDING) if kind in windows else {}
    if kind == "smollm3":
        slides = dict(no_rope_layers=[1, 1, 1, 1])
    config = config_of(kind, **slides)
    if config is None:
        pytest.skip(f"this transformers has no {kind}")
    want, layers = rope.speeds(config, DIM), measured(model_of(config))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    chosen = [speed for speed, layer in zip(layers, kinds) if layer == "full_attention"]
    assert chosen and all(speed is not None for speed in chosen)
    assert all(torch.allclose(speed, torch.tensor(want).double(), rtol=1e-3, atol=2e-5) for speed in chosen)


@pytest.mark.parametrize("kind", ["cohere", "glm", "ernie4_5", "helium", "stablelm", "phi", "opt"])
def test_architectures_that_turn_otherwise_are_not_listed(kind):
    """Neighbouring pairs, parts of heads, learned positions: measured to be other, and refused by expected_attention."""
    config = config_of(kind)
    assert None in measured(model_of(config))
    with pytest.raises(ValueError, match=f"^RoPE of the model of the architecture '{kind}' is not known; "):
        rope.speeds(config, DIM)


@pytest.mark.parametrize("kind, options, sentence", [
    ("smollm3", dict(no_rope_layers=[1, 1, 1, 0]), "is missing in layer 3 and turns in layer 0; "),
    ("phi3", dict(partial_rotary_factor=0.5), "turns 0.5 of each head; "),
    ("helium", {}, "of the architecture 'helium' is not known; "),
])
def test_what_cannot_be_turned_back_is_refused_before_anything_is_stored(kind, options, sentence):
    config = config_of(kind, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera").eval()
    cache = TesseraCache(model.config, "expected_attention", 32)
    with torch.no_grad(), pytest.raises(ValueError, match=f"^RoPE of the model {sentence}.*use another method$"):
        model(torch.ones(1, 40, dtype=torch.long), past_key_values=cache)
    assert cache.get_seq_length() == 0 and cache.bytes() == 0
    cache = TesseraCache(model.config, "snapkv", 32, window=8)  # needs to know nothing of RoPE
    with torch.no_grad():
        model(torch.ones(1, 40, dtype=torch.long), past_key_values=cache)
    assert cache.get_seq_length() == 40


def rows_of(config, prompt):
    """Queries, keys and values of a model of one layer, [heads, tokens, dim]."""
    rows = []

    def note(module, query, key, value, *_, **__):
        rows.extend(x[0].double() for x in (query, key, value))
        return torch.zeros_like(query.transpose(1, 2)), None

    AttentionInterface.register("noting", note)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="noting").eval()
    with torch.no_grad():
        model(prompt, use_cache=False)
    return rows


def most_expected(rows, budget, sinks=4):
    """What Expected Attention keeps where nothing turns, in double: [kv_head] of ascending positions."""
    q, k, v = rows
    kept = []
    for head in range(k.shape[0]):
        group, weights = q.shape[0] // k.shape[0], 0
        for asking in q[head * group:(head + 1) * group, sinks:]:
            logits = k[head, sinks:] / DIM**0.5
            spread = torch.cov(asking.T, correction=0)
            weights = weights + (logits @ asking.mean(0) + ((logits @ spread) * logits).sum(-1) / 2).softmax(0)
        scores = weights * v[head, sinks:].norm(dim=-1)
        kept.append(sorted([*range(sinks), *(scores.topk(budget - sinks).indices + sinks).tolist()]))
    return kept


@pytest.mark.parametrize("kind, options", [
    ("cohere2", dict(layer_types=["full_attention"], sliding_window=64)),
    ("exaone4", dict(layer_types=["full_attention"], sliding_window=64)),
    ("smollm3", dict(no_rope_layers=[0])),
])
def test_expected_attention_without_rope_keeps_what_double_keeps(kind, options):
    make = lambda: config_of(kind, num_hidden_layers=1, num_key_value_heads=1, vocab_size=512, **options)
    torch.manual_seed(9)
    prompt = torch.randperm(500)[None, :200] + 3  # each token once: no two rows are alike
    want = most_expected(rows_of(make(), prompt), 48)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(make(), attn_implementation="tessera").eval()
    cache = TesseraCache(model.config, "expected_attention", 48)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    cache.end_prompt()
    assert [head.tolist() for head in cache.kept_positions(0)[0]] == want
