// The CPU's side of the laws of caches.
#pragma once

#include <memory>
#include <vector>

#include <tessera/cache.hpp>

#include "laws/backends.hpp"
#include "layout/short_segments.hpp"

namespace support {

template <class Recipe>
struct cpu_side {
  using cache_type = tessera::cache<Recipe>;
  using element_type = typename Recipe::layout_type::element_type;
  using rows_type = chunk_rows<element_type>;
  static constexpr int dim = Recipe::layout_type::k_dim;
  static constexpr double tolerance = 1e-5;

  static tessera::model_shape shape() { return law_shape(); }
  static cache_type make() {
    Recipe recipe;
    support::shorten_segments(recipe);
    recipe.set_budget(33);
    return cache_type(shape(), recipe, std::make_shared<tessera::cpu::executor>(1));
  }

  static void prefill_layer(cache_type& cache, index_t id, const rows_type& rows, index_t layer) {
    const auto at = std::size_t(layer);
    cache.prefill(layer, id, view(rows.q[at], rows.tokens, shape().q_heads),
                  view(rows.k[at], rows.tokens, shape().kv_heads), view(rows.v[at], rows.tokens, shape().kv_heads));
  }
  static void end_prefill(cache_type& cache, index_t id) { cache.end_prefill(id); }

  static tessera::batch begin(cache_type& cache, const std::vector<index_t>& ids, index_t tokens) {
    return cache.prepare_step(ids, tokens);
  }
  static tessera::draft_step begin_draft(cache_type& cache, const std::vector<index_t>& ids,
                                         const tessera::host_vector<tessera::draft_tree>& trees) {
    return cache.prepare_draft(ids, trees);
  }
  /// `step`: a batch or a draft.
  template <class Step>
  static std::vector<float> decode_layer(cache_type& cache, const Step& step, const std::vector<rows_type>& rows,
                                         index_t layer) {
    const index_t tokens = rows[0].tokens, batch = index_t(rows.size());
    const auto q = rows_type::batch(rows, &rows_type::q, layer), k = rows_type::batch(rows, &rows_type::k, layer),
               v = rows_type::batch(rows, &rows_type::v, layer);
    std::vector<float> out(std::size_t(batch * tokens * shape().q_heads * dim));
    cache.decode(layer, step, view(q, tokens, shape().q_heads, batch), view(k, tokens, shape().kv_heads, batch),
                 view(v, tokens, shape().kv_heads, batch),
                 tessera::nhd_rows(out.data(), tokens, shape().q_heads, dim, batch));
    return out;
  }
  static void accept(cache_type& cache, const tessera::host_vector<tessera::accepted_tokens>& accepted) {
    cache.accept(accepted);
  }
  /// Outputs of batches of other sizes.
  static bool same(const std::vector<float>& a, const std::vector<float>& b) { return a == b; }

 private:
  static auto view(const std::vector<element_type>& rows, index_t tokens, index_t heads, index_t batch = 1) {
    return tessera::nhd_rows<const element_type>(rows.data(), tokens, heads, dim, batch);
  }
};

}  // namespace support
