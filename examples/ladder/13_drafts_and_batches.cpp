// Rung 13: one pass through the model for everybody. A prompt's chunk, a step, and another request's draft of a tree, of
// which one branch is accepted; a draft that comes to nothing is cancelled.
#include <memory>

#include <tessera/methods/h2o.hpp>
#include <tessera/tessera.hpp>

#include "support/ladder.hpp"

using namespace tessera;

int main() {
  constexpr index_t q_heads = 8, heads = 2, dim = 64, prompt = 300;
  const ladder::tensors model(2 * prompt, q_heads, heads, dim);
  const auto workers = std::make_shared<cpu::executor>();
  using method = h2o<fp32, dim>;  // it drops tokens in every step: what is dropped cannot be taken back
  method recipe;
  recipe.set_budget(128);
  ladder::checks check;
  cache<method> kv({1, q_heads, heads}, recipe, workers);
  std::vector<float> out(model.q.size());
  const auto room = [&](index_t tokens) { return nhd_rows(out.data(), tokens, q_heads, dim); };

  // A batch as a scheduler has it: two chunks of prompts in one call, then a chunk beside a step. Rows are packed.
  const index_t first = kv.open(), second = kv.open();
  const mixed_batch chunks = kv.prepare({{first, prompt, true}, {second, prompt - 100, true}});
  kv.process(0, chunks, model.queries(0, chunks.rows()), model.keys(0, chunks.rows()), model.values(0, chunks.rows()),
             room(chunks.rows()));
  kv.end_prefill(first);
  const mixed_batch work = kv.prepare({{first, 1, false}, {second, 100, true}});
  kv.process(0, work, model.queries(prompt, work.rows()), model.keys(prompt, work.rows()),
             model.values(prompt, work.rows()), room(work.rows()));
  kv.end_prefill(second);
  check(kv.next_position(first) == prompt + 1 && kv.next_position(second) == prompt,
        "each item moves its own sequence");

  // A draft: token 0 follows what is stored, tokens 1 and 2 are two guesses behind it, token 3 follows token 1.
  const index_t plain = kv.fork(first), t = kv.next_position(first);
  const draft_tree tree(host_vector<index_t>{-1, 0, 0, 1});
  const draft_step draft = kv.prepare_draft({first}, {tree});
  kv.decode(0, draft, model.queries(t, 4), model.keys(t, 4), model.values(t, 4), room(4));
  const std::vector<float> drafted(out.begin(), out.begin() + 4 * q_heads * dim);
  check(kv.next_position(first) == t, "a draft's tokens wait beside the cache");

  // The model agrees with token 0 and the guess in token 2. The cache then is as after a step of these two tokens.
  kv.accept(first, {0, 2});
  const auto pair = [&](const std::vector<float>& from, index_t count) {
    std::vector<float> both(from.begin() + offset_t(t) * count * dim, from.begin() + offset_t(t + 1) * count * dim);
    both.insert(both.end(), from.begin() + offset_t(t + 2) * count * dim, from.begin() + offset_t(t + 3) * count * dim);
    return both;
  };
  const std::vector<float> q = pair(model.q, q_heads), k = pair(model.k, heads), v = pair(model.v, heads);
  kv.decode(0, kv.prepare_step({plain}, 2), nhd_rows(q.data(), 2, q_heads, dim), nhd_rows(k.data(), 2, heads, dim),
            nhd_rows(v.data(), 2, heads, dim), room(2));
  check(kv.next_position(first) == t + 2, "two tokens of four are accepted");
  check(kv.positions(0, first, 0) == kv.positions(0, plain, 0), "... and leave what a step of them leaves");
  float largest = 0;
  for (offset_t i = 0; i < q_heads * dim; ++i) {
    largest = std::max(largest, std::abs(drafted[std::size_t(i)] - out[std::size_t(i)]));
    largest =
        std::max(largest, std::abs(drafted[std::size_t(i + 2 * q_heads * dim)] - out[std::size_t(i + q_heads * dim)]));
  }
  check(largest < 1e-5f, "... and were given its outputs, to rounding");

  // Nothing is accepted: not even a method that drops in steps has lost anything.
  const auto before = kv.positions(0, first, 0);
  const draft_step wrong = kv.prepare_draft({first}, 4);
  kv.decode(0, wrong, model.queries(t, 4), model.keys(t, 4), model.values(t, 4), room(4));
  try {
    kv.prepare_step({first}, 1);
  } catch (const error& refused) {
    std::printf("%s\n", refused.what());
  }
  kv.cancel(first);
  check(kv.positions(0, first, 0) == before, "a cancelled draft leaves no trace");
  return check.exit_code();
}
