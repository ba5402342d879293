// The newest queries of every prompt on the device, for scorers that observe a window, and their log-sum-exps.
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

// What attention has made of the queries that a window remembers, on the device: their log-sum-exps.

namespace detail {

/// x: a row of the window, y: a query head. What attention says of other queries than the window's becomes NaN.
template <class T, int Threads>
__global__ void __launch_bounds__(Threads)
    take_lse_entry(rows_view<const T> window, rows_view<const T> attended, rows_view<float> lse, int dim, float* to) {
  const index_t i = blockIdx.x, head = blockIdx.y, rows = gridDim.x;
  const T *mine = window.row(0, i, head), *theirs = attended.row(0, attended.tokens - rows + i, head);
  bool differs = false;
  for (int d = threadIdx.x; d < dim; d += Threads) differs |= mine[d].bits != theirs[d].bits;
  differs = __syncthreads_or(differs);
  if (threadIdx.x == 0)
    to[i * index_t(gridDim.y) + head] = differs ? nanf("") : *lse.row(0, lse.tokens - rows + i, head);
}

}  // namespace detail

/// The log-sum-exps of a query_window's rows, from the attention of a prompt over all that a layer stores.
///
/// They stand for what a choice by these rows would compute: tokens that come later are hidden from the rows, and
/// whoever drops tokens makes the window forget its rows. Only the newest call of attention counts, and only where it
/// went over the whole window; queries that are not the window's own, bit for bit, leave NaN, which a scorer takes as
/// not given.
/// Memory   (places + 1) * window * q_heads floats.   Cost  one small launch a call of attention.
template <class T>
class window_lse {
 public:
  window_lse() = default;
  window_lse(index_t places, index_t window, index_t q_heads)
      : window_(window),
        heads_(q_heads),
        rows_(std::size_t(places), 0),
        lse_(std::size_t(places) * row()),
        written_(row()) {}

  /// Where attention of so many tokens may write what it makes of the newest: [1, min(tokens, window), q_heads]. Valid
  /// until the next call of attention.
  rows_view<float> room(index_t tokens) const {
    return nhd_rows(written_.data(), (std::min)(tokens, window_), heads_, 1);
  }
  /// A place's newest queries `attended` [1, tokens, q_heads, k_dim] have been attended; `lse`: of the last of them, as
  /// many as its window has at least.
  void take(std::size_t place, const query_window<T>& window, const rows_view<const T>& attended,
            const rows_view<float>& lse, cudaStream_t stream) {
    const rows_view<const T> mine = window.queries(place);
    rows_[place] = 0;
    if (mine.tokens == 0 || attended.tokens < mine.tokens) return;
    detail::take_lse_entry<T, 64>
        <<<dim3(unsigned(mine.tokens), unsigned(heads_)), 64, 0, stream>>>(mine, attended, lse, mine.dim, at(place));
    check(cudaGetLastError(), "launch of take_lse");
    rows_[place] = mine.tokens;
  }
  /// The window has other rows now.
  void forget(std::size_t place) { rows_[place] = 0; }

  /// Of a place whose window has `rows` rows, [1, rows, q_heads]; data null: not known.
  rows_view<const float> of(std::size_t place, index_t rows) const {
    if (rows == 0 || rows_[place] != rows) return {};
    return nhd_rows<const float>(at(place), rows, heads_, 1);
  }

  offset_t bytes_per_place() const { return offset_t(row() * sizeof(float)); }

 private:
  std::size_t row() const { return std::size_t(window_) * std::size_t(heads_); }
  float* at(std::size_t place) const { return lse_.data() + std::size_t(place) * row(); }

  index_t window_ = 0, heads_ = 0;
  host_vector<index_t> rows_;  // by place; 0: not known
  device_buffer<float> lse_, written_;
};

/// In place of it where every choice computes its own.
template <class T>
struct no_window_lse {
  no_window_lse(index_t, index_t, index_t) {}
  rows_view<float> room(index_t) const { return {}; }
  void forget(std::size_t) {}
  void take(std::size_t, const query_window<T>&, const rows_view<const T>&, const rows_view<float>&,
            cudaStream_t) const {}
  rows_view<const float> of(std::size_t, index_t) const { return {}; }
  offset_t bytes_per_place() const { return 0; }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
