// Packed rows in pages beside packed rows in planes: random calls give both the same outputs, to the bit.
#include "backend/cuda/cache/cases/placed_calls.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/methods/mosaickv.hpp"
#include "tessera/methods/think.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

constexpr int call_dim = support::cache_call::dim;
template <int Page>
using rows_in_pages = stored<dense_rows<bf16, call_dim>, fixed_pages<Page>>;

}  // namespace

TEST_CASE("random calls over packed rows in pages have the outputs of planes, to the bit", "[gpu][calls][packed]") {
  if (gpu_missing()) return;
  call_both<mosaickv<bf16, call_dim, call_dim, rows_in_pages<16>>, mosaickv<bf16, call_dim>>(50100);
}
TEST_CASE("random calls over packed rows without means in small pages have the outputs of planes",
          "[gpu][calls][packed]") {
  if (gpu_missing()) return;
  call_both<think<bf16, call_dim, call_dim, rows_in_pages<4>>, think<bf16, call_dim>>(50200);
}

TEST_CASE("packed rows in pages return every page, share them with forks, and say what they take", "[gpu][packed]") {
  if (gpu_missing()) return;
  using method = mosaickv<bf16, call_dim, call_dim, rows_in_pages<16>>;
  const model_shape shape{2, 4, 2};
  cuda::cache<method> kv(shape, method(), {.sequences = 4, .tokens = 4096});
  const offset_t all = kv.available().pages;
  const auto prompt = [&](index_t id, index_t tokens) {
    const capacity promised = kv.bound({.prompt = tokens, .answer = 0, .step = 1});
    CHECK(promised.pages <= all);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const step_rows<bf16> x(1, tokens, shape, call_dim);
      kv.prefill(layer, id, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
    }
    kv.end_prefill(id, nullptr);
    CHECK(all - kv.available().pages <= promised.pages);
  };
  REQUIRE(kv.open() == 0);
  prompt(0, 3000);
  const offset_t taken = all - kv.available().pages, bytes = kv.bytes(0);
  // 16 values of 64 in bf16 and bits of 64, for K and V.
  CHECK(bytes >= 2 * 2 * 3000 * 2 * (64 * 2 / 4 + 8));
  const index_t fork = kv.fork(0);
  CHECK(all - kv.available().pages == taken);
  CHECK(kv.bytes(0) + kv.bytes(fork) <= bytes + bytes / 8);  // bases count in both
  for (int step = 0; step < 70; ++step) {                    // both pack tails of their own
    const batch now = kv.prepare_step({0, fork}, 1, nullptr);
    kv.begin_step(now, nullptr);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const step_rows<bf16> x(2, 1, shape, call_dim);
      buffer<float> out(2 * 4 * call_dim);
      kv.decode(layer, now, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2),
                nhd_rows(out.data, 1, 4, call_dim, 2), {}, nullptr);
    }
  }
  CHECK(all - kv.available().pages <= taken + 2 * 2 * 8);
  kv.close(0);
  CHECK(kv.bytes(fork) >= bytes - bytes / 10);
  const cuda::cache<method> copied = kv;
  kv.close(fork);
  CHECK(kv.available().pages == all);
  CHECK(copied.available().pages < all);
}

namespace {

using paged_method = mosaickv<bf16, call_dim, call_dim, rows_in_pages<16>>;
const model_shape few_layers{2, 4, 2};

/// A cache whose pool has so many pages; 0: enough for everything.
cuda::cache<paged_method> cache_of_pages(offset_t pages) {
  paged_method method;
  method.layout.rows.segment = 512;
  return {few_layers, method, {.sequences = 3, .tokens = 2048, .rows = pages * 16 * few_layers.kv_heads}};
}
void write_chunk(cuda::cache<paged_method>& kv, index_t id, index_t tokens) {
  for (index_t layer = 0; layer < few_layers.layers; ++layer) {
    const step_rows<bf16> x(1, tokens, few_layers, call_dim);
    kv.prefill(layer, id, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
  }
}
void take_step(cuda::cache<paged_method>& kv, index_t id) {
  const batch now = kv.prepare_step({id}, 1, nullptr);
  kv.begin_step(now, nullptr);
  for (index_t layer = 0; layer < few_layers.layers; ++layer) {
    const step_rows<bf16> x(1, 1, few_layers, call_dim);
    buffer<float> out(4 * call_dim);
    kv.decode(layer, now, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2),
              nhd_rows(out.data, 1, 4, call_dim), {}, nullptr);
  }
}
/// A sequence whose tail is full, behind a chunk of another one's prompt.
void fill_tail_beside_a_chunk(cuda::cache<paged_method>& kv) {
  REQUIRE(kv.open() == 0);
  write_chunk(kv, 0, 640);
  kv.end_prefill(0, nullptr);
  for (int step = 0; step < 32; ++step) take_step(kv, 0);
  REQUIRE(kv.open() == 1);
  write_chunk(kv, 1, 800);
}

}  // namespace

TEST_CASE("pages that a chunk has taken do not count twice when another sequence packs its tail", "[gpu][packed]") {
  if (gpu_missing()) return;
  auto roomy = cache_of_pages(0);
  const offset_t all = roomy.available().pages;
  fill_tail_beside_a_chunk(roomy);
  const offset_t before = all - roomy.available().pages;
  offset_t most = before;
  for (int step = 0; step < 4; ++step) {
    take_step(roomy, 0);
    most = std::max(most, all - roomy.available().pages);
  }
  // Packed rows and whole ones lie side by side for a moment.
  auto tight = cache_of_pages(std::max(most, before + 4 * few_layers.layers));
  fill_tail_beside_a_chunk(tight);
  for (int step = 0; step < 4; ++step) REQUIRE_NOTHROW(take_step(tight, 0));
}
TEST_CASE("a saved sequence of packed rows comes back into a pool of its own size", "[gpu][packed]") {
  if (gpu_missing()) return;
  auto roomy = cache_of_pages(0);
  const offset_t all = roomy.available().pages;
  REQUIRE(roomy.open() == 0);
  write_chunk(roomy, 0, 1000);
  roomy.end_prefill(0, nullptr);
  const offset_t pages = all - roomy.available().pages;
  const auto bytes = support::saved(roomy, 0);
  auto small = cache_of_pages(pages);
  index_t loaded = -1;
  REQUIRE_NOTHROW(loaded = support::loaded(small, bytes));
  CHECK(small.available().pages == 0);
  CHECK(support::saved(small, loaded) == bytes);
  small.close(loaded);
  CHECK(small.available().pages == pages);
  CHECK_THROWS_AS(support::loaded(small, std::vector<unsigned char>(bytes.begin(), bytes.end() - 100)), error);
  CHECK(small.available().pages == pages);
  auto smaller = cache_of_pages(pages - 1);
  CHECK_THROWS_AS(support::loaded(smaller, bytes), error);
  CHECK(smaller.available().pages == pages - 1);
}

TEST_CASE("packed rows of a long prompt take a third of whole ones on the device", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  using method = mosaickv<bf16, 64>;
  cuda::cache_options options;
  options.tokens = 20000;
  const model_shape shape{1, 1, 1};
  cuda::cache<method> held(shape, {}, options);
  REQUIRE(held.open() == 0);
  const step_rows<bf16> x(1, 19990, shape, 64);
  held.prefill(0, 0, x.rows(x.dq.data, 1), x.rows(x.dk.data, 1), x.rows(x.dv.data, 1), nullptr);
  held.end_prefill(0, nullptr);
  CHECK(double(held.full_bytes(19990)) / double(held.bytes(0)) > 2.9);
}
