// What every cache keeps to, held by the device's; the CPU's: tests/cache/test_backend_laws.cpp.
#include "laws/backends.hpp"

#include "cases/cache_case.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/ragged_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/h2o.hpp"
#include "tessera/methods/rocketkv.hpp"
#include "tessera/methods/snapkv.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

template <class Recipe>
struct device_side {
  using cache_type = cuda::cache<Recipe>;
  using element_type = typename Recipe::layout_type::element_type;
  static constexpr int dim = Recipe::layout_type::k_dim;

  static model_shape shape() { return {2, 4, 2}; }
  static cache_type make() {
    Recipe recipe;
    recipe.set_budget(33);
    return cache_type(shape(), recipe, {.sequences = 3, .tokens = 256, .step_tokens = 2});
  }
  using rows_type = support::chunk_rows<element_type>;
  static auto view(const buffer<element_type>& rows, index_t tokens, index_t heads, index_t batch = 1) {
    return nhd_rows<const element_type>(rows.data, tokens, heads, dim, batch);
  }
  static void prefill(cache_type& cache, index_t id, const rows_type& rows) {
    for (index_t layer = 0; layer < 2; ++layer) {
      const auto at = std::size_t(layer);
      const buffer<element_type> q(rows.q[at]), k(rows.k[at]), v(rows.v[at]);
      cache.prefill(layer, id, view(q, rows.tokens, 4), view(k, rows.tokens, 2), view(v, rows.tokens, 2), nullptr);
      cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    }
  }
  static void end_prefill(cache_type& cache, index_t id) { cache.end_prefill(id, nullptr); }
  static std::vector<float> decode(cache_type& cache, const std::vector<index_t>& ids,
                                   const std::vector<rows_type>& rows) {
    const index_t tokens = rows[0].tokens, batch = index_t(ids.size());
    const auto step = cache.prepare_step(ids, tokens, nullptr);
    cache.begin_step(step, nullptr);
    std::vector<float> all(std::size_t(batch * tokens * 4 * dim));
    const buffer<float> out(all);
    for (index_t layer = 0; layer < 2; ++layer) {
      const buffer<element_type> q(rows_type::batch(rows, &rows_type::q, layer)),
          k(rows_type::batch(rows, &rows_type::k, layer)), v(rows_type::batch(rows, &rows_type::v, layer));
      cache.decode(layer, step, view(q, tokens, 4, batch), view(k, tokens, 2, batch), view(v, tokens, 2, batch),
                   nhd_rows(out.data, tokens, 4, dim, batch), {}, nullptr);
      const std::vector<float> got = out.get();
      for (std::size_t i = 0; i < all.size(); ++i) all[i] += got[i];
    }
    return all;
  }
  /// How attention is split hangs on the batch.
  static bool same(const std::vector<float>& a, const std::vector<float>& b) { return relative_error(a, b) < 1e-2; }
};

template <class Recipe>
void hold() {
  support::backend_laws<device_side<Recipe>>{{}, support::rng(4601)}.hold();
}

}  // namespace

TEST_CASE("the device's caches keep the laws of caches", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold<snapkv<bf16, 64>>();
  hold<snapkv<bf16, 64, 64, stored<dense_rows<bf16, 64>, fixed_pages<16>>>>();
  hold<h2o<bf16, 64>>();
  hold<rocketkv<bf16, 64, 64, stored<dense_rows<bf16, 64>, ragged_pages>>>();
}
