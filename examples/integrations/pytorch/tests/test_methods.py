"""Every method answers what `tessera eval` answers, document by document, turn by turn.

TESSERA names the tool (test.sh builds it).
"""
import json
import os
import subprocess

import pytest
import torch
import transformers
from conftest import MODEL
from tessera_torch import TesseraCache, build, methods, parameters

BUDGET = 64


@pytest.fixture(scope="session")
def expected(conversations, tmp_path_factory):
    """The tool's cells by (method, family, turn)."""
    folder = tmp_path_factory.mktemp("eval")
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(one) + "\n" for one in conversations))
    subprocess.run([os.environ["TESSERA"], "eval", "--model", MODEL, "--questions", questions, "--dtype", "fp32",
                    "--methods", ",".join(methods()), "--budgets", str(BUDGET), "--json", folder / "cells.json"],
                   check=True, stdout=subprocess.DEVNULL)
    return {(cell["method"], cell["family"], cell["turn"]): cell for cell in json.loads((folder / "cells.json").read_text())}


def limit_of(tokenizer, answer):
    """Most tokens that the tool gives an answer: as many again as it has, and a few."""
    return 2 * len(tokenizer.encode(f" {answer}\n")) + 2


class EndsLine(transformers.StoppingCriteria):
    """An answer ends with eos or with the line."""

    def __init__(self, tokenizer, begin):
        self.tokenizer, self.begin = tokenizer, begin

    def ended(self, generated):
        return generated[-1] == 2 or (generated[-1] == 3 and "\n" in self.tokenizer.decode(generated).lstrip())

    def __call__(self, input_ids, scores, **_):
        return torch.tensor([self.ended(row[self.begin:].tolist()) for row in input_ids])


def ask(model, tokenizer, conversation, cache):
    """Answers by turn."""
    ids, answers = [1], []
    for turn in conversation["turns"]:
        ids = ids + tokenizer.encode(turn["prompt"])
        stop = EndsLine(tokenizer, len(ids))
        out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                             past_key_values=cache, max_new_tokens=limit_of(tokenizer, turn["answer"]), do_sample=False,
                             pad_token_id=0, eos_token_id=None,
                             stopping_criteria=transformers.StoppingCriteriaList([stop]))[0].tolist()
        generated = out[len(ids):]
        answers.append(tokenizer.decode(generated))
        ids = out[:-1] if stop.ended(generated) else out  # a line break that ends an answer is no part of the next turn
    return answers


@pytest.mark.parametrize("method", methods())
def test_answers_are_those_of_the_tool(model, tokenizer, conversations, expected, method):
    listed = subprocess.run([os.environ["TESSERA"], "list", "--json"], check=True, capture_output=True).stdout
    needs = next(one for one in json.loads(listed)["methods"] if one["name"] == method)
    if any(needs[f"needs_{what}"] for what in ("boundaries", "engine", "profile", "rope_theta")):
        pytest.skip("the cache has no boundaries, no profile and no RoPE to hand over, and reads no prompt again")
    got = {}
    for conversation in conversations:
        options = {}
        if "max_new" in parameters(method):
            options["max_new"] = max(limit_of(tokenizer, turn["answer"]) for turn in conversation["turns"])
        cache = TesseraCache(model.config, method, None if method == "full" else BUDGET, **options)
        for turn, answer in enumerate(ask(model, tokenizer, conversation, cache), 1):
            got.setdefault((method, conversation["family"], turn), []).append(answer)
    right = 0
    for key, answers in got.items():
        want = expected[key]
        assert answers == want["answers"], key
        right += want["right"]
    print(f"{method}: {right} of {sum(map(len, got.values()))} right")


def test_unequal_heads_free_memory(model, prompts):
    """Ada-SnapKV gives heads of a layer unequal shares of one budget: what is held is the budget, not the longest head."""
    ids = torch.tensor([max(prompts, key=len)])
    cache = TesseraCache(model.config, "ada_snapkv", 48)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    before = cache.bytes()
    cache.end_prompt()
    lengths = [[len(head) for head in cache.kept_positions(layer)[0]] for layer in range(6)]
    assert any(max(layer) > min(layer) for layer in lengths)
    assert all(sum(layer) <= 4 * 48 for layer in lengths)
    row = 2 * 64 * 4
    assert cache.bytes() <= sum(map(sum, lengths)) * (row + 4) * 1.02
    assert cache.bytes() < 0.25 * before
    assert cache.full_bytes() == 6 * 4 * ids.shape[1] * row


def test_methods_and_parameters_are_the_library_s():
    listed = subprocess.run([os.environ["TESSERA"], "list", "--json"], check=True, capture_output=True).stdout
    tool = json.loads(listed)["methods"]
    assert [one["name"] for one in tool] == methods()
    build.build_all([(method, torch.float32, 64) for method in methods()])
    for one in tool:
        assert {p["name"]: p["default"] for p in one["parameters"]} == {
            name: value for name, (value, *_) in parameters(one["name"]).items()}
