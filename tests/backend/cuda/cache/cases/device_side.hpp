// The device's side of the laws of caches.
#pragma once

#include "cache_case.hpp"
#include "laws/backends.hpp"

namespace gpu_test {

template <class Recipe>
struct device_side {
  using cache_type = cuda::cache<Recipe>;
  using element_type = typename Recipe::layout_type::element_type;
  using rows_type = support::chunk_rows<element_type>;
  static constexpr int dim = Recipe::layout_type::k_dim;
  static constexpr double tolerance = 1e-2;

  static model_shape shape() { return support::law_shape(); }
  static cache_type make() {
    Recipe recipe;
    support::shorten_segments(recipe);
    recipe.set_budget(33);
    return cache_type(shape(), recipe, {.sequences = 3, .tokens = 256, .step_tokens = 8, .draft_tokens = 24});
  }

  static void prefill_layer(cache_type& cache, index_t id, const rows_type& rows, index_t layer) {
    const auto at = std::size_t(layer);
    const buffer<element_type> q(rows.q[at]), k(rows.k[at]), v(rows.v[at]);
    cache.prefill(layer, id, view(q, rows.tokens, shape().q_heads), view(k, rows.tokens, shape().kv_heads),
                  view(v, rows.tokens, shape().kv_heads), nullptr);
    cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  static void end_prefill(cache_type& cache, index_t id) { cache.end_prefill(id, nullptr); }

  static batch begin(cache_type& cache, const std::vector<index_t>& ids, index_t tokens) {
    const batch step = cache.prepare_step(ids, tokens, nullptr);
    cache.begin_step(step, nullptr);
    return step;
  }
  static draft_step begin_draft(cache_type& cache, const std::vector<index_t>& ids,
                                const host_vector<draft_tree>& trees) {
    const draft_step draft = cache.prepare_draft(ids, trees, nullptr);
    cache.begin_step(draft, nullptr);
    return draft;
  }
  template <class Step>
  static std::vector<float> decode_layer(cache_type& cache, const Step& step, const std::vector<rows_type>& rows,
                                         index_t layer) {
    const index_t tokens = rows[0].tokens, batch = index_t(rows.size());
    const buffer<element_type> q(rows_type::batch(rows, &rows_type::q, layer)),
        k(rows_type::batch(rows, &rows_type::k, layer)), v(rows_type::batch(rows, &rows_type::v, layer));
    const buffer<float> out(std::vector<float>(std::size_t(batch * tokens * shape().q_heads * dim)));
    cache.decode(layer, step, view(q, tokens, shape().q_heads, batch), view(k, tokens, shape().kv_heads, batch),
                 view(v, tokens, shape().kv_heads, batch), nhd_rows(out.data, tokens, shape().q_heads, dim, batch), {},
                 nullptr);
    return out.get();
  }
  static void accept(cache_type& cache, const host_vector<accepted_tokens>& accepted) {
    cache.accept(accepted, nullptr);
  }
  /// How attention is split hangs on the batch.
  static bool same(const std::vector<float>& a, const std::vector<float>& b) { return relative_error(a, b) < 1e-2; }

 private:
  static auto view(const buffer<element_type>& rows, index_t tokens, index_t heads, index_t batch = 1) {
    return nhd_rows<const element_type>(rows.data, tokens, heads, dim, batch);
  }
};

}  // namespace gpu_test
