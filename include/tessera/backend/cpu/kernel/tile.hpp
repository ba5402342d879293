// The inner kernels of the CPU backend: a block of query rows against a tile of tokens, all fp32 in cache.
#pragma once

#include <type_traits>
#include <utility>

#include "../../../core/logit_rule.hpp"
#include "../../../math/exp.hpp"
#include "lanes.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
inline namespace TESSERA_HOST_ISA {

inline constexpr int tile_tokens = 64;  ///< tokens of a tile: K of d 128 takes 32 KiB as fp32
inline constexpr int tile_rows = 64;    ///< query rows of a block

/// What one worker needs to run a tile.
template <int D, int Dv>
struct tile_memory {
  alignas(64) float keys[tile_tokens * D];        // [tokens, D]
  alignas(64) float transposed[D * tile_tokens];  // [D, tokens]
  alignas(64) float values[tile_tokens * Dv];     // [tokens, Dv]
  alignas(64) float logits[tile_rows * tile_tokens];
  alignas(64) float queries[tile_rows * D];
  index_t positions[tile_tokens];
};

/// logits[r, t .. t + 4) = q[r] . keys[t .. t + 4) with lanes along D, for `Rows` rows.
template <int D, int Rows, class T>
TESSERA_INLINE void dots_block(const float* q, const T* const* keys, float* logits) {
  lanes acc[Rows][4] = {};
  for (int d = 0; d < D; d += lane_count) {
    lanes key[4];
    for (int t = 0; t < 4; ++t) key[t] = load(keys[t] + d);
    for (int r = 0; r < Rows; ++r) {
      const lanes query = load(q + r * D + d);
      for (int t = 0; t < 4; ++t) acc[r][t] += query * key[t];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    const lanes4 four = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    std::memcpy(logits + r * tile_tokens, &four, sizeof four);
  }
}

/// logits [rows, tile_tokens] = q . k, straight from the stored rows: for few rows, where converting and transposing
/// the tile would cost more than it saves. `keys` has a multiple of four pointers; surplus logits are masked later.
/// The tile's values are asked for meanwhile.
template <int D, int Dv, class T>
inline void dots_few_rows(const float* q, int rows, const T* const* keys, const T* const* values, int tokens,
                          float* logits) {
  for (int t = 0; t < tokens; t += 4) {
    for (int i = 0; i < 4; ++i) prefetch_row<Dv>(values[t + i]);
    int r = 0;
    for (; r + 4 <= rows; r += 4) dots_block<D, 4>(q + r * D, keys + t, logits + r * tile_tokens + t);
    for (; r < rows; ++r) dots_block<D, 1>(q + r * D, keys + t, logits + r * tile_tokens + t);
  }
}

/// rows [rows, tile_tokens] *= scales [tile_tokens]: logits, or weights, of encoded rows.
inline void scale_tokens(float* rows, int count, const float* scales) {
  for (int r = 0; r < count; ++r) {
    for (int t = 0; t < tile_tokens; t += lane_count) {
      store(rows + r * tile_tokens + t, load(rows + r * tile_tokens + t) * load(scales + t));
    }
  }
}

/// out [rows, Dv] += weights [rows, tile_tokens] v, straight from the stored rows. The next tile's keys are asked for
/// meanwhile.
template <int D, int Dv, class T>
inline void add_values_few_rows(const float* weights, int rows, const T* const* values, const T* const* next_keys,
                                int tokens, float* out) {
  const auto strip = [&]<int Rows, int Vectors>(std::integer_sequence<int, Rows, Vectors>, int r, int column) {
    lanes acc[Rows][Vectors];
    for (int i = 0; i < Rows; ++i) {
      for (int v = 0; v < Vectors; ++v) acc[i][v] = load(out + (r + i) * Dv + column + v * lane_count);
    }
    const bool ask = r == 0 && column == 0;
    for (int t = 0; t < tokens; ++t) {
      if (ask) prefetch_row<D>(next_keys[t]);
      lanes value[Vectors];
      for (int v = 0; v < Vectors; ++v) value[v] = load(values[t] + column + v * lane_count);
      for (int i = 0; i < Rows; ++i) {
        const lanes weight = splat(weights[(r + i) * tile_tokens + t]);
        for (int v = 0; v < Vectors; ++v) acc[i][v] += weight * value[v];
      }
    }
    for (int i = 0; i < Rows; ++i) {
      for (int v = 0; v < Vectors; ++v) store(out + (r + i) * Dv + column + v * lane_count, acc[i][v]);
    }
  };
  constexpr int wide = accumulators * lane_count, rest = Dv % wide / lane_count;
  const auto columns = [&]<int Rows>(std::integral_constant<int, Rows>, int r) {
    for (int c = 0; c + wide <= Dv; c += wide) strip(std::integer_sequence<int, Rows, accumulators>{}, r, c);
    if constexpr (rest > 0) strip(std::integer_sequence<int, Rows, rest>{}, r, Dv - rest * lane_count);
  };
  int r = 0;
  for (; r + 4 <= rows; r += 4) columns(std::integral_constant<int, 4>{}, r);
  for (; r < rows; ++r) columns(std::integral_constant<int, 1>{}, r);
}

/// out[r, :] (+)= sum over k of a[r, k] * b[k, :] for `Rows` rows and `Vectors` vectors of columns.
/// Every element is summed over k in order, whatever the blocking: results do not depend on how rows are grouped.
template <int Rows, int Vectors>
TESSERA_INLINE void multiply_block(const float* a, offset_t a_stride, const float* b, offset_t b_stride, int depth,
                                   float* out, offset_t out_stride) {
  lanes acc[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) acc[r][v] = load(out + r * out_stride + v * lane_count);
  }
  for (int k = 0; k < depth; ++k) {
    lanes column[Vectors];
    for (int v = 0; v < Vectors; ++v) column[v] = load(b + k * b_stride + v * lane_count);
    for (int r = 0; r < Rows; ++r) {
      const lanes weight = splat(a[r * a_stride + k]);
      for (int v = 0; v < Vectors; ++v) acc[r][v] += weight * column[v];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) store(out + r * out_stride + v * lane_count, acc[r][v]);
  }
}

/// out [rows, Columns] += a [rows, depth] b [depth, Columns]; Columns a multiple of 16.
template <int Columns>
inline void multiply_add(const float* a, offset_t a_stride, const float* b, offset_t b_stride, int rows, int depth,
                         float* out, offset_t out_stride) {
  constexpr int wide = accumulators * lane_count;
  constexpr int rest = Columns % wide / lane_count;
  const auto strip = [&]<int Vectors>(std::integral_constant<int, Vectors>, int column) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) {
      multiply_block<4, Vectors>(a + r * a_stride, a_stride, b + column, b_stride, depth, out + r * out_stride + column,
                                 out_stride);
    }
    for (; r < rows; ++r) {
      multiply_block<1, Vectors>(a + r * a_stride, a_stride, b + column, b_stride, depth, out + r * out_stride + column,
                                 out_stride);
    }
  };
  for (int column = 0; column + wide <= Columns; column += wide) {
    strip(std::integral_constant<int, accumulators>{}, column);
  }
  if constexpr (rest > 0) strip(std::integral_constant<int, rest>{}, Columns - rest * lane_count);
}

/// to [D, tile_tokens] = from [tokens, D] transposed; columns beyond `tokens` become 0.
template <int D>
inline void transpose(const float* from, int tokens, float* to) {
  for (int t = 0; t < tile_tokens; ++t) {
    if (t < tokens) {
      for (int d = 0; d < D; ++d) to[d * tile_tokens + t] = from[t * D + d];
    } else {
      for (int d = 0; d < D; ++d) to[d * tile_tokens + t] = 0;
    }
  }
}

/// logits [rows, tile_tokens] = q . k, from a transposed tile: for many rows.
template <int D>
inline void dots_many_rows(const float* q, int rows, const float* transposed, float* logits) {
  for (int i = 0; i < rows * tile_tokens; ++i) logits[i] = 0;
  multiply_add<tile_tokens>(q, D, transposed, tile_tokens, rows, D, logits, tile_tokens);
}

/// Turns dot products of one row into logits: cap and masks. Queries are scaled already. Entries from `tokens` on
/// become -infinity. Returns whether every token of the tile is visible.
inline bool apply_rule(const logit_rule& rule, index_t query_position, const index_t* positions, int tokens,
                       float* row) {
  if (rule.soft_cap > 0) {
    for (int t = 0; t < tokens; ++t) row[t] = rule.cap(row[t]);
  }
  // Positions ascend: if the newest key is visible to the causal mask and the oldest to the window, all are.
  const bool all_visible =
      tokens > 0 && rule.visible(query_position, positions[tokens - 1]) && rule.visible(query_position, positions[0]);
  if (!all_visible) {
    for (int t = 0; t < tokens; ++t) row[t] = rule.visible(query_position, positions[t]) ? row[t] : -infinity;
  }
  for (int t = tokens; t < tile_tokens; ++t) row[t] = -infinity;
  return all_visible;
}

/// Whether all values of a tile are finite. `value(t)` points at a row.
template <int Dv, class Row>
inline bool all_finite(const Row& value, int tokens) {
  lanes poison = {};
  for (int t = 0; t < tokens; ++t) {
    for (int d = 0; d < Dv; d += lane_count) poison += load(value(t) + d) * splat(0.0f);
  }
  return sum(poison) == 0;
}

/// As the kernels above, but a token of weight 0 adds nothing even where its value is not finite: for tiles in which a
/// row must not see some of the tokens. Shapes   values [tokens, Dv].
template <int Dv>
inline void add_visible_values(const float* weights, int rows, const float* values, int tokens, float* out) {
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < tokens; ++t) {
      const float weight = weights[r * tile_tokens + t];
      if (weight == 0) continue;
      for (int d = 0; d < Dv; ++d) out[r * Dv + d] += weight * values[t * Dv + d];
    }
  }
}

/// Largest logit of a row; NaN is passed over.
TESSERA_INLINE float row_max(const float* row) {
  lanes best = load(row);
  best = best == best ? best : splat(-infinity);
  for (int t = lane_count; t < tile_tokens; t += lane_count) best = larger(load(row + t), best);
  return largest(best);
}

/// row[t] = exp(row[t] - top); returns their sum.
TESSERA_INLINE float row_exp(float* row, float top) {
  for (int t = 0; t < tile_tokens; ++t) row[t] = fast_exp(row[t] - top);
  lanes total = {};
  for (int t = 0; t < tile_tokens; t += lane_count) total += load(row + t);
  return sum(total);
}

}  // namespace TESSERA_HOST_ISA
}  // namespace cpu
TESSERA_NAMESPACE_END
