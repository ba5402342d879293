// The attention of a few rows of a prompt chunk on the device, and what each line carries of it.
#pragma once

#include "../../../../core/logit_rule.hpp"
#include "../../../../core/views.hpp"
#include "../../device/logit.cuh"
#include "../../device/mma.cuh"
#include "../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// What is looked at of one sequence's chunk: the device's sampled_attention. Every pointer is a device pointer; arrays of lines
/// have `stride` entries a query head, of which slots, or distances, come first.
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
  float* weights;                // [heads of a slice, row_count, stride]
  float* verticals;              // [heads of a slice, stride]: what a slot's column carries, or still adds
  float* slashes;                // [heads of a slice, stride]: by distance
  std::uint8_t* has_vertical;    // [q_heads, stride]: 1 where a slot's column is chosen
  std::uint8_t* has_slash;       // [q_heads, stride]
  index_t first_head;            // query head with which the slice begins

  /// The lines of one query head.
  struct head_lines {
    index_t first, next, slots, row_count;
    const index_t *rows, *positions, *before;
    float *weights, *verticals, *slashes;
    std::uint8_t *has_vertical, *has_slash;
    offset_t stride;

    __device__ float* row(index_t r) const { return weights + r * stride; }
    __device__ index_t position(index_t slot) const { return positions ? positions[slot] : slot; }
    __device__ index_t slots_below(index_t position) const { return before ? before[position] : min(position, slots); }
    /// The slot of a position; no_index: it is not stored.
    __device__ index_t slot_at(index_t at) const {
      const index_t slot = slots_below(at);
      return slot < slots && position(slot) == at ? slot : no_index;
    }
    /// Entries of a line in the whole chunk, sampled or not.
    __device__ index_t vertical_length(index_t slot) const { return next - max(first, position(slot)); }
    __device__ index_t slash_length(index_t distance) const {
      return slots_below(next - distance) - slots_below(max(0, first - distance));
    }
  };
  __device__ head_lines head(index_t in_slice) const {
    const index_t q_head = first_head + in_slice, kv_head = q_head / group;
    const offset_t own = offset_t(in_slice) * stride, all = offset_t(q_head) * stride;
    return {first,
            next,
            min(max(lengths[kv_head * length_stride], 0), stride),
            row_count,
            rows,
            positions ? positions + offset_t(kv_head) * stride : nullptr,
            stored_before ? stored_before + offset_t(kv_head) * (stride + 1) : nullptr,
            weights + own * row_count,
            verticals + own,
            slashes + own,
            has_vertical + all,
            has_slash + all,
            stride};
  }
};

/// Positions by slot, and how many slots lie below a position, of every kv_head: only where slots are no positions.
template <class View, int Threads>
__global__ void __launch_bounds__(Threads)
    line_positions_entry(const __grid_constant__ View view, index_t next, offset_t stride, index_t* positions,
                         index_t* stored_before) {
  const index_t head = index_t(blockIdx.y), slots = max(view.length(0, head), 0);
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

/// Logits of the sampled rows of all query heads of a kv_head: 64 rows against 64 slots a block, -infinity where a row does not
/// see a slot. Rows are numbered head after head.
template <class View>
struct line_logits {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, warps = 4, threads = warps * 32, tile = 64;
  static constexpr int chunks = D / 8, row_bytes = (chunks | 1) * 16, shared_bytes = 2 * tile * row_bytes;

  static __device__ void run(const View& view, const rows_view<const T>& q, const logit_rule& rule,
                             const line_sample& seen, index_t first_kv_head) {
    extern __shared__ __align__(16) unsigned char line_memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const index_t kv_head = first_kv_head + index_t(blockIdx.y), rows = seen.group * seen.row_count;
    const index_t first_row = index_t(blockIdx.z) * tile, first = index_t(blockIdx.x) * tile;
    const index_t stored = min(max(view.length(0, kv_head), 0), seen.stride);
    if (first >= stored) return;
    const std::uint32_t keys = shared_address(line_memory), queries = keys + tile * row_bytes;
    for (int i = int(threadIdx.x); i < tile * chunks; i += threads) {
      const int r = i / chunks, chunk = i % chunks;
      const index_t slot = first + r, row = first_row + r;
      const std::uint32_t to = std::uint32_t(r * row_bytes + chunk * 16);
      const bool has_key = slot < stored, has_query = row < rows;
      const auto* key = view.key(0, kv_head, has_key ? slot : 0) + chunk * 8;
      if constexpr (View::is_raw) {
        copy_async16(keys + to, key, has_key);
      } else {
        store_key(keys + to, key, has_key, has_key ? view.key_scale(0, kv_head, slot) : 0.0f);
      }
      const index_t known = has_query ? row : 0;
      const T* from =
          q.row(0, seen.rows[known % seen.row_count] - seen.first, kv_head * seen.group + known / seen.row_count);
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
      const index_t position = seen.rows[row % seen.row_count];
      float* to = seen.weights + (offset_t(blockIdx.y) * rows + row) * seen.stride;
#pragma unroll
      for (int i = 0; i < tile / 8; ++i) {
        const index_t slot = first + i * 8 + lane % 4 * 2;
        if (slot >= stored) continue;
        const auto logit_of = [&](int j) {
          if (slot + j >= stored || !rule.visible(position, view.position(0, kv_head, slot + j))) return -infinity;
          return quick_cap(rule, s[i][half * 2 + j] * scale);
        };
        *reinterpret_cast<float2*>(to + slot) = make_float2(logit_of(0), logit_of(1));  // the stride is even
      }
    }
  }

  static __device__ void store_key(std::uint32_t to, const auto* from, bool valid, float scale) {
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

/// By (sampled row, query head of the slice): the largest logit and the sum of exponentials, sink logit included. A NaN counts as
/// not seen.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    line_sums_entry(const __grid_constant__ line_sample seen, const float* sink_logits, float2* states) {
  __shared__ float tops[Threads / 32], sums[Threads / 32];
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.y));
  const float* row = lines.row(index_t(blockIdx.x));
  float top = -infinity, sum = 0;
  for (index_t slot = index_t(threadIdx.x); slot < lines.slots; slot += Threads) {
    const float logit = row[slot];
    if (!(logit > -infinity)) continue;
    if (logit > top) {
      sum = sum * exp2f((top - logit) * log2e);  // 0 at first
      top = logit;
    }
    sum += exp2f((logit - top) * log2e);
  }
  const auto merge = [](float& a, float& total, float b, float more) {
    const float both = fmaxf(a, b);
    if (both == -infinity) return;
    total = total * exp2f((a - both) * log2e) + more * exp2f((b - both) * log2e);
    a = both;
  };
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
  states[offset_t(blockIdx.y) * seen.row_count + blockIdx.x] = make_float2(top, sum);
}

/// Sums over the sampled rows as so many threads take them that share a line: what is left of a line is then never more than what it
/// began with, not by rounding either.
inline constexpr index_t line_sharing = 8;
template <class WeightOf>
__device__ __forceinline__ float sum_of_rows(index_t rows, const WeightOf& weight_of) {
  float part[line_sharing] = {};
  for (index_t first = 0; first < rows; first += line_sharing) {
#pragma unroll
    for (index_t i = 0; i < line_sharing; ++i) {
      if (first + i < rows) part[i] += weight_of(first + i);
    }
  }
#pragma unroll
  for (int step = 1; step < line_sharing; step *= 2) {
#pragma unroll
    for (int i = 0; i < line_sharing; i += 2 * step) part[i] += part[i + step];
  }
  return part[0];
}

/// Logits become weights, and a column's are summed, for each slot of a query head.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    line_columns_entry(const __grid_constant__ line_sample seen, const float2* states) {
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.y));
  const index_t slot = index_t(blockIdx.x) * Threads + index_t(threadIdx.x);
  if (slot >= lines.slots) return;
  const float2* own = states + offset_t(blockIdx.y) * seen.row_count;
  lines.verticals[slot] = sum_of_rows(lines.row_count, [&](index_t r) {
    float& x = lines.row(r)[slot];
    const float2 state = own[r];
    return x = x > -infinity && state.y > 0 ? exp2f((x - state.x) * log2e) * __fdividef(1.0f, state.y) : 0.0f;
  });
}

/// What a slash line carries, for each distance of a query head.
template <int Threads>
__global__ void __launch_bounds__(Threads) line_slashes_entry(const __grid_constant__ line_sample seen) {
  const line_sample::head_lines lines = seen.head(index_t(blockIdx.y));
  const index_t distance = index_t(blockIdx.x) * Threads + index_t(threadIdx.x);
  if (distance >= lines.next) return;
  lines.slashes[distance] = sum_of_rows(lines.row_count, [&](index_t r) {
    const index_t at = lines.rows[r] - distance;
    const index_t slot = at < 0 ? no_index : lines.slot_at(at);
    return slot == no_index ? 0.0f : lines.row(r)[slot];
  });
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
