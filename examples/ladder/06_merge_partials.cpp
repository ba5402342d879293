// Rung 6: attention over parts. Every operation returns its log-sum-exp, so partial results merge into the whole one.
#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/math/softmax_state.hpp>

#include "support/ladder.hpp"

using namespace tessera;

int main() {
  constexpr index_t q_heads = 8, heads = 2, dim = 128, tokens = 500, cut = 123;
  const ladder::tensors model(tokens, q_heads, heads, dim);
  cpu::executor workers;
  cpu::decode_workspace workspace;

  struct partial {
    std::vector<float> out = std::vector<float>(q_heads * dim), lse = std::vector<float>(q_heads);
  };
  // The newest query over tokens [first, last), as an engine would keep them in two places (a shared prefix and a
  // sequence's own suffix, say).
  std::vector<index_t> positions(tokens);
  for (index_t t = 0; t < tokens; ++t) positions[std::size_t(t)] = t;
  const auto attend = [&](index_t first, index_t last) {
    const index_t length = last - first, newest = tokens - 1;
    kv_view<const float, dim> view;
    view.k = model.keys(first, length).data;
    view.v = model.values(first, length).data;
    view.k_strides = view.v_strides = {0, dim, heads * dim};
    view.sequences = 1;
    view.kv_heads = heads;
    view.lengths = &length;
    view.positions = positions.data() + first;  // slot 0 of a part is not position 0: masks go by position
    partial result;
    cpu::decode_attention(
        view, cpu::query_rows<float>{model.queries(newest, 1), &newest}, logit_rule{.sliding_window = 450}, nullptr,
        {nhd_rows(result.out.data(), 1, q_heads, dim), nhd_rows(result.lse.data(), 1, q_heads, 1)}, workspace, workers);
    return result;
  };
  const auto merge = [](partial& into, const partial& from) {
    for (index_t h = 0; h < q_heads; ++h) {
      merge_attention(into.out.data() + h * dim, into.lse[std::size_t(h)], from.out.data() + h * dim,
                      from.lse[std::size_t(h)], dim);
    }
  };

  ladder::checks check;
  const partial whole = attend(0, tokens);
  partial merged = attend(0, cut);
  merge(merged, attend(cut, tokens));
  check(ladder::largest_difference(merged.out, whole.out) < 1e-5f, "two partial outputs merge into the whole one");
  check(ladder::largest_difference(merged.lse, whole.lse) < 1e-5f, "so do their log-sum-exps");

  // Tokens 0..39 lie outside the sliding window: an empty part has log-sum-exp -infinity and changes nothing.
  const partial unseen = attend(0, 40);
  partial unchanged = whole;
  merge(unchanged, unseen);
  check(unseen.lse[0] == -infinity && unchanged.out == whole.out, "a part that sees nothing changes nothing");

  // FlashInfer and others give log-sum-exps in base 2; mixing the bases is a silent error, so the adaptor has a name.
  const float in_base_2 = whole.lse[0] / 0.69314718f;
  check(std::abs(natural_lse_from_base2(in_base_2) - whole.lse[0]) < 1e-5f,
        "base-2 log-sum-exps are converted by name");
  return check.exit_code();
}
