// Scores of contents: one pass over keys or values, and a second one where rows are compared with their mean.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "../../../concepts/scorer.hpp"
#include "../../../math/ordered.hpp"
#include "../kernel/executor.hpp"
#include "../kernel/rows.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

namespace detail {

/// A row's sums over channels, in 16 lanes side by side so that the loop vectorises. anchor [dim], or null.
template <contents_scorer Scorer>
void measure_row(const Scorer& scorer, const float* row, const float* anchor, int dim, float* sums) {
  constexpr int lanes = 16, measures = Scorer::measures;
  float parts[lanes][measures] = {};
  const int whole = dim / lanes * lanes;
  for (int d = 0; d < whole; d += lanes) {
    for (int l = 0; l < lanes; ++l) scorer.measure(row[d + l], anchor ? anchor[d + l] : 0.0f, parts[l]);
  }
  for (int d = whole; d < dim; ++d) scorer.measure(row[d], anchor ? anchor[d] : 0.0f, parts[d - whole]);
  for (int m = 0; m < measures; ++m) {
    sums[m] = 0;
    for (int l = 0; l < lanes; ++l) sums[m] += parts[l][m];
  }
}

}  // namespace detail

/// The scores of all slots of one (sequence, kv_head), in slot order.
/// The mean leaves out rows that are not finite, so that none of them spoils another token's score.
/// Shapes   out [length].   Cost  one read of the scorer's rows, two for an anchored scorer; sums of rows in double.
template <class View, contents_scorer Scorer>
void score_contents(const View& view, index_t sequence, index_t head, const Scorer& scorer, float* out) {
  constexpr bool keys = stored_rows(Scorer::reads) == stored_rows::keys;
  constexpr int dim = keys ? View::k_dim : View::v_dim;
  const default_float_mode mode;
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

/// The same of projected values: the mean over the group's query heads.
/// Shapes   projection [group, v_dim, hidden]; row [hidden]; out [length].   Cost  v_dim * hidden * group products a
///          token.
template <class View, contents_scorer Scorer>
void score_projected(const View& view, index_t sequence, index_t head, const Scorer& scorer, const float* projection,
                     index_t hidden, index_t group, float* row, float* out) {
  const default_float_mode mode;
  alignas(64) float value[View::v_dim];
  float sums[Scorer::measures];
  for (index_t slot = 0; slot < view.length(sequence, head); ++slot) {
    load_value(view, sequence, head, slot, value);
    out[slot] = 0;
    for (index_t g = 0; g < group; ++g) {
      std::fill_n(row, hidden, 0.0f);
      for (int d = 0; d < View::v_dim; ++d) {
        const float* weights = projection + (offset_t(g) * View::v_dim + d) * hidden;
        for (index_t c = 0; c < hidden; ++c) row[c] += value[d] * weights[c];
      }
      detail::measure_row(scorer, row, nullptr, hidden, sums);
      out[slot] += scorer.score(sums) / float(group);
    }
  }
}

/// The scores of all slots of one (sequence, kv_head), relative to the tokens behind them; see lagged_scorer. Values of
/// the next partition that are not finite are left out. A row without a finite spread ranks last and changes no other
/// rank.
/// Shapes   out [length]; scratch [2 * lag].   Cost  two reads of K and of V.
template <class View, lagged_scorer Scorer>
void score_lagged(const View& view, index_t sequence, index_t head, const Scorer& scorer, float* out, float* scratch) {
  const default_float_mode mode;
  const index_t stored = view.length(sequence, head), lag = scorer.lag;
  const index_t partitions = (std::max)(0, stored - scorer.sinks) / lag;
  for (index_t slot = 0; slot < stored; ++slot) out[slot] = scorer.outside(slot, stored);
  float *spreads = scratch, *scores = scratch + lag;
  const auto add_softmax = [&]<int Dim>(std::integral_constant<int, Dim>, index_t first, const auto& load) {
    alignas(64) float row[Dim];
    float low[Dim], high[Dim], sums[Scorer::measures];
    std::fill_n(low, Dim, infinity);
    std::fill_n(high, Dim, -infinity);
    for (index_t i = 0; i < lag; ++i) {
      load(first + lag + i, row);
      for (int d = 0; d < Dim; ++d) {
        if (row[d] - row[d] != 0) continue;
        low[d] = (std::min)(low[d], row[d]);
        high[d] = (std::max)(high[d], row[d]);
      }
    }
    channel_scale scales[Dim];
    for (int d = 0; d < Dim; ++d) scales[d] = scorer.scale(low[d], high[d]);
    float top = -infinity, total = 0;
    for (index_t i = 0; i < lag; ++i) {
      load(first + i, row);
      std::fill_n(sums, Scorer::measures, 0.0f);
      for (int d = 0; d < Dim; ++d) scorer.measure(row[d], scales[d], sums);
      spreads[i] = scorer.spread(sums, Dim);
      if (spreads[i] < infinity) top = (std::max)(top, spreads[i]);
    }
    for (index_t i = 0; i < lag; ++i) {
      spreads[i] = spreads[i] < infinity ? std::exp(spreads[i] - top) : std::numeric_limits<float>::quiet_NaN();
      total += spreads[i] == spreads[i] ? spreads[i] : 0.0f;
    }
    for (index_t i = 0; i < lag; ++i) scores[i] += spreads[i] / total / 2;
  };
  for (index_t p = 0; p + 1 < partitions; ++p) {
    const index_t first = scorer.sinks + p * lag;
    std::fill_n(scores, lag, 0.0f);
    add_softmax(std::integral_constant<int, View::k_dim>{}, first,
                [&](index_t slot, float* to) { load_key(view, sequence, head, slot, to); });
    add_softmax(std::integral_constant<int, View::v_dim>{}, first,
                [&](index_t slot, float* to) { load_value(view, sequence, head, slot, to); });
    for (index_t i = 0; i < lag; ++i) {
      const float own = scores[i];
      index_t behind = 0;
      for (index_t j = 0; j < lag; ++j) behind += rank_key(scores[j], j) < rank_key(own, i);
      out[first + i] = own == own ? scorer.ranked(behind) : own;
    }
  }
}

}  // namespace cpu
TESSERA_NAMESPACE_END
