// The CUDA cache of recipes whose policies exist only in the tests, and of filters by position, against the CPU's.
#include "cases/cache_case.hpp"
#include "support/open_layouts.hpp"
#include "support/open_policies.hpp"
#include "tessera/attention/dense_decode.hpp"
#include "tessera/attention/gathered_decode.hpp"
#include "tessera/budget/uniform.hpp"
#include "tessera/layout/dense.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/schedule/each_step.hpp"
#include "tessera/schedule/once.hpp"
#include "tessera/scorer/exact_score.hpp"
#include "tessera/scorer/position.hpp"
#include "tessera/selector/top_tokens.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace support;

namespace {

template <class Retain, class Schedule = once>
using dropping_by = recipe<Retain, dense<bf16, 64>, retrieve_all, dense_decode, Schedule>;

}  // namespace

TEST_CASE("a filter by position holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<recipe<filter<position, uniform, top_tokens>, dense<bf16, 64>, retrieve<exact_score, top_tokens>,
                            gathered_decode, once>>(20);
}
TEST_CASE("a last pass and a budget by head of a test hold the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<dropping_by<retain<spread_window, every_other_head, top_tokens>>>(20);
}
TEST_CASE("a last pass over accumulated scores holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<dropping_by<retain<spread_accumulated, uniform, top_tokens>, each_step>>(20);
}
TEST_CASE("a budget of winners and a selector of a test hold the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<dropping_by<retain<spread_window, half_won, spaced>>>(20);
}
TEST_CASE("a schedule and a row format of a test hold the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<
      recipe<retain<spread_accumulated, every_other_head, top_tokens>, stored<integer_rows<bf16, 64>, fixed_pages<8>>,
             retrieve_all, dense_decode, every_few_steps>>(20, scales::even);
}
TEST_CASE("memory that follows uneven heads has room for what steps gave back", "[gpu][cache]") {
  if (gpu_missing()) return;
  using method = dropping_by<retain<spread_accumulated, every_other_head, top_tokens>, each_step>;
  const model_shape shape{2, 4, 2};
  method recipe;
  recipe.set_budget(64);
  cuda::cache_options options;
  options.tokens = 1000;
  cuda::cache<method> follows(shape, recipe, options), stays(shape, recipe, options);
  const auto both = [&](const auto& call) { call(follows), call(stays); };
  both([&](auto& kv) { kv.open(); });
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    const step_rows<bf16> x(1, 80, shape, 64);
    both([&](auto& kv) {
      kv.prefill(layer, 0, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
    });
  }
  both([&](auto& kv) { kv.end_prefill(0, nullptr), kv.reserve(0, 300, nullptr); });
  for (int step = 0; step < 330; ++step) {
    if (step == 250) follows.fit_memory(100, nullptr);  // longer than the room that is left, which the host only bounds
    const step_rows<bf16> x(1, 1, shape, 64);
    std::vector<std::vector<float>> answers;
    both([&](auto& kv) {
      const batch now = kv.prepare_step({0}, 1, nullptr);
      kv.begin_step(now, nullptr);
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        buffer<float> out(4 * 64);
        kv.decode(layer, now, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2),
                  nhd_rows(out.data, 1, 4, 64), {}, nullptr);
        answers.push_back(out.get());
      }
    });
    REQUIRE(answers[0] == answers[2]);
    REQUIRE(answers[1] == answers[3]);
  }
}
