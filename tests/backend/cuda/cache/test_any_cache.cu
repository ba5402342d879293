// A cache by name on the device: the bits of the cache itself, and sequences that pass to one on the CPU.
#include <memory>
#include <vector>

#include <tessera/backend/cpu/any_cache.hpp>
#include <tessera/backend/cuda/any_cache.cuh>

#include "cache/callers/gated_method.hpp"
#include "cases/step_rows.hpp"
#include "support/calls/saved_bytes.hpp"
#include "tessera/methods/snapkv.hpp"

using namespace tessera;
using namespace gpu_test;

TEST_CASE("a cache by name gives the bits of the cache itself on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  using method = snapkv<bf16, 64>;
  const model_shape shape{2, 4, 2};
  method recipe;
  recipe.set_budget(40);
  cuda::cache_options options;
  options.sequences = 2;
  options.tokens = 200;
  cuda::cache<method> own(shape, recipe, options);
  const std::unique_ptr<any_cache> named = std::make_unique<cuda::any_cache_of<method>>(shape, recipe, options);
  CHECK(named->facts().input == element_kind::bf16);
  CHECK((named->facts().drops_by_layer && named->facts().saves && !named->facts().packs));

  const step_rows<bf16> prompt(1, 120, shape, 64), next(1, 1, shape, 64);
  buffer<float> a(120 * 4 * 64), b(120 * 4 * 64);
  const auto same = [&] { CHECK(a.get() == b.get()); };
  const index_t id = own.open();
  REQUIRE(named->open() == id);
  own.reserve(id, 120, nullptr), named->reserve(id, 120);
  const auto q = prompt.rows(prompt.dq.data, 4), k = prompt.rows(prompt.dk.data, 2), v = prompt.rows(prompt.dv.data, 2);
  for (index_t layer = 0; layer < 2; ++layer) {
    own.prefill(layer, id, q, k, v, nullptr), named->prefill(layer, id, q, k, v);
    own.prefill_attention(layer, id, q, nhd_rows(a.data, 120, 4, 64), {}, nullptr);
    named->prefill_attention(layer, id, q, nhd_rows(b.data, 120, 4, 64));
    same();
  }
  own.end_prefill(id, nullptr), named->end_prefill(id);
  const auto copy = named->clone();
  const auto step_q = next.rows(next.dq.data, 4), step_k = next.rows(next.dk.data, 2),
             step_v = next.rows(next.dv.data, 2);
  const auto step_on = [&](any_cache& held) {
    b.fill(0);
    const batch step = held.prepare_step({id}, 1);
    held.begin_step(step);
    for (index_t layer = 0; layer < 2; ++layer)
      held.decode(layer, step, step_q, step_k, step_v, nhd_rows(b.data + layer * 256, 1, 4, 64));
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  };
  a.fill(0);
  const batch step = own.prepare_step({id}, 1, nullptr);
  own.begin_step(step, nullptr);
  for (index_t layer = 0; layer < 2; ++layer)
    own.decode(layer, step, step_q, step_k, step_v, nhd_rows(a.data + layer * 256, 1, 4, 64), {}, nullptr);
  step_on(*named), same();
  step_on(*copy), same();
  CHECK(named->positions(1, id, 0) == own.positions(1, id, 0));
  CHECK(named->bytes(id) == own.bytes(id));
  CHECK(named->bytes_read(id) == own.bytes_read(id));
  CHECK(named->step_positions() != nullptr);
  CHECK_THROWS_WITH(named->trace_ranked(true), contains("asked of a cache on a GPU"));
  CHECK_THROWS_WITH(
      named->prefill_attention(0, id, nhd_rows<const float>(a.data, 1, 4, 64), nhd_rows(b.data, 1, 4, 64)),
      contains("element type of rows is fp32; expected bf16"));

  const std::unique_ptr<any_cache> on_host =
      std::make_unique<cpu::any_cache_of<method>>(shape, recipe, std::make_shared<cpu::executor>(1));
  const index_t loaded = support::loaded(*on_host, support::saved(*named, id));
  CHECK(on_host->next_position(loaded) == 121);
  CHECK(on_host->positions(1, loaded, 1) == named->positions(1, id, 1));
  const index_t back = support::loaded(*named, support::saved(*on_host, loaded));
  CHECK(named->positions(0, back, 0) == own.positions(0, id, 0));
}

TEST_CASE("a cache by name takes an engine's scores on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  const model_shape shape{gated::layers, gated::q_heads, gated::kv_heads};
  using method = gated::at_the_end<bf16>;
  method recipe;
  recipe.set_budget(4);
  const std::unique_ptr<any_cache> kv =
      std::make_unique<cuda::any_cache_of<method>>(shape, recipe, cuda::cache_options{.tokens = 64});
  CHECK(kv->facts().takes_scores);
  const index_t id = kv->open();
  const step_rows<bf16> x(1, 20, shape, gated::dim);
  for (index_t layer = 0; layer < gated::layers; ++layer) {
    kv->prefill(layer, id, x.rows(x.dq.data, gated::q_heads), x.rows(x.dk.data, gated::kv_heads),
                x.rows(x.dv.data, gated::kv_heads));
    std::vector<float> scores(std::size_t(gated::kv_heads) * 20, 0.0f);  // tokens 2, 3, 5 and 7 of every head
    for (index_t h = 0; h < gated::kv_heads; ++h) {
      for (const index_t t : {2, 3, 5, 7}) scores[std::size_t(h * 20 + t)] = 1;
    }
    const buffer<float> given(scores);
    kv->set_scores(layer, id, 0, 20, given.data);
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  kv->end_prefill(id);
  CHECK(kv->positions(1, id, 0) == host_vector<index_t>{2, 3, 5, 7});
}
