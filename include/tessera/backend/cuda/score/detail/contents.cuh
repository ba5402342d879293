// Scores by stored keys or values, on the GPU: one pass, or two if rows are compared with their mean.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../../../concepts/scorer.hpp"
#include "../../../../core/views.hpp"
#include "../../device/alignment.cuh"
#include "../../device/check.cuh"
#include "../../device/warp.cuh"
#include "../../device/workspace.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int contents_threads = 256, contents_chunk = 8;

/// Keys or values of a view, read by neighbouring lanes: together they read a row, eight channels each.
template <class View, bool Keys, int Threads = contents_threads>
struct stored_chunks {
  using unit = typename View::encoding_type::stored_type;
  static constexpr bool in_blocks = element_block<unit>;
  using stored = std::conditional_t<in_blocks, float, unit>;  // what a lane holds of an element
  static constexpr int dim = Keys ? View::k_dim : View::v_dim, chunks = dim / contents_chunk;
  static constexpr int lanes = chunks <= 8 ? 8 : chunks <= 16 ? 16 : 32, rows = Threads / lanes;
  static constexpr int at_once = sizeof(stored) == 4 ? 2 : 4;  // rows that a lane has in flight
  static constexpr index_t tile = rows * at_once;              // neighbouring slots that a block has in flight

  /// A lane's part of a slot's row, as it is stored.
  struct raw {
    alignas(16) stored element[contents_chunk];
    float scale;
  };
  /// Loads a lane's part of a row. Lanes without channels, and rows that do not exist, get zeros.
  __device__ static void fetch(const View& view, index_t b, index_t h, index_t slot, bool aligned, int lane, bool there,
                               raw& to) {
    to.scale = 1;
    if (!there || lane >= chunks) {
#pragma unroll
      for (int d = 0; d < contents_chunk; ++d) to.element[d] = stored(0.0f);
      return;
    }
    const offset_t stride = Keys ? view.k_strides.dim : view.v_strides.dim;
    const auto from = row_elements(Keys ? view.key(b, h, slot) : view.value(b, h, slot), lane * contents_chunk, stride);
    if constexpr (in_blocks) {
#pragma unroll
      for (int d = 0; d < contents_chunk; ++d) to.element[d] = from[d];
    } else if (aligned) {
      if constexpr (sizeof(stored) == 1) {
        *reinterpret_cast<uint2*>(to.element) = __ldg(reinterpret_cast<const uint2*>(from));
      } else {
#pragma unroll
        for (int w = 0; w < int(sizeof(stored)) / 2; ++w)
          reinterpret_cast<uint4*>(to.element)[w] = __ldg(reinterpret_cast<const uint4*>(from) + w);
      }
    } else {
#pragma unroll
      for (int d = 0; d < contents_chunk; ++d) to.element[d] = from[d * stride];
    }
    if constexpr (View::encoding_type::scaled) {
      to.scale = Keys ? view.key_scale(b, h, slot) : view.value_scale(b, h, slot);
    }
  }
  __device__ static float value(const raw& chunk, int d) {
    if constexpr (std::is_same_v<stored, bf16> && !View::encoding_type::scaled) {  // one instruction each
      const unsigned pair = reinterpret_cast<const unsigned*>(chunk.element)[d / 2];
      return __uint_as_float(d % 2 ? pair & 0xffff0000u : pair << 16);
    }
    return View::encoding_type::scaled ? float(chunk.element[d]) * chunk.scale : float(chunk.element[d]);
  }

  /// Sums over the channels of rows. A lane returns the sums of row `lane % at_once`. `anchor`: this lane's channels,
  /// or null.
  template <class Scorer>
  __device__ static void measure(const Scorer& scorer, const raw (&chunk)[at_once], const float* anchor, int lane,
                                 float (&sums)[Scorer::measures]) {
    float parts[Scorer::measures][at_once] = {};
    if (lane < chunks) {
#pragma unroll
      for (int u = 0; u < at_once; ++u) {
        float own[Scorer::measures] = {};
#pragma unroll
        for (int d = 0; d < contents_chunk; ++d) scorer.measure(value(chunk[u], d), anchor ? anchor[d] : 0.0f, own);
#pragma unroll
        for (int m = 0; m < Scorer::measures; ++m) parts[m][u] = own[m];
      }
    }
#pragma unroll
    for (int m = 0; m < Scorer::measures; ++m) sums[m] = lanes_sums<lanes>(parts[m], lane);
  }

  /// Calls see(first, chunk) for a block's share of the tiles of a row of the batch. All lanes call it. chunk[u] is
  /// from slot first + u, or zeros if that slot does not exist. `Backwards`: the tiles are visited in reverse order.
  template <bool Backwards, class See>
  __device__ static void each_tile(const View& view, index_t b, index_t h, index_t length, bool aligned,
                                   const See& see) {
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
    const index_t tiles = ceil_div(length, tile);
    for (index_t t = index_t(blockIdx.x); t < tiles; t += index_t(gridDim.x)) {
      const index_t first = (Backwards ? tiles - 1 - t : t) * tile + group * at_once;
      raw chunk[at_once];
#pragma unroll
      for (int u = 0; u < at_once; ++u) fetch(view, b, h, first + u, aligned, lane, first + u < length, chunk[u]);
      see(first, chunk);
    }
  }
};

/// Sums of scaled rows by row of the batch and block, in double, and the number of rows summed.
struct anchor_partials {
  double* sums;      // [rows, blocks, dim]
  index_t* counted;  // [rows, blocks]
  float* anchors;    // [rows, dim]
};

/// blockIdx: x a share of the slots, y a (sequence, kv_head). Rows that are not finite are left out of the mean.
template <class View, class Scorer, bool Keys>
__global__ void __launch_bounds__(contents_threads)
    sum_rows_entry(const __grid_constant__ View view, Scorer scorer, bool aligned, anchor_partials out) {
  using chunks = stored_chunks<View, Keys>;
  __shared__ double parts[chunks::rows][chunks::dim];
  __shared__ index_t counts[chunks::rows];
  const index_t row = blockIdx.y, b = row / view.kv_heads, h = row % view.kv_heads;
  const int lane = threadIdx.x % chunks::lanes, group = threadIdx.x / chunks::lanes;
  const unsigned own_lanes = (~0u >> (32 - chunks::lanes)) << (threadIdx.x % 32 / chunks::lanes * chunks::lanes);
  double total[contents_chunk] = {};
  index_t counted = 0;
  const index_t length = view.length(b, h);
  chunks::template each_tile<false>(view, b, h, length, aligned, [&](index_t first, const auto& chunk) {
    float sums[Scorer::measures], few[contents_chunk] = {};
    chunks::measure(scorer, chunk, nullptr, lane, sums);
    const float in_charge = scorer.anchor_scale(sums);
#pragma unroll
    for (int u = 0; u < chunks::at_once; ++u) {
      const float scale = __shfl_sync(~0u, in_charge, u, chunks::lanes);
      float probe = 0;  // becomes NaN
#pragma unroll
      for (int d = 0; d < contents_chunk; ++d) probe += chunks::value(chunk[u], d) * 0.0f;
      if ((__ballot_sync(~0u, probe != 0) & own_lanes) != 0 || first + u >= length) continue;
#pragma unroll
      for (int d = 0; d < contents_chunk; ++d) few[d] += chunks::value(chunk[u], d) * scale;
      ++counted;
    }
#pragma unroll
    for (int d = 0; d < contents_chunk; ++d) total[d] += double(few[d]);
  });
  if (lane < chunks::chunks) {
#pragma unroll
    for (int d = 0; d < contents_chunk; ++d) parts[group][lane * contents_chunk + d] = total[d];
  }
  if (lane == 0) counts[group] = counted;
  __syncthreads();
  const offset_t at = offset_t(row) * gridDim.x + blockIdx.x;
  for (int d = threadIdx.x; d < chunks::dim; d += contents_threads) {
    double sum = 0;
    for (int g = 0; g < chunks::rows; ++g) sum += parts[g][d];
    out.sums[at * chunks::dim + d] = sum;
  }
  if (threadIdx.x == 0) {
    index_t all = 0;
    for (int g = 0; g < chunks::rows; ++g) all += counts[g];
    out.counted[at] = all;
  }
}

/// Computes the mean of each channel, in the same order every time. One block per row.
template <int Threads, int Dim>
__global__ void __launch_bounds__(Threads) mean_rows_entry(anchor_partials out, index_t blocks) {
  constexpr int shares = Threads / Dim;
  __shared__ double parts[shares][Dim];
  __shared__ index_t counted;
  const offset_t row = blockIdx.x;
  const int d = threadIdx.x % Dim, share = threadIdx.x / Dim;
  if (share < shares) {
    double sum = 0;
#pragma unroll 8
    for (index_t i = share; i < blocks; i += shares) sum += out.sums[(row * blocks + i) * Dim + d];
    parts[share][d] = sum;
  }
  if (threadIdx.x < 32) {
    index_t all = 0;
    for (index_t i = index_t(threadIdx.x); i < blocks; i += 32) all += out.counted[row * blocks + i];
    all = warp_sum(all);
    if (threadIdx.x == 0) counted = all;
  }
  __syncthreads();
  if (share > 0) return;
  double sum = 0;
#pragma unroll
  for (int g = 0; g < shares; ++g) sum += parts[g][d];
  out.anchors[row * Dim + d] = counted ? float(sum / double(counted)) : 0.0f;
}

/// For an anchored scorer, the rows have been read before. Those that were read last come first: they may still be in
/// the L2.
template <class View, class Scorer, bool Keys>
__global__ void __launch_bounds__(contents_threads)
    score_contents_entry(const __grid_constant__ View view, Scorer scorer, bool aligned, const float* anchors,
                         float* scores, offset_t row_stride) {
  using chunks = stored_chunks<View, Keys>;
  constexpr bool again = anchored_scorer<Scorer>;
  const index_t row = again ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
  const index_t b = row / view.kv_heads, h = row % view.kv_heads, length = view.length(b, h);
  const int lane = threadIdx.x % chunks::lanes;
  float anchor[contents_chunk] = {};
  if constexpr (again) {
#pragma unroll
    for (int d = 0; d < contents_chunk; ++d) {
      if (lane < chunks::chunks) anchor[d] = anchors[offset_t(row) * chunks::dim + lane * contents_chunk + d];
    }
  }
  chunks::template each_tile<again>(view, b, h, length, aligned, [&](index_t first, const auto& chunk) {
    float sums[Scorer::measures];
    chunks::measure(scorer, chunk, again ? anchor : nullptr, lane, sums);
    if (lane < chunks::at_once && first + lane < length) scores[row * row_stride + first + lane] = scorer.score(sums);
  });
}

}  // namespace detail

/// Writes the scores of all stored slots of a batch: the device's cpu::score_contents, to rounding. Every call gives
/// the same bits.
/// Shapes   scores [rows, row_stride], row = sequence * kv_heads + head.
/// Workspace  for an anchored scorer: sums by block, and the means.
/// Cost     one read of what the scorer reads, 16 bytes at a time where rows are 16-byte aligned; two reads for an
///          anchored scorer.
template <class View, contents_scorer Scorer>
class score_contents {
  static_assert(check_device_rows<View>());
  static constexpr bool keys = stored_rows(Scorer::reads) == stored_rows::keys, anchored = anchored_scorer<Scorer>;
  using chunks = detail::stored_chunks<View, keys>;

 public:
  /// `capacity`: an upper bound of a row's tokens.
  score_contents(index_t rows, index_t capacity) : rows_(rows) {
    require(rows >= 1 && rows <= 65535, "sequences * kv_heads", rows, "1 to 65535", "split the batch");
    blocks_ = std::clamp(ceil_div(capacity, 4 * chunks::tile), 1, (std::max)(1, 2048 / rows));
  }

  std::size_t workspace_bytes() const { return anchored ? memory(*this, nullptr).bytes() : 0; }

  void run(const View& view, const Scorer& scorer, float* scores, offset_t row_stride, void* workspace,
           cudaStream_t stream) const {
    const index_t rows = view.sequences * view.kv_heads;
    require(rows <= rows_, "sequences * kv_heads", rows, "at most " + std::to_string(rows_),
            "construct score_contents for the largest batch");
    if (rows == 0) return;
    const bool aligned = keys ? rows_on_16_bytes(view.k, view.k_strides) : rows_on_16_bytes(view.v, view.v_strides);
    const dim3 grid{unsigned(blocks_), unsigned(rows)};
    [[maybe_unused]] const float* anchors = nullptr;
    if constexpr (anchored) {
      const detail::anchor_partials partials = memory(*this, workspace).partials;
      anchors = partials.anchors;
      detail::sum_rows_entry<View, Scorer, keys>
          <<<grid, detail::contents_threads, 0, stream>>>(view, scorer, aligned, partials);
      detail::mean_rows_entry<1024, chunks::dim><<<unsigned(rows), 1024, 0, stream>>>(partials, blocks_);
    }
    detail::score_contents_entry<View, Scorer, keys>
        <<<grid, detail::contents_threads, 0, stream>>>(view, scorer, aligned, anchors, scores, row_stride);
    check(cudaGetLastError(), "launch of score_contents");
  }

 private:
  struct memory : workspace_cut {
    const score_contents& op;
    memory(const score_contents& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t rows = std::size_t(op.rows_), values = rows * chunks::dim, blocks = std::size_t(op.blocks_);
    detail::anchor_partials partials{array<double>(values * blocks), array<index_t>(rows* blocks),
                                     array<float>(values)};
  };

  index_t rows_, blocks_ = 1;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
