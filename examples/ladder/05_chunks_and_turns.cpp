// Rung 5: prompts in chunks, positions that survive eviction, and a second turn.
#include <memory>

#include <tessera/methods/snapkv.hpp>
#include <tessera/tessera.hpp>

#include "support/ladder.hpp"

using namespace tessera;

int main() {
  constexpr index_t q_heads = 8, heads = 2, dim = 64, prompt = 1000, answer = 5, question = 200;
  constexpr index_t budget = 128, window = 32;
  const ladder::tensors model(prompt + answer + question, q_heads, heads, dim);
  const auto workers = std::make_shared<cpu::executor>();
  using method = snapkv<fp32, dim>;
  method recipe;
  recipe.set_budget(budget);
  recipe.retain.scorer.window = window;
  ladder::checks check;

  // The engine has no attention of its own here, so the cache attends each chunk too.
  std::vector<float> out(model.q.size());
  const auto feed = [&](cache<method>& kv, index_t id, index_t first, index_t count) {
    kv.prefill(0, id, model.queries(first, count), model.keys(first, count), model.values(first, count));
    kv.prefill_attention(0, id, model.queries(first, count),
                         nhd_rows(out.data() + offset_t(first) * q_heads * dim, count, q_heads, dim));
  };

  cache<method> whole({1, q_heads, heads}, recipe, workers), kv({1, q_heads, heads}, recipe, workers);
  const index_t one_shot = whole.open(), id = kv.open();
  feed(whole, one_shot, 0, prompt);
  whole.end_prefill(one_shot);
  const std::vector<float> expected = out;
  for (index_t first = 0, chunk = 1; first < prompt; first += chunk, chunk = std::min(3 * chunk, prompt - first)) {
    feed(kv, id, first, chunk);  // chunks of 1, 3, 9, ... tokens
  }
  kv.end_prefill(id);
  check(out == expected, "a prompt in chunks attends to the same bits as in one shot");
  check(kv.positions(0, id, 0) == whole.positions(0, one_shot, 0), "... and keeps the same tokens");

  // What is kept keeps its logical position: the query of the next token is at 1000, not at 128.
  const auto kept = kv.positions(0, id, 0);
  std::printf("head 0 keeps %d of %d tokens, positions %d, %d, %d ... %d\n", int(kept.size()), int(prompt),
              int(kept[0]), int(kept[1]), int(kept[2]), int(kept.back()));
  check(kv.next_position(id) == prompt && index_t(kept.size()) == budget, "the budget holds, the positions go on");
  check(kept[budget - window] == prompt - window && kept.back() == prompt - 1, "the window's own tokens are all there");

  // The answer: tokens are appended and stay (schedule `once`), up to the next turn's end of prefill.
  for (index_t t = prompt; t < prompt + answer; ++t) {
    kv.decode(0, kv.prepare_step({id}, 1), model.queries(t, 1), model.keys(t, 1), model.values(t, 1),
              nhd_rows(out.data() + offset_t(t) * q_heads * dim, 1, q_heads, dim));
  }
  check(kv.length(0, id, 0) == budget + answer, "decoded tokens are appended");

  // The second turn attends to what is stored, then retains again over kept and new, to the same budget. The window is
  // that of this turn's prompt.
  feed(kv, id, prompt + answer, question);
  check(kv.length(0, id, 0) == budget + answer + question, "a turn's prompt is stored whole while it lasts");
  kv.end_prefill(id);
  const auto again = kv.positions(0, id, 0);
  const auto newer = std::count_if(again.begin(), again.end(), [](index_t p) { return p >= prompt + answer; });
  std::printf("after turn 2 head 0 keeps %d tokens, %d of them from this turn\n", int(again.size()), int(newer));
  check(index_t(again.size()) == budget && newer >= window,
        "the second turn keeps the budget, its own window included");
  check(std::includes(kept.begin(), kept.end(), again.begin(), std::lower_bound(again.begin(), again.end(), prompt)),
        "nothing that was dropped comes back");
  return check.exit_code();
}
