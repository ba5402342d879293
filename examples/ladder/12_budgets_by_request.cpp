// Rung 12: requests with budgets of their own. Three requests of one batch keep what each has paid for; admission knows
// it before a token is written.
#include <memory>

#include <tessera/methods/h2o.hpp>
#include <tessera/tessera.hpp>

#include "support/ladder.hpp"

using namespace tessera;

int main() {
  constexpr index_t q_heads = 8, heads = 2, dim = 64, prompt = 600, answer = 30;
  const ladder::tensors model(prompt + answer, q_heads, heads, dim);
  const auto workers = std::make_shared<cpu::executor>();
  using method = h2o<fp32, dim>;
  method recipe;
  recipe.set_budget(256);
  ladder::checks check;
  cache<method> kv({1, q_heads, heads}, recipe, workers);

  // The recipe's budget, a number of tokens, and a share of all that the request takes.
  const sequence_options options[] = {{}, {.budget = {.tokens = 100}}, {.budget = {.share = 0.25}}};
  host_vector<index_t> ids;
  for (const sequence_options& own : options) {
    const capacity needed = kv.bound(prompt, answer, 0, own);
    std::printf("a request of %d tokens and %d more takes at most %lld bytes\n", int(prompt), int(answer),
                static_cast<long long>(needed.bytes));
    const index_t id = kv.open(own);
    kv.prefill(0, id, model.queries(0, prompt), model.keys(0, prompt), model.values(0, prompt));
    std::vector<float> unread(std::size_t(prompt * q_heads * dim));
    kv.prefill_attention(0, id, model.queries(0, prompt), nhd_rows(unread.data(), prompt, q_heads, dim));
    kv.end_prefill(id);
    check(kv.bytes(id) <= needed.bytes, "a request stays within its bound");
    ids.push_back(id);
  }

  // One batch: every request by its own budget, which a share follows from step to step.
  const auto for_all = [&](const rows_view<const float>& token) {
    std::vector<float> all;
    for (std::size_t b = 0; b < ids.size(); ++b)
      all.insert(all.end(), token.data, token.data + token.heads * token.dim);
    return all;
  };
  std::vector<float> out(ids.size() * q_heads * dim);
  for (index_t t = prompt; t < prompt + answer; ++t) {
    const std::vector<float> q = for_all(model.queries(t, 1));
    const std::vector<float> k = for_all(model.keys(t, 1));
    const std::vector<float> v = for_all(model.values(t, 1));
    const index_t count = index_t(ids.size());
    kv.decode(0, kv.prepare_step(ids, 1), nhd_rows(q.data(), 1, q_heads, dim, count),
              nhd_rows(k.data(), 1, heads, dim, count), nhd_rows(v.data(), 1, heads, dim, count),
              nhd_rows(out.data(), 1, q_heads, dim, count));
  }
  const index_t taken = prompt + answer, expected[] = {256, 100, (taken + 3) / 4};
  for (std::size_t b = 0; b < ids.size(); ++b) {
    std::printf("request %d keeps %d of %d tokens\n", int(b), int(kv.length(0, ids[b], 0)), int(taken));
    check(kv.length(0, ids[b], 0) == expected[b], "a request keeps its own budget");
  }

  // What a method cannot do is refused before a sequence is opened.
  try {
    kv.open({.read_tokens = {.tokens = 64}});
  } catch (const error& refused) {
    std::printf("%s\n", refused.what());
  }
  check(kv.open() == index_t(ids.size()), "a refused request opens nothing");
  return check.exit_code();
}
