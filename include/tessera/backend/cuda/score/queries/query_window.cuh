// The newest queries of every prompt, on the device, for scorers that observe a window.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/views.hpp"
#include "../../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Rows first, first + 1, ... of one sequence's queries as [tokens, heads, dim].
template <class T, int Threads>
__global__ void __launch_bounds__(Threads) copy_queries_entry(rows_view<const T> q, index_t first, int dim, T* to) {
  const T* from = q.row(0, first + index_t(blockIdx.x), index_t(blockIdx.y));
  T* row = to + (offset_t(blockIdx.x) * gridDim.y + blockIdx.y) * dim;
  for (int d = threadIdx.x; d < dim; d += Threads) row[d] = from[d];
}

}  // namespace detail

/// Remembers the last `window` queries of a turn's prompt for each of `places` (layer, sequence).
/// Memory   places * 2 * window * q_heads * k_dim elements.
template <class T>
class query_window {
 public:
  query_window() = default;
  query_window(index_t places, index_t window, index_t q_heads, int k_dim)
      : window_(window),
        heads_(q_heads),
        dim_(k_dim),
        held_(std::size_t(places)),
        rows_(std::size_t(places) * 2 * std::size_t(window) * std::size_t(q_heads) * std::size_t(k_dim)) {}

  /// Two windows a place: what stays when it is full never overlaps where it goes.
  void remember(std::size_t place, const rows_view<const T>& q, cudaStream_t stream) {
    const index_t fresh = (std::min)(q.tokens, window_);
    if (fresh == 0) return;
    run& here = held_[place];
    const index_t old = (std::min)(window_ - fresh, here.count);
    T* memory = at(place, 0);
    here.first += here.count - old;
    if (here.first + old + fresh > 2 * window_) {
      check(cudaMemcpyAsync(memory, at(place, here.first), std::size_t(old * row()) * sizeof(T),
                            cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
      here.first = 0;
    }
    detail::copy_queries_entry<T, 128><<<dim3(unsigned(fresh), unsigned(heads_)), 128, 0, stream>>>(
        q, q.tokens - fresh, dim_, at(place, here.first + old));
    check(cudaGetLastError(), "launch of copy_queries");
    here.count = old + fresh;
  }

  /// [1, remembered, q_heads, k_dim], oldest first.
  rows_view<const T> queries(std::size_t place) const {
    const run& here = held_[place];
    return nhd_rows<const T>(at(place, here.first), here.count, heads_, dim_);
  }
  /// Between turns there is nothing.
  void copy(index_t, index_t, cudaStream_t) const {}
  void forget(std::size_t place) { held_[place] = {}; }

  offset_t bytes_per_place() const { return 2 * window_ * row() * offset_t(sizeof(T)); }

 private:
  struct run {
    index_t first = 0, count = 0;
  };
  offset_t row() const { return offset_t(heads_) * dim_; }
  T* at(std::size_t place, index_t first) const {
    return rows_.data() + (offset_t(place) * 2 * window_ + first) * row();
  }

  index_t window_ = 0, heads_ = 0;
  int dim_ = 0;
  host_vector<run> held_;
  device_buffer<T> rows_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
