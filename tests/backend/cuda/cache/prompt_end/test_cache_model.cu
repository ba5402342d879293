// The CUDA caches of methods that know more of the model than its shape: gates of its heads, its RoPE, a text read again.
#include <deque>

#include "../cases/cache_case.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/fp8_rows.hpp"
#include "tessera/layout/runs.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/duo_attention.hpp"
#include "tessera/methods/expected_attention.hpp"
#include "tessera/methods/kvzip.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

constexpr int dim = 64;
using paged_duo = duo_attention<bf16, dim, dim, stored<dense_rows<bf16, dim>, fixed_pages<16>>>;
using paged_kvzip = kvzip<bf16, dim, dim, stored<dense_rows<bf16, dim>, fixed_pages<16>>>;
using fp8_kvzip = kvzip<bf16, dim, dim, stored<fp8_rows<bf16, dim>, runs>>;
using fp8_expected = expected_attention<bf16, dim, dim, stored<fp8_rows<bf16, dim>, runs>>;

/// Gates that live as long as the program: caches point to them.
struct with_gates {
  template <class Method>
  void operator()(Method& method, const model_shape& shape) const {
    static std::deque<std::vector<double>> all;
    std::vector<double>& gates = all.emplace_back();
    for (index_t h = 0; h < shape.layers * shape.kv_heads; ++h) gates.push_back(double(draw(0, 4)) / 4);
    method.retain.budget.gates = {gates.data(), shape.layers, shape.kv_heads};
    method.retain.budget.streaming = float(draw(0, 10)) / 10;
    method.dense_layers = draw(0, 4) ? 0 : 1;
  }
};

struct with_floor {
  template <class Method>
  void operator()(Method& method, const model_shape&) const {
    method.retain.budget.floor = float(draw(0, 2)) / 2;
    method.retain.scorer.sinks = draw(0, 8);
    method.retain.scorer.future = draw(1, 700);
    method.retain.scorer.covariance = draw(0, 3) ? 1 : 0;
    method.retain.scorer.epsilon = draw(0, 1) ? 0.0f : 0.01f;
  }
};

struct with_sinks {
  template <class Method>
  void operator()(Method& method, const model_shape&) const {
    method.retain.scorer.sinks = draw(0, 8);
    method.dense_layers = draw(0, 4) ? 0 : 1;
  }
};

}  // namespace

TEST_CASE("heads stream or keep everything by the gates of a table, as on the CPU", "[gpu][cache][duo_attention]") {
  if (gpu_missing()) return;
  hold_conversations<duo_attention<bf16, dim>>(60, scales::any, with_gates{});
  hold_conversations<paged_duo>(30, scales::any, with_gates{});
}
TEST_CASE("a table of gates is the one that the cache was made with", "[gpu][cache][duo_attention]") {
  if (gpu_missing()) return;
  const std::vector<double> gates{0.5, 1};
  duo_attention<bf16, dim> method;
  method.retain.budget.gates = {gates.data(), 1, 2};
  REQUIRE_NOTHROW((cuda::cache<duo_attention<bf16, dim>>({1, 4, 2}, method, {.tokens = 100})));
  REQUIRE_THROWS_WITH((cuda::cache<duo_attention<bf16, dim>>({2, 4, 2}, method, {.tokens = 100})),
                      contains("those of the model"));
}

TEST_CASE("expected attention under budgets for which heads compete, and in fp8", "[gpu][cache][expected_attention]") {
  if (gpu_missing()) return;
  hold_conversations<expected_attention<bf16, dim>>(60, scales::any, with_floor{});
  hold_conversations<expected_attention<fp16, dim>>(20, scales::any, with_floor{});
  hold_conversations<fp8_expected>(20, scales::even, with_floor{});
}
TEST_CASE("a model that does not say its RoPE is refused on the device", "[gpu][cache][expected_attention]") {
  if (gpu_missing()) return;
  REQUIRE_THROWS_WITH((cuda::cache<expected_attention<bf16, dim>>({1, 4, 2}, {}, {.tokens = 100})),
                      contains("rope_frequencies is 0; expected 32"));
}

TEST_CASE("one threshold over the model keeps what it keeps on the CPU, of rows of any form", "[gpu][cache][kvzip]") {
  if (gpu_missing()) return;
  hold_conversations<kvzip<bf16, dim>>(60, scales::any, with_sinks{});
  hold_conversations<paged_kvzip>(30, scales::any, with_sinks{});
  hold_conversations<fp8_kvzip>(20, scales::even, with_sinks{});
}
TEST_CASE("a re-reading of other tokens than the prompt's is refused before anything is launched",
          "[gpu][cache][kvzip]") {
  if (gpu_missing()) return;
  const model_shape shape{1, 4, 2};
  cuda::cache<kvzip<bf16, dim>> kv(shape, {}, {.sequences = 1, .tokens = 128});
  const index_t id = kv.open();
  const step_rows<bf16> x(1, 20, shape, dim);
  buffer<float> out(x.q.size());
  const auto again = [&](index_t first, index_t count) {
    kv.reread(0, id, first, count, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2),
              nhd_rows(out.data, 20, 4, dim), nullptr);
  };
  REQUIRE_THROWS_WITH(again(0, 10), contains("read a prompt again before it ends"));
  kv.prefill(0, id, {}, x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
  REQUIRE_THROWS_WITH(again(15, 6), contains("tokens that are read again"));
  again(15, 5);
  REQUIRE(kv.next_position(id) == 20);
  for (int i = 0; i < 6; ++i) again(0, 20);  // leaves nothing behind: five of them would not fit
  REQUIRE(kv.positions(0, id, 1).size() == 20);
  REQUIRE_THROWS_WITH(kv.reserve(id, 120, nullptr), contains("tokens of a kv_head"));
  kv.end_prefill(id, nullptr);
}
