"""What generate asks of a cache, and what the cache reads of generate: the same on the oldest and the newest transformers."""
import copy
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import HERE
from tessera_torch import TesseraCache, versions
from test_use import GREEDY, small_model, tokens

FOUR = transformers.__version__.startswith("4.")


def kept(cache, below):
    return [[head[head < below].tolist() for head in cache.kept_positions(layer)[0]] for layer in range(2)]


def test_answers_about_layers_are_the_truth():
    model = small_model()
    cache = TesseraCache(model.config)
    assert len(cache) == len(cache.layers) == 2 and not cache.is_initialized and not cache.is_compileable
    assert cache.is_sliding == [False, False] and cache.get_seq_length() == cache.get_seq_length(1) == 0
    with torch.no_grad():
        model(tokens(9, 3), past_key_values=cache)
    assert cache.is_initialized and not cache.is_compileable and cache.get_seq_length(1) == 9
    new = torch.arange(9, 13) if FOUR else 4
    assert cache.get_mask_sizes(new, 1) == (13, 0)
    if FOUR:
        assert cache.max_batch_size == 3
    else:
        assert cache.batch_size == 3 and cache.is_linear == getattr(cache, "is_dummy", [False, False]) == [False, False] and cache.is_croppable
        assert cache.get_query_offset() == 9 and cache.get_max_length() == -1
        assert TesseraCache(model.config, max_length=90).get_max_length() == 90
    with pytest.raises(NotImplementedError, match="^reading a layer's keys as a tensor is not possible"):
        cache.layers[0].keys
    for undo in (lambda: cache.reorder_cache(torch.tensor([0])), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(NotImplementedError, match="is not possible with a TesseraCache"):
            undo()
    twin = copy.deepcopy(cache)
    cache.reset()
    assert twin.get_seq_length() == 9 and twin.is_initialized and cache.get_seq_length() == 0 and not cache.is_initialized


def test_sliding_layers_say_so():
    config = transformers.Gemma3TextConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=64,
                                           sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    config._attn_implementation = "tessera"
    assert TesseraCache(config).is_sliding == [True, False]


def test_update_takes_what_it_does_not_know():
    cache = TesseraCache(small_model().config)
    rows = torch.ones(1, 1, 3, 64)
    for rest, named in (((), {}), (({"cos": rows},), {}), ((), {"cache_kwargs": {}}), ((), {"kwargs": {}, "to_come": 1})):
        keys, values = cache.update(rows, rows, 1, *rest, **named)
        assert keys.shape == rows.shape and values is rows


@pytest.mark.parametrize("filled", [0, 1, 30, 59])
def test_a_filled_cache_takes_the_rest_of_the_prompt(filled):
    model, ids = small_model(), tokens(60)
    want = model.generate(ids, past_key_values=TesseraCache(model.config), max_new_tokens=8, **GREEDY)
    cache, lengths = TesseraCache(model.config), []
    with torch.no_grad():
        if filled:
            model(ids[:, :filled], past_key_values=cache)
    model.register_forward_pre_hook(lambda _, __, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True)
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=8, **GREEDY), want)
    assert lengths == [60 - filled] + [1] * 7


@pytest.mark.parametrize("length, chunk", [(100, 1), (100, 7), (100, 33), (100, 99), (100, 98), (100, 200), (2, 1)])
def test_chunks_of_generate_belong_to_the_prompt(length, chunk):
    """Also those of one token, up to the prompt's last. That one, alone in its call, is the first step; in a chunk with others
    it belongs to the prompt, and then all is as it is without chunks."""
    model, ids = small_model(), tokens(length)
    last_is_step = FOUR or chunk == 1 or length % chunk == 1
    prompt = length - last_is_step
    reference = TesseraCache(model.config, "snapkv", 40, window=8)
    with torch.no_grad(), reference.prompt():
        logits = model(ids[:, :prompt], past_key_values=reference).logits
    reference.end_prompt()
    want = kept(reference, prompt)
    cache = TesseraCache(model.config, "snapkv", 40, window=8)
    got = model.generate(ids, past_key_values=cache, max_new_tokens=6, prefill_chunk_size=chunk, **GREEDY)
    assert kept(cache, prompt) == want and cache.get_seq_length() == length + 5
    first = got[:, length:length + 1] if not last_is_step else ids[:, -1:]
    assert last_is_step or torch.equal(first, logits[:, -1:].argmax(-1))
    if not last_is_step:
        whole = TesseraCache(model.config, "snapkv", 40, window=8)
        assert torch.equal(model.generate(ids, past_key_values=whole, max_new_tokens=6, **GREEDY), got)
        assert kept(cache, length + 5) == kept(whole, length + 5)
    rest = got[:, :length + 1] if not last_is_step else ids
    assert torch.equal(model.generate(rest, past_key_values=reference, max_new_tokens=6 - (rest.shape[1] - length), **GREEDY), got)


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunks_of_a_later_turn(chunk):
    """transformers 5 goes on where the cache ends; transformers 4 begins anew, which is refused."""
    model, ids = small_model(), tokens(60)
    caches = [TesseraCache(model.config, "snapkv", 40, window=8) for _ in range(2)]
    first = [model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY) for cache in caches][0]
    ids = torch.cat([first, tokens(20)], 1)
    if FOUR:
        with pytest.raises(ValueError, match="^a chunk of generate begins at token 0 and the cache has 63; "):
            model.generate(ids, past_key_values=caches[0], max_new_tokens=4, prefill_chunk_size=chunk, **GREEDY)
        assert caches[0].get_seq_length() == 63
        return
    last_is_step = chunk == 1 or (ids.shape[1] - 63) % chunk == 1
    got = model.generate(ids, past_key_values=caches[0], max_new_tokens=4, prefill_chunk_size=chunk, **GREEDY)
    with torch.no_grad(), caches[1].prompt():
        model(ids[:, 63:ids.shape[1] - last_is_step], past_key_values=caches[1])
    caches[1].end_prompt()
    below = ids.shape[1] - last_is_step
    assert kept(caches[0], below) == kept(caches[1], below) and got.shape[1] == ids.shape[1] + 4


def test_a_model_within_a_generate_of_another_cache_is_not_confused():
    """A call of one token, made by a hook while another cache reads chunks, is a step of its own cache."""
    model, inner = small_model(), small_model()
    own = TesseraCache(inner.config, "snapkv", 20, window=8)
    with torch.no_grad():
        inner(tokens(50), past_key_values=own)

    def step(*_):
        with torch.no_grad():
            inner(tokens(1), past_key_values=own)

    hook = model.register_forward_pre_hook(step)
    model.generate(tokens(12), past_key_values=TesseraCache(model.config), max_new_tokens=1, prefill_chunk_size=5, **GREEDY)
    hook.remove()
    assert [len(head) for head in own.kept_positions(0)[0]] == [20 + own.get_seq_length() - 50] != [own.get_seq_length()]


def test_versions_that_are_not_known_are_doubted_once():
    assert all(versions.doubt(known) is None for known in ("4.57.0", "4.57.6", "5.24.0", "5.24.1"))
    for other in ("4.56.2", "5.17.0", "5.25.0", "6.0.0", "5.25.0.dev0"):
        assert versions.doubt(other).startswith(f"transformers is {other}; expected 4.57 or 5.24, with which")
    program = ("import transformers; transformers.__version__ = '5.25.0'; import warnings\n"
               "with warnings.catch_warnings(record=True) as said:\n    warnings.simplefilter('always')\n"
               "    import tessera_torch, tessera_torch.cache; tessera_torch.methods(); import tessera_torch\n"
               "print(sum('expected 4.57 or 5.24' in str(one.message) for one in said))")
    result = subprocess.run([sys.executable, "-c", program], cwd=HERE.parent, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"
