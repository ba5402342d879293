// What attention has made of the queries that a window remembers, on the device: their log-sum-exps.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "query_window.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
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
