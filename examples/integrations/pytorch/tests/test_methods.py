"""Every method answers what `tessera eval` answers, document by document, turn by turn.

TESSERA names the tool (test.sh builds it).
"""
import functools
import json
import os
import subprocess

import pytest
import torch
import transformers
from conftest import MODEL, profile_of
from tessera_torch import TesseraCache, build, methods, parameters

BUDGET = 64
CHUNK = 512  # tokens of a prompt that the tool reads at a time
# Answers that may be others. Of a token that comes twice, the first layer's keys differ by their rotation alone: their norms are
# equal but for rounding, and rounding decides which of them stays.
MAY_DIFFER = {"knorm": 1}


@functools.cache
def listed():
    """What the tool says of each method, by name."""
    text = subprocess.run([os.environ["TESSERA"], "list", "--json"], check=True, capture_output=True).stdout
    return {one["name"]: one for one in json.loads(text)["methods"]}


@pytest.fixture(scope="session")
def ask_tool(conversations, tmp_path_factory):
    """Of a method, and of a profile's file where it goes by one: the tool's cells by (family, turn)."""
    folder = tmp_path_factory.mktemp("eval")
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(one) + "\n" for one in conversations))

    def ask(method, profile):
        subprocess.run([os.environ["TESSERA"], "eval", "--model", MODEL, "--questions", questions, "--dtype", "fp32",
                        "--methods", method, "--json", folder / "cells.json",
                        *(["--budgets", str(BUDGET)] if listed()[method]["has_budget"] else []),
                        *(["--set", f"profile={profile}"] if profile else [])], check=True, stdout=subprocess.DEVNULL)
        return {(cell["family"], cell["turn"]): cell for cell in json.loads((folder / "cells.json").read_text())}

    return ask


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
    """Answers by turn. Prompts come in the tool's chunks: some methods choose anew with each."""
    ids, answers = [1], []
    for turn in conversation["turns"]:
        ids = ids + tokenizer.encode(turn["prompt"])
        stop = EndsLine(tokenizer, len(ids))
        new = torch.tensor([ids[cache.get_seq_length():]])
        with torch.no_grad(), cache.prompt():
            for begin in range(0, new.shape[1] - CHUNK, CHUNK):  # generate takes the last one
                model(new[:, begin:begin + CHUNK], past_key_values=cache, logits_to_keep=1)
        out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                             past_key_values=cache, max_new_tokens=limit_of(tokenizer, turn["answer"]), do_sample=False,
                             pad_token_id=0, eos_token_id=None,
                             stopping_criteria=transformers.StoppingCriteriaList([stop]))[0].tolist()
        generated = out[len(ids):]
        answers.append(tokenizer.decode(generated))
        ids = out[:-1] if stop.ended(generated) else out  # a line break that ends an answer is no part of the next turn
    return answers


def test_answers_are_those_of_the_tool(model, tokenizer, conversations, ask_tool, tmp_path, method):
    if listed()[method]["needs_scores"]:
        with pytest.raises(ValueError, match="expected one that scores tokens by itself"):
            model(torch.tensor([[1, 5, 6]]), past_key_values=TesseraCache(model.config, method, BUDGET))
        return
    options, got = {}, {}
    profile = profile_of(method, model.config.num_hidden_layers, model.config.num_key_value_heads)
    if profile:
        options["profile"] = tmp_path / "profile.json"
        options["profile"].write_text(json.dumps(profile))
    expected = ask_tool(method, options.get("profile"))
    for conversation in conversations:
        if "max_new" in parameters(method):
            options["max_new"] = max(limit_of(tokenizer, turn["answer"]) for turn in conversation["turns"])
        cache = TesseraCache(model.config, method, BUDGET if listed()[method]["has_budget"] else None, **options)
        if listed()[method]["needs_boundaries"] or listed()[method]["needs_engine"]:
            cache.read_text(model, tokenizer)
        for turn, answer in enumerate(ask(model, tokenizer, conversation, cache), 1):
            got.setdefault((conversation["family"], turn), []).append(answer)
    assert got.keys() == expected.keys()
    others = []
    for key, answers in got.items():
        assert len(answers) == len(expected[key]["answers"]), key
        others += [(key, mine, its) for mine, its in zip(answers, expected[key]["answers"]) if mine != its]
    assert len(others) <= MAY_DIFFER.get(method, 0), others
    asked, right = sum(map(len, got.values())), sum(cell["right"] for cell in expected.values())
    print(f"{method}: {len(conversations)} conversations, {asked} questions, {asked - len(others)} the same answers; "
          f"{right} of them right")


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
    tool = listed().values()
    assert list(listed()) == methods()
    build.build_all([(method, torch.float32, 64) for method in methods()])
    # What the tool does with a profile's file and with rows, where no recipe has it.
    of_tool = {"profile", "alpha", "layer", "slack", "rows", "rotate", "whole_tail"}
    for one in tool:
        own = {name: value for name, (value, *_) in parameters(one["name"]).items()}
        asked = {p["name"]: p["default"] for p in one["parameters"] if p["name"] in own or p["name"] not in of_tool}
        assert asked == own, one["name"]
