"""`full` keeps everything: it must generate token for token what transformers' own cache does. The README's first snippet has at
most 12 lines, and runs on the shipped model; so does the script that draws."""
import re
import subprocess
import sys

import pytest
import sentencepiece
import torch
import transformers
from conftest import HERE, ROOT, padded
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


def test_the_snippet_runs_and_answers():
    code = re.search(r"```python\n(.*?)```", (HERE.parent / "README.md").read_text(), flags=re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = result.stdout.strip().splitlines()
    held, full, read = map(int, re.findall(r"\d+", lines[-1]))
    assert lines[0].strip() == "velvet walnut" and read < 0.15 * full and held < full


def test_the_script_draws(tmp_path):
    flags = "--method snapkv --budget 48 --set window=16 --prompt-tokens 200 --new-tokens 12".split()
    subprocess.run([sys.executable, HERE.parent / "show.py", *flags, "--out", tmp_path], check=True,
                   stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.png", "memory.png", "speed.png"]


def test_transformers_splits_text_as_the_engine_does():
    folder = ROOT / "examples" / "model"
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = (ROOT / "examples" / "data" / "opticks.txt").read_text()
    for part in (*(text[at:at + 1500] for at in range(0, len(text), 50000)), "", " a", "two  blanks\n\n\t", "\u00e9\u6f22 2,048"):
        pieces = own.encode(part)
        assert tokenizer(part).input_ids == [own.bos_id(), *pieces] and tokenizer.decode(pieces) == own.decode(pieces)
