"""A policy of one's own, from Python: compiled when it is first used, kept by its content, errors in one sentence."""
import re

import pytest
import torch
from tessera_torch import Policy, TesseraCache, build, parameters

SCORER = """
/// Keeps the first tokens, and of the others every stride-th before those between.
struct strided {
  static constexpr const char* name = "strided";
  static constexpr observes observed = observes::nothing;
  static constexpr bool comparable_across_heads = false;
  index_t first = 2;
  index_t stride = 4;
  TESSERA_HD float score(index_t at, index_t) const {
    return at < first ? infinity : at % stride == 0 ? 1e9f + float(at) : float(at);
  }
  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const { check_parameters(*this); }
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("first", self.first, value_range{0, 64}, "first tokens that are always kept");
    visit("stride", self.stride, value_range{1, 64}, "positions from one preferred token to the next");
  }
};
"""
RECIPE = "recipe<retain<strided, uniform, top_tokens>, dense<T, D>, retrieve_all, dense_decode, once>"


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Nothing is compiled yet, but for the operators."""
    build.operators()
    monkeypatch.setenv("TESSERA_TORCH_CACHE", str(tmp_path))
    return tmp_path


def test_twenty_lines_run_in_a_model_and_are_compiled_once(model, prompts, fresh):
    assert len(SCORER.strip().splitlines()) <= 20
    ids = torch.tensor([prompts[0][:101]])
    cache = TesseraCache(model.config, Policy(SCORER, RECIPE), budget=20, stride=10)
    model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
    # 11 multiples of 10 and position 1 are preferred; the newest others fill up; then the step's own token.
    want = sorted({*range(0, 101, 10), 1, *[p for p in range(90, 100) if p > 91]}) + [101]
    assert [head.tolist() for head in cache.kept_positions(5)[0]] == [want] * 4

    made = lambda: {path: path.stat().st_mtime_ns for path in fresh.iterdir()}
    built = made()
    assert [path.suffix for path in built] == [".so"]
    again = TesseraCache(model.config, Policy(SCORER, RECIPE), budget=20)
    model.generate(ids, past_key_values=again, max_new_tokens=2, do_sample=False)
    assert made() == built


def test_a_header_by_its_path(fresh):
    header = fresh / "strided.hpp"
    header.write_text("#pragma once\n#include <algorithm>\n" + SCORER)
    assert parameters(Policy(header, RECIPE))["stride"] == ("4", "1 to 64", "positions from one preferred token to the next")


@pytest.mark.parametrize("before, after, sentence", [
    ("float score(", "double score(", r"tessera: .*score.*"),
    ("uniform, top_tokens", "two_stage<uniform>, top_tokens", r"tessera: a budget over two stages needs a second stage; .*"),
    ("float(at);", "float(at)", r"the policy, line 10: expected ';' before .*"),
    ("strided, uniform", "stridden, uniform", r"the recipe, line 1: 'stridden' was not declared in this scope.*"),
])
def test_an_error_is_the_compiler_s_one_sentence(fresh, before, after, sentence):
    policy = Policy(SCORER.replace(before, after).strip(), RECIPE.replace(before, after))
    with pytest.raises(ValueError) as problem:
        build.library(policy, torch.float32, 64)
    text = str(problem.value).replace("‘", "'").replace("’", "'")
    assert re.fullmatch(sentence, text), text
    assert not list(fresh.glob("*.so"))
