// Attention over packed rows on the device: parts of the chosen rows, each in its segment's basis, and the whole rows.
#pragma once

#include <algorithm>
#include <string>

#include "../../attention_problems.cuh"
#include "packed_splits.cuh"
#include "rotated_queries.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A block's part of the work, for 8 query rows: some of the chosen units of a (sequence, kv_head), or its whole rows.
template <class View, class Tile, class Out>
class packed_part {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim;
  using memory = packed_memory<D, Dv, View::rows_in>;

 public:
  __device__ packed_part(const packed_problem<View, Out>& p, const rotated_rows& rotated, const packed_parts& to,
                         const memory& shape, unsigned char* shared)
      : p_(p), rotated_(rotated), parts_(to), shape_(shape), shared_(shared) {
    const index_t heads = p.view.whole.kv_heads;
    lane_row_ = index_t(blockIdx.x);
    sequence_ = lane_row_ / heads, head_ = lane_row_ % heads, group_ = p.q.heads / heads;
    first_row_ = index_t(blockIdx.z) * query_rows_together;
    row_begin_ = reinterpret_cast<index_t*>(shared + shape.begins);
    unit_begin_ = row_begin_ + p.view.max_segments + 1;
    chosen_row_begin_ = unit_begin_ + p.view.max_segments + 1;
    if (threadIdx.x < query_rows_together) {
      reinterpret_cast<index_t*>(shared + shape.positions)[threadIdx.x] = position_of(first_row_ + int(threadIdx.x));
    }
  }

  /// Attends a split: chosen units, segment after segment. The last splits also have the whole rows.
  ///
  /// Whole rows are attended before the previous launch has ended. The previous launch waited for all launches before
  /// it, so the rows are written and the last merge has read its parts. Only the list of parts may still be in the
  /// course of being reset.
  __device__ __forceinline__ void attend(index_t split) {
    const index_t count = p_.view.count(sequence_);
    fill_begins(p_.view, sequence_, head_, count, 1, row_begin_);
    fill_begins(p_.view, sequence_, head_, count, p_.unit, unit_begin_);
    if (blockIdx.z == 0) fetch_value_bases(p_.view, sequence_, head_, count, split, parts_.splits);
    const index_t whole_part = parts_.parts - (parts_.splits - split);
    const bool whole = whole_part >= parts_.parts - parts_.whole && attend_whole(count, whole_part);
    wait();
    if (whole) mark(p_.view.max_segments, whole_part);
    attend_chosen(split, count);
  }

 private:
  static constexpr index_t never = 0x7fffffff;  // a position that no query sees

  /// Attends the chosen units of one split, segment after segment.
  __device__ __forceinline__ void attend_chosen(index_t split, index_t count) {
    const index_t* list = p_.chosen.indices ? p_.chosen.row(lane_row_) : nullptr;
    if (p_.chosen_begins) {
      const index_t* begins = chosen_begins();
      fill_sums(count, chosen_row_begin_, [&](index_t s) { return (begins[s + 1] - begins[s]) * unit_of_segment(s); });
    } else {
      find_begins(list, list ? p_.chosen.counts[lane_row_] : unit_begin_[count], (max)(p_.unit, 1), unit_begin_, count,
                  reinterpret_cast<index_t*>(shared_), chosen_row_begin_);
    }
    const index_t all = chosen_row_begin_[count];
    if (all == 0) return;
    // The range of the split's rows is in shared memory, because the kernel has no register to spare.
    volatile index_t* const range = chosen_row_begin_ + p_.view.max_segments + 1;
    if (threadIdx.x < 32) {
      const int2 own = rows_of_split(chosen_row_begin_, count, all, parts_.splits, split);
      if (threadIdx.x == 0) range[0] = own.x, range[1] = own.y;
    }
    __syncthreads();
    for (index_t s = 0; s < count && chosen_row_begin_[s] < range[1]; ++s) {
      const index_t before = chosen_row_begin_[s], first = (max)(range[0], before);
      const index_t end = (min)(chosen_row_begin_[s + 1], range[1]);
      if (first >= end) continue;
      const index_t unit = p_.chosen_begins ? unit_of_segment(s) : (max)(p_.unit, 1);
      const index_t from = p_.chosen_begins ? chosen_begins()[s] : before / unit;
      const index_t begin_unit = from + ceil_div(first - before, unit), end_unit = from + ceil_div(end - before, unit);
      if (begin_unit < end_unit) attend_units(s, list, begin_unit, end_unit, split + s);
    }
  }
  __device__ __forceinline__ const index_t* chosen_begins() const {
    return p_.chosen_begins + offset_t(lane_row_) * (p_.view.max_segments + 1);
  }

  /// Attends a part of the rows that are not packed: the last part has the oldest. Returns whether there are any.
  __device__ __forceinline__ bool attend_whole(index_t count, index_t part) {
    constexpr index_t round = packed_warps * whole_tokens;
    const index_t packed = row_begin_[count], all = p_.view.whole.length(sequence_, head_);
    const index_t each = ceil_div(ceil_div(all, parts_.whole), round) * round;
    const index_t first = (parts_.parts - 1 - part) * each, rows = (min)(all, first + each);
    if (first >= rows) return false;
    packed_state<T, D, Dv> state(put_queries(), D);
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, half = lane / whole_tokens;
    unsigned char* keys = shared_ + warp * shape_.tile;
    unsigned char* values = shared_ + shape_.raws + warp * shape_.raw;
    const auto& whole = p_.view.whole;
    for (index_t tile = first + warp * whole_tokens; tile < rows; tile += round) {
      const index_t row = tile + lane % whole_tokens;
      const bool valid = row < rows;
      const auto* k = whole.key(sequence_, head_, valid ? row : 0);
      const auto* v = whole.value(sequence_, head_, valid ? row : 0);
      for (int c = half; c < D / 8; c += 2) {
        copy_async16(shared_address(keys + memory::k_rows().offset(lane % whole_tokens, c)), k + c * 8, valid);
      }
      for (int c = half; c < Dv / 8; c += 2) {
        copy_async16(shared_address(values + memory::v_rows().offset(lane % whole_tokens, c)), v + c * 8, valid);
      }
      commit_copies();
      const index_t position = valid ? p_.view.whole_position(sequence_, head_, packed, row) : never;
      wait_copies<0>();
      __syncwarp();
      attend_tile(state, shared_address(keys), shared_address(values), position);
      __syncwarp();
    }
    write(state, part, Dv);
    return true;
  }

  /// Waits for the previous launch. Lengths may be read earlier: they were written before the queries were rotated, and
  /// the previous launch waited for all launches before it.
  __device__ static __forceinline__ void wait() {
    wait_for_earlier();
    let_later_begin();
  }
  /// The position of a row of queries. A row that does not exist sees nothing.
  __device__ index_t position_of(index_t row) const {
    return row < parts_.rows ? p_.first_position[sequence_] + row / group_ : no_index;
  }

  __device__ __forceinline__ index_t unit_of_segment(index_t s) const {
    return p_.unit > 0 ? p_.unit : p_.view.segment(sequence_, s).block;
  }

  __device__ __forceinline__ void attend_units(index_t s, const index_t* list, index_t first, index_t last,
                                               index_t part) {
    const device_segment& segment = p_.view.segment(sequence_, s);
    const index_t unit_rows = unit_of_segment(s);
    const int unit_shift = (unit_rows & (unit_rows - 1)) == 0 ? __ffs(int(unit_rows)) - 1 : -1;  // -1: no power of two
    const float4 queries = queries_of(s, int(threadIdx.x));
    using key_rows = raw_rows<row_layout<D>, View::rows_in>;
    using value_rows = raw_rows<row_layout<Dv>, View::rows_in>;
    using address_type = typename key_rows::address_type;  // keys and values of a row lie in one page
    const key_rows first_keys(segment.k, head_);
    const value_rows first_values(segment.v, head_);
    // After the first tile these are read from shared memory: the loop over a row leaves no registers for them.
    auto* const keys = reinterpret_cast<key_rows*>(shared_ + shape_.sources);
    auto* const values = reinterpret_cast<value_rows*>(keys + 1);
    if (threadIdx.x == 0) *keys = first_keys, *values = first_values;
    const int k_way = way_of<D>(segment.k.format), v_way = way_of<Dv>(segment.v.format);
    const int k_kept = int(segment.k.format.stored_channels), v_kept = int(segment.v.format.stored_channels);
    const int channels = int(whole_channels(segment.v.format.channels));
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, tile_place = warp * shape_.tile;
    unsigned char* weights = shared_ + shape_.weights + warp * shape_.weight;
    const int k_raw = shape_.raws + warp * shape_.raw, v_raw = k_raw + shape_.k_raw * tile_tokens;
    const unsigned k_row = unsigned(k_raw) + row_layout<D>::row(unsigned(lane), first_keys.stride()),
                   v_row = unsigned(v_raw) + row_layout<Dv>::row(unsigned(lane), first_values.stride());
    const index_t rows = row_begin_[s + 1] - row_begin_[s], tokens = (last - first) * unit_rows;
    const auto unit_of = [&](index_t token) -> index_t {  // below 0: none
      if (token >= tokens) return no_index;
      const index_t i = first + (unit_shift >= 0 ? token >> unit_shift : token / unit_rows);
      return list ? list[i] : i;
    };
    const index_t before = unit_begin_[s];
    const auto row_of = [&](index_t token, index_t unit) -> index_t {  // in the segment; below 0: none
      const index_t row = (unit - before) * unit_rows + (unit_shift >= 0 ? token & (unit_rows - 1) : token % unit_rows);
      return unit >= 0 && row < rows ? row : no_index;
    };
    // Rows that do not exist get the bits of the first row, and zeros as values.
    std::uint32_t k_bits[group_words<D, 1>] = {}, v_bits[group_words<Dv, 1>] = {};
    float k_scale, v_scale;
    const unsigned k_to = unsigned(k_raw) + first_keys.own_place(), v_to = unsigned(v_raw) + first_values.own_place();
    const auto begin_keys = [&](const key_rows& from, const address_type& at) {
      from.copy(at, shared_address(shared_), k_to);
      from.bits.load(at, k_bits);
      k_scale = from.scale(at);
    };
    const auto begin_values = [&](const value_rows& from, const address_type& at) {
      from.copy(at, shared_address(shared_), v_to);
      from.bits.load(at, v_bits);
      v_scale = from.scale(at);
    };
    constexpr int warp_step = packed_warps * tile_tokens;
    spread_state<Tile, Dv> state(shared_ + shape_.softmaxes + warp * shape_.softmax, shape_.parts);
    index_t token = warp * tile_tokens + lane, row = row_of(token, unit_of(token));
    address_type address = first_keys.bits.address(row);
    if (token - lane < tokens) begin_keys(first_keys, address);
    commit_copies();
    if (token - lane < tokens) begin_values(first_values, address);
    commit_copies();
    index_t next_unit = unit_of(token + warp_step);
    put_copies(s, queries);
    // While a warp multiplies keys, the values of the same tokens are copied. While it multiplies values, the next keys
    // are.
    for (; token - lane < tokens; token += warp_step) {
      const index_t next = row_of(token + warp_step, next_unit);
      address = keys->bits.address(next);
      const bool more = token - lane + warp_step < tokens;
      next_unit = unit_of(token + 2 * warp_step);
      const index_t position = row >= 0 ? p_.view.position(sequence_, head_, row_begin_[s] + row) : never;
      wait_copies<1>();
      __syncwarp();
#pragma unroll 1
      for (int part = 0; part < shape_.parts; ++part) {
        float logits[queries_at_once];
        multiply_row<Tile, D>(k_way, k_kept, k_bits, k_row, shared_, shape_.queries + part * shape_.queries_part,
                              logits);
        take_logits(state, part, logits, k_scale, position, v_scale, weights);
      }
      __syncwarp();
      if (more) begin_keys(*keys, address);
      commit_copies();
      with_matrices<Dv>(channels, [&](int m) {
        auto* tile = reinterpret_cast<uint4*>(shared_ + tile_place) + m * 64 + lane;
        tile[0] = tile[32] = make_uint4(0, 0, 0, 0);
      });
      wait_copies<1>();
      __syncwarp();
      spread_row<Tile, Dv>(v_way, v_kept, v_bits, v_row, shared_, tile_place);
      __syncwarp();
      if (more) begin_values(*values, address);
      commit_copies();
      state.take_values(shared_ + tile_place, weights, shape_.parts, channels);
      __syncwarp();
      row = next;
    }
    wait_copies<0>();
    write(state, part, channels);
    mark(s, part);
  }

  /// Query rows in the segment's basis, for part i / channels and channel i % channels, multiplied by the scale of
  /// logits. `i` is this thread's index.
  __device__ __forceinline__ float4 queries_of(index_t s, int i) const {
    const int channels = shape_.queries_part / 128;
    const float factor = p_.rule.scale_for(D) * (p_.rule.soft_cap > 0 ? 1.0f : log2e);
    const int part = i / channels, c = i % channels, first = part * queries_at_once;
    // For a row that does not exist, the last row is loaded and multiplied by 0. Without branches, the four loads do
    // not wait for each other.
    const auto load = [&](int row) {
      const index_t at = first_row_ + row, there = (min)(at, parts_.rows - 1);
      return rotated_.row(lane_row_, s, there)[c] * (part < shape_.parts && at == there ? factor : 0.0f);
    };
    return make_float4(load(first), load(first + 1), load(first + 2), load(first + 3));
  }
  /// Writes the query rows in the layout of `query_products`; `q`: those of the thread's first channel.
  __device__ __forceinline__ void put_copies(index_t s, float4 q) {
    const int all = shape_.queries_part / 128 * shape_.parts;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < all; i += packed_threads) {
      unsigned char* to = shared_ + shape_.queries + i * 128;
#pragma unroll
      for (int copy = 0; copy < 8; ++copy) *reinterpret_cast<float4*>(to + (copy + i) % 8 * 16) = q;
      if (i + packed_threads < all) q = queries_of(s, i + packed_threads);
    }
    __syncthreads();
  }

  /// Turns a tile's products into base-2 logits of the rows that may see the tokens.
  template <class State>
  __device__ __forceinline__ void take_logits(State& state, int part, float (&x)[queries_at_once], float scale,
                                              index_t position, float weight, unsigned char* weights) const {
    const int4 rows = *reinterpret_cast<const int4*>(shared_ + shape_.positions + part * int(sizeof(int4)));
    const index_t at[queries_at_once] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
    for (float& logit : x) logit *= scale;
    if (p_.rule.soft_cap > 0) {
#pragma unroll
      for (float& logit : x) logit = quick_cap(p_.rule, logit) * log2e;
    }
    // As `logit_rule::visible`: the distance to a token after the row is a very large unsigned number.
    const unsigned seen = p_.rule.sliding_window > 0 ? unsigned(p_.rule.sliding_window) : 0x7fffffffu;
#pragma unroll
    for (int i = 0; i < queries_at_once; ++i) x[i] = unsigned(at[i]) - unsigned(position) < seen ? x[i] : -infinity;
    state.take_logits(shape_.parts, part, x, weight, weights);
  }

  /// Writes the block's 8 query rows in the layout of `packed_state`. Returns their address.
  __device__ std::uint32_t put_queries() {
    unsigned char* to = shared_ + shape_.queries;
    for (int i = int(threadIdx.x); i < query_rows_together * D; i += packed_threads) {
      const int row = i / D, c = i % D;
      const index_t at = first_row_ + row;
      // These queries have 16 bits and no second part.
      const T x =
          at < parts_.rows ? T(float(p_.q.row(sequence_, at / group_, head_ * group_ + at % group_)[c])) : T(0.0f);
      const auto put = [&](int place, T part) {
        *reinterpret_cast<std::uint16_t*>(to + memory::k_rows().offset(place, c / 8) + std::uint32_t(c % 8 * 2)) =
            part.bits;
      };
      put(row, x);
      put(row + query_rows_together, T(0.0f));
    }
    __syncthreads();
    return shared_address(to);
  }

  template <class State>
  __device__ __forceinline__ void attend_tile(State& state, std::uint32_t keys, std::uint32_t values,
                                              index_t position) {
    const int lane = int(threadIdx.x) % 32;
    const index_t query = reinterpret_cast<const index_t*>(shared_ + shape_.positions)[lane / 4];
    const float scale = p_.rule.scale_for(D);
    float logits[4];
    state.dot(keys, D, logits);
    index_t positions[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) positions[j] = __shfl_sync(~0u, position, lane % 4 * 2 + j % 2 + j / 2 * 8);
    state.add_tokens(
        logits, values, Dv, [&](float x, int) { return quick_cap(p_.rule, x * scale) * log2e; },
        [&](int j) { return query >= 0 && positions[j] != never && p_.rule.visible(query, positions[j]); },
        [&](int) { return 1.0f; });
  }

  /// Adds the warps' states in their order and writes the part.
  template <class State>
  __device__ void write(const State& state, index_t part, int channels) {
    const int warp = int(threadIdx.x) / 32;
    float* states = reinterpret_cast<float*>(shared_ + shape_.states);  // [warps, 8, 2]
    state.write(shape_.parts, states + warp * query_rows_together * 2,
                reinterpret_cast<float*>(shared_ + warp * shape_.tile), channels);
    __syncthreads();
    const int rows = int((min)(index_t(query_rows_together), parts_.rows - first_row_));
    const offset_t at = (offset_t(lane_row_) * parts_.parts + part) * parts_.rows + first_row_;
    for (int i = int(threadIdx.x); i < rows * channels; i += packed_threads) {
      const int row = i / channels, c = i % channels;
      float top = -infinity, sum = 0;
      for (int w = 0; w < packed_warps; ++w) top = fmaxf(top, states[(w * query_rows_together + row) * 2]);
      for (int w = 0; w < packed_warps; ++w) {
        const float largest = states[(w * query_rows_together + row) * 2];
        if (largest == -infinity) continue;
        sum += reinterpret_cast<const float*>(shared_ + w * shape_.tile)[row * Dv + c] * exp2f(largest - top);
      }
      parts_.out[(at + row) * Dv + c] = sum;
    }
    for (int row = int(threadIdx.x); row < rows; row += packed_threads) {
      float top = -infinity, sum = 0;
      for (int w = 0; w < packed_warps; ++w) top = fmaxf(top, states[(w * query_rows_together + row) * 2]);
      for (int w = 0; w < packed_warps; ++w) {
        const float largest = states[(w * query_rows_together + row) * 2],
                    own = states[(w * query_rows_together + row) * 2 + 1];
        sum += largest == -infinity ? own : own * exp2f(largest - top);  // a row of NaN has a sum but no largest logit
      }
      parts_.states[(at + row) * 2] = top, parts_.states[(at + row) * 2 + 1] = sum;
    }
    __syncthreads();
  }
  /// Marks a part as written, in the basis of `segment`.
  __device__ void mark(index_t segment, index_t part) const {
    if (threadIdx.x == 0 && blockIdx.z == 0) parts_.segment[offset_t(lane_row_) * parts_.parts + part] = segment;
  }

  const packed_problem<View, Out>& p_;
  const rotated_rows& rotated_;
  const packed_parts& parts_;
  const memory& shape_;
  unsigned char* shared_;
  index_t lane_row_, sequence_, head_, group_, first_row_;
  index_t *row_begin_, *unit_begin_, *chosen_row_begin_;
};

template <class View, class Tile, class Out>
__global__ void __launch_bounds__(packed_threads, View::k_dim <= 128 && View::v_dim <= 128 ? packed_blocks : 1)
    attend_packed_entry(const __grid_constant__ packed_problem<View, Out> p, rotated_rows rotated, packed_parts to,
                        packed_lengths<View::k_dim, View::v_dim> lengths) {
  extern __shared__ uint4 shared_memory[];
  const packed_memory<View::k_dim, View::v_dim, View::rows_in> shape(rotated.rows, p.view.max_segments, lengths);
  packed_part<View, Tile, Out> part(p, rotated, to, shape, reinterpret_cast<unsigned char*>(shared_memory));
  // Blocks that begin last, when the choice has ended, have no time left for whole rows. So the first blocks get the
  // last splits, which contain them.
  part.attend(to.splits - 1 - index_t(blockIdx.y));
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
