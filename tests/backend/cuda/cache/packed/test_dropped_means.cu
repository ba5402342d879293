// Steps that read blocks by their means behind a first stage that drops packed rows, on the device against the CPU's
// caches.
#include "backend/cuda/cache/cases/cache_case.hpp"
#include "dropped_means.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

using in_runs = dense<fp16, 64>;  // bf16 would swap more tokens

/// Budgets of steps below and above what is stored, blocks of several lengths, and chunks that are packed.
struct few_blocks {
  template <class Method>
  void operator()(Method& method, const model_shape&) const {
    method.retrieve.selector.block = 1 << draw(0, 4);
    method.retrieve.tokens = draw(0, 5) == 0 ? 1024 : draw(32, 64);
    method.layout.rows.prefill = draw(0, 3) == 0 ? prefill_rows::packed : prefill_rows::whole;
  }
};

}  // namespace

TEST_CASE("blocks of random rows that stay are those of the CPU's conversations", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<means_behind<random_score, uniform, in_runs>>(60, scales::any, few_blocks{});
}
TEST_CASE("blocks behind SnapKV's choice hold the CPU's conversations on the device", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<means_behind<observation_window, uniform, in_runs>>(40, scales::any, few_blocks{});
}
TEST_CASE("blocks of heads that compete hold the CPU's conversations in small pages", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<means_behind<observation_window, adaptive, packed_in_pages<fp16, 4>>>(40, scales::any,
                                                                                           few_blocks{});
}
TEST_CASE("a budget over two stages shares out dropped rows and blocks as on the CPU", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<means_behind<observation_window, two_stage<uniform>, packed_in_pages<fp16, 16>>>(40, scales::any,
                                                                                                      few_blocks{});
}
TEST_CASE("a budget over two stages for which heads compete is shared out as on the CPU", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<means_behind<observation_window, two_stage<adaptive>, in_runs>>(40, scales::any, few_blocks{});
}
