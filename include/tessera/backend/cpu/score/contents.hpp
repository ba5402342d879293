// Scores by what is stored: one pass over keys or values, one more where rows are compared with their mean.
#pragma once

#include <algorithm>
#include <vector>

#include "../../../concepts/scorer.hpp"
#include "../kernel/executor.hpp"
#include "../kernel/rows.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
inline namespace TESSERA_HOST_ISA {

namespace detail {

/// What one row's channels add up to. `row` [dim] has been loaded; anchor [dim], or null.
template <contents_scorer Scorer>
void measure_row(const Scorer& scorer, const float* row, const float* anchor, int dim, float* sums) {
  std::fill_n(sums, Scorer::measures, 0.0f);
  for (int d = 0; d < dim; ++d) scorer.measure(row[d], anchor ? anchor[d] : 0.0f, sums);
}

}  // namespace detail

/// The scores of all slots of one (sequence, kv_head), in slot order.
/// The mean of rows leaves out those that are not finite, so that none of them poisons another token's score.
/// Shapes   out [length].   Cost  one read of what the scorer reads, two for an anchored scorer; sums of rows in double.
template <class View, contents_scorer Scorer>
void score_contents(const View& view, index_t sequence, index_t head, const Scorer& scorer, float* out) {
  constexpr bool keys = stored_rows(Scorer::reads) == stored_rows::keys;
  constexpr int dim = keys ? View::k_dim : View::v_dim;
  alignas(64) float row[dim];
  float anchor[dim], sums[Scorer::measures];
  const index_t length = view.length(sequence, head);
  const auto load = [&](index_t slot) {
    if constexpr (keys) {
      load_key(view, sequence, head, slot, row);
    } else {
      load_value(view, sequence, head, slot, row);
    }
  };
  if constexpr (anchored_scorer<Scorer>) {
    double total[dim] = {};
    offset_t counted = 0;
    for (index_t slot = 0; slot < length; ++slot) {
      load(slot);
      if (std::any_of(row, row + dim, [](float x) { return x - x != 0; })) continue;
      detail::measure_row(scorer, row, nullptr, dim, sums);
      const float scale = scorer.anchor_scale(sums);
      for (int d = 0; d < dim; ++d) total[d] += double(row[d] * scale);
      ++counted;
    }
    for (int d = 0; d < dim; ++d) anchor[d] = counted ? float(total[d] / double(counted)) : 0.0f;
  }
  for (index_t slot = 0; slot < length; ++slot) {
    load(slot);
    detail::measure_row(scorer, row, anchored_scorer<Scorer> ? anchor : nullptr, dim, sums);
    out[slot] = scorer.score(sums);
  }
}

}  // namespace TESSERA_HOST_ISA
}  // namespace cpu
TESSERA_NAMESPACE_END
