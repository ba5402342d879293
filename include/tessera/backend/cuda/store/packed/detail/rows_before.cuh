// The original rows of packed ones, on the host until a search has read them, and the losses of packing.
#pragma once

#include "../../../../../core/host/host_vector.hpp"
#include "../../../device/pinned.cuh"
#include "../unpack_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Rows of a layer that were packed together, in a block of the host: K [kv_heads, rows, k_dim], then V, as the cache
/// has them.
struct rows_before {
  row_blocks::block block;
  index_t rows = 0;
};

namespace detail {

/// Copies whole rows first, ... of head blockIdx.x to `to`, in the layout of `rows_before`.
template <class View, int Threads>
__global__ void __launch_bounds__(Threads)
    keep_rows_entry(const __grid_constant__ View whole, index_t first, index_t count, std::byte* to) {
  using T = typename View::element_type;
  constexpr int k_units = View::k_dim * int(sizeof(T)) / 16, v_units = View::v_dim * int(sizeof(T)) / 16;
  const index_t head = index_t(blockIdx.x);
  auto* k = reinterpret_cast<uint4*>(to) + offset_t(head) * count * k_units;
  auto* v =
      reinterpret_cast<uint4*>(to) + offset_t(whole.kv_heads) * count * k_units + offset_t(head) * count * v_units;
  for (index_t i = index_t(threadIdx.x); i < count * k_units; i += Threads)
    k[i] = reinterpret_cast<const uint4*>(whole.key(0, head, first + i / k_units))[i % k_units];
  for (index_t i = index_t(threadIdx.x); i < count * v_units; i += Threads)
    v[i] = reinterpret_cast<const uint4*>(whole.value(0, head, first + i / v_units))[i % v_units];
}

/// The share of a row's energy that packing has lost, by one warp: 1 - |stored|^2 / |given|^2, not below 0.
template <int D, class T>
__device__ float lost_share(const packed_vectors& from, index_t head, index_t row, const T* given) {
  const int lane = int(threadIdx.x) % 32;
  float all = 0, stays = 0;
  for (int d = lane; d < D; d += 32) {
    const float x = float(given[d]);
    all += x * x;
  }
  for (index_t place = lane; place < from.format.stored_channels; place += 32) {
    const float x = packed_value(from, head, row, place);
    stays += x * x;
  }
  all = warp_sum(all), stays = warp_sum(stays);
  return fmaxf(0.0f, all - stays) / (all + 1e-12f);
}

inline constexpr int loss_threads = 256, loss_rows = 256;

/// Writes the losses of `count` whole rows from `first` on to sums [chunks, kv_heads]. They are the rows from `held` on
/// of a segment. blockIdx: x 256 rows, y a head.
template <class View>
__global__ void __launch_bounds__(loss_threads)
    lose_rows_entry(const __grid_constant__ View view, index_t segment_index, index_t held, index_t first,
                    index_t count, float* sums) {
  __shared__ float of_warps[loss_threads / 32];
  const index_t head = index_t(blockIdx.y), begin = index_t(blockIdx.x) * loss_rows;
  const index_t end = (min)(begin + loss_rows, count);
  const int warp = int(threadIdx.x) / 32;
  const device_segment& segment = view.segment(0, segment_index);
  float sum = 0;
  for (index_t i = begin + warp; i < end; i += loss_threads / 32) {
    sum += 0.5f * (lost_share<View::k_dim>(segment.k, head, held + i, view.whole.key(0, head, first + i)) +
                   lost_share<View::v_dim>(segment.v, head, held + i, view.whole.value(0, head, first + i)));
  }
  if (threadIdx.x % 32 == 0) of_warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < loss_threads / 32; ++w) sum += of_warps[w];
    sums[offset_t(blockIdx.x) * gridDim.y + head] = sum;
  }
}
/// Adds the mean over heads of those sums to `total`, in one order; sets it where `fresh`.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    add_losses_entry(const float* sums, index_t chunks, index_t heads, bool fresh, double* total) {
  __shared__ double of_threads[Threads];
  double sum = 0;
  for (index_t i = index_t(threadIdx.x); i < chunks * heads; i += Threads) sum += double(sums[i]);
  of_threads[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int t = 1; t < Threads; ++t) sum += of_threads[t];
  *total = (fresh ? 0.0 : *total) + sum / double(heads);
}

}  // namespace detail

/// Copies `count` whole rows of a view of one sequence, from `first` on, to blocks of at most `each` rows. It does not
/// wait: the host may read them when a later `stream_mark` has been reached.
template <class View>
void keep_rows(const View& whole, index_t first, index_t count, const host_vector<rows_before>& to,
               cudaStream_t stream) {
  static_assert(View::is_raw, "tessera: rows that are packed on the device are raw");
  for (const rows_before& part : to) {
    const index_t rows = part.rows < count ? part.rows : count;
    detail::keep_rows_entry<View, 256>
        <<<unsigned(whole.kv_heads), 256, 0, stream>>>(whole, first, rows, const_cast<std::byte*>(part.block.get()));
    check(cudaGetLastError(), "launch of keep_rows");
    first += rows, count -= rows;
  }
}

/// Sums the losses of packed rows. A row's loss is the mean of K's and V's lost share of energy. Rows are summed, heads
/// averaged. It has scratch of its own.
template <class View>
class row_losses {
 public:
  row_losses(index_t kv_heads, index_t max_rows)
      : heads_(kv_heads), sums_(std::size_t(kv_heads) * std::size_t(ceil_div(max_rows, detail::loss_rows))) {}

  /// Sums the losses of `count` whole rows from `first` on, which became the rows from `held` on of segment `segment`
  /// of the view's one sequence. `total` lies in page-locked memory of the host. The segment's first rows set it; later
  /// rows are added.
  void run(const View& view, index_t segment, index_t held, index_t first, index_t count, double* total,
           cudaStream_t stream) const {
    if (count == 0) return;
    const index_t chunks = ceil_div(count, detail::loss_rows);
    detail::lose_rows_entry<View><<<dim3(unsigned(chunks), unsigned(heads_)), detail::loss_threads, 0, stream>>>(
        view, segment, held, first, count, sums_.data());
    check(cudaGetLastError(), "launch of lose_rows");
    detail::add_losses_entry<128><<<1, 128, 0, stream>>>(sums_.data(), chunks, heads_, held == 0, total);
    check(cudaGetLastError(), "launch of add_losses");
  }

 private:
  index_t heads_;
  device_buffer<float> sums_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
