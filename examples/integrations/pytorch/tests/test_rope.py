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


def measured(model, orders):
    """Of each layer the speeds [dim / 2], 0 without RoPE, of pairs in an order of elements; None where it turns other pairs."""
    first, second, far = (asked(model, position) for position in (0, 1, 37))
    result = []
    for *queries_at, order in zip(first, second, far, orders):
        pairs = [torch.complex(*(q if order is None else q[:, order]).chunk(2, -1)) for q in queries_at]
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
    return CONFIG_MAPPING[kind](**{**SIZES, **more}) if kind in CONFIG_MAPPING else None


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)


def scaled(options):
    """RoPE's parameters as a config of this transformers takes them."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, **options})
    part = options.pop("partial_rotary_factor", None)
    return dict(rope_scaling=options or None, **({} if part is None else {"partial_rotary_factor": part}))


@pytest.mark.parametrize("kind, options", [
    ("llama", scaled(YARN)), ("llama", scaled(LLAMA3)), ("qwen3", scaled(dict(rope_type="linear", factor=4.0))),
    ("gemma3_text", dict(sliding_window=16, layer_types=SLIDING)), ("cohere", {}), ("glm", {}), ("helium", {}),
    ("phi", scaled(dict(partial_rotary_factor=0.5))), ("stablelm", scaled(dict(partial_rotary_factor=0.25))),
    ("smollm3", dict(no_rope_layers=[1, 0, 1, 0])),
], ids=lambda value: value if isinstance(value, str) else "")
def test_turns_are_what_layers_do(kind, options):
    """tests/models measures every architecture as its config comes; these are parameters that configs may have."""
    config = config_of(kind, **options)
    if config is None:
        pytest.skip(f"this transformers has no {kind}")
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    turns = [rope.turn_of(config, layer) for layer in range(config.num_hidden_layers)]
    got = measured(model_of(config), [turn.order_of(DIM) for turn in turns])
    for turn, speed, layer_kind in zip(turns, got, kinds):
        if layer_kind == "full_attention":
            assert speed is not None
            assert torch.allclose(speed, torch.tensor(turn.speeds_of(DIM)).double(), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("kind, sentence", [("gpt2", "of the architecture 'gpt2' is not known; "),
                                            ("llama", "is of the type 'dynamic', whose speeds change with the length of the text; ")])
def test_what_cannot_be_turned_back_is_refused_before_anything_is_stored(kind, sentence):
    config = config_of(kind, **({} if kind == "gpt2" else scaled(dict(rope_type="dynamic", factor=2.0))))
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
