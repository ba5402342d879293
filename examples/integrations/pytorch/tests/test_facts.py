"""What a cache is told of the model and the text: RoPE's speeds, ends of segments, profiles."""
import json

import pytest
import torch
import transformers
from conftest import padded
from tessera_torch import TesseraCache
from tessera_torch.facts import model_facts, rope
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)
GREEDY = dict(do_sample=False, pad_token_id=0, eos_token_id=None)


def llama(**options):
    sizes = dict(hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=4096)
    if int(transformers.__version__.split(".")[0]) >= 5:
        return transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 5e5, **options})
    return transformers.LlamaConfig(**sizes, rope_theta=5e5, rope_scaling=options or None)


@pytest.mark.parametrize("options", [{}, LLAMA3, dict(rope_type="linear", factor=4.0)], ids=["default", "llama3", "linear"])
def test_speeds_are_those_of_the_model_s_rotary_embedding(options):
    config = llama(**options)
    got = torch.tensor(rope.turn_of(config, config.num_hidden_layers - 1).speeds)
    assert torch.allclose(got, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6)


def test_speeds_of_layers_that_do_not_slide():
    config = transformers.Gemma3TextConfig(hidden_size=128, num_attention_heads=2, head_dim=64, num_hidden_layers=6)
    embedding = Gemma3RotaryEmbedding(config)
    want = embedding.full_attention_inv_freq if hasattr(embedding, "full_attention_inv_freq") else embedding.inv_freq
    assert torch.allclose(torch.tensor(rope.turn_of(config, config.num_hidden_layers - 1).speeds), want, rtol=1e-6)


def test_no_speeds_where_they_change_with_the_text():
    with pytest.raises(ValueError, match="^RoPE of the model is of the type 'dynamic', whose speeds change with the length of the text; "):
        rope.turn_of(llama(rope_type="dynamic", factor=2.0), 0)


def test_segments_end_behind_delimiters(tokenizer):
    text = "One, two... Three?! four\n\nfive."
    tokens = tokenizer.encode(text)
    flags = model_facts.SegmentEnds(tokenizer)(torch.tensor([tokens, tokens[::-1]]))
    assert flags.dtype == torch.uint8
    pieces, piece = [], []
    for token, ends in zip(tokens, flags[0].tolist()):
        piece.append(token)
        if ends:
            pieces.append(tokenizer.decode(piece).strip(" "))
            piece = []
    assert not piece and [one.strip() for one in pieces] == ["One,", "two...", "Three?!", "four", "five."]


@pytest.mark.parametrize("method, sentence", [
    ("sentencekv", "boundaries is 0; expected one flag for each new token"),
    ("kvzip", "^text of the prompt is not known; expected it, as the method reads prompts again before they end; "),
])
def test_the_text_in_padded_batches_and_turns(model, tokenizer, prompts, method, sentence, monkeypatch):
    """Every sequence of a batch answers what it answers alone; without the text the method says what it misses."""
    monkeypatch.setattr(model_facts.Repeated, "PART", 70)  # several parts, of several lengths
    rows = [prompts[i] for i in (3, 8, 11)]
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        model(torch.tensor(rows[:1]), past_key_values=TesseraCache(model.config, method, 64))

    def generate(rows):
        cache = TesseraCache(model.config, method, 64).read_text(model, tokenizer)
        inputs = padded(rows)
        first = model.generate(**inputs, past_key_values=cache, max_new_tokens=6, **GREEDY)
        more = torch.tensor([tokenizer.encode("\nAnd then, what? ")] * len(rows))
        ids = torch.cat([first, more], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(rows), 6 + more.shape[1], dtype=torch.long)], 1)
        second = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, **GREEDY)
        kept = [[head.tolist() for head in sequence] for sequence in cache.kept_positions(3)]
        return second[:, -(12 + more.shape[1]):].tolist(), kept

    together, kept = generate(rows)
    for i, row in enumerate(rows):
        alone, own = generate([row])
        assert together[i] == alone[0] and kept[i] == own[0]


def test_a_cache_that_is_gone_takes_its_hook_along(model, tokenizer):
    before = len(model._forward_pre_hooks)
    cache = TesseraCache(model.config, "sablock", 64).read_text(model, tokenizer)
    assert len(model._forward_pre_hooks) == before + 1
    del cache
    assert len(model._forward_pre_hooks) == before


def test_profiles_as_files_and_as_numbers(model, prompts, tmp_path):
    """DuoAttention: heads of high gates keep everything, the others the budget."""
    gates = [[0.9, 0.1, 0.1, 0.8]] * 6
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"kind": "tessera head gates", "version": 1, "gates": gates}))
    ids = torch.tensor([max(prompts, key=len)])
    for profile in (path, str(path), gates, {"gates": gates}):
        cache = TesseraCache(model.config, "duo_attention", 40, profile=profile)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
        lengths = [len(head) for head in cache.kept_positions(2)[0]]
        assert lengths[0] == lengths[3] == ids.shape[1] + 1 and lengths[1] == lengths[2] <= 41


@pytest.mark.parametrize("method, profile, sentence", [
    ("duo_attention", [[0.5] * 4] * 5, "^numbers of the profile is 20; expected one for each kv_head of the model, 24; "),
    ("duo_attention", [[1.5] * 4] * 6, r"^gate of layer 0, kv_head 0 is 1.5; expected in \[0, 1\]; "),
    ("snapkv", [[0.5] * 4] * 6, "^profile is given; expected none: this method takes no table"),
    ("tangram", {"version": 1}, "^profile has version; expected gates or budget; "),
])
def test_wrong_profiles_are_refused_by_a_sentence(model, method, profile, sentence):
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        model(torch.ones(1, 9, dtype=torch.long), past_key_values=TesseraCache(model.config, method, 40, profile=profile))
