// The order of the channels of segments' bases, for groups of several: those that are often chosen together become
// neighbours, as runtime/rotation.hpp says.
#pragma once

#include <algorithm>
#include <array>

#include "../../../../../../core/host/host_vector.hpp"
#include "../../../../../../runtime/rotation.hpp"
#include "../../../../device/kernel.cuh"
#include "../../../../device/warp.cuh"
#include "../encode_rows.cuh"
#include "../pack_vector.cuh"
#include "../segment_format.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Whole rows that become a segment: `count` rows of a view of one sequence, from `first` on.
template <class View>
struct segment_span {
  View view;
  index_t layer = 0, first = 0, count = 0;
};

namespace detail {

inline constexpr int sample_rows = 1024, sample_warps = 4, ordering_warps = 8, ordering_threads = ordering_warps * 32;
static_assert(sample_step(sample_rows) == 1 && sample_step(sample_rows + 1) == 2, "the host samples as many rows");
/// Segments that are ordered or searched together, at most.
inline constexpr int max_sampled = 4;

/// Rows of several segments in their bases, in fp32. A lane is a (segment, kind, kv_head), keys before values.
struct row_sample {
  float* rows = nullptr;      ///< [lanes, sample_rows, stride]
  float* energies = nullptr;  ///< [lanes, sample_rows], of the whole vectors
  int stride = 0, heads = 0;
  index_t counts[max_sampled] = {};  ///< rows of each segment

  TESSERA_HD int lane_of(int segment, bool keys, int head) const { return (segment * 2 + !keys) * heads + head; }
  TESSERA_HD bool is_of_keys(int lane) const { return lane / heads % 2 == 0; }
  TESSERA_HD index_t count(int lane) const { return counts[lane / (2 * heads)]; }
  TESSERA_HD float* row(int lane, int i) const { return rows + (offset_t(lane) * sample_rows + i) * stride; }
  TESSERA_HD float* energy(int lane) const { return energies + offset_t(lane) * sample_rows; }
};

/// Channels that are left and how many of them stay, for each share that is a candidate.
struct candidate_channels {
  int k_left = 0, v_left = 0, shares = 0;
  int k[strategy_shares.size()] = {}, v[strategy_shares.size()] = {};
  TESSERA_HD int left(bool keys) const { return keys ? k_left : v_left; }
  TESSERA_HD int stored(bool keys, int share) const { return keys ? k[share] : v[share]; }
};

template <class View, int D>
__device__ void sample_side(const View& view, bool keys, index_t head, index_t first, index_t step, index_t samples,
                            int channels, const float* basis, float* rows, float* energies, int stride) {
  using T = typename View::element_type;
  const int tile = (int(blockIdx.x) * sample_warps + int(threadIdx.x) / 32) * 32, lane = int(threadIdx.x) % 32;
  if (tile >= samples) return;
  const auto row_of = [&](int i) -> const T* {
    if (tile + i >= samples) return nullptr;
    const index_t slot = first + (tile + i) * step;
    return keys ? view.whole.key(0, head, slot) : view.whole.value(0, head, slot);
  };
  rotate_rows<T, D>(row_of, basis, channels, 0, 1, rows + offset_t(tile) * stride, stride);
  const T* own = row_of(lane);
  if (!own) return;
  float energy = 0;
  for (int d = 0; d < D; d += 8) {
    const uint4 eight = *reinterpret_cast<const uint4*>(own + d);
    const T* x = reinterpret_cast<const T*>(&eight);
#pragma unroll
    for (int i = 0; i < 8; ++i) energy += float(x[i]) * float(x[i]);
  }
  energies[tile + lane] = energy;
}

/// Rotates every `step`-th row of one segment. blockIdx: tiles, kv_head, keys or values.
template <class View>
__global__ void __launch_bounds__(sample_warps * 32)
    sample_rows_entry(const __grid_constant__ View view, index_t first, index_t step, int segment, int k_left,
                      int v_left, const float* k_bases, const float* v_bases, const __grid_constant__ row_sample to) {
  constexpr int D = View::k_dim, Dv = View::v_dim;
  const int head = int(blockIdx.y);
  const bool keys = blockIdx.z == 0;
  const int lane = to.lane_of(segment, keys, head), left = keys ? k_left : v_left;
  const float* basis = keys ? k_bases + offset_t(head) * left * D : v_bases + offset_t(head) * left * Dv;
  if (D == Dv || keys)
    sample_side<View, D>(view, keys, head, first, step, to.count(lane), left, basis, to.row(lane, 0), to.energy(lane),
                         to.stride);
  else
    sample_side<View, Dv>(view, keys, head, first, step, to.count(lane), left, basis, to.row(lane, 0), to.energy(lane),
                          to.stride);
}

/// Memory of the block that orders the channels of one lane.
template <int D>
struct ordering_memory {
  static constexpr int words = (D + 31) / 32, blocks = sample_rows / 32;
  std::uint32_t rows[sample_rows][words];  // what each row chooses, and the same by channel
  std::uint32_t channels[D][blocks];
  std::uint64_t of_warps[ordering_warps];
  ushort2 pairs[D / 2], sorted[D / 2];
  bool taken[D];
};

/// Matches items, whose number is even, greedily into pairs, as runtime/rotation.hpp does. together [items, items];
/// pairs are sorted by their lower item. By a block.
template <class Memory>
__device__ void match_pairs(const std::uint16_t* together, int items, Memory& memory) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  for (int i = int(threadIdx.x); i < items; i += ordering_threads) memory.taken[i] = false;
  __syncthreads();
  for (int made = 0; made < items / 2; ++made) {
    std::uint64_t best = 0;  // the likeness, then the lower items
    for (int a = warp; a < items; a += ordering_warps) {
      if (memory.taken[a]) continue;
      for (int b = a + 1 + lane; b < items; b += 32) {
        if (memory.taken[b]) continue;
        const int at = a * items + b;
        const std::uint64_t key = std::uint64_t(together[at] + 1u) << 32 | std::uint32_t(~at);
        best = key > best ? key : best;
      }
    }
    for (int step = 16; step > 0; step /= 2) {
      const std::uint64_t other = __shfl_xor_sync(~0u, best, step);
      best = other > best ? other : best;
    }
    if (lane == 0) memory.of_warps[warp] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (const std::uint64_t other : memory.of_warps) best = other > best ? other : best;
      const int at = int(~std::uint32_t(best)), a = at / items, b = at % items;
      memory.pairs[made] = make_ushort2(std::uint16_t(a), std::uint16_t(b));
      memory.taken[a] = memory.taken[b] = true;
    }
    __syncthreads();
  }
  for (int i = int(threadIdx.x); i < items / 2; i += ordering_threads) {
    int before = 0;
    for (int j = 0; j < items / 2; ++j) before += memory.pairs[j].x < memory.pairs[i].x;
    memory.sorted[before] = memory.pairs[i];
  }
  __syncthreads();
}

/// Orders of the channels of one lane for one share, for groups of 2 and of 4 where they divide the channels.
/// blockIdx: the lane, the share. counts: work, [lanes, shares, 2, most * most]; orders [lanes, shares, 2, most], for
/// groups of 2, then of 4; `most`: channels of the longer of keys and values.
template <int D>
__global__ void __launch_bounds__(ordering_threads)
    order_channels_entry(const __grid_constant__ row_sample sample, const __grid_constant__ candidate_channels of,
                         int most, std::uint16_t* counts, std::uint16_t* orders) {
  extern __shared__ uint4 shared_memory[];
  using memory_type = ordering_memory<D>;
  auto& memory = *reinterpret_cast<memory_type*>(shared_memory);
  const int lane_row = int(blockIdx.x), share = int(blockIdx.y), warp = int(threadIdx.x) / 32;
  const int lane = int(threadIdx.x) % 32;
  const bool keys = sample.is_of_keys(lane_row);
  const int n = of.left(keys), kept = of.stored(keys, share), count = int(sample.count(lane_row));
  if (kept < 1 || kept > n || n % 2 != 0) return;
  for (int i = warp; i < sample_rows; i += ordering_warps) {
    std::uint32_t chosen[memory_type::words] = {};
    if (i < count) choose_groups(sample.row(lane_row, i), n, 1, kept, chosen);
    if (lane < memory_type::words) {
      std::uint32_t own = 0;
#pragma unroll
      for (int j = 0; j < memory_type::words; ++j) own = j == lane ? chosen[j] : own;
      memory.rows[i][lane] = own;
    }
  }
  __syncthreads();
  for (int block = warp; block < memory_type::blocks; block += ordering_warps) {
    for (int c = 0; c < n; ++c) {
      const std::uint32_t column = __ballot_sync(~0u, (memory.rows[block * 32 + lane][c / 32] >> (c % 32)) & 1u);
      if (lane == 0) memory.channels[c][block] = column;
    }
  }
  __syncthreads();
  const offset_t number = offset_t(lane_row) * gridDim.y + share;
  std::uint16_t *together = counts + number * 2 * most * most, *of_pairs = together + most * most;
  std::uint16_t *twos = orders + number * 2 * most, *fours = twos + most;
  for (int i = int(threadIdx.x); i < n * n; i += ordering_threads) {
    int both = 0;
    for (int block = 0; block < memory_type::blocks; ++block)
      both += __popc(memory.channels[i / n][block] & memory.channels[i % n][block]);
    together[i] = std::uint16_t(both);
  }
  __syncthreads();
  match_pairs(together, n, memory);
  const int pairs = n / 2;
  for (int i = int(threadIdx.x); i < pairs; i += ordering_threads)
    twos[i * 2] = memory.sorted[i].x, twos[i * 2 + 1] = memory.sorted[i].y;
  if (n % 4 != 0) return;
  for (int i = int(threadIdx.x); i < pairs * pairs; i += ordering_threads) {
    const ushort2 a = memory.sorted[i / pairs], b = memory.sorted[i % pairs];
    of_pairs[i] = std::uint16_t(together[a.x * n + b.x] + together[a.x * n + b.y] + together[a.y * n + b.x] +
                                together[a.y * n + b.y]);
  }
  __syncthreads();
  match_pairs(of_pairs, pairs, memory);
  for (int i = int(threadIdx.x); i < pairs / 2; i += ordering_threads) {
    const int first = memory.sorted[i].x * 2, second = memory.sorted[i].y * 2;
    int own[4] = {twos[first], twos[first + 1], twos[second], twos[second + 1]};
    for (int x = 0; x < 3; ++x) {
      for (int y = 0; y < 3 - x; ++y) {
        const int low = (min)(own[y], own[y + 1]), high = (max)(own[y], own[y + 1]);
        own[y] = low, own[y + 1] = high;
      }
    }
    for (int j = 0; j < 4; ++j) fours[i * 4 + j] = std::uint16_t(own[j]);
  }
}

/// to [kv_heads, channels, dim] = rows of `from` in another order; a head's order lies `step` behind the last one's.
/// blockIdx: the channel, the kv_head.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    reorder_basis_entry(const float* from, const std::uint16_t* order, offset_t step, int dim, float* to) {
  const offset_t head = offset_t(blockIdx.y), begin = head * gridDim.x;
  const float* source = from + (begin + order[head * step + blockIdx.x]) * dim;
  for (int d = int(threadIdx.x); d < dim; d += Threads) to[(begin + blockIdx.x) * dim + d] = source[d];
}

}  // namespace detail

/// The channel orders of a few segments at once, for each of some shares of channels.
///
/// Memory   for each segment 1,024 rows of keys and values in fp32, and two counts for each two channels and share.
/// Cost     a launch for all segments and one for each; a copy and a launch for each basis that is put in order.
template <class View>
class channel_orders {
  static constexpr int D = View::k_dim, Dv = View::v_dim, largest = D > Dv ? D : Dv;
  using memory = detail::ordering_memory<largest>;

 public:
  channel_orders() = default;
  /// `limit`: segments at once, at most 4.
  channel_orders(const detail::candidate_channels& of, index_t kv_heads, index_t limit)
      : candidates_(of), heads_(kv_heads), max_channels_((std::max)(of.k_left, of.v_left)) {
    entry_ = {detail::order_channels_entry<largest>};
    entry_.require_shared(sizeof(memory), device_info::current(), "the search for strategies",
                          "do without strategy=searched, or use a device with more of it");
    sample_.heads = int(kv_heads), sample_.stride = ceil_div(max_channels_, 8) * 8;
    const std::size_t lanes = std::size_t(limit) * 2 * std::size_t(kv_heads), most = std::size_t(max_channels_);
    rows_ = device_buffer<float>::not_cleared(lanes * detail::sample_rows * std::size_t(sample_.stride));
    energies_ = device_buffer<float>::not_cleared(lanes * detail::sample_rows);
    counts_ = device_buffer<std::uint16_t>::not_cleared(lanes * std::size_t(of.shares) * 2 * most * most);
    orders_ = device_buffer<std::uint16_t>::not_cleared(lanes * std::size_t(of.shares) * 2 * most);
    unordered_ = device_buffer<float>::not_cleared(std::size_t(kv_heads) * most * largest);
  }

  /// Rows of a segment, the `i`-th, in its bases [kv_heads, channels, dim].
  void sample(index_t i, const segment_span<View>& of, const float* k_bases, const float* v_bases,
              cudaStream_t stream) {
    const index_t step = sample_step(of.count), count = ceil_div(of.count, step);
    sample_.counts[i] = count;
    launch(detail::sample_rows_entry<View>,
           {.blocks = dim3(unsigned((std::max)(1, ceil_div(count, detail::sample_warps * 32))), unsigned(heads_), 2),
            .threads = dim3(detail::sample_warps * 32)},
           stream, "launch of sample_rows", of.view, of.first, step, int(i), candidates_.k_left, candidates_.v_left,
           k_bases, v_bases, sample());
  }
  /// Finds the orders of `count` segments that have been sampled.
  void find(index_t count, cudaStream_t stream) {
    entry_.launch({.blocks = dim3(unsigned(count * 2 * heads_), unsigned(candidates_.shares)),
                   .threads = dim3(detail::ordering_threads),
                   .shared_bytes = sizeof(memory)},
                  stream, "launch of order_channels", sample(), candidates_, max_channels_, counts_.data(),
                  orders_.data());
  }
  /// Puts the bases of the i-th segment, keys' or values', in order for a share and a group of 2 or 4.
  void apply(index_t i, bool keys, index_t share, index_t group, float* bases, cudaStream_t stream) const {
    const int dim = keys ? D : Dv, n = candidates_.left(keys);
    check(cudaMemcpyAsync(unordered_.data(), bases, std::size_t(heads_) * std::size_t(n * dim) * sizeof(float),
                          cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
    const offset_t of_lane = offset_t(candidates_.shares) * 2 * max_channels_;
    launch(detail::reorder_basis_entry<64>, {.blocks = dim3(unsigned(n), unsigned(heads_)), .threads = dim3(64)},
           stream, "launch of reorder_basis", static_cast<const float*>(unordered_.data()),
           static_cast<const std::uint16_t*>(orders_.data() + sample_.lane_of(int(i), keys, 0) * of_lane +
                                             (share * 2 + (group == 4)) * max_channels_),
           of_lane, dim, bases);
  }

  detail::row_sample sample() const {
    detail::row_sample made = sample_;
    made.rows = rows_.data(), made.energies = energies_.data();
    return made;
  }
  const std::uint16_t* orders() const { return orders_.data(); }
  int max_channels() const { return max_channels_; }
  const detail::candidate_channels& candidates() const { return candidates_; }

 private:
  detail::candidate_channels candidates_;
  index_t heads_ = 0;
  int max_channels_ = 0;
  detail::row_sample sample_;
  device_kernel<detail::row_sample, detail::candidate_channels, int, std::uint16_t*, std::uint16_t*> entry_;
  device_buffer<float> rows_, energies_, unordered_;
  device_buffer<std::uint16_t> counts_, orders_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
