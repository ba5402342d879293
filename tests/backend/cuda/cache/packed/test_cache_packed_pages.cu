// The CUDA cache of packed rows in pages, and of those whose tail lies in ragged pages.
#include "backend/cuda/cache/cases/calls_case.hpp"
#include "backend/cuda/cache/cases/memory_case.hpp"
#include "backend/cuda/cache/cases/steps_case.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/ragged_pages.hpp"
#include "tessera/methods/mosaickv.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {
using paged_mosaickv = mosaickv<bf16, 64, 64, stored<dense_rows<bf16, 64>, fixed_pages<16>>>;
using ragged_mosaickv = mosaickv<bf16, 64, 64, stored<dense_rows<bf16, 64>, ragged_pages>>;
}  // namespace

TEST_CASE("packed rows in pages hold the CPU's conversations on the device", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<paged_mosaickv>(20);
}
TEST_CASE("a recorded step of packed rows in pages follows its growing cache", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  replay_steps<paged_mosaickv>();
}
TEST_CASE("random calls of packed rows in pages do what the contract says", "[gpu][cache][calls][packed]") {
  if (gpu_missing()) return;
  call_at_random<paged_mosaickv>();
}
TEST_CASE("every allocation of packed rows in pages fails once, and the conversation goes on",
          "[gpu][cache][long][packed]") {
  if (gpu_missing()) return;
  faulty_conversation<paged_mosaickv>::fails_everywhere_once();
}

TEST_CASE("packed rows with a tail in ragged pages answer as in runs, and say what pages they take",
          "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  const model_shape shape{2, 4, 2};
  const cuda::cache_options options{.sequences = 1, .tokens = 300};
  cuda::cache<ragged_mosaickv> ragged(shape, ragged_mosaickv(), options);
  cuda::cache<mosaickv<bf16, 64>> runs(shape, mosaickv<bf16, 64>(), options);
  const auto both = [&](const auto& call) { call(ragged), call(runs); };
  both([&](auto& kv) { REQUIRE(kv.open() == 0); });
  CHECK(ragged.upper_bound_pages(90) == ragged.plan_pages(0, 90).peak);
  ragged.announce(0, 90);
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    const step_rows<bf16> x(1, 90, shape, 64);
    both([&](auto& kv) {
      kv.prefill(layer, 0, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
    });
  }
  const index_t most = ragged.upper_bound_pages(90);
  const auto held = [&] {
    const std::vector<index_t> pages = ragged.pages(0);
    return std::accumulate(pages.begin(), pages.end(), index_t(0));
  };
  CHECK(held() > 0);
  CHECK(held() <= most);
  both([&](auto& kv) { kv.end_prefill(0, nullptr); });
  const index_t before = held();
  for (int step = 0; step < 40; ++step) {  // a tail fills, and is packed
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
  CHECK(held() <= before + 2 * 4);
}
