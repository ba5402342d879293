"""Tokens that are taken back: drafts of generate, and crop."""
import copy

import pytest
import torch
import transformers
from tessera_torch import TesseraCache, drafts
from test_refusals import SIZES
from test_use import small_model, tokens

METHODS = ("full", "snapkv", "tangram", "quest", "rocketkv")  # a filter, a reader and both chosen sets among them
ASKED = dict(do_sample=False, pad_token_id=0, eos_token_id=2, max_new_tokens=24)


def cache_of(model, method, **more):
    return TesseraCache(model.config, method, **({} if method == "full" else dict(budget=40)), **more)


@pytest.mark.parametrize("method", (*METHODS, "h2o"))
def test_drafts_give_greedy_answers(method):
    model, ids = small_model(), tokens(20).repeat(1, 4)
    small = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**SIZES, "vocab_size": 128}),
                                                          attn_implementation="eager").eval()
    small.generation_config.num_assistant_tokens = 4
    want = model.generate(ids, past_key_values=cache_of(model, method), **ASKED)
    for options in (dict(prompt_lookup_num_tokens=3), dict(prompt_lookup_num_tokens=12), dict(assistant_model=small)):
        for parts in (0, 60):  # with the prompt's first tokens in the cache already
            cache = cache_of(model, method)
            if parts:
                with torch.no_grad(), cache.prompt():
                    model(ids[:, :parts], past_key_values=cache)
            got = model.generate(ids, past_key_values=cache, **ASKED, **options)
            count = min(got.shape[1], want.shape[1])  # transformers 4.57 may give one token more
            assert torch.equal(got[:, :count], want[:, :count]) and got.shape[1] >= want.shape[1]
            assert cache.get_seq_length() == got.shape[1] - 1


@pytest.mark.parametrize("method", ("h2o", "loopserve", "streaming_llm", "tova"))
def test_a_draft_leaves_nothing_where_a_method_chooses_in_every_step(method):
    model, ids, token = small_model(), tokens(20).repeat(1, 4), tokens(1)
    plain, drafted = cache_of(model, method), cache_of(model, method)
    for cache, options in ((plain, {}), (drafted, dict(prompt_lookup_num_tokens=5))):
        out = model.generate(ids, past_key_values=cache, **ASKED, **options)
    with torch.no_grad():
        last = []
        for cache in (plain, drafted):  # transformers 4.57 may give a drafted answer one token more
            for place in range(cache.get_seq_length(), out.shape[1]):
                logits = model(out[:, place:place + 1], past_key_values=cache).logits
            last.append(logits)
        wrong = copy.deepcopy(drafted)
        with pytest.raises(ValueError, match="^tokens to take back is 1; expected 0 to 0: the method has settled the others; "):
            wrong.crop(-1)
        logits = [model(token, past_key_values=cache).logits for cache in (plain, drafted, wrong)]
    assert torch.equal(*last) and torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert [[head.tolist() for head in row] for row in plain.kept_positions(1)] == \
           [[head.tolist() for head in row] for row in drafted.kept_positions(1)]


def test_a_budget_that_changes_while_a_draft_is_judged_holds(monkeypatch):
    model, ids, crop, changed = small_model(), tokens(20).repeat(1, 4), drafts.crop, []

    def change_before(cache, removed):
        if removed and not changed:
            cache.set_budget(20)
            changed.append(removed)
        crop(cache, removed)

    monkeypatch.setattr(drafts, "crop", change_before)
    cache = cache_of(model, "h2o")
    model.generate(ids, past_key_values=cache, **ASKED, prompt_lookup_num_tokens=5)
    assert changed and all(len(head) == 20 for row in cache.kept_positions(1) for head in row)


@pytest.mark.parametrize("method", METHODS)
def test_what_follows_a_crop_has_the_bits_of_a_cache_that_never_had_the_tokens(method):
    model, prompt, answer, other = small_model(), tokens(70, 2), tokens(6, 2), tokens(5, 2)
    cache, plain = cache_of(model, method), cache_of(model, method)
    with torch.no_grad():
        for one in (cache, plain):
            model(prompt, past_key_values=one)
            for token in answer.split(1, dim=1):
                model(token, past_key_values=one)
        for token in other.split(1, dim=1):
            model(token, past_key_values=cache)
        cache.crop(-3), cache.crop(torch.tensor(-2)), cache.crop(0)
        assert cache.get_seq_length() == plain.get_seq_length() == 76 and type(cache.get_seq_length()) is int
        again, want = (model(answer[:, :1], past_key_values=one).logits for one in (cache, plain))
    assert torch.equal(again, want)
    assert [[head.tolist() for head in row] for row in cache.kept_positions(1)] == \
           [[head.tolist() for head in row] for row in plain.kept_positions(1)]


def test_a_crop_that_goes_too_far_is_refused_and_changes_nothing():
    model = small_model()
    cache = cache_of(model, "snapkv")
    with torch.no_grad():
        model(tokens(70), past_key_values=cache)
        model(tokens(1), past_key_values=cache)
    with pytest.raises(ValueError, match="^tokens to take back is 5; expected 0 to 1: the method has settled the others; "):
        cache.crop(-5)
    with pytest.raises(ValueError, match="^tokens to take back are 72; expected at most 71; "):
        cache.crop(-72)
    assert cache.get_seq_length() == 71
    cache.crop(70)  # all but so many, as transformers 4 says it
    assert cache.get_seq_length() == 70


def test_a_prompt_is_taken_back_before_and_after_its_end():
    model, prompt, question = small_model(), tokens(50), tokens(20)
    cache, plain = cache_of(model, "full"), cache_of(model, "full")
    with torch.no_grad():
        for one in (cache, plain):
            model(prompt, past_key_values=one)
        model(tokens(9), past_key_values=cache)  # of the same prompt, as no step has come
        cache.crop(-9)
        model(tokens(1), past_key_values=cache)
        cache.crop(-11)  # and ten of the prompt, which has ended
        want = model(torch.cat((prompt[:, 40:], question), 1), past_key_values=cache_of_first(model, prompt[:, :40])).logits
        got = model(torch.cat((prompt[:, 40:], question), 1), past_key_values=cache).logits
        assert cache.get_seq_length() == 70
    assert torch.equal(got, want)


def cache_of_first(model, ids):
    cache = cache_of(model, "full")
    model(ids, past_key_values=cache)
    cache.end_prompt()
    return cache


def test_padding_is_no_token_that_is_taken_back():
    model, ids = small_model(), tokens(12, 2)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0  # three columns of padding behind the first sequence
    cache, plain = cache_of(model, "full"), cache_of(model, "full")
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.crop(-4)
        model(ids[:, :8], past_key_values=plain)
        got, want = (model(ids[:, :3], past_key_values=one).logits for one in (cache, plain))
    assert torch.equal(got, want)
