// Partitions of 128 plain rows beside the next ones, on the GPU: each warp has its columns of all rows, so that what
// they are scaled by stays within a warp, and a partition takes one barrier.
#pragma once

#include <type_traits>

#include "../../device/copy.cuh"
#include "partitions.cuh"
#include "ranks.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// How a block measures a run of such partitions, where slots lie one after another in a contiguous view. Takes 163 us
/// of 8 x 128K; with rows dealt out to threads and two barriers a partition it was 176 (H200, CUDA 13.0). Lost: ranking
/// a partition while the next one is measured (182), the loop unrolled by two (165).
template <class View>
struct lagged_columns {
  using stored = typename View::encoding_type::stored_type;
  using chunks = stored_chunks<View, true>;
  using raw = typename chunks::raw;
  using extremes = lane_extremes<chunks>;
  using cell = typename extremes::cell;
  static constexpr int dim = View::k_dim, lag = 128, warps = lagged_threads / 32;
  /// Elements of 16 bits, rows of 8 or 16 chunks of 16 bytes, K and V alike, side by side.
  static constexpr bool possible = View::is_raw && sizeof(stored) == 2 && (dim == 64 || dim == 128) &&
                                   View::v_dim == dim &&
                                   std::is_same_v<std::remove_cvref_t<decltype(View::table)>, contiguous>;

  static constexpr int of_warp = dim / contents_chunk / warps;  // chunks of a row that a warp has
  static constexpr int rows = 32 / of_warp;    // that a warp's lanes have at a time
  static constexpr int each = lag / rows;      // rows that a lane has in all
  static constexpr int kept = each / of_warp;  // rows whose sums a lane hands on
  static constexpr staged_rows layout{dim / contents_chunk};
  static constexpr int shared_bytes = 2 * lag * layout.bytes();

  /// What warps tell each other.
  struct memory_type {
    float2 sums[2][warps][lag + 2];  // of a partition's rows; halves of the warps lie in other banks
    alignas(16) float2 scales[warps][of_warp][contents_chunk];
  };

  const View& view;
  index_t b, h, first, count;
  std::uint32_t staged;
  const unsigned char* staged_at;
  memory_type& memory;
  int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;

  /// Begins to bring a partition to where the one two before it was: `count` + 1 of keys, then as many of values.
  __device__ void bring(index_t q) const {
    constexpr int at_once = lagged_threads / layout.chunks;
    const int chunk = int(threadIdx.x) % layout.chunks, row = int(threadIdx.x) / layout.chunks;
    const bool keys = q <= count;
    const offset_t token = keys ? view.k_strides.token : view.v_strides.token;
    const stored* from = (keys ? view.key(b, h, 0) : view.value(b, h, 0)) +
                         token * (first + (keys ? q : q - count - 1) * lag + row) + chunk * contents_chunk;
    std::uint32_t to = staged + std::uint32_t(q % 2 * lag * layout.bytes()) + staged_rows{layout}.place(row, chunk);
#pragma unroll
    for (int i = 0; i < lag / at_once; ++i, from += token * at_once, to += at_once * layout.bytes())
      copy_async16(to, from, true);
    commit_copies();
  }
  /// The lane's chunk of rows lane % rows, and so on every `rows`.
  __device__ void take(index_t q, raw (&to)[each]) const {
    const unsigned char* from =
        staged_at + q % 2 * lag * layout.bytes() + staged_rows{layout}.place(lane % rows, warp * of_warp + lane / rows);
#pragma unroll
    for (int u = 0; u < each; ++u) {
      *reinterpret_cast<uint4*>(to[u].element) = *reinterpret_cast<const uint4*>(from + u * rows * layout.bytes());
      to[u].scale = 1;
    }
  }

  __device__ static std::uint32_t bits_of(const cell& x) { return *reinterpret_cast<const std::uint32_t*>(&x); }
  __device__ static cell cell_of(const std::uint32_t& x) { return *reinterpret_cast<const cell*>(&x); }
  __device__ static std::uint32_t least_of(std::uint32_t x, std::uint32_t y) {
    return bits_of(extremes::least(cell_of(x), cell_of(y)));
  }
  /// What the lane's channels are scaled by, from a partition's rows: lanes of a chunk halve what they compare until
  /// each has one channel.
  template <class Scorer>
  __device__ void find_scales(const raw (&next)[each], const Scorer& scorer, channel_scale (&scales)[contents_chunk]) {
    extremes seen;
#pragma unroll
    for (int w = 0; w < extremes::cells; ++w) seen.low[w] = seen.both(infinity), seen.high[w] = seen.both(-infinity);
#pragma unroll
    for (int u = 0; u < each; ++u) seen.see(next[u]);
    // Pairs of elements as bits: where i is odd, of cell i / 2 negated.
    std::uint32_t least[contents_chunk];
#pragma unroll
    for (int w = 0; w < extremes::cells; ++w)
      least[w * 2] = bits_of(seen.low[w]), least[w * 2 + 1] = bits_of(__hneg2(seen.high[w]));
#pragma unroll
    for (int half = contents_chunk / 2; half > 0; half /= 2) {
      const bool upper = lane & half;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const std::uint32_t given = upper ? least[i] : least[i + half], own = upper ? least[i + half] : least[i];
        least[i] = least_of(own, __shfl_xor_sync(~0u, given, half));
      }
    }
#pragma unroll
    for (int step = contents_chunk; step < rows; step *= 2)
      least[0] = least_of(least[0], __shfl_xor_sync(~0u, least[0], step));
    const std::uint32_t other = __shfl_xor_sync(~0u, least[0], 1);
    const cell low = cell_of(lane % 2 ? other : least[0]), high = __hneg2(cell_of(lane % 2 ? least[0] : other));
    const channel_scale own = scorer.scale(extremes::part(low, lane % 2), extremes::part(high, lane % 2));
    float2* const mine = memory.scales[warp][lane / rows];
    if (lane % rows < contents_chunk) mine[lane % contents_chunk] = make_float2(own.factor, own.shift);
    __syncwarp();
#pragma unroll
    for (int d = 0; d < contents_chunk; d += 2) {
      const float4 two = *reinterpret_cast<const float4*>(mine + d);
      scales[d] = {two.x, two.y}, scales[d + 1] = {two.z, two.w};
    }
  }
  /// Hands on what the warp's channels of each row add up to.
  template <class Scorer>
  __device__ void add_up(index_t q, const raw (&held)[each], const Scorer& scorer,
                         const channel_scale (&scales)[contents_chunk]) {
    float2 sums[each];
#pragma unroll
    for (int u = 0; u < each; ++u) {
      float own[2] = {};
#pragma unroll
      for (int d = 0; d < contents_chunk; ++d) scorer.measure(chunks::value(held[u], d), scales[d], own);
      sums[u] = make_float2(own[0], own[1]);
    }
    int begin = lane % rows;
    if constexpr (of_warp == 2) {
      const bool upper = lane & rows;
      begin += upper ? kept * rows : 0;
#pragma unroll
      for (int i = 0; i < kept; ++i) {
        const float2 given = upper ? sums[i] : sums[i + kept], own = upper ? sums[i + kept] : sums[i];
        sums[i].x = own.x + __shfl_xor_sync(~0u, given.x, rows);
        sums[i].y = own.y + __shfl_xor_sync(~0u, given.y, rows);
      }
    }
#pragma unroll
    for (int i = 0; i < kept; ++i) memory.sums[q % 2][warp][begin + i * rows] = sums[i];
  }
  /// Writes the spreads of a partition whose sums are there; two lanes a row.
  template <class Scorer>
  __device__ void finish(index_t q, const Scorer& scorer, float* of_keys, float* of_values) const {
    const int row = int(threadIdx.x) / 2, half = lane % 2 * (warps / 2);
    float own[2] = {};
#pragma unroll
    for (int w = 0; w < warps / 2; ++w) {
      const float2 more = memory.sums[q % 2][half + w][row];
      own[0] += more.x, own[1] += more.y;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) own[m] += __shfl_xor_sync(~0u, own[m], 1);
    float* const spreads = q < count ? of_keys + q * lag : of_values + (q - count - 1) * lag;
    if (lane % 2 == 0) spreads[row] = scorer.spread(own, dim);
  }

  /// Writes the spreads [count * lag] of `count` partitions from slot `first` on, which a next one follows. Threads
  /// hold their part of a partition from when its extremes are found to when it is measured.
  template <class Scorer>
  __device__ void measure(const Scorer& scorer, float* of_keys, float* of_values) {
    const index_t last = 2 * count + 1;
    bring(0);
    bring(1);
    wait_copies<1>();
    __syncthreads();
    raw held[each], next[each];
    take(0, held);
    for (index_t q = 0; q < last; ++q) {
      wait_copies<0>();
      __syncthreads();  // q + 1 is there, q has been taken, and the sums of q - 1 have been written
      if (q + 2 <= last) bring(q + 2);
      if (q > 0 && q != count + 1) finish(q - 1, scorer, of_keys, of_values);
      take(q + 1, next);
      if (q != count) {  // between keys and values nothing is measured
        channel_scale scales[contents_chunk];
        find_scales(next, scorer, scales);
        add_up(q, held, scorer, scales);
      }
#pragma unroll
      for (int u = 0; u < each; ++u) held[u] = next[u];
    }
    __syncthreads();
    finish(last - 1, scorer, of_keys, of_values);
  }
};

/// As score_lagged_entry, of partitions of 128 rows that begin on 16 bytes.
template <class View, class Scorer>
__global__ void __launch_bounds__(lagged_threads, lagged_blocks)
    score_columns_entry(const __grid_constant__ View view, Scorer scorer, float* out, offset_t row_stride,
                        float* scratch, index_t capacity, index_t run) {
  using columns = lagged_columns<View>;
  __shared__ typename columns::memory_type memory;
  extern __shared__ uint4 lagged_rows[];
  scorer.lag = columns::lag;
  const index_t row = blockIdx.y, b = row / view.kv_heads, h = row % view.kv_heads, lag = scorer.lag;
  const index_t stored = view.length(b, h), partitions = (max)(0, (min)(stored, capacity) - scorer.sinks) / lag;
  out += row * row_stride;
  for (index_t p = index_t(blockIdx.x) * run; p + 1 < partitions; p += index_t(gridDim.x) * run) {
    const index_t count = (min)(run, partitions - 1 - p), first = scorer.sinks + p * lag;
    float *of_keys = scratch + offset_t(row) * 2 * capacity + p * lag, *of_values = of_keys + capacity;
    columns{view,  b, h, first, count, shared_address(lagged_rows), reinterpret_cast<const unsigned char*>(lagged_rows),
            memory}
        .measure(scorer, of_keys, of_values);
    __syncthreads();
    rank_run(scorer, of_keys, of_values, count, out + first);
    __syncthreads();
  }
  score_outside(scorer, stored, (max)(0, partitions - 1) * lag, out);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
