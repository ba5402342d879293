// The attention of a few rows of a prompt chunk on the device, and how much of it each line carries.
#pragma once

#include "../../../../../core/logit_rule.hpp"
#include "../../../../../core/views.hpp"
#include "../../../device/mma.cuh"
#include "../../../device/softmax.cuh"
#include "../../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// What is sampled of one sequence's chunk: the device's sampled_attention. Every pointer is a device pointer. Arrays
/// of lines have `stride` entries per query head; the first ones are those of slots, or of distances.
struct line_sample {
  index_t first, next;  // the chunk's rows have the positions [first, next)
  const index_t* rows;  // [row_count]: positions of the sampled rows, ascending
  index_t row_count;
  index_t group;           // query heads of a kv_head
  index_t stride;          // above every position and slot
  const index_t* lengths;  // of the view
  offset_t length_stride;
  const index_t* positions;      // [kv_heads, stride]; null where slots are positions
  const index_t* stored_before;  // [kv_heads, stride + 1]: slots below a position; null likewise
  float* logits;                 // [heads of a slice, row_count, stride]; written up to the row's own tile
  float2* parts;     // [heads of a slice, row_count, tiles]: largest logit and sum of exponentials of 64 slots
  float2* states;    // [heads of a slice, row_count]: largest logit and one over the sum, 0 where there is none
  float* verticals;  // [heads of a slice, stride]: weight of a slot's column, or what it still adds
  float* slashes;    // [heads of a slice, stride]: by distance
  std::uint8_t* has_vertical;          // [q_heads, stride]: 1 where a slot's column is chosen
  std::uint8_t* has_slash;             // [q_heads, stride]
  index_t first_head;                  // query head with which the slice begins
  static constexpr index_t tile = 64;  // slots of a part

  __device__ index_t tiles() const { return index_t((stride + tile - 1) / tile); }

  /// The lines of one query head.
  struct head_lines {
    index_t first, next, slots, row_count;
    const index_t *rows, *positions, *stored_before;
    const float* logits;
    const float2* states;
    float *verticals, *slashes;
    std::uint8_t *has_vertical, *has_slash;
    offset_t stride;

    /// The weight that a sampled row gives a slot. It has the same bits wherever it is used, because the product is
    /// rounded before it is added to anything.
    __device__ float weight(index_t r, index_t slot) const { return weight_of(logits[r * stride + slot], states[r]); }
    __device__ static float weight_of(float logit, float2 state) {
      return logit > -infinity && state.y > 0 ? __fmul_rn(exp2f((logit - state.x) * log2e), state.y) : 0.0f;
    }
    __device__ index_t position(index_t slot) const { return positions ? positions[slot] : slot; }
    __device__ index_t slots_below(index_t position) const {
      return stored_before ? stored_before[position] : (min)(position, slots);
    }
    /// The slot of a position; no_index: it is not stored.
    __device__ index_t slot_at(index_t at) const {
      const index_t slot = slots_below(at);
      return slot < slots && position(slot) == at ? slot : no_index;
    }
    /// Entries of a line in the whole chunk, sampled or not.
    __device__ index_t vertical_length(index_t slot) const { return next - (max)(first, position(slot)); }
    __device__ index_t slash_length(index_t distance) const {
      return slots_below(next - distance) - slots_below((max)(0, first - distance));
    }
  };
  __device__ head_lines head(index_t in_slice) const {
    const index_t q_head = first_head + in_slice, kv_head = q_head / group;
    const offset_t own = offset_t(in_slice) * stride, all = offset_t(q_head) * stride;
    return {first,
            next,
            (min)((max)(lengths[kv_head * length_stride], 0), stride),
            row_count,
            rows,
            positions ? positions + offset_t(kv_head) * stride : nullptr,
            stored_before ? stored_before + offset_t(kv_head) * (stride + 1) : nullptr,
            logits + own * row_count,
            states + offset_t(in_slice) * row_count,
            verticals + own,
            slashes + own,
            has_vertical + all,
            has_slash + all,
            stride};
  }
};

/// Positions by slot, and how many slots lie below a position, for every kv_head. Needed only where slots are not
/// positions.
template <class View, int Threads>
__global__ void __launch_bounds__(Threads)
    line_positions_entry(const __grid_constant__ View view, index_t next, offset_t stride, index_t* positions,
                         index_t* stored_before) {
  const index_t head = index_t(blockIdx.y), slots = (max)(view.length(0, head), 0);
  index_t* own = positions + head * stride;
  index_t* before = stored_before + head * (stride + 1);
  // Slot `slots` ends the last gap: no position from there up to `next` is stored.
  for (index_t slot = index_t(blockIdx.x) * Threads + index_t(threadIdx.x); slot <= slots;
       slot += index_t(gridDim.x) * Threads) {
    const index_t here = slot < slots ? view.position(0, head, slot) : next;
    const index_t last = slot > 0 ? view.position(0, head, slot - 1) : no_index;
    if (slot < slots) own[slot] = here;
    for (index_t at = last + 1; at <= here; ++at) before[at] = slot;
  }
}

/// Logits of the sampled rows of all query heads of a kv_head, 64 rows against 64 slots per block. A logit is -infinity
/// where a row does not see a slot. Tiles that only newer rows see are not written, except the first tile. Rows are
/// numbered by position, all heads of a position one after another.
template <class View>
struct line_logits {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, warps = 4, threads = warps * 32, tile = 64;
  static_assert(tile == line_sample::tile);
  static constexpr int chunks = D / 8, row_bytes = (chunks | 1) * 16, shared_bytes = 2 * tile * row_bytes;

  static __device__ void run(const View& view, const rows_view<const T>& q, const logit_rule& rule,
                             const line_sample& seen, index_t first_kv_head) {
    extern __shared__ __align__(16) unsigned char line_memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const index_t kv_head = first_kv_head + index_t(blockIdx.y), rows = seen.group * seen.row_count;
    const index_t first_row = index_t(blockIdx.z) * tile, first = index_t(blockIdx.x) * tile;
    const index_t stored = (min)((max)(view.length(0, kv_head), 0), seen.stride);
    if (first >= stored) return;
    const index_t first_key = first > 0 ? view.position(0, kv_head, first) : 0;
    if (first_key > seen.rows[((min)(first_row + tile, rows) - 1) / seen.group]) return;
    const std::uint32_t keys = shared_address(line_memory), queries = keys + tile * row_bytes;
    for (int i = int(threadIdx.x); i < tile * chunks; i += threads) {
      const int r = i / chunks, chunk = i % chunks;
      const index_t slot = first + r, row = first_row + r;
      const std::uint32_t to = std::uint32_t(r * row_bytes + chunk * 16);
      const bool has_key = slot < stored, has_query = row < rows;
      const auto key = row_elements(view.key(0, kv_head, has_key ? slot : 0), chunk * 8);
      if constexpr (View::is_raw) {
        copy_async16(keys + to, key, has_key);
      } else {
        store_key(keys + to, key, has_key, has_key ? view.key_scale(0, kv_head, slot) : 0.0f);
      }
      const index_t known = has_query ? row : 0;
      const T* from = q.row(0, seen.rows[known / seen.group] - seen.first, kv_head * seen.group + known % seen.group);
      copy_async16(queries + to, from + chunk * 8, has_query);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    float s[tile / 8][4] = {};
    const std::uint32_t q_at = queries + std::uint32_t((warp * 16 + lane % 16) * row_bytes + lane / 16 * 16);
    const std::uint32_t k_at = keys + std::uint32_t((lane / 16 * 8 + lane % 8) * row_bytes + lane / 8 % 2 * 16);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t a[4];
      load_matrices(a, q_at + std::uint32_t(step * 32));
#pragma unroll
      for (int pair = 0; pair < tile / 16; ++pair) {
        std::uint32_t b[4];
        load_matrices(b, k_at + std::uint32_t(pair * 16 * row_bytes + step * 32));
        multiply<T>(s[pair * 2], a, b[0], b[1]);
        multiply<T>(s[pair * 2 + 1], a, b[2], b[3]);
      }
    }
    const float scale = rule.scale_for(D);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const index_t row = first_row + warp * 16 + half * 8 + lane / 4;
      if (row >= rows) continue;
      const index_t r = row / seen.group, position = seen.rows[r];
      if (first_key > position) continue;
      const offset_t own = (offset_t(blockIdx.y) * seen.group + row % seen.group) * seen.row_count + r;
      float* to = seen.logits + own * seen.stride;
      float top = -infinity;
#pragma unroll
      for (int i = 0; i < tile / 8; ++i) {
        const index_t slot = first + i * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[i][half * 2 + j];
          const bool sees = slot + j < stored && rule.visible(position, view.position(0, kv_head, slot + j));
          x = sees ? quick_cap(rule, x * scale) : -infinity;
          top = fmaxf(top, x);  // ignores NaN
        }
        if (slot < seen.stride) *reinterpret_cast<float2*>(to + slot) = make_float2(s[i][half * 2], s[i][half * 2 + 1]);
      }
      const unsigned quad = 15u << lane / 4 * 4;  // rows end between quads
      top = fmaxf(top, __shfl_xor_sync(quad, top, 1)), top = fmaxf(top, __shfl_xor_sync(quad, top, 2));
      float sum = 0;
#pragma unroll
      for (int i = 0; i < tile / 4; ++i) {
        const float x = s[i / 2][half * 2 + i % 2];
        sum += x > -infinity ? exp2f((x - top) * log2e) : 0.0f;
      }
      sum += __shfl_xor_sync(quad, sum, 1), sum += __shfl_xor_sync(quad, sum, 2);
      if (lane % 4 == 0) seen.parts[own * seen.tiles() + index_t(blockIdx.x)] = make_float2(top, sum);
    }
  }

  static __device__ void store_key(std::uint32_t to, const auto& from, bool valid, float scale) {
    std::uint32_t pairs[4] = {};
    if (valid) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = pack_pair<T>(float(from[i * 2]) * scale, float(from[i * 2 + 1]) * scale);
      }
    }
    store_shared16(to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
};

template <class View>
__global__ void __launch_bounds__(line_logits<View>::threads)
    line_logits_entry(const __grid_constant__ View view,
                      const __grid_constant__ rows_view<const typename View::element_type> q,
                      const __grid_constant__ logit_rule rule, const __grid_constant__ line_sample seen,
                      index_t first_kv_head) {
  line_logits<View>::run(view, q, rule, seen, first_kv_head);
}

/// The states of sampled rows from their parts, by (sampled row, query head of the slice), sink logit included. A NaN
/// counts as not seen.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    line_sums_entry(const __grid_constant__ line_sample seen, const float* sink_logits) {
  __shared__ float tops[Threads / 32], sums[Threads / 32];
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.y));
  const offset_t own = offset_t(blockIdx.y) * seen.row_count + blockIdx.x;
  float top = -infinity, sum = 0;
  const auto merge = [](float& a, float& total, float b, float more) {
    const float both = fmaxf(a, b);
    if (both == -infinity) return;
    total = total * exp2f((a - both) * log2e) + more * exp2f((b - both) * log2e);
    a = both;
  };
  const index_t sees = lines.slots_below(lines.rows[blockIdx.x] + 1), tiles = ceil_div(sees, line_sample::tile);
#pragma unroll 4
  for (index_t i = index_t(threadIdx.x); i < tiles; i += Threads) {
    const float2 part = seen.parts[own * seen.tiles() + i];
    merge(top, sum, part.x, part.y);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, top, step), more = __shfl_xor_sync(~0u, sum, step);
    merge(top, sum, other, more);
  }
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top, sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < Threads / 32; ++warp) merge(top, sum, tops[warp], sums[warp]);
  if (sink_logits) merge(top, sum, sink_logits[seen.first_head + index_t(blockIdx.y)], 1.0f);
  seen.states[own] = make_float2(top, sum > 0 ? __fdividef(1.0f, sum) : 0.0f);
}

/// How many threads share a line when it is summed over the sampled rows. The number is the same everywhere, so that
/// rounding never makes the rest of a line larger than its first sum.
inline constexpr index_t line_sharing = 8;
template <int Lines, class WeightsOf>
__device__ __forceinline__ void sum_of_rows(index_t rows, const WeightsOf& weights_of, float (&sums)[Lines]) {
  float part[line_sharing][Lines] = {};
  for (index_t first = 0; first < rows; first += line_sharing) {
#pragma unroll
    for (index_t i = 0; i < line_sharing; ++i) {
      if (first + i >= rows) continue;
      float weights[Lines];
      weights_of(first + i, weights);
#pragma unroll
      for (int l = 0; l < Lines; ++l) part[i][l] += weights[l];
    }
  }
#pragma unroll
  for (int step = 1; step < line_sharing; step *= 2) {
#pragma unroll
    for (int i = 0; i < line_sharing; i += 2 * step) {
#pragma unroll
      for (int l = 0; l < Lines; ++l) part[i][l] += part[i + step][l];
    }
  }
#pragma unroll
  for (int l = 0; l < Lines; ++l) sums[l] = part[0][l];
}

/// Columns of a thread, which reads a row's position and state once for all of them. The same number of slash lines per
/// thread was slower: 176 us against 85 at 32K (48 rows, 32 query heads, H200, CUDA 13.0).
inline constexpr int columns_of_thread = 4;

/// What a column carries, for each slot of a query head.
template <int Threads>
__global__ void __launch_bounds__(Threads) line_columns_entry(const __grid_constant__ line_sample seen) {
  constexpr int each = columns_of_thread;
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.y));
  const index_t slot = (index_t(blockIdx.x) * Threads + index_t(threadIdx.x)) * each;
  if (slot >= lines.slots) return;
  index_t positions[each];
#pragma unroll
  for (int l = 0; l < each; ++l) positions[l] = slot + l < lines.slots ? lines.position(slot + l) : lines.next;
  float sums[each];
  sum_of_rows<each>(
      lines.row_count,
      [&](index_t r, float(&weights)[each]) {
        const index_t row = lines.rows[r];
        float4 logits = make_float4(-infinity, -infinity, -infinity, -infinity);
        if (positions[0] <= row) logits = *reinterpret_cast<const float4*>(lines.logits + r * lines.stride + slot);
        const float2 state = lines.states[r];
        const float four[each] = {logits.x, logits.y, logits.z, logits.w};
#pragma unroll
        for (int l = 0; l < each; ++l) weights[l] = positions[l] <= row ? lines.weight_of(four[l], state) : 0.0f;
      },
      sums);
#pragma unroll
  for (int l = 0; l < each; ++l) {
    if (slot + l < lines.slots) lines.verticals[slot + l] = sums[l];
  }
}

/// What a slash line carries, for each distance of a query head.
template <int Threads>
__global__ void __launch_bounds__(Threads) line_slashes_entry(const __grid_constant__ line_sample seen) {
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.y));
  const index_t distance = index_t(blockIdx.x) * Threads + index_t(threadIdx.x);
  if (distance >= lines.next) return;
  float sum[1];
  sum_of_rows<1>(
      lines.row_count,
      [&](index_t r, float(&weight)[1]) {
        const index_t at = lines.rows[r] - distance;
        const index_t slot = at < 0 ? no_index : lines.slot_at(at);
        weight[0] = slot == no_index ? 0.0f : lines.weight(r, slot);
      },
      sum);
  lines.slashes[distance] = sum[0];
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
