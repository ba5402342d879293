"""generate, padding, copies and pickle with models whose layers differ: recurrent ones, layers that read another's keys, latent rows."""
import copy
import pickle

import pytest
import tiny_models
import torch
import transformers
from conftest import padded
from tessera_torch import TesseraCache
from tessera_torch.generation import cache_keyword

KINDS = [kind for kind in ("qwen3_5_text", "gemma4_text", "deepseek_v3", "falcon_h1") if kind in tiny_models.ARCHITECTURES]
OF_FIVE = pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 keeps their states in caches of their own")
GREEDY = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
ROWS = [torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (60, 41)]


def models_of(kind):
    torch.manual_seed(1)
    make = lambda attention: transformers.AutoModelForCausalLM.from_config(tiny_models.config_of(kind), attn_implementation=attention).eval()
    eager, ours = tiny_models.randomise(make("eager")), make("tessera")
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@OF_FIVE
@pytest.mark.parametrize("kind", KINDS)
def test_generate_gives_eager_s_tokens_in_a_padded_batch(kind):
    eager, ours = models_of(kind)
    inputs = padded(ROWS)
    want = eager.generate(**inputs, **GREEDY)
    assert torch.equal(ours.generate(**inputs, **GREEDY, **{cache_keyword(ours): TesseraCache(ours.config)}), want)


@OF_FIVE
@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_go_on_alike(kind):
    _, ours = models_of(kind)
    cache, name = TesseraCache(ours.config, "snapkv", 24, window=8), cache_keyword(ours)
    with torch.no_grad():
        ours(torch.tensor(ROWS[:1]), **{name: cache})
        cache.end_prompt()
        others = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        for token in (5, 6, 7):
            want, *got = [ours(torch.tensor([[token]]), **{name: one}).logits for one in (cache, *others)]
            assert all(torch.equal(one, want) for one in got)
    cache.reset()
    with torch.no_grad():
        assert ours(torch.tensor(ROWS[1:]), **{name: cache}).logits.shape[1] == 41 and cache.get_seq_length() == 41


@OF_FIVE
def test_drafts_are_refused_where_layers_read_another_one_s_keys():
    _, ours = models_of("gemma4_text")
    with pytest.raises(NotImplementedError, match="^checking drafts in a model whose layers share keys, or have states"):
        ours.generate(torch.tensor(ROWS[:1]), prompt_lookup_num_tokens=3, **GREEDY, **{cache_keyword(ours): TesseraCache(ours.config)})


@OF_FIVE
def test_what_layers_with_states_cannot_do_is_refused():
    _, ours = models_of("qwen3_5_text")
    name = cache_keyword(ours)
    cache = TesseraCache(ours.config, max_length=65)
    with torch.no_grad():
        ours(torch.tensor(ROWS[:1]), **{name: cache})
        with pytest.raises(ValueError, match="^tokens to take back are 2; expected 0: layers of the model have states"):
            cache.crop(-2)
        with pytest.raises(ValueError, match="^tokens of the conversation are 70; "):  # recurrent layers have had them
            ours(torch.full((1, 10), 5), **{name: cache})
        with pytest.raises(ValueError, match="^the cache is half way through a call that failed; "):
            ours(torch.tensor([[5]]), **{name: cache})
