// Attention over packed rows on the device: parts of what is chosen, each in its segment's basis, and the rows that are whole.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/logit_rule.hpp"
#include "../../../../core/selection.hpp"
#include "../../device/search.cuh"
#include "packed_state.cuh"
#include "rotated_queries.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What a decode step over packed rows reads and writes; every pointer is a device pointer, every length is read on the device.
template <class View, class Out>
struct packed_problem {
  using T = typename View::element_type;
  View view;
  rows_view<const T> q;           ///< [sequences, tokens, q_heads, k_dim]
  const index_t* first_position;  ///< [sequences], position of the step's first token
  logit_rule rule;
  rows_view<Out> out;    ///< [sequences, tokens, q_heads, v_dim]
  rows_view<float> lse;  ///< [sequences, tokens, q_heads]; data null: not wanted
  selection_view
      chosen;  ///< of units, row = sequence * kv_heads + head; indices null: everything; whole rows are always read
  index_t unit = 1;  ///< rows of a unit; every segment begins with a new one
};

namespace detail {

inline constexpr int packed_warps = 4, packed_threads = packed_warps * 32;

/// Results of parts: [lanes, parts, rows, v_dim], not divided by the sum, in the basis of the part's segment, whose number is in
/// `segment` [lanes, parts] (none: nothing was there; most_segments: whole rows); most and sum [lanes, parts, rows, 2].
struct packed_parts {
  float *out, *states;
  index_t* segment;
  index_t splits, parts, rows;
};

/// Where a block's shared memory lies.
template <int D, int Dv>
struct packed_memory {
  TESSERA_HD static constexpr staged_rows k_rows() { return {D / 8}; }
  TESSERA_HD static constexpr staged_rows v_rows() { return {Dv / 8}; }
  static constexpr int q_bytes = staged_rows{D / 8}.bytes() * 2 * query_rows_together;
  static constexpr int tiles = (staged_rows{D / 8}.bytes() + staged_rows{Dv / 8}.bytes()) * tile_tokens;
  static constexpr int sums = query_rows_together * Dv * 4, warp_bytes = tiles > sums ? tiles : sums;
  static constexpr int states = packed_warps * query_rows_together * 2 * 4;
  int begins, raw;  // bytes: of the tables, and of one stage of a warp's raw rows

  TESSERA_HD packed_memory(index_t most_segments, int k_raw, int v_raw)
      : begins((int(most_segments + 1) * 2 * 4 + 15) / 16 * 16), raw((k_raw + v_raw) * tile_tokens) {}
  TESSERA_HD int of_warp(int warp) const { return begins + q_bytes + states + warp * (warp_bytes + 2 * raw); }
  TESSERA_HD int bytes() const { return of_warp(packed_warps); }
};

/// One block's part: some of the chosen units of a (sequence, kv_head), or its whole rows, for 8 query rows.
template <class View, class Tile, class Out>
class packed_part {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim;
  using memory = packed_memory<D, Dv>;
  using state_type = packed_state<Tile, D, Dv>;

 public:
  __device__ packed_part(const packed_problem<View, Out>& p, const rotated_rows& rotated, const packed_parts& to,
                         const memory& shape, int k_raw, unsigned char* shared)
      : p_(p), rotated_(rotated), to_(to), shape_(shape), k_raw_(k_raw), shared_(shared) {
    const index_t heads = p.view.whole.kv_heads;
    lane_row_ = index_t(blockIdx.y);
    sequence_ = lane_row_ / heads, head_ = lane_row_ % heads, group_ = p.q.heads / heads;
    first_row_ = index_t(blockIdx.z) * query_rows_together;
    row_begin_ = reinterpret_cast<index_t*>(shared);
    unit_begin_ = row_begin_ + p.view.most_segments + 1;
    const index_t row = first_row_ + int(threadIdx.x) % 32 / 4;
    position_ = row < to.rows ? p.first_position[sequence_] + row / group_ : no_index;
    scale_ = p.rule.scale_for(D);
  }

  /// Chosen units of one split, segment after segment.
  __device__ void attend_split(index_t split) {
    const index_t count = p_.view.count(sequence_);
    fill_begins(p_.view, sequence_, head_, count, 1, row_begin_);
    fill_begins(p_.view, sequence_, head_, count, p_.unit, unit_begin_);
    const index_t* list = p_.chosen.indices ? p_.chosen.row(lane_row_) : nullptr;
    const index_t units = list ? p_.chosen.counts[lane_row_] : unit_begin_[count];
    const index_t tile_units = max(1, tile_tokens / p_.unit);
    const index_t each = ceil_div(ceil_div(units, to_.splits), tile_units) * tile_units;
    index_t first = min(split * each, units);
    const index_t last = min(first + each, units);
    for (index_t s = 0; s < count && first < last; ++s) {
      const index_t limit = unit_begin_[s + 1];
      if (limit <= unit_begin_[s]) continue;
      const index_t end = list ? first + first_where(last - first, [&](index_t i) { return list[first + i] >= limit; })
                               : max(first, min(last, limit));
      if (end > first) attend_units(s, list, first, end, split + s);
      first = end;
    }
  }

  /// The rows that are not packed.
  __device__ void attend_whole() {
    const index_t count = p_.view.count(sequence_);
    fill_begins(p_.view, sequence_, head_, count, 1, row_begin_);
    const index_t packed = row_begin_[count], rows = p_.view.whole.length(sequence_, head_);
    if (rows <= 0) return;
    packed_state<T, D, Dv> state(
        put_queries<T>(
            [&](index_t row, int c) {
              return float(p_.q.row(sequence_, row / group_, head_ * group_ + row % group_)[c]);
            },
            D),
        D);
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, half = lane / tile_tokens;
    unsigned char* keys = shared_ + shape_.of_warp(warp);
    unsigned char* values = keys + memory::k_rows().bytes() * tile_tokens;
    const auto& whole = p_.view.whole;
    for (index_t tile = warp * tile_tokens; tile < rows; tile += packed_warps * tile_tokens) {
      const index_t row = tile + lane % tile_tokens;
      const bool valid = row < rows;
      const auto* k = whole.key(sequence_, head_, valid ? row : 0);
      const auto* v = whole.value(sequence_, head_, valid ? row : 0);
      for (int c = half; c < D / 8; c += 2) {
        copy_async16(shared_address(keys + memory::k_rows().place(lane % tile_tokens, c)), k + c * 8, valid);
      }
      for (int c = half; c < Dv / 8; c += 2) {
        copy_async16(shared_address(values + memory::v_rows().place(lane % tile_tokens, c)), v + c * 8, valid);
      }
      commit_copies();
      const index_t position = valid ? p_.view.whole_position(sequence_, head_, packed, row) : never;
      wait_copies<0>();
      __syncwarp();
      attend_tile(
          state, shared_address(keys), shared_address(values), D, Dv, position, [](int) { return 1.0f; },
          [](int) { return 1.0f; });
      __syncwarp();
    }
    write(state, p_.view.most_segments, to_.parts - 1, Dv);
  }

 private:
  static constexpr index_t never = 0x7fffffff;  // a position that no query sees

  __device__ void attend_units(index_t s, const index_t* list, index_t first, index_t last, index_t part) {
    const device_segment& segment = p_.view.segment(sequence_, s);
    const packed_vectors keys = segment.k, values = segment.v;
    const int k_channels = int(whole_channels(keys.format.channels));
    const int v_channels = int(whole_channels(values.format.channels));
    state_type state(
        put_queries<Tile>([&](index_t row, int c) { return rotated_.row(lane_row_, s, row)[c]; }, k_channels),
        k_channels);
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    unsigned char* k_tile = shared_ + shape_.of_warp(warp);
    unsigned char* v_tile = k_tile + memory::k_rows().bytes() * tile_tokens;
    unsigned char* raw = shared_ + shape_.of_warp(warp) + memory::warp_bytes;
    const index_t rows = row_begin_[s + 1] - row_begin_[s], unit = p_.unit, tokens = (last - first) * unit;
    const auto row_of = [&](index_t token) -> index_t {  // in the segment; below 0: none
      if (token >= tokens) return no_index;
      const index_t i = first + token / unit;
      const index_t row = ((list ? list[i] : i) - unit_begin_[s]) * unit + token % unit;
      return row < rows ? row : no_index;
    };
    const auto copy = [&](index_t row, int stage) {
      const std::uint32_t to = shared_address(raw + stage * shape_.raw);
      copy_raw_rows(keys, head_, row, to);
      copy_raw_rows(values, head_, row, to + std::uint32_t(k_raw_ * tile_tokens));
    };
    constexpr index_t step = packed_warps * tile_tokens;
    index_t row = row_of(warp * tile_tokens + lane % tile_tokens);
    if (warp * tile_tokens < tokens) copy(row, 0);
    commit_copies();
    int stage = 0;
    for (index_t tile = warp * tile_tokens; tile < tokens; tile += step, stage ^= 1) {
      const index_t next = row_of(tile + step + lane % tile_tokens);
      if (tile + step < tokens) copy(next, stage ^ 1);
      commit_copies();
      const index_t position = row >= 0 ? p_.view.position(sequence_, head_, row_begin_[s] + row) : never;
      wait_copies<1>();
      __syncwarp();
      const unsigned char *k_raw = raw + stage * shape_.raw, *v_raw = k_raw + k_raw_ * tile_tokens;
      spread_tile<Tile, D, Dv>(keys, values, k_raw, v_raw, row >= 0, k_tile, v_tile);
      __syncwarp();
      attend_tile(
          state, shared_address(k_tile), shared_address(v_tile), k_channels, v_channels, position,
          [&](int column) { return raw_scale(keys.format, k_raw, column); },
          [&](int column) { return raw_scale(values.format, v_raw, column); });
      __syncwarp();
      row = next;
    }
    wait_copies<0>();
    write(state, s, part, v_channels);
  }

  /// Writes the block's 8 query rows as two numbers of 16 bits each. Returns where.
  template <class Split, class Load>
  __device__ std::uint32_t put_queries(const Load& load, int channels) {
    unsigned char* to = shared_ + shape_.begins;
    for (int i = int(threadIdx.x); i < query_rows_together * D; i += packed_threads) {
      const int row = i / D, c = i % D;
      if (c >= channels) continue;
      const float x = first_row_ + row < to_.rows ? load(first_row_ + row, c) : 0.0f;
      const Split first(x);
      // What does not fit is infinite or NaN: it has no second part.
      const float rest = x - float(first);
      const auto put = [&](int at, Split part) {
        *reinterpret_cast<std::uint16_t*>(to + memory::k_rows().place(at, c / 8) + std::uint32_t(c % 8 * 2)) =
            part.bits;
      };
      put(row, first);
      put(row + query_rows_together, Split(rest - rest == 0 ? rest : 0.0f));
    }
    __syncthreads();
    return shared_address(to);
  }

  template <class State, class KeyScale, class ValueScale>
  __device__ __forceinline__ void attend_tile(State& state, std::uint32_t keys, std::uint32_t values, int k_channels,
                                              int v_channels, index_t position, const KeyScale& key_scale,
                                              const ValueScale& value_scale) {
    const int lane = int(threadIdx.x) % 32;
    float logits[4];
    state.dot(keys, k_channels, logits);
    index_t at[4];
    float key[4], value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = lane % 4 * 2 + j % 2 + j / 2 * 8;
      at[j] = __shfl_sync(~0u, position, column);
      key[j] = key_scale(column) * scale_, value[j] = value_scale(column);
    }
    state.take(
        logits, values, v_channels, [&](float x, int j) { return quick_cap(p_.rule, x * key[j]) * log2e; },
        [&](int j) { return position_ >= 0 && at[j] != never && p_.rule.visible(position_, at[j]); },
        [&](int j) { return value[j]; });
  }

  /// Adds the warps' states up in their order and writes the part.
  template <class State>
  __device__ void write(const State& state, index_t segment, index_t part, int channels) {
    const int warp = int(threadIdx.x) / 32;
    float* states = reinterpret_cast<float*>(shared_ + shape_.begins + memory::q_bytes);  // [warps, 8, 2]
    state.write(states + warp * query_rows_together * 2, reinterpret_cast<float*>(shared_ + shape_.of_warp(warp)),
                channels);
    __syncthreads();
    const int rows = int(min(index_t(query_rows_together), to_.rows - first_row_));
    const offset_t at = (offset_t(lane_row_) * to_.parts + part) * to_.rows + first_row_;
    for (int i = int(threadIdx.x); i < rows * channels; i += packed_threads) {
      const int row = i / channels, c = i % channels;
      float top = -infinity, sum = 0;
      for (int w = 0; w < packed_warps; ++w) top = fmaxf(top, states[(w * query_rows_together + row) * 2]);
      for (int w = 0; w < packed_warps; ++w) {
        const float most = states[(w * query_rows_together + row) * 2];
        if (most == -infinity) continue;
        sum += reinterpret_cast<const float*>(shared_ + shape_.of_warp(w))[row * Dv + c] * exp2f(most - top);
      }
      to_.out[(at + row) * Dv + c] = sum;
    }
    for (int row = int(threadIdx.x); row < rows; row += packed_threads) {
      float top = -infinity, sum = 0;
      for (int w = 0; w < packed_warps; ++w) top = fmaxf(top, states[(w * query_rows_together + row) * 2]);
      for (int w = 0; w < packed_warps; ++w) {
        const float most = states[(w * query_rows_together + row) * 2],
                    own = states[(w * query_rows_together + row) * 2 + 1];
        sum += most == -infinity ? own : own * exp2f(most - top);  // a row of NaN has a sum and no largest logit
      }
      to_.states[(at + row) * 2] = top, to_.states[(at + row) * 2 + 1] = sum;
    }
    if (threadIdx.x == 0 && blockIdx.z == 0) to_.segment[offset_t(lane_row_) * to_.parts + part] = segment;
    __syncthreads();
  }

  const packed_problem<View, Out>& p_;
  const rotated_rows& rotated_;
  const packed_parts& to_;
  const memory& shape_;
  int k_raw_;
  unsigned char* shared_;
  index_t lane_row_, sequence_, head_, group_, first_row_;
  index_t *row_begin_, *unit_begin_;
  index_t position_;  // of the lane's query row
  float scale_;
};

template <class View, class Tile, class Out>
__global__ void __launch_bounds__(packed_threads, View::k_dim <= 128 && View::v_dim <= 128 ? 3 : 1)
    attend_packed_entry(const __grid_constant__ packed_problem<View, Out> p, rotated_rows rotated, packed_parts to,
                        int k_raw, int v_raw) {
  extern __shared__ uint4 shared_memory[];
  wait_for_earlier();
  let_later_begin();
  const packed_memory<View::k_dim, View::v_dim> shape(p.view.most_segments, k_raw, v_raw);
  packed_part<View, Tile, Out> part(p, rotated, to, shape, k_raw, reinterpret_cast<unsigned char*>(shared_memory));
  if (index_t(blockIdx.x) < to.splits)
    part.attend_split(index_t(blockIdx.x));
  else
    part.attend_whole();
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
