// What every cache keeps to, held by the CPU's; the device's: tests/backend/cuda/cache/test_backend_laws.cu.
#include "catch.hpp"

#include <memory>

#include <tessera/cache.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/ragged_pages.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/loopserve.hpp>
#include <tessera/methods/rocketkv.hpp>
#include <tessera/methods/snapkv.hpp>

#include "laws/backends.hpp"

using namespace tessera;

namespace {

template <class Recipe>
struct cpu_side {
  using cache_type = cache<Recipe>;
  using element_type = typename Recipe::layout_type::element_type;
  static constexpr int dim = Recipe::layout_type::k_dim;

  static model_shape shape() { return {2, 4, 2}; }
  static cache_type make() {
    Recipe recipe;
    recipe.set_budget(33);
    return cache_type(shape(), recipe, std::make_shared<cpu::executor>(1));
  }
  using rows_type = support::chunk_rows<element_type>;
  static auto view(const std::vector<element_type>& rows, index_t tokens, index_t heads) {
    return nhd_rows<const element_type>(rows.data(), tokens, heads, dim);
  }
  static void prefill(cache_type& cache, index_t id, const rows_type& rows) {
    for (index_t layer = 0; layer < 2; ++layer) {
      const auto at = std::size_t(layer);
      cache.prefill(layer, id, view(rows.q[at], rows.tokens, 4), view(rows.k[at], rows.tokens, 2),
                    view(rows.v[at], rows.tokens, 2));
    }
  }
  static void end_prefill(cache_type& cache, index_t id) { cache.end_prefill(id); }
  static std::vector<float> decode(cache_type& cache, const std::vector<index_t>& ids,
                                   const std::vector<rows_type>& rows) {
    const index_t tokens = rows[0].tokens, batch = index_t(ids.size());
    const auto step = cache.prepare_step(ids, tokens);
    std::vector<float> all(std::size_t(batch * tokens * 4 * dim)), out = all;
    for (index_t layer = 0; layer < 2; ++layer) {
      const auto q = rows_type::batch(rows, &rows_type::q, layer), k = rows_type::batch(rows, &rows_type::k, layer),
                 v = rows_type::batch(rows, &rows_type::v, layer);
      cache.decode(layer, step, nhd_rows<const element_type>(q.data(), tokens, 4, dim, batch),
                   nhd_rows<const element_type>(k.data(), tokens, 2, dim, batch),
                   nhd_rows<const element_type>(v.data(), tokens, 2, dim, batch),
                   nhd_rows(out.data(), tokens, 4, dim, batch));
      for (std::size_t i = 0; i < all.size(); ++i) all[i] += out[i];
    }
    return all;
  }
  static bool same(const std::vector<float>& a, const std::vector<float>& b) { return a == b; }
};

template <class Recipe>
void hold() {
  support::backend_laws<cpu_side<Recipe>>{{}, support::rng(4600)}.hold();
}

}  // namespace

TEST_CASE("the CPU's caches keep the laws of caches") {
  hold<snapkv<float, 64>>();
  hold<h2o<float, 64>>();
  hold<rocketkv<float, 64>>();
  hold<loopserve<float, 64>>();
  hold<snapkv<float, 64, 64, stored<dense_rows<float, 64>, fixed_pages<16>>>>();
  hold<rocketkv<float, 64, 64, stored<dense_rows<float, 64>, ragged_pages>>>();
}
