// Scores of tokens relative to later tokens, on the GPU: a block compares partitions with the next ones and ranks them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../device/copy.cuh"
#include "../../device/kernel.cuh"
#include "lagged_partitions.cuh"
#include "lagged_ranks.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Partitions of 128 plain rows compared with the next partitions, on the GPU. Each warp has its own columns of all
// rows, so scales stay within a warp and a partition takes one barrier.

namespace detail {

/// How a block measures a run of such partitions in a contiguous view. Takes 163 us for 8 x 128K; with rows distributed
/// to threads and two barriers a partition it took 176 (H200, CUDA 13.0). Slower: ranking a partition while the next
/// one is measured (182), unrolling the loop by two (165).
template <class View>
struct lagged_columns {
  using stored = typename View::encoding_type::stored_type;
  using chunks = stored_chunks<View, true>;
  using raw = typename chunks::raw;
  using extremes = lane_extremes<chunks>;
  using cell = typename extremes::cell;
  static constexpr int dim = View::k_dim, lag = 128, warps = lagged_threads / 32;
  /// Whether it can be used: 16-bit elements, rows of 8 or 16 chunks of 16 bytes, the same layout for K and V,
  /// contiguous.
  static constexpr bool possible = View::is_raw && sizeof(stored) == 2 && (dim == 64 || dim == 128) &&
                                   View::v_dim == dim &&
                                   std::is_same_v<std::remove_cvref_t<decltype(View::table)>, contiguous>;

  static constexpr int of_warp = dim / contents_chunk / warps;  // chunks of a row per warp
  static constexpr int rows = 32 / of_warp;                     // rows that a warp's lanes hold at a time
  static constexpr int lane_rows = lag / rows;                  // rows of a lane in all
  static constexpr int lane_sums = lane_rows / of_warp;         // rows whose sums a lane passes on
  static constexpr staged_rows layout{dim / contents_chunk};
  static constexpr int shared_bytes = 2 * lag * layout.bytes();

  /// What warps exchange.
  struct memory_type {
    float2 sums[2][warps][lag + 2];  // of a partition's rows; halves of the warps use different banks
    alignas(16) float2 scales[warps][of_warp][contents_chunk];
  };

  const View& view;
  index_t b, h, first, count;
  std::uint32_t staged;
  const unsigned char* staged_at;
  memory_type& memory;
  int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;

  /// Begins to copy a partition to the place of the one two before it: first `count` + 1 partitions of keys, then as
  /// many of values.
  __device__ void bring(index_t q) const {
    constexpr int at_once = lagged_threads / layout.chunks;
    const int chunk = int(threadIdx.x) % layout.chunks, row = int(threadIdx.x) / layout.chunks;
    const bool keys = q <= count;
    const offset_t token = keys ? view.k_strides.token : view.v_strides.token;
    const stored* from = (keys ? view.key(b, h, 0) : view.value(b, h, 0)) +
                         token * (first + (keys ? q : q - count - 1) * lag + row) + chunk * contents_chunk;
    std::uint32_t to = staged + std::uint32_t(q % 2 * lag * layout.bytes()) + staged_rows{layout}.offset(row, chunk);
#pragma unroll
    for (int i = 0; i < lag / at_once; ++i, from += token * at_once, to += at_once * layout.bytes())
      copy_async16(to, from, true);
    commit_copies();
  }
  /// Loads the lane's chunk of rows lane % rows, lane % rows + rows, and so on.
  __device__ void load(index_t q, raw (&to)[lane_rows]) const {
    const unsigned char* from = staged_at + q % 2 * lag * layout.bytes() +
                                staged_rows{layout}.offset(lane % rows, warp * of_warp + lane / rows);
#pragma unroll
    for (int u = 0; u < lane_rows; ++u) {
      *reinterpret_cast<uint4*>(to[u].element) = *reinterpret_cast<const uint4*>(from + u * rows * layout.bytes());
      to[u].scale = 1;
    }
  }

  __device__ static std::uint32_t bits_of(const cell& x) { return *reinterpret_cast<const std::uint32_t*>(&x); }
  __device__ static cell cell_of(const std::uint32_t& x) { return *reinterpret_cast<const cell*>(&x); }
  __device__ static std::uint32_t least_of(std::uint32_t x, std::uint32_t y) {
    return bits_of(extremes::least(cell_of(x), cell_of(y)));
  }
  /// Finds the scales of the lane's channels from a partition's rows. In each round, the lanes of a chunk halve the
  /// channels that each compares, until each has one.
  template <class Scorer>
  __device__ void find_scales(const raw (&next)[lane_rows], const Scorer& scorer,
                              channel_scale (&scales)[contents_chunk]) {
    extremes seen;
#pragma unroll
    for (int w = 0; w < extremes::cells; ++w) seen.low[w] = seen.both(infinity), seen.high[w] = seen.both(-infinity);
#pragma unroll
    for (int u = 0; u < lane_rows; ++u) seen.see(next[u]);
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
  /// Stores the sums over the warp's channels of each row.
  template <class Scorer>
  __device__ void add_up(index_t q, const raw (&held)[lane_rows], const Scorer& scorer,
                         const channel_scale (&scales)[contents_chunk]) {
    float2 sums[lane_rows];
#pragma unroll
    for (int u = 0; u < lane_rows; ++u) {
      float own[2] = {};
#pragma unroll
      for (int d = 0; d < contents_chunk; ++d) scorer.measure(chunks::value(held[u], d), scales[d], own);
      sums[u] = make_float2(own[0], own[1]);
    }
    int begin = lane % rows;
    if constexpr (of_warp == 2) {
      const bool upper = lane & rows;
      begin += upper ? lane_sums * rows : 0;
#pragma unroll
      for (int i = 0; i < lane_sums; ++i) {
        const float2 given = upper ? sums[i] : sums[i + lane_sums], own = upper ? sums[i + lane_sums] : sums[i];
        sums[i].x = own.x + __shfl_xor_sync(~0u, given.x, rows);
        sums[i].y = own.y + __shfl_xor_sync(~0u, given.y, rows);
      }
    }
#pragma unroll
    for (int i = 0; i < lane_sums; ++i) memory.sums[q % 2][warp][begin + i * rows] = sums[i];
  }
  /// Writes the spreads of a partition from its sums; two lanes a row.
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

  /// Writes the spreads [count * lag] of `count` partitions from slot `first` on; another partition follows them.
  /// Threads keep their part of a partition from the search for its extremes until it is measured.
  template <class Scorer>
  __device__ void measure(const Scorer& scorer, float* of_keys, float* of_values) {
    const index_t last = 2 * count + 1;
    bring(0);
    bring(1);
    wait_copies<1>();
    __syncthreads();
    raw held[lane_rows], next[lane_rows];
    load(0, held);
    for (index_t q = 0; q < last; ++q) {
      wait_copies<0>();
      __syncthreads();  // q + 1 has arrived, q has been read, and the sums of q - 1 have been written
      if (q + 2 <= last) bring(q + 2);
      if (q > 0 && q != count + 1) finish(q - 1, scorer, of_keys, of_values);
      load(q + 1, next);
      if (q != count) {  // between keys and values nothing is measured
        channel_scale scales[contents_chunk];
        find_scales(next, scorer, scales);
        add_up(q, held, scorer, scales);
      }
#pragma unroll
      for (int u = 0; u < lane_rows; ++u) held[u] = next[u];
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

/// Writes the spreads of a lane's rows base + u * rows + group; `memory` has their partition's scales.
template <class Partitions, class Scorer, class Memory, int Count>
__device__ __forceinline__ void measure_rows(const Partitions& all, const Scorer& scorer, const Memory& memory,
                                             index_t base, const typename Partitions::raw (&chunk)[Count],
                                             float* spreads) {
  using chunks = typename Partitions::chunks;
  constexpr int measures = Scorer::measures;
  const int lane = Partitions::lane();
  float sums[Count][measures] = {}, parts[measures][Count];
#pragma unroll
  for (int d = 0; d < contents_chunk; ++d) {
    const channel_scale scale = memory.scales[d][lane < chunks::chunks ? lane : 0];
#pragma unroll
    for (int u = 0; u < Count; ++u) scorer.measure(chunks::value(chunk[u], d), scale, sums[u]);
  }
  float own[measures];
#pragma unroll
  for (int m = 0; m < measures; ++m) {
#pragma unroll
    for (int u = 0; u < Count; ++u) parts[m][u] = lane < chunks::chunks ? sums[u][m] : 0.0f;
    own[m] = lanes_sums<chunks::lanes>(parts[m], lane);
  }
  const index_t row = base + lane * chunks::rows + Partitions::group();
  if (lane < Count && all.holds(row)) spreads[row] = scorer.spread(own, chunks::dim);
}

/// Writes the spreads of `count` partitions from slot `first` on to spreads [count * lag]; another partition follows
/// them. Threads keep their rows of a partition from the search for its extremes until it is measured.
template <bool Keys, class View, class Scorer, class Memory>
__device__ void measure_spreads(const View& view, const Scorer& scorer, index_t b, index_t h, index_t first,
                                index_t count, bool aligned, Memory& memory, void* shared, float* spreads) {
  using partitions = partition_rows<View, Keys>;
  using chunks = typename partitions::chunks;
  using extremes = lane_extremes<chunks>;
  constexpr int rows = chunks::rows, at_once = partitions::at_once;
  const index_t group = partitions::group();
  partitions all(view, b, h, first, scorer.lag, aligned, shared);
  for (index_t p = 0; p < lagged_ahead; ++p) all.bring(p, p <= count);
  typename partitions::raw held[at_once], next[at_once];
  wait_copies<lagged_ahead - 1>();
  all.load(0, held);
  all.bring(lagged_ahead, lagged_ahead <= count);
  for (index_t p = 0; p < count; ++p, spreads += all.lag()) {
    wait_copies<lagged_ahead - 1>();
    all.load(p + 1, next);
    extremes seen;
#pragma unroll
    for (int w = 0; w < extremes::cells; ++w) seen.low[w] = seen.both(infinity), seen.high[w] = seen.both(-infinity);
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
      if (all.holds(u * rows + group)) seen.see(next[u]);
    }
    all.bring(p + 1 + lagged_ahead, p + 1 + lagged_ahead <= count);
    all.each_other(p + 1, [&](index_t base, const auto& chunk) {
#pragma unroll
      for (int u = 0; u < partitions::few; ++u) {
        if (all.holds(base + u * rows + group)) seen.see(chunk[u]);
      }
    });
    memory.join(seen, scorer);
    measure_rows(all, scorer, memory, 0, held, spreads);
    all.each_other(p,
                   [&](index_t base, const auto& chunk) { measure_rows(all, scorer, memory, base, chunk, spreads); });
#pragma unroll
    for (int u = 0; u < at_once; ++u) held[u] = next[u];
  }
}

/// blockIdx: x runs of `run` partitions, y a (sequence, kv_head). `scratch` [rows, 2, capacity].
template <class View, class Scorer>
__global__ void __launch_bounds__(lagged_threads, lagged_blocks)
    score_lagged_entry(const __grid_constant__ View view, Scorer scorer, bool keys_aligned, bool values_aligned,
                       float* out, offset_t row_stride, float* scratch, index_t capacity, index_t run) {
  using of_keys_type = partition_scales<typename partition_rows<View, true>::chunks>;
  using of_values_type = partition_scales<typename partition_rows<View, false>::chunks>;
  constexpr std::size_t most =
      sizeof(of_keys_type) > sizeof(of_values_type) ? sizeof(of_keys_type) : sizeof(of_values_type);
  __shared__ alignas(16) unsigned char memory[most];
  extern __shared__ uint4 lagged_rows[];
  const index_t row = blockIdx.y, b = row / view.kv_heads, h = row % view.kv_heads, lag = scorer.lag;
  const index_t stored = view.length(b, h), partitions = (max)(0, (min)(stored, capacity) - scorer.sinks) / lag;
  out += row * row_stride;
  for (index_t p = index_t(blockIdx.x) * run; p + 1 < partitions; p += index_t(gridDim.x) * run) {
    const index_t count = (min)(run, partitions - 1 - p), first = scorer.sinks + p * lag;
    float *of_keys = scratch + offset_t(row) * 2 * capacity + p * lag, *of_values = of_keys + capacity;
    measure_spreads<true>(view, scorer, b, h, first, count, keys_aligned, *reinterpret_cast<of_keys_type*>(memory),
                          lagged_rows, of_keys);
    __syncthreads();
    measure_spreads<false>(view, scorer, b, h, first, count, values_aligned, *reinterpret_cast<of_values_type*>(memory),
                           lagged_rows, of_values);
    __syncthreads();
    rank_run(scorer, of_keys, of_values, count, out + first);
    __syncthreads();
  }
  score_outside(scorer, stored, (max)(0, partitions - 1) * lag, out);
}

}  // namespace detail

/// Writes the scores of all stored slots relative to the tokens after them: the device's cpu::score_lagged, to rounding
/// of the spreads.
/// Shapes   scores [rows, row_stride].
/// Workspace  two numbers a slot.
/// Cost     one read of K and of V, and one more of a run's last partition; lag comparisons a token.
template <class View, lagged_scorer Scorer>
class score_lagged {
  static_assert(check_device_rows<View>());

 public:
  score_lagged(index_t rows, index_t capacity)
      : rows_(rows), capacity_(capacity), resident_(detail::lagged_blocks * device_info::current().multiprocessors) {
    require(rows >= 1 && rows <= 65535, "sequences * kv_heads", rows, "1 to 65535", "split the batch");
    const device_info device = device_info::current();
    any_.require_shared(any_bytes, device, "scoring by lags", "use a device with more of it");
    if constexpr (columns::possible) {
      columns_ = {detail::score_columns_entry<View, Scorer>};
      columns_.require_shared(columns::shared_bytes, device, "scoring by lags", "use a device with more of it");
    }
  }

  std::size_t workspace_bytes() const { return std::size_t(rows_) * 2 * std::size_t(capacity_) * sizeof(float); }

  void run(const View& view, const Scorer& scorer, float* scores, offset_t row_stride, void* workspace,
           cudaStream_t stream) const {
    const index_t rows = view.sequences * view.kv_heads;
    require(rows <= rows_, "sequences * kv_heads", rows, "at most " + std::to_string(rows_),
            "construct score_lagged for the largest batch");
    require(scorer.lag >= 2 && scorer.sinks >= 0, "lag and sinks",
            std::to_string(scorer.lag) + " and " + std::to_string(scorer.sinks), "at least 2, and at least 0",
            "check the scorer first");
    if (rows == 0) return;
    // As many runs as blocks fit at a time: a block waits for the first loads of every run.
    const index_t partitions = (std::max)(capacity_ / scorer.lag, 1);
    const index_t run = index_t(std::clamp<offset_t>(offset_t(partitions) * rows / resident_, 1, 32));
    const dim3 runs{unsigned((std::min)(ceil_div(partitions, run), 65535)), unsigned(rows)};
    const bool keys_aligned = rows_on_16_bytes(view.k, view.k_strides),
               values_aligned = rows_on_16_bytes(view.v, view.v_strides);
    bool in_columns = false;
    if constexpr (columns::possible) {
      in_columns = scorer.lag == columns::lag && keys_aligned && values_aligned;
      if (in_columns) {
        columns_.launch({runs, dim3(detail::lagged_threads), columns::shared_bytes}, stream, "launch of score_lagged",
                        view, scorer, scores, row_stride, static_cast<float*>(workspace), capacity_, run);
      }
    }
    if (!in_columns) {
      any_.launch({runs, dim3(detail::lagged_threads), any_bytes}, stream, "launch of score_lagged", view, scorer,
                  keys_aligned, values_aligned, scores, row_stride, static_cast<float*>(workspace), capacity_, run);
    }
  }

 private:
  using columns = detail::lagged_columns<View>;
  static constexpr int any_bytes = detail::partition_rows<View, true>::shared_bytes;
  index_t rows_, capacity_, resident_;
  device_kernel<View, Scorer, bool, bool, float*, offset_t, float*, index_t, index_t> any_{
      detail::score_lagged_entry<View, Scorer>};
  device_kernel<View, Scorer, float*, offset_t, float*, index_t, index_t> columns_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
