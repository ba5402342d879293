// The search for the strategies of segments on the device: what each candidate loses on a sample of the rows, and how
// keys differ within blocks; see runtime/strategy.hpp.
#pragma once

#include <algorithm>
#include <numeric>

#include "../../../../../../core/host/host_vector.hpp"
#include "../../../../../../runtime/strategy.hpp"
#include "../../../../device/kernel.cuh"
#include "../../../../device/pinned.cuh"
#include "../../../../device/warp.cuh"
#include "channel_orders.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int candidates = int(strategy_shares.size() * strategy_groups.size());
inline constexpr int search_warps = 8, search_threads = search_warps * 32, search_chunk = 128,
                     search_chunks = sample_rows / search_chunk;
inline constexpr int spread_threads = 128, spread_rows = 512;
// The kernels below are written for these candidates.
static_assert(strategy_blocks == std::array<index_t, 3>{16, 8, 4} &&
              strategy_groups == std::array<index_t, 3>{4, 2, 1});

/// Losses of one lane's sample, by chunk: sums [lanes, search_chunks, candidates]. A warp a row. blockIdx: the chunk,
/// the lane.
template <int D>
__global__ void __launch_bounds__(search_threads)
    candidate_losses_entry(const __grid_constant__ row_sample sample, const __grid_constant__ candidate_channels of,
                           const std::uint16_t* orders, int most, double* sums) {
  constexpr int words = (D + 31) / 32;
  __shared__ float reordered[search_warps][D];
  __shared__ double of_warps[search_warps][candidates];
  const int lane_row = int(blockIdx.y), warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const bool keys = sample.is_of_keys(lane_row);
  const int n = of.left(keys), count = int(sample.count(lane_row)), begin = int(blockIdx.x) * search_chunk;
  if (lane < candidates) of_warps[warp][lane] = 0;
  __syncwarp();
  for (int i = begin + warp; i < (min)(count, begin + search_chunk); i += search_warps) {
    const float* row = sample.row(lane_row, i);
    const float energy = sample.energy(lane_row)[i];
#pragma unroll 1
    for (int candidate = 0; candidate < candidates; ++candidate) {
      const int share = candidate / 3, group = 4 >> (candidate % 3), kept = of.stored(keys, share);
      if (!fits_candidate(kept, group, n)) continue;
      const std::uint16_t* order = orders + ((offset_t(lane_row) * of.shares + share) * 2 + (group == 4)) * most;
      for (int c = lane; c < n; c += 32) reordered[warp][c] = row[group == 1 ? c : int(order[c])];
      __syncwarp();
      std::uint32_t chosen[words];
      choose_groups(reordered[warp], n / group, group, kept / group, chosen);
      float stays = 0;
#pragma unroll
      for (int j = 0; j < words; ++j) {
        if (!(chosen[j] >> lane & 1u)) continue;
        const float* x = reordered[warp] + (j * 32 + lane) * group;
        for (int c = 0; c < group; ++c) stays += x[c] * x[c];
      }
      stays = warp_sum(stays);
      if (lane == 0) of_warps[warp][candidate] += double(fmaxf(0.0f, energy - stays) / (energy + 1e-12f));
      __syncwarp();
    }
  }
  __syncthreads();
  if (threadIdx.x >= candidates) return;
  double sum = 0;
  for (const auto& of_warp : of_warps) sum += of_warp[threadIdx.x];
  sums[(offset_t(lane_row) * search_chunks + blockIdx.x) * candidates + threadIdx.x] = sum;
}

/// How the keys of a piece of the rows of one head differ. inside [kv_heads, pieces, 4]: sums of squared distances from
/// the means of blocks of 16, 8 and 4 rows, and the sum of squares; totals [kv_heads, pieces, k_dim]: sums of rows.
/// blockIdx: the piece, the kv_head. Differences are of fp32 sums of at most 16 rows, sums of them of double.
template <class View>
__global__ void __launch_bounds__(spread_threads)
    key_spreads_entry(const __grid_constant__ View view, index_t first, index_t count, double* inside, double* totals) {
  constexpr int D = View::k_dim;
  __shared__ double of_threads[spread_threads][4];
  const index_t head = index_t(blockIdx.y), begin = index_t(blockIdx.x) * spread_rows;
  const index_t end = (min)(begin + spread_rows, count), piece = index_t(head * gridDim.x + blockIdx.x);
  double sums[4] = {};
  for (int d = int(threadIdx.x); d < D; d += spread_threads) {
    double total = 0;
    for (index_t block = begin; block < end; block += 16) {
      float x[16], square = 0, of_block[3] = {};
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = block + i < end ? float(view.whole.key(0, head, first + block + i)[d]) : 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) square += x[i] * x[i];
      float of_16 = 0;
#pragma unroll
      for (int eight = 0; eight < 16; eight += 8) {
        float of_8 = 0;
#pragma unroll
        for (int four = eight; four < eight + 8; four += 4) {
          const float of_4 = x[four] + x[four + 1] + x[four + 2] + x[four + 3];
          const int rows = int((min)(index_t(4), end - block - four));
          if (rows > 0) of_block[2] += of_4 * of_4 / float(rows);
          of_8 += of_4;
        }
        const int rows = int((min)(index_t(8), end - block - eight));
        if (rows > 0) of_block[1] += of_8 * of_8 / float(rows);
        of_16 += of_8;
      }
      of_block[0] = of_16 * of_16 / float((min)(index_t(16), end - block));
#pragma unroll
      for (int b = 0; b < 3; ++b) sums[b] += double(square - of_block[b]);
      sums[3] += double(square), total += double(of_16);
    }
    totals[offset_t(piece) * D + d] = total;
  }
  for (int i = 0; i < 4; ++i) of_threads[threadIdx.x][i] = sums[i];
  __syncthreads();
  if (threadIdx.x >= 4) return;
  double sum = 0;
  for (const auto& of_thread : of_threads) sum += of_thread[threadIdx.x];
  inside[offset_t(piece) * 4 + threadIdx.x] = sum;
}

/// What a search knows of one segment.
struct search_sums {
  double losses[candidates];  // of all sampled rows of keys and of values
  double inside[3], outside;
};

/// Adds what the blocks have found, in one order, by one block. losses [lanes, search_chunks, candidates].
template <int Threads>
__global__ void __launch_bounds__(Threads)
    add_search_entry(const double* losses, int lanes, const double* inside, const double* totals, index_t heads,
                     index_t pieces, int dim, double rows, search_sums* to) {
  __shared__ double of_threads[Threads];
  const int thread = int(threadIdx.x);
  if (thread < candidates) {
    double sum = 0;
    for (int i = 0; i < lanes * search_chunks; ++i) sum += losses[i * candidates + thread];
    to->losses[thread] = sum;
  } else if (thread >= 32 && thread < 35) {
    double sum = 0;
    for (index_t i = 0; i < heads * pieces; ++i) sum += inside[offset_t(i) * 4 + thread - 32];
    to->inside[thread - 32] = sum;
  }
  double sum = 0;
  for (index_t i = thread; i < heads * pieces; i += Threads) sum += inside[offset_t(i) * 4 + 3];
  for (index_t h = 0; h < heads; ++h) {
    for (int d = thread; d < dim; d += Threads) {
      double total = 0;
      for (index_t piece = 0; piece < pieces; ++piece) total += totals[(offset_t(h) * pieces + piece) * dim + d];
      sum -= total * total / rows;
    }
  }
  of_threads[thread] = sum;
  __syncthreads();
  if (thread != 0) return;
  for (int t = 1; t < Threads; ++t) sum += of_threads[t];
  to->outside = sum;
}

}  // namespace detail

/// What a search may choose, and when.
struct strategy_limits {
  bool searches = false;
  float loss = 0, spread = 0;
  index_t unit = 0;  ///< blocks divide it
  detail::candidate_channels candidates{};
};

/// Which candidates a layout's search has.
template <packing_layout Layout>
strategy_limits limits_of(const Layout& layout) {
  const auto& rows = layout.rows;
  strategy_limits made;
  made.candidates = {int(rows.key_format().channels),
                     int(rows.value_format().channels),
                     1,
                     {int(rows.key_format().stored_channels)},
                     {int(rows.value_format().stored_channels)}};
  if constexpr (searching_layout<Layout>) {
    if (!rows.searches()) return made;
    made.searches = true;
    made.loss = rows.strategy.channel_loss, made.spread = rows.strategy.block_spread;
    made.unit = rows.searched_block_unit();
    made.candidates.shares = int(strategy_shares.size());
    for (std::size_t s = 0; s < strategy_shares.size(); ++s) {
      const auto candidate = rows.by_strategy({strategy_shares[s], 1, strategy_blocks.back()});
      made.candidates.k[s] = int(candidate.key_format().stored_channels);
      made.candidates.v[s] = int(candidate.value_format().stored_channels);
    }
  }
  return made;
}

/// Measures the candidate strategies of segments whose sample and orders are in a `channel_orders`.
///
/// Cost     two launches a segment and one for all; the host waits for the device. Same input, same bits.
template <class View>
class find_strategies {
  static constexpr int D = View::k_dim, Dv = View::v_dim, largest = D > Dv ? D : Dv;

 public:
  find_strategies() = default;
  /// For `limit` segments of at most `rows` rows at once.
  find_strategies(index_t kv_heads, index_t limit, index_t rows) : heads_(kv_heads), found_(std::size_t(limit)) {
    const std::size_t lanes = std::size_t(limit) * 2 * std::size_t(kv_heads);
    losses_ = device_buffer<double>::not_cleared(lanes * detail::search_chunks * detail::candidates);
    const std::size_t pieces = std::size_t(kv_heads) * std::size_t((std::max)(1, ceil_div(rows, detail::spread_rows)));
    inside_ = device_buffer<double>::not_cleared(pieces * 4);
    totals_ = device_buffer<double>::not_cleared(pieces * D);
  }

  /// Measures of each of `segments`. Waits for the device.
  host_vector<strategy_measures> run(const host_vector<segment_span<View>>& segments,
                                     const channel_orders<View>& orders, cudaStream_t stream) const {
    const detail::row_sample sample = orders.sample();
    const int count = int(segments.size()), of_segment = 2 * int(heads_);
    launch(detail::candidate_losses_entry<largest>,
           {.blocks = dim3(unsigned(detail::search_chunks), unsigned(count * of_segment)),
            .threads = dim3(detail::search_threads)},
           stream, "launch of candidate_losses", sample, orders.candidates(), orders.orders(), orders.max_channels(),
           losses_.data());
    for (int i = 0; i < count; ++i) {
      const auto& of = segments[std::size_t(i)];
      const index_t pieces = (std::max)(1, ceil_div(of.count, detail::spread_rows));
      launch(detail::key_spreads_entry<View>,
             {.blocks = dim3(unsigned(pieces), unsigned(heads_)), .threads = dim3(detail::spread_threads)}, stream,
             "launch of key_spreads", of.view, of.first, of.count, inside_.data(), totals_.data());
      launch(detail::add_search_entry<256>, {.blocks = dim3(1), .threads = dim3(256)}, stream, "launch of add_search",
             static_cast<const double*>(losses_.data()) +
                 offset_t(i) * of_segment * detail::search_chunks * detail::candidates,
             of_segment, static_cast<const double*>(inside_.data()), static_cast<const double*>(totals_.data()), heads_,
             pieces, D, double(of.count), found_.data() + i);
    }
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    host_vector<strategy_measures> all;
    for (int i = 0; i < count; ++i)
      all.push_back(measures_of(found_.data()[i], double(of_segment) * sample.counts[i], orders.candidates()));
    return all;
  }

 private:
  static strategy_measures measures_of(const detail::search_sums& sums, double rows,
                                       const detail::candidate_channels& of) {
    strategy_measures measures{{}, {sums.inside[0], sums.inside[1], sums.inside[2]}, sums.outside};
    for (std::size_t s = 0; s < strategy_shares.size(); ++s) {
      for (std::size_t g = 0; g < strategy_groups.size(); ++g) {
        const index_t group = strategy_groups[g];
        const bool fits = fits_candidate(of.k[s], group, of.k_left) && fits_candidate(of.v[s], group, of.v_left);
        const double sum = sums.losses[s * strategy_groups.size() + g];
        measures.losses[s][g] = !fits ? double(infinity) : rows > 0 ? sum / rows : 0;
      }
    }
    return measures;
  }

  index_t heads_ = 0;
  pinned_buffer<detail::search_sums> found_;
  device_buffer<double> losses_, inside_, totals_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
