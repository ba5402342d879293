"""Facts of a model and ways of use that a cache cannot honour: refused in a sentence, and nothing is stored."""
import copy
import io
import pickle

import pytest
import torch
import transformers
from conftest import padded
from tessera_torch import TesseraCache, build
from test_use import GREEDY, small_model, tokens

SIZES = dict(hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
             vocab_size=128, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def refused(model, cache, sentence, error=ValueError, **inputs):
    before = cache.get_seq_length(), cache.bytes()
    with torch.no_grad(), pytest.raises(error, match=sentence):
        model(past_key_values=cache, **inputs)
    assert (cache.get_seq_length(), cache.bytes()) == before


# --- masks ------------------------------------------------------------------------------------------------------------------


def with_images(blocks):
    """A text model of Gemma 3 behind its image tokens, and what it is called with; blocks: of tokens that see both ways."""
    text = transformers.Gemma3TextConfig(**SIZES, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
                                         query_pre_attn_scalar=64)
    vision = transformers.SiglipVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                             image_size=28, patch_size=14)
    make = lambda attention: transformers.Gemma3ForConditionalGeneration._from_config(
        transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4,
                                  image_token_index=127), attn_implementation=attention).float().eval()
    eager, ours = make("eager"), make({"text_config": "tessera", "vision_config": "eager"})
    ours.load_state_dict(eager.state_dict())
    types = torch.zeros(1, 40, dtype=torch.long)
    for block in blocks:
        types[:, block] = 1
    return eager, ours, {"input_ids": tokens(40), "attention_mask": torch.ones_like(types), "token_type_ids": types}


@pytest.mark.parametrize("blocks", [[slice(5, 7)], [slice(30, 40)], [slice(0, 4), slice(20, 24)]], ids=str)
def test_blocks_that_see_both_ways_are_refused(blocks):
    _, ours, inputs = with_images(blocks)
    refused(ours.model, TesseraCache(ours.config), "^mask of the call is neither causal nor that of a sliding window; ", **inputs)


def test_a_mask_that_could_have_blocks_and_has_none_is_the_plain_one():
    eager, ours, inputs = with_images([])
    with torch.no_grad():
        want = eager.model(**inputs).last_hidden_state
        got = ours.model(**inputs, past_key_values=TesseraCache(ours.config)).last_hidden_state
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_a_part_without_a_cache_is_told_to_have_another_attention():
    _, ours, inputs = with_images([])
    ours.set_attn_implementation("tessera")
    inputs["input_ids"][:, 20:24] = 127
    refused(ours, TesseraCache(ours.config), "has no TesseraCache; .*'vision_config': 'sdpa'", pixel_values=torch.zeros(1, 3, 28, 28),
            **inputs)


def test_masks_are_compared_entry_by_entry():
    """What sees too much, or too little, in a single entry; padding's own entries do not matter."""
    from tessera_torch.attention import padding_of
    from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_causal_mask_function

    config = transformers.MistralConfig(sliding_window=8)
    sizes = dict(batch_size=2, q_length=20, kv_length=30, q_offset=10, config=config)
    one = lambda query, key: lambda b, h, q, k: (b == 1) & (q == query) & (k == key)
    other = lambda query, key: lambda b, h, q, k: ~((b == 1) & (q == query) & (k == key))
    padding = torch.ones(2, 30, dtype=torch.long)
    padding[1, :3] = 0
    for plain in (causal_mask_function, sliding_window_causal_mask_function(8), lambda b, h, q, k: k <= q):
        assert padding_of(mask_function=plain, attention_mask=padding, **sizes) is padding
    for wrong in (or_masks(causal_mask_function, one(12, 13)), and_masks(causal_mask_function, other(29, 9)),
                  sliding_window_causal_mask_function(9), lambda b, h, q, k: torch.ones((), dtype=torch.bool)):
        with pytest.raises(ValueError, match="^mask of the call is neither causal nor"):
            padding_of(mask_function=wrong, attention_mask=None, **sizes)
    harmless = or_masks(and_masks(causal_mask_function, other(20, 2)), one(20, 2))
    assert padding_of(mask_function=and_masks(harmless, other(25, 1)), attention_mask=padding, **sizes) is padding


def test_a_mask_of_four_dimensions_is_refused():
    model = small_model()
    refused(model, TesseraCache(model.config), "^attention mask has 4 dimensions; ", input_ids=tokens(9),
            attention_mask=torch.zeros(1, 1, 9, 9))


def test_a_mask_that_hides_or_shows_what_is_stored_is_refused():
    model, rows = small_model(), [list(range(3, 23)), list(range(30, 42))]
    inputs = padded(rows)
    cache = TesseraCache(model.config)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    step = dict(input_ids=tokens(1, 2))
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    hides, shows = mask.clone(), mask.clone()
    hides[0, 4], shows[1, 7] = 0, 1
    for wrong in (hides, shows):
        refused(model, cache, "^attention mask of stored tokens is another than when they were stored; ", attention_mask=wrong, **step)
    refused(model, cache, r"^shape of the attention mask is \(2, 1\); expected \(2, 21\)", attention_mask=mask[:, -1:], **step)
    want = []
    for given in (mask, None):  # no mask says nothing of padding
        twin = copy.deepcopy(cache)
        position = torch.tensor([[20], [12]])
        with torch.no_grad():
            want.append(model(**step, attention_mask=given, position_ids=position, past_key_values=twin).logits)
    assert torch.equal(*want)


def test_padding_of_several_calls_is_remembered():
    """Prompt, step, and the next question with padding of its own; a mask that changes any of it is refused."""
    model = small_model()
    cache, mask = TesseraCache(model.config), torch.zeros(2, 0, dtype=torch.long)
    parts = [[[1, 1, 1, 1], [0, 0, 1, 1]], [[1], [1]], [[0, 1, 1], [1, 1, 1]], [[1], [1]], [[1, 1], [1, 1]]]
    for part in parts:
        part = torch.tensor(part)
        mask = torch.cat([mask, part], 1)
        for column in range(mask.shape[1] - part.shape[1]):
            wrong = mask.clone()
            wrong[0, column] ^= 1
            refused(model, cache, "^attention mask of stored tokens", input_ids=torch.full_like(part, 5), attention_mask=wrong)
        with torch.no_grad():
            model(input_ids=torch.full_like(part, 5), attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 11


# --- models -----------------------------------------------------------------------------------------------------------------


def test_layers_that_share_keys_and_values_are_refused_where_no_config_says_whose():
    options = dict(num_kv_shared_layers=2, sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2)
    config = transformers.Gemma3nTextConfig(**{**SIZES, "num_hidden_layers": 4}, **options)
    config._attn_implementation = "tessera"
    if hasattr(config, "kv_sharing_modes"):
        return  # tests/models has them
    with pytest.raises(ValueError, match="^the last 2 layers of the model read keys and values of other layers; "):
        TesseraCache(config)


def test_keys_of_another_layer_are_refused():
    """What no config says: the second layer reads the first one's. An empty cache begins anew afterwards."""
    model, ids = small_model(), tokens(9)
    with torch.no_grad():
        want = model(ids, past_key_values=TesseraCache(model.config)).logits
    cache, first = TesseraCache(model.config), []
    own = cache.update

    def shared(keys, values, layer, *rest, **named):
        first[:] = first if layer else own(keys, values, layer)
        return first

    cache.update = shared
    with torch.no_grad(), pytest.raises(ValueError, match="^keys of layer 1 are those of layer 0; expected its own, "):
        model(ids, past_key_values=cache)
    cache.update = own
    with torch.no_grad():
        assert torch.equal(model(ids, past_key_values=cache).logits, want) and cache.get_seq_length() == 9


def test_a_decoder_with_an_encoder_is_refused():
    config = transformers.T5Config(num_layers=1, d_model=64)
    config._attn_implementation = "tessera"
    with pytest.raises(ValueError, match="^model is an encoder with a decoder; "):
        TesseraCache(config)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layers", [1, 2])
def test_another_attention_is_refused_before_it_sees_a_step_alone(attention, layers):
    config = lambda: transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": layers})
    ours = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="tessera").eval()
    other = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation=attention).eval()
    for switched in (False, True):  # a cache of another model's config, and a model that is switched afterwards
        cache = TesseraCache(ours.config)
        if switched:
            ours.set_attn_implementation(attention)
        refused(ours if switched else other, cache, "^attention of the model is another than 'tessera'; ", input_ids=tokens(9))


def test_terms_that_attention_does_not_have_are_refused():
    model = small_model()
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    refused(model, TesseraCache(model.config), "^dropout is 0.5; expected 0: ", input_ids=tokens(9))
    model.eval()
    refused(model, TesseraCache(model.config), "^position_bias is given to attention; expected none: ", input_ids=tokens(9),
            position_bias=torch.zeros(1, 2, 9, 9))
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    refused(model, TesseraCache(model.config), "is not causal; expected that no token sees a later one", input_ids=tokens(9))


# --- ways of use ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, mode", [
    (dict(num_beams=2), "beam search"), (dict(num_beams=2, do_sample=True), "beam sample"),
    (dict(guidance_scale=1.5), "classifier-free guidance"),
    (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions"),
], ids=str)
def test_what_no_cache_can_is_refused_before_the_prompt_is_in(options, mode):
    model, ids = small_model(), tokens(40)
    cache = TesseraCache(model.config)
    with pytest.raises(NotImplementedError, match=f"^{mode} is not possible with a TesseraCache: "):
        model.generate(ids, past_key_values=cache, max_new_tokens=4, **{**GREEDY, "eos_token_id": 2, **options})
    assert cache.get_seq_length() == 0 and cache.bytes() == 0


def test_an_answer_that_would_not_fit_is_refused_before_the_prompt_is_in():
    model, ids = small_model(), tokens(60)
    cache = TesseraCache(model.config, max_length=70)
    with pytest.raises(ValueError, match="^tokens of the conversation may become 71; expected at most 70; "):
        model.generate(ids, past_key_values=cache, max_new_tokens=12, **GREEDY)
    assert cache.get_seq_length() == 0
    first = model.generate(ids, past_key_values=cache, max_new_tokens=5, **GREEDY)
    with pytest.raises(ValueError, match="^tokens of the conversation may become 71; expected at most 70; "):
        model.generate(first, past_key_values=cache, max_new_tokens=7, **GREEDY)
    assert model.generate(first, past_key_values=cache, max_new_tokens=6, **GREEDY).shape[1] == 71  # its last one is not stored
    assert cache.get_seq_length() == 70


def test_copies_that_would_share_the_store_are_refused():
    model = small_model()
    cache = TesseraCache(model.config)
    with torch.no_grad():
        model(tokens(9), past_key_values=cache)
    with pytest.raises(NotImplementedError, match="^copy.copy of a TesseraCache would share what is stored with it; "):
        copy.copy(cache)
    for save in (pickle.dumps, lambda one: torch.save(one, io.BytesIO()), lambda one: torch.save({"cache": one}, io.BytesIO())):
        with pytest.raises(ValueError, match="^the prompt has not ended; "):
            save(cache)
    assert copy.deepcopy(cache).get_seq_length() == 9


def test_rows_of_several_types_are_named():
    path = build.library("full", torch.float32, 64)
    operators = build.operators()
    cache = operators.create(str(path), 1, 1, 1, [], 0, 0.0, 0.0, None, [], 1, 64, None)
    row = torch.ones(1, 1, 2, 64)
    with pytest.raises(ValueError, match="^dtype of k and v is Float and BFloat16; expected Float, that of q; "):
        operators.prompt(cache, 0, row, row, row.bfloat16(), [0], [2])
    with pytest.raises(ValueError, match="^dtype of k and v is Half and Float; expected Float, that of q; "):
        operators.prompt(cache, 0, row, row.half(), row, [0], [2])
    operators.destroy(cache.item())


def test_a_choice_that_cannot_be_made_is_said_when_the_prompt_ends():
    """And every layer has the prompt then: with a larger budget it goes on as a cache that had that budget."""
    model, ids = small_model(), tokens(600)
    caches = [TesseraCache(model.config, "rocketkv", budget, window=400) for budget in (64, 500)]
    with torch.no_grad():
        for cache in caches:
            with cache.prompt(600):
                model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="room for the window"):
            caches[0].end_prompt()
        caches[0].set_budget(500)
        assert caches[0].get_seq_length() == 600
        got, want = (model(ids[:, :1], past_key_values=cache).logits for cache in caches)
    assert torch.equal(got, want)
    assert [len(head) for head in caches[0].kept_positions(1)[0]] == [len(head) for head in caches[1].kept_positions(1)[0]]
