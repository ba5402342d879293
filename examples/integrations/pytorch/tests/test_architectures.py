"""Small random models of each architecture: logits of a prompt and of 64 steps with `full` are those of eager attention."""
import pytest
import torch
import transformers
from conftest import padded
from tessera_torch import TesseraCache

PLACES = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
if torch.cuda.is_available():
    PLACES.append(("cuda", torch.bfloat16))  # the library's CUDA caches are of 16 bits
SIZES = dict(hidden_size=128, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=320, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)
WINDOW = 24  # shorter than the prompts, so that it matters
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, dict(head_dim=64)),
    "llama-96": (transformers.LlamaConfig, dict(head_dim=96, num_key_value_heads=4)),
    "llama-128": (transformers.LlamaConfig, dict(head_dim=128, num_key_value_heads=1)),
    "mistral": (transformers.MistralConfig, dict(head_dim=64, sliding_window=WINDOW)),
    "mistral-whole": (transformers.MistralConfig, dict(head_dim=64, sliding_window=None)),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=64)),
    "qwen3-sliding": (transformers.Qwen3Config,
                      dict(head_dim=64, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)),
    "gemma2": (transformers.Gemma2Config, dict(head_dim=256, sliding_window=WINDOW, query_pre_attn_scalar=100,
                                               attn_logit_softcapping=3.0, final_logit_softcapping=30.0)),
    "gemma3": (transformers.Gemma3TextConfig, dict(head_dim=256, sliding_window=WINDOW, query_pre_attn_scalar=256,
                                                   layer_types=["sliding_attention"] * 3 + ["full_attention"])),
    # Every expert for every token: a choice between experts would turn a rounding into another answer.
    "gpt-oss": (transformers.GptOssConfig, dict(head_dim=64, sliding_window=WINDOW, num_local_experts=2,
                                                num_experts_per_tok=2, rope_scaling=None)),
}


def models_of(name, dtype):
    """The same random weights under eager attention and under Tessera's."""
    kind, options = ARCHITECTURES[name]
    torch.manual_seed(3)
    config, same = (kind(**{**SIZES, **options}) for _ in range(2))  # a model keeps its config
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in eager.named_parameters():
            if "q_proj.weight" in parameter_name or "k_proj.weight" in parameter_name:
                parameter.mul_(4)  # attention that looks somewhere
            if "sinks" in parameter_name:
                parameter.normal_()
    eager = eager.to(dtype).eval()
    ours = transformers.AutoModelForCausalLM.from_config(same, attn_implementation="tessera").to(dtype).eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def logits_of(model, inputs, cache, steps):
    """Of the prompt's real tokens, and of each step. Steps take tokens that do not depend on the model."""
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    with torch.no_grad():
        result = model(**inputs, past_key_values=cache)
        logits = [result.logits[inputs["attention_mask"].bool()]]
        mask = inputs["attention_mask"]
        for token in steps:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            position = mask.sum(1, keepdim=True) - 1
            result = model(input_ids=token.to(model.device), attention_mask=mask, position_ids=position, past_key_values=cache)
            logits.append(result.logits[:, -1])
    return torch.cat([one.float().cpu() for one in logits])


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("device, dtype", PLACES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_eager_attention(name, device, dtype):
    eager, ours = (model.to(device) for model in models_of(name, dtype))
    torch.manual_seed(5)
    rows = [torch.randint(3, 320, (length,)).tolist() for length in (100, 61, 17)]
    inputs = padded(rows)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    steps = torch.randint(3, 320, (64, 3, 1))
    truth = logits_of(eager.float(), inputs, transformers.DynamicCache(config=eager.config), steps)
    want = logits_of(eager.to(dtype), inputs, transformers.DynamicCache(config=eager.config), steps)
    got = logits_of(ours, inputs, TesseraCache(ours.config), steps)
    error, own = relative(got, want), relative(want, truth)
    print(f"{name} {device} {dtype}: from eager {error:.1e}, from fp32 {relative(got, truth):.1e}, eager itself {own:.1e}, "
          f"worst token {((got - want).norm(dim=-1) / want.norm(dim=-1)).max():.1e}")
    assert error < (1e-4 if dtype == torch.float32 else 2e-2)
    assert relative(got, truth) < 1.1 * own + 1e-5  # no further from fp32 than eager's own rounding


def test_methods_drop_in_the_layers_that_do_not_slide():
    _, ours = models_of("gemma3", torch.float32)
    torch.manual_seed(6)
    ids = torch.randint(3, 320, (1, 100))
    cache = TesseraCache(ours.config, "snapkv", 40)
    with torch.no_grad():
        ours(ids, past_key_values=cache)
        ours(ids[:, :1], past_key_values=cache)
    lengths = [[len(head) for head in cache.kept_positions(layer)[0]] for layer in range(4)]
    assert lengths[3] == [41, 41]
    assert all(WINDOW <= length <= WINDOW + 17 for layer in lengths[:3] for length in layer)


def test_other_kinds_of_layers_are_refused():
    config = transformers.Llama4TextConfig(num_hidden_layers=4, layer_types=["chunked_attention"] * 4)
    config._attn_implementation = "tessera"
    with pytest.raises(ValueError, match="chunked_attention"):
        TesseraCache(config)
