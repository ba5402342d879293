// The bases of several segments at once, of the rows that they will hold.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../runtime/rotation.hpp"
#include "../../../device/pinned.cuh"
#include "../../../device/tuning.cuh"
#include "find_bases.cuh"
#include "pack_vector.cuh"
#include "segment_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// The order of a basis' channels for groups of several: those that are often chosen together become neighbours.

namespace detail {

inline constexpr int ordering_warps = 8, ordering_threads = ordering_warps * 32, ordering_samples = 1024;

/// Memory of a block: rows that its warps rotate, what each sampled row chooses, and the same by channel.
template <int D>
struct ordering_memory {
  static constexpr int words = (D + 31) / 32, blocks = ordering_samples / 32;
  float given[ordering_warps][D], turned[ordering_warps][D];
  std::uint32_t rows[ordering_samples][words];
  std::uint32_t channels[D][blocks];
};

/// counts [kv_heads, channels, channels] = in how many of up to 1,024 rows both channels are among the `kept` with most
/// energy. blockIdx: the kv_head. A warp rotates and chooses a row at a time.
template <class Whole, int D>
__global__ void __launch_bounds__(ordering_threads)
    count_pairs_entry(const __grid_constant__ Whole whole, bool keys, index_t first, index_t count,
                      packed_format format, const float* bases, std::uint16_t* counts) {
  extern __shared__ uint4 shared_memory[];
  auto& memory = *reinterpret_cast<ordering_memory<D>*>(shared_memory);
  constexpr int words = ordering_memory<D>::words, blocks = ordering_memory<D>::blocks;
  const index_t head = index_t(blockIdx.x), step = (max)(1, ceil_div(count, ordering_samples));
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, channels = int(format.channels);
  const float* basis = bases + offset_t(head) * channels * D;
  const int samples = int(ceil_div(count, step));
  for (int sample = warp; sample < ordering_samples; sample += ordering_warps) {
    std::uint32_t chosen[max_group_words] = {};
    if (sample < samples) {
      const index_t slot = first + sample * step;
      const auto* row = keys ? whole.key(0, head, slot) : whole.value(0, head, slot);
      for (int d = lane; d < D; d += 32) memory.given[warp][d] = float(row[d]);
      __syncwarp();
      for (int c = lane; c < channels; c += 32) {
        float sum = 0;
        for (int d = 0; d < D; ++d) sum += basis[offset_t(c) * D + d] * memory.given[warp][d];
        memory.turned[warp][c] = sum;
      }
      __syncwarp();
      choose_groups(memory.turned[warp], channels, 1, int(format.stored_channels), chosen);
    }
    if (lane < words) {
      std::uint32_t own = 0;
#pragma unroll
      for (int j = 0; j < max_group_words; ++j) own = j == lane ? chosen[j] : own;
      memory.rows[sample][lane] = own;
    }
    __syncwarp();
  }
  __syncthreads();
  for (int block = warp; block < blocks; block += ordering_warps) {
    for (int c = 0; c < channels; ++c) {
      const std::uint32_t column = __ballot_sync(~0u, (memory.rows[block * 32 + lane][c / 32] >> (c % 32)) & 1u);
      if (lane == 0) memory.channels[c][block] = column;
    }
  }
  __syncthreads();
  std::uint16_t* to = counts + offset_t(head) * channels * channels;
  for (int i = int(threadIdx.x); i < channels * channels; i += ordering_threads) {
    int both = 0;
    for (int block = 0; block < blocks; ++block) {
      both += __popc(memory.channels[i / channels][block] & memory.channels[i % channels][block]);
    }
    to[i] = std::uint16_t(both);
  }
}

/// to [kv_heads, channels, dim] = rows of `from` in another order.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    order_channels_entry(const float* from, const index_t* order, int dim, float* to) {
  const offset_t row = offset_t(blockIdx.y) * gridDim.x + blockIdx.x;
  const float* source = from + (offset_t(blockIdx.y) * gridDim.x + order[row]) * dim;
  for (int d = int(threadIdx.x); d < dim; d += Threads) to[row * dim + d] = source[d];
}

}  // namespace detail

/// Orders the channels of bases of one kind, K or V, for `format.group`: as cpu's segments do, see
/// runtime/rotation.hpp. Of group 1 nothing.
/// Cost     two launches a segment; the host matches pairs and waits for the device.
template <class View, int D>
class order_bases {
  using memory = detail::ordering_memory<D>;
  using whole = typename View::whole_type;

 public:
  order_bases(bool keys, const packed_format& format, index_t kv_heads)
      : keys_(keys), format_(format), heads_(kv_heads) {
    if (format.group == 1) return;
    entry_ = detail::count_pairs_entry<whole, D>;
    check(cudaFuncSetAttribute(entry_, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(memory))),
          "cudaFuncSetAttribute");
    const std::size_t channels = std::size_t(kv_heads) * std::size_t(format.channels);
    counts_ = device_buffer<std::uint16_t>(channels * std::size_t(format.channels));
    order_ = device_buffer<index_t>(channels);
    unordered_ = device_buffer<float>(channels * D);
  }

  /// bases [kv_heads, channels, dim], of whole rows `first`, ... of one sequence.
  void run(const View& view, index_t first, index_t count, float* bases, cudaStream_t stream) const {
    if (format_.group == 1) return;
    const index_t n = format_.channels;
    entry_<<<unsigned(heads_), detail::ordering_threads, sizeof(memory), stream>>>(view.whole, keys_, first, count,
                                                                                   format_, bases, counts_.data());
    check(cudaGetLastError(), "launch of count_pairs");
    host_vector<std::uint16_t> counts(counts_.size());
    check(cudaMemcpyAsync(counts.data(), counts_.data(), counts_.bytes(), cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    host_vector<index_t> orders;
    for (index_t h = 0; h < heads_; ++h) {
      const auto begin = counts.begin() + offset_t(h) * n * n;
      const host_vector<double> together(begin, begin + offset_t(n) * n);
      const host_vector<index_t> order = group_channels(together, n, format_.group);
      orders.insert(orders.end(), order.begin(), order.end());
    }
    check(cudaMemcpyAsync(order_.data(), orders.data(), order_.bytes(), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    check(cudaMemcpyAsync(unordered_.data(), bases, unordered_.bytes(), cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
    detail::order_channels_entry<64>
        <<<dim3(unsigned(n), unsigned(heads_)), 64, 0, stream>>>(unordered_.data(), order_.data(), D, bases);
    check(cudaGetLastError(), "launch of order_channels");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // `orders` is the host's
  }

 private:
  bool keys_;
  packed_format format_;
  index_t heads_;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  void (*entry_)(whole, bool, index_t, index_t, packed_format, const float*, std::uint16_t*) = nullptr;
  device_buffer<std::uint16_t> counts_;
  device_buffer<index_t> order_;
  device_buffer<float> unordered_;
};

/// Whole rows that become a segment: `count` rows of a view of one sequence, from `first` on.
template <class View>
struct segment_span {
  View view;
  index_t layer = 0, first = 0, count = 0;
};

/// Finds bases of many segments, one launch for up to 64 of them: a block makes one basis and takes milliseconds.
///
/// Memory   the moments of 64 segments, and the pieces of one.
/// Errors   a second moment with NaN or infinity: tessera::error. The host waits for the device to know.
template <class View>
class find_segment_bases {
  using moments = second_moments<View>;
  static constexpr index_t together = 64;

 public:
  /// For at most `limit` segments at once, each of at most `rows` rows.
  find_segment_bases(const segment_formats& formats, index_t kv_heads, index_t limit, index_t rows,
                     const device_info& device)
      : formats_(formats),
        heads_(kv_heads),
        together_((std::min)(together, limit)),
        keys_(View::k_dim, device),
        values_(View::v_dim, device),
        order_keys_(true, formats.k, kv_heads),
        order_values_(false, formats.v, kv_heads),
        moments_(std::size_t(together_ - 1) * std::size_t(kv_heads) * moments::lane_floats * sizeof(float) +
                 moments::workspace_bytes(kv_heads, rows)),
        work_((std::max)(keys_.workspace_bytes(together_ * kv_heads), values_.workspace_bytes(together_ * kv_heads))),
        not_finite_(2 * std::size_t(together_) * std::size_t(kv_heads)) {}

  /// Floats that the bases of one segment take: those of keys, then of values, each by head.
  offset_t segment_floats() const { return heads_ * (formats_.k_basis() + formats_.v_basis()); }

  /// bases [segments, segment_floats()]. Waits for the device.
  void run(const host_vector<segment_span<View>>& segments, float* bases, cudaStream_t stream) {
    start(segments, bases, stream);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const auto [wrong, lane] = first_wrong();
    if (!wrong) return;
    fail("the second moment of " + std::string(wrong) + " of layer " +
             std::to_string(segments[std::size_t(lane / heads_)].layer) + ", kv_head " + std::to_string(lane % heads_),
         "NaN or infinity", "finite numbers", "keep NaN and infinity out of keys and values, or scale them");
  }
  /// The same, but only groups of several channels wait for the device. When the device is done, `are_finite` says
  /// whether all bases are valid.
  void start(const host_vector<segment_span<View>>& segments, float* bases, cudaStream_t stream) {
    lanes_ = segments.size() * std::size_t(heads_);
    if (wrong_.size() < 2 * lanes_) wrong_ = pinned_buffer<index_t>(2 * lanes_);
    for (std::size_t first = 0; first < segments.size(); first += std::size_t(together_)) {
      const std::size_t count = (std::min)(segments.size() - first, std::size_t(together_));
      run_some({segments.begin() + offset_t(first), segments.begin() + offset_t(first + count)},
               bases + offset_t(first) * segment_floats(), wrong_.data() + 2 * first * std::size_t(heads_), stream);
    }
  }
  bool are_finite() const { return !first_wrong().first; }

 private:
  /// Keys or values without a finite second moment, and their lane; null: there are none.
  std::pair<const char*, std::size_t> first_wrong() const {
    const std::size_t group = std::size_t(together_) * std::size_t(heads_);
    for (std::size_t first = 0; first < lanes_; first += group) {
      const std::size_t count = (std::min)(lanes_ - first, group);
      const index_t* wrong = wrong_.data() + 2 * first;
      for (std::size_t i = 0; i < 2 * count; ++i) {
        if (wrong[i] != 0) return {i < count ? "keys" : "values", first + i % count};
      }
    }
    return {nullptr, 0};
  }
  void run_some(const host_vector<segment_span<View>>& some, float* bases, index_t* wrong, cudaStream_t stream) const {
    const index_t count = index_t(some.size()), lanes = count * heads_;
    const offset_t step = offset_t(moments::lane_floats), of_segment = heads_ * step;
    // The memory behind a segment's result is scratch: the next result begins there.
    for (index_t i = 0; i < count; ++i) {
      const auto& rows = some[std::size_t(i)];
      moments{}.run(rows.view, rows.first, rows.count, moments_.data() + i * of_segment * offset_t(sizeof(float)),
                    stream);
    }
    const auto* sums = reinterpret_cast<const float*>(moments_.data());
    keys_.run(sums, step, lanes, formats_.k.channels, bases, not_finite_.data(), work_.data(), stream,
              {heads_, segment_floats()});
    values_.run(sums + View::k_dim * View::k_dim, step, lanes, formats_.v.channels, bases + heads_ * formats_.k_basis(),
                not_finite_.data() + lanes, work_.data(), stream, {heads_, segment_floats()});
    check(cudaMemcpyAsync(wrong, not_finite_.data(), 2 * std::size_t(lanes) * sizeof(index_t), cudaMemcpyDeviceToHost,
                          stream),
          "cudaMemcpyAsync");
    for (index_t i = 0; i < count; ++i) {
      const auto& rows = some[std::size_t(i)];
      float* segment = bases + i * segment_floats();
      order_keys_.run(rows.view, rows.first, rows.count, segment, stream);
      order_values_.run(rows.view, rows.first, rows.count, segment + heads_ * formats_.k_basis(), stream);
    }
  }

  segment_formats formats_;
  index_t heads_, together_;
  find_bases keys_, values_;
  order_bases<View, View::k_dim> order_keys_;
  order_bases<View, View::v_dim> order_values_;
  device_buffer<unsigned char> moments_, work_;
  device_buffer<index_t> not_finite_;
  pinned_buffer<index_t> wrong_;  // not_finite_ of each of `together_` segments, one behind the other
  std::size_t lanes_ = 0;         // of the newest call
};

}  // namespace cuda
TESSERA_NAMESPACE_END
