// choose_kept on the device, with policies that exist only in the tests, against the CPU and a definition in double.
#include "backend/cuda/device.hpp"
#include "support/choose_case.hpp"
#include "tessera/backend/cuda/choose/retain.cuh"
#include "tessera/budget/uniform.hpp"
#include "tessera/scorer/accumulated_attention.hpp"
#include "tessera/selector/top_tokens.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace support;

namespace {

/// A pooling scorer whose pool is one token wide.
struct unpooled : accumulated_attention {
  static constexpr const char* name = "unpooled";
  pooling_window pooled() const { return {1, pooling::max}; }
};

template <class Policy>
lists on_device(const layer_case& c, const Policy& policy, bool by_sequence, index_t granularity = 1) {
  const buffer<float> scores(c.scores);
  const buffer<index_t> lengths(c.lengths), tails(c.tails), budgets(c.budgets);
  cuda::score_rows in;
  in.scores = scores.data;
  in.row_stride = c.capacity;
  in.sequences = c.sequences;
  in.kv_heads = c.heads;
  in.lengths = lengths.data;
  in.length_strides = {c.heads, 1};
  in.tails = tails.data;
  if (by_sequence) in.budgets = budgets.data;
  // Made for a larger batch than comes.
  const cuda::choose_kept<Policy> op(policy, c.sequences + 2, c.heads, c.capacity, c.capacity,
                                     cuda::device_info::current());
  buffer<unsigned char> workspace(op.workspace_bytes());
  workspace.fill(0xff);
  cuda::slot_facts beside;
  beside.granularity = granularity;
  const selection_view chosen = op.run(policy, in, 1, 4, workspace.data, nullptr, beside);
  cuda::check(cudaDeviceSynchronize(), "choose_kept");
  lists rows;
  for (int r = 0; r < c.sequences * c.heads; ++r) {
    index_t count = 0;
    cuda::check(cudaMemcpy(&count, chosen.counts + r, sizeof count, cudaMemcpyDeviceToHost), "cudaMemcpy");
    rows.emplace_back(std::size_t(count));
    cuda::check(cudaMemcpy(rows.back().data(), chosen.indices + r * chosen.row_stride,
                           std::size_t(count) * sizeof(index_t), cudaMemcpyDeviceToHost),
                "cudaMemcpy");
  }
  return rows;
}

template <class Scorer, class Budget, class Selector>
void compare_retained(bool defined = true) {
  support::rng random(7);
  for (const int i : gpu_test::scaled(cases(40), 6)) {
    const layer_case c(random, draw(1, 4), draw(1, 5), i % 4 ? draw(1, 200) : draw(1, gpu_test::scaled(9000, 600)));
    for (const bool by_sequence : {false, true}) {
      CAPTURE(Scorer::name, Budget::name, Selector::name, c.sequences, c.heads, c.capacity, by_sequence, i);
      retain<Scorer, Budget, Selector> policy;
      policy.budget.tokens = draw(1, c.capacity);
      const lists got = on_device(c, policy, by_sequence);
      REQUIRE(got == on_host(c, policy, by_sequence));
      if (defined) REQUIRE(got == by_definition(c, policy, by_sequence));
      const index_t page = draw(2, 40);
      REQUIRE(on_device(c, policy, by_sequence, page) == on_host(c, policy, by_sequence, page));
    }
  }
}

}  // namespace

TEST_CASE("a scorer's last pass that a test defines is run on the device", "[gpu]") {
  if (gpu_missing()) return;
  compare_retained<spread_window, uniform, top_tokens>();
}
TEST_CASE("a budget by head that a test defines is run on the device", "[gpu]") {
  if (gpu_missing()) return;
  compare_retained<accumulated_attention, every_other_head, top_tokens>();
  compare_retained<spread_window, every_other_head, spaced>();
}
TEST_CASE("a budget of winners that a test defines is run on the device", "[gpu]") {
  if (gpu_missing()) return;
  compare_retained<accumulated_attention, half_won, top_tokens>();
  compare_retained<spread_window, half_won, top_tokens>();
}
TEST_CASE("selectors that a test defines are run on the device", "[gpu]") {
  if (gpu_missing()) return;
  compare_retained<accumulated_attention, uniform, spaced>();
  compare_retained<spread_window, uniform, pairs>(false);  // against the CPU: top_blocks has its own definition
}
TEST_CASE("a pool of one token leaves scores as they are, NaN among them", "[gpu]") {
  if (gpu_missing()) return;
  compare_retained<unpooled, uniform, top_tokens>();
  compare_retained<unpooled, half_won, top_tokens>();
}
