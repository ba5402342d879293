// Partitions of rows on the GPU for a scorer that compares tokens with later ones: their copies, extremes and scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "../../device/copy.cuh"
#include "contents.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// How many partitions are being copied for a block, besides the two that its threads hold. Measured when this code
/// read partitions of 128 rows too: three in flight take as long; 512 threads, or three blocks, spill registers; 512
/// threads whose rows stay in shared memory and are read twice take 195 us instead of 176 (8 x 128K; H200, CUDA 13.0).
inline constexpr index_t lagged_ahead = 2;
inline constexpr int lagged_threads = 256, lagged_blocks = 2;

/// The smallest and the largest finite element of a lane's channels over its rows so far, in cells of one channel.
template <class Chunks>
struct lane_extremes {
  using cell = float;
  static constexpr int width = 1, cells = contents_chunk;
  __device__ static cell both(float x) { return x; }
  __device__ static cell least(cell x, cell y) { return fminf(x, y); }
  __device__ static cell largest(cell x, cell y) { return fmaxf(x, y); }
  __device__ static float part(cell x, int) { return x; }

  cell low[cells], high[cells];
  __device__ void see(const typename Chunks::raw& chunk) {
#pragma unroll
    for (int d = 0; d < contents_chunk; ++d) {
      const float x = Chunks::value(chunk, d);
      if (x - x != 0) continue;
      low[d] = fminf(low[d], x), high[d] = fmaxf(high[d], x);
    }
  }
};
/// 16-bit elements stay in pairs, which takes a quarter of the instructions.
template <class Chunks>
requires(sizeof(typename Chunks::stored) == 2) struct lane_extremes<Chunks> {
  using cell = std::conditional_t<std::is_same_v<typename Chunks::stored, bf16>, __nv_bfloat162, __half2>;
  static constexpr int width = 2, cells = contents_chunk / 2;
  __device__ static cell both(float x) {
    if constexpr (std::is_same_v<cell, __half2>) {
      return __float2half2_rn(x);
    } else {
      return __float2bfloat162_rn(x);
    }
  }
  __device__ static cell least(cell x, cell y) { return __hmin2(x, y); }
  __device__ static cell largest(cell x, cell y) { return __hmax2(x, y); }
  __device__ static float part(cell x, int i) { return i ? __high2float(x) : __low2float(x); }

  cell low[cells], high[cells];
  __device__ void see(const typename Chunks::raw& chunk) {
    const cell* pairs = reinterpret_cast<const cell*>(chunk.element);
#pragma unroll
    for (int w = 0; w < cells; ++w) {
      // Infinity becomes NaN. The minimum of NaN and a number is the number.
      const cell x = __hfma2(pairs[w], both(0), pairs[w]);
      low[w] = __hmin2(low[w], x), high[w] = __hmax2(high[w], x);
    }
  }
};

/// A partition's extremes by warp, and the scales of its channels. The scale of channel d is scales[d %
/// contents_chunk][d / contents_chunk].
template <class Chunks>
struct partition_scales {
  using extremes = lane_extremes<Chunks>;
  using cell = typename extremes::cell;
  static constexpr int warps = lagged_threads / 32, row = Chunks::dim / extremes::width;
  alignas(16) cell lows[warps][row], highs[warps][row];
  channel_scale scales[contents_chunk][Chunks::chunks];

  /// Computes scales from the extremes of all lanes, with two barriers. After the second barrier the extremes are free;
  /// the scales are free after the first barrier of the next call.
  template <class Scorer>
  __device__ void join(extremes& seen, const Scorer& scorer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int w = 0; w < extremes::cells; ++w) {
#pragma unroll
      for (int step = Chunks::lanes; step < 32; step *= 2) {
        seen.low[w] = extremes::least(seen.low[w], __shfl_xor_sync(~0u, seen.low[w], step));
        seen.high[w] = extremes::largest(seen.high[w], __shfl_xor_sync(~0u, seen.high[w], step));
      }
      if (lane >= Chunks::chunks) continue;
      lows[warp][lane * extremes::cells + w] = seen.low[w];
      highs[warp][lane * extremes::cells + w] = seen.high[w];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < row; c += lagged_threads) {
      cell low = lows[0][c], high = highs[0][c];
#pragma unroll
      for (int w = 1; w < warps; ++w)
        low = extremes::least(low, lows[w][c]), high = extremes::largest(high, highs[w][c]);
#pragma unroll
      for (int i = 0; i < extremes::width; ++i) {
        const int d = c * extremes::width + i;
        scales[d % contents_chunk][d / contents_chunk] = scorer.scale(extremes::part(low, i), extremes::part(high, i));
      }
    }
    __syncthreads();
  }
};

/// Copies rows of partitions to the threads that measure them. Each thread has its own chunks in shared memory, for
/// `at_once` rows of a partition; no other thread reads them. Further rows of longer partitions are read from device
/// memory.
template <class View, bool Keys>
class partition_rows {
 public:
  using chunks = stored_chunks<View, Keys, lagged_threads>;
  using stored = typename chunks::stored;
  using raw = typename chunks::raw;
  static constexpr int rows = chunks::rows, at_once = (sizeof(stored) == 4 ? 1024 : 2048) / lagged_threads,
                       few = at_once < 4 ? at_once : 4, staged = rows * at_once;
  struct staged_chunk {
    alignas(8 * sizeof(stored) < 16 ? 8 : 16) stored element[contents_chunk];
  };
  static constexpr int shared_bytes = lagged_ahead * at_once * lagged_threads * int(sizeof(staged_chunk));

  __device__ partition_rows(const View& view, index_t b, index_t h, index_t first, index_t lag, bool aligned,
                            void* shared)
      : view_(view),
        b_(b),
        h_(h),
        first_(first),
        lag_(lag),
        aligned_(aligned),
        staged_chunks_(static_cast<staged_chunk*>(shared) + threadIdx.x),
        origin_(origin(view, b, h)) {}

  /// Begins to copy a partition, if there is one, to the place of the one `lagged_ahead` before it, which has been
  /// loaded.
  __device__ void bring(index_t partition, bool there) {
    if (there && lane() < chunks::chunks) {
      staged_chunk* to = &chunk_of(partition, 0);
      if (side_by_side && aligned_) {
        // One address and a fixed step from row to row: computing each address anew took a quarter of all instructions.
        const offset_t token = Keys ? view_.k_strides.token : view_.v_strides.token;
        const stored* from = origin_ + token * slot(partition, 0);
#pragma unroll
        for (int u = 0; u < at_once; ++u, from += token * rows) {
          if (holds(u * rows + group())) copy_row(from, to[u * lagged_threads]);
        }
      } else {
#pragma unroll
        for (int u = 0; u < at_once; ++u) {
          if (holds(u * rows + group())) bring_row(slot(partition, u * rows), to[u * lagged_threads]);
        }
      }
    }
    commit_copies();
  }
  /// Loads the lane's rows u * rows + group of a partition that has arrived. Rows after its end are arbitrary.
  __device__ void load(index_t partition, raw (&to)[at_once]) const {
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
      const staged_chunk& from = chunk_of(partition, u);
#pragma unroll
      for (int d = 0; d < contents_chunk; ++d) to[u].element[d] = from.element[d];
      to[u].scale = 1;
      if constexpr (View::encoding_type::scaled) {
        if (!holds(u * rows + group())) continue;
        const index_t slot_of_row = slot(partition, u * rows);
        to[u].scale = Keys ? view_.key_scale(b_, h_, slot_of_row) : view_.value_scale(b_, h_, slot_of_row);
      }
    }
  }
  /// Calls see(base, chunk) for those of the lane's rows base + u * rows + group of a partition that are not in shared
  /// memory; zeros after its end. All lanes call it.
  template <class See>
  __device__ void each_other(index_t partition, const See& see) const {
    for (index_t base = staged; base < lag_; base += rows * few) {
      raw chunk[few];
#pragma unroll
      for (int u = 0; u < few; ++u)
        chunks::fetch(view_, b_, h_, slot(partition, base + u * rows), aligned_, lane(),
                      holds(base + u * rows + group()), chunk[u]);
      see(base, chunk);
    }
  }
  /// Whether a partition has this row.
  __device__ bool holds(index_t row) const { return row < lag_; }
  __device__ index_t lag() const { return lag_; }
  __device__ static int lane() { return int(threadIdx.x) % chunks::lanes; }
  __device__ static int group() { return int(threadIdx.x) / chunks::lanes; }

  static constexpr bool side_by_side =
      !chunks::in_blocks && std::is_same_v<std::remove_cvref_t<decltype(View::table)>, contiguous>;

 private:
  __device__ static const stored* origin(const View& view, index_t b, index_t h) {
    if constexpr (side_by_side) {
      return (Keys ? view.key(b, h, 0) : view.value(b, h, 0)) + lane() * contents_chunk;
    } else {
      return nullptr;
    }
  }
  __device__ index_t slot(index_t partition, index_t row) const { return first_ + partition * lag() + row + group(); }
  __device__ staged_chunk& chunk_of(index_t partition, int u) const {
    return staged_chunks_[(partition % lagged_ahead * at_once + u) * lagged_threads];
  }
  __device__ void bring_row(index_t from, staged_chunk& to) const {
    if constexpr (!chunks::in_blocks) {
      if (aligned_) {
        copy_row((Keys ? view_.key(b_, h_, from) : view_.value(b_, h_, from)) + lane() * contents_chunk, to);
        return;
      }
    }
    raw chunk;
    chunks::fetch(view_, b_, h_, from, false, lane(), true, chunk);
#pragma unroll
    for (int d = 0; d < contents_chunk; ++d) to.element[d] = chunk.element[d];
  }
  __device__ static void copy_row(const stored* row, staged_chunk& to) {
    constexpr int step = sizeof(staged_chunk) < 16 ? 4 : 16;
#pragma unroll
    for (int i = 0; i < int(sizeof(staged_chunk)); i += step) {
      const auto* source = reinterpret_cast<const unsigned char*>(row) + i;
      const std::uint32_t target = shared_address(&to) + std::uint32_t(i);
      step == 4 ? copy_async4(target, source) : copy_async16(target, source, true);
    }
  }

  const View& view_;
  index_t b_, h_, first_, lag_;
  bool aligned_;
  staged_chunk* staged_chunks_;
  const stored* origin_;  // the lane's part of slot 0, where slots are contiguous
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
