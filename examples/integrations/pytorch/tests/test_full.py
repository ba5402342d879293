"""`full` keeps everything: it must generate token for token what transformers' own cache does."""
import pytest
import torch
from conftest import padded
from tessera_torch import TesseraCache

NEW = 24


def both(reference, model, inputs, cache=None, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    cache = cache or TesseraCache(model.config)
    return reference.generate(**inputs, **options), model.generate(**inputs, past_key_values=cache, **options), cache


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_full_generates_what_transformers_does(reference, model, prompts, whole, batch):
    """50 prompts, or the first of them: a batch of each size is whole, padding included."""
    prompts = prompts if whole else prompts[:9]
    for begin in range(0, len(prompts), batch):
        rows = prompts[begin:begin + batch]
        want, got, cache = both(reference, model, padded(rows))
        assert torch.equal(want, got), f"prompts from {begin}"
        for i, row in enumerate(rows):
            longest = len(row) + got.shape[1] - max(map(len, rows)) - 1
            assert [len(kept) for kept in cache.kept_positions(3)[i]] == [longest] * 4
            assert cache.kept_positions(3)[i][0].tolist() == list(range(longest))


def test_three_turns_over_one_cache(reference, model, prompts):
    """Each turn begins with what the last one generated; the reference reads everything anew."""
    rows = prompts[:3]
    cache = TesseraCache(model.config)
    inputs = padded(rows)
    for turn in range(3):
        want, got, _ = both(reference, model, inputs, cache, eos_token_id=None)
        assert torch.equal(want, got), f"turn {turn}"
        more = padded([row[1:20 + 7 * i] for i, row in enumerate(prompts[10 + 3 * turn:13 + 3 * turn])])
        answered = torch.ones(len(rows), NEW, dtype=torch.long)
        inputs = {"input_ids": torch.cat([got, more["input_ids"]], 1),
                  "attention_mask": torch.cat([inputs["attention_mask"], answered, more["attention_mask"]], 1)}


@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_chunks_of_a_prompt(reference, model, prompts, chunk):
    """generate's own chunks; it leaves the prompt's last token to the first step."""
    inputs = padded([max(prompts, key=len)])
    want, got, _ = both(reference, model, inputs, prefill_chunk_size=chunk)
    assert torch.equal(want, got)


def test_padding_on_the_right_and_logits(reference, model, prompts):
    """Not generate's habit, but a model may be called so. Padding itself has no defined logits."""
    inputs = padded(prompts[20:23], side="right")
    with torch.no_grad():
        want = reference(**inputs).logits
        got = model(**inputs, past_key_values=TesseraCache(model.config)).logits
    real = inputs["attention_mask"].bool()
    assert (want - got)[real].abs().max() < 1e-3 * want[real].abs().max()


def test_sampled_sequences_of_one_prompt(reference, model, prompts):
    inputs = padded([prompts[5]])
    made = []
    for one in (reference, model):
        torch.manual_seed(1)
        cache = {"past_key_values": TesseraCache(model.config)} if one is model else {}
        made.append(one.generate(**inputs, **cache, max_new_tokens=NEW, do_sample=True, top_k=20, num_return_sequences=4,
                                 pad_token_id=0))
    assert torch.equal(*made)
