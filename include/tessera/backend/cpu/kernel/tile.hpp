// The inner kernels of the CPU backend: a block of query rows against a tile of tokens, all fp32 in cache.
#pragma once

#include <type_traits>

#include "../../../core/logit_rule.hpp"
#include "../../../math/exp.hpp"
#include "lanes.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

inline constexpr int tile_tokens = 64;  ///< tokens of a tile: K of d 128 takes 32 KiB as fp32
inline constexpr int tile_rows = 64;    ///< query rows of a block

/// The memory of one worker for a tile.
template <int D, int Dv>
struct tile_memory {
  alignas(64) float keys[tile_tokens * D];        // [tokens, D]
  alignas(64) float transposed[D * tile_tokens];  // [D, tokens]
  alignas(64) float values[tile_tokens * Dv];     // [tokens, Dv]
  alignas(64) float logits[tile_rows * tile_tokens];
  alignas(64) float queries[tile_rows * D];
  index_t positions[tile_tokens];
};

/// logits[r, t .. t + Keys) = q[r] . keys[t .. t + Keys) with lanes along D, for `Rows` rows; Rows * Keys is a multiple
/// of four. Queries are in the order of stored rows.
template <int D, int Rows, int Keys, class T>
TESSERA_INLINE void dots_block(const float* q, const T* const* keys, float* logits) {
  constexpr int two = 2 * lane_count;
  lanes acc[Rows][Keys] = {};
  const auto add = [&](int d, const auto& key) {
    for (int r = 0; r < Rows; ++r) {
      const lanes query = load(q + r * D + d);
      for (int t = 0; t < Keys; ++t) acc[r][t] += query * key(t);
    }
  };
  for (int d = 0; d + two <= D; d += two) {
    lanes first[Keys], second[Keys];
    for (int t = 0; t < Keys; ++t) load_two(keys[t] + d, first[t], second[t]);
    add(d, [&](int t) { return first[t]; });
    add(d + lane_count, [&](int t) { return second[t]; });
  }
  if constexpr (D % two > 0) {
    lanes rest[Keys];
    for (int t = 0; t < Keys; ++t) rest[t] = load(keys[t] + D - lane_count);
    add(D - lane_count, [&](int t) { return rest[t]; });
  }
  for (int i = 0; i < Rows * Keys; i += 4) {
    const auto at = [&](int j) -> lanes& { return acc[(i + j) / Keys][(i + j) % Keys]; };
    const lanes4 four = sums(at(0), at(1), at(2), at(3));
    for (int j = 0; j < 4; j += Keys) {
      std::memcpy(logits + (i + j) / Keys * tile_tokens, reinterpret_cast<const char*>(&four) + j * 4, Keys * 4);
    }
  }
}

/// logits [rows, tile_tokens] = q . k, straight from the stored rows: for few rows, where converting and transposing
/// the tile would cost more than it saves. `keys` has a multiple of four pointers; surplus logits are masked later.
/// Prefetches the tile's values meanwhile.
template <int D, int Dv, class T>
inline void dots_few_rows(const float* q, int rows, const T* const* keys, const T* const* values, int tokens,
                          float* logits) {
  constexpr int at_once = lane_count == 16 ? 4 : 2;  // four rows by two keys and their halves fill 16 registers
  for (int t = 0; t < tokens; t += 4) {
    for (int i = 0; i < 4; ++i) prefetch_row<Dv>(values[t + i]);
    int r = 0;
    for (; r + 4 <= rows; r += 4) {
      for (int i = 0; i < 4; i += at_once) {
        dots_block<D, 4, at_once>(q + r * D, keys + t + i, logits + r * tile_tokens + t + i);
      }
    }
    for (; r < rows; ++r) dots_block<D, 1, 4>(q + r * D, keys + t, logits + r * tile_tokens + t);
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

/// Rows to prefetch while others are worked on.
template <class T>
struct prefetched_rows {
  const T* const* next;
  const T* const* end;
};

/// out [Rows, Vectors of columns] += weights [Rows, tile_tokens] v, straight from the stored rows, in whose order `out`
/// is. Prefetches `count` more rows with every eight tokens.
template <int D, int Dv, int Rows, int Vectors, class T>
TESSERA_INLINE void add_values_block(const float* weights, const T* const* values, int tokens, int column, float* out,
                                     prefetched_rows<T>& prefetched, int count) {
  lanes acc[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) acc[r][v] = load(out + r * Dv + column + v * lane_count);
  }
  const auto add = [&](int t) {
    const T* row = values[t] + column;
    lanes value[Vectors];
    for (int v = 0; v + 2 <= Vectors; v += 2) load_two(row + v * lane_count, value[v], value[v + 1]);
    if constexpr (Vectors % 2 == 1) value[Vectors - 1] = load(row + (Vectors - 1) * lane_count);
    for (int r = 0; r < Rows; ++r) {
      const lanes weight = splat(weights[r * tile_tokens + t]);
      for (int v = 0; v < Vectors; ++v) acc[r][v] += weight * value[v];
    }
  };
  int t = 0;
  for (; t + 8 <= tokens; t += 8) {
    for (int i = 0; i < count && prefetched.next < prefetched.end; ++i) prefetch_row<D>(*prefetched.next++);
    [&]<int... i>(std::integer_sequence<int, i...>) { (add(t + i), ...); }(std::make_integer_sequence<int, 8>{});
  }
  for (; t < tokens; ++t) add(t);
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) store(out + r * Dv + column + v * lane_count, acc[r][v]);
  }
}

/// out [rows, Dv] += weights [rows, tile_tokens] v, straight from the stored rows. Prefetches the next tile's keys
/// meanwhile, a few at a time: all at once they would fill the queue of misses, and arithmetic would wait.
template <int D, int Dv, class T>
inline void add_values_few_rows(const float* weights, int rows, const T* const* values, const T* const* next_keys,
                                int tokens, float* out) {
  constexpr int wide = accumulators * lane_count, rest = Dv % wide / lane_count;
  constexpr int blocks = (Dv / wide + (rest > 0)) * tile_tokens / 8, count = (tile_tokens + blocks - 1) / blocks;
  prefetched_rows<T> prefetched{next_keys, next_keys + tile_tokens};
  const auto columns = [&]<int Rows>(std::integer_sequence<int, Rows>, int r) {
    const float* row_weights = weights + r * tile_tokens;
    float* to = out + r * Dv;
    for (int c = 0; c + wide <= Dv; c += wide) {
      add_values_block<D, Dv, Rows, accumulators>(row_weights, values, tokens, c, to, prefetched, count);
    }
    if constexpr (rest > 0) {
      add_values_block<D, Dv, Rows, rest>(row_weights, values, tokens, Dv - rest * lane_count, to, prefetched, count);
    }
  };
  int r = 0;
  for (; r + 4 <= rows; r += 4) columns(std::integer_sequence<int, 4>{}, r);
  for (; r < rows; ++r) columns(std::integer_sequence<int, 1>{}, r);
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
/// become -infinity. `positions` null: every token is known to be visible. Returns whether they are.
inline bool apply_rule(const logit_rule& rule, index_t query_position, const index_t* positions, int tokens,
                       float* row) {
  if (rule.soft_cap > 0) {
    for (int t = 0; t < tokens; ++t) row[t] = rule.cap(row[t]);
  }
  // Positions ascend: if the newest key is visible to the causal mask and the oldest to the window, all are.
  const bool all_visible = !positions || (tokens > 0 && rule.visible(query_position, positions[tokens - 1]) &&
                                          rule.visible(query_position, positions[0]));
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

/// The largest logit of a row; NaN is ignored.
TESSERA_INLINE float row_max(const float* row) {
  lanes best = load(row);
  best = best == best ? best : splat(-infinity);
  for (int t = lane_count; t < tile_tokens; t += lane_count) best = larger(load(row + t), best);
  return largest(best);
}

/// row[t] = exp(row[t] - top); returns their sum.
TESSERA_INLINE float row_exp(float* row, float top) {
  lanes total = {};
  for (int t = 0; t < tile_tokens; t += lane_count) {
    const lanes x = exp_lanes(load(row + t) - splat(top));
    store(row + t, x);
    total += x;
  }
  return sum(total);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
