// The newest queries of every prompt on the device, and their log-sum-exps, for scorers that observe a window.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../../../../core/views.hpp"
#include "../../device/copy.cuh"
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

/// Stores the last `window` queries of a turn's prompt for each of `entries`; an entry is a (layer, sequence).
/// Memory   entries * 2 * window * q_heads * k_dim elements.
template <class T>
class query_window {
 public:
  query_window() = default;
  query_window(index_t entries, index_t window, index_t q_heads, int k_dim)
      : window_(window),
        heads_(q_heads),
        dim_(k_dim),
        runs_(std::size_t(entries)),
        rows_(std::size_t(entries) * 2 * std::size_t(window) * std::size_t(q_heads) * std::size_t(k_dim)) {}

  /// An entry has memory for two windows. So when it is full and its newest rows are moved, source and target never
  /// overlap.
  void remember(std::size_t entry, const rows_view<const T>& q, cudaStream_t stream) {
    const index_t added = (std::min)(q.tokens, window_);
    if (added == 0) return;
    run& newest = runs_[entry];
    const index_t old = (std::min)(window_ - added, newest.count);
    T* memory = row_address(entry, 0);
    newest.first += newest.count - old;
    if (newest.first + old + added > 2 * window_) {
      check(cudaMemcpyAsync(memory, row_address(entry, newest.first), std::size_t(old * row()) * sizeof(T),
                            cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
      newest.first = 0;
    }
    detail::copy_queries_entry<T, 128><<<dim3(unsigned(added), unsigned(heads_)), 128, 0, stream>>>(
        q, q.tokens - added, dim_, row_address(entry, newest.first + old));
    check(cudaGetLastError(), "launch of copy_queries");
    newest.count = old + added;
  }

  /// [1, stored rows, q_heads, k_dim], oldest first.
  rows_view<const T> queries(std::size_t entry) const {
    const run& newest = runs_[entry];
    return nhd_rows<const T>(row_address(entry, newest.first), newest.count, heads_, dim_);
  }
  /// Copies the rows of one sequence to another one, in all layers.
  void copy(layer_major order, index_t id, index_t to, cudaStream_t stream) {
    const index_t layers = index_t(runs_.size()) / order.sequences;
    for (index_t layer = 0; layer < layers; ++layer) runs_[order.index({layer, to})] = runs_[order.index({layer, id})];
    const offset_t words = 2 * window_ * row() * offset_t(sizeof(T)) / 4;  // of an entry
    copy_in_layers(reinterpret_cast<std::uint32_t*>(rows_.data()), layers, order.sequences * words, id * words,
                   to * words, words, stream);
  }
  void forget(std::size_t entry) { runs_[entry] = {}; }

  offset_t bytes_per_entry() const { return 2 * window_ * row() * offset_t(sizeof(T)); }

 private:
  struct run {
    index_t first = 0, count = 0;
  };
  offset_t row() const { return offset_t(heads_) * dim_; }
  T* row_address(std::size_t entry, index_t first) const {
    return rows_.data() + (offset_t(entry) * 2 * window_ + first) * row();
  }

  index_t window_ = 0, heads_ = 0;
  int dim_ = 0;
  host_vector<run> runs_;
  device_buffer<T> rows_;
};

// The log-sum-exps of the queries that a window stores, from attention, on the device.

namespace detail {

/// blockIdx: x a row of the window, y a query head. Writes NaN where the attended query differs from the window's.
template <class T, int Threads>
__global__ void __launch_bounds__(Threads)
    store_lse_entry(rows_view<const T> window, rows_view<const T> attended, rows_view<float> lse, int dim, float* to) {
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
/// They equal the log-sum-exps that a choice would compute from these rows: later tokens are hidden from the rows, and
/// the window forgets its rows when tokens are dropped. Only the newest call of attention counts, and only where it
/// covered the whole window. Queries that differ from the window's in any bit get NaN, which a scorer treats as not
/// given.
/// Memory   (entries + 1) * window * q_heads floats.   Cost  one small launch a call of attention.
template <class T>
class window_lse {
 public:
  window_lse() = default;
  window_lse(index_t entries, index_t window, index_t q_heads)
      : window_(window),
        heads_(q_heads),
        rows_(std::size_t(entries), 0),
        lse_(std::size_t(entries) * row()),
        written_(row()) {}

  /// Memory to which attention of `tokens` tokens may write the log-sum-exps of the newest queries: [1, min(tokens,
  /// window), q_heads]. Valid until the next call of attention.
  rows_view<float> output(index_t tokens) const {
    return nhd_rows(written_.data(), (std::min)(tokens, window_), heads_, 1);
  }
  /// Stores the log-sum-exps of an entry's window. `attended` [1, tokens, q_heads, k_dim]: the newest queries of
  /// attention. `lse`: the log-sum-exps of the last of these queries, at least as many as the window has rows.
  void store(std::size_t entry, const query_window<T>& window, const rows_view<const T>& attended,
             const rows_view<float>& lse, cudaStream_t stream) {
    const rows_view<const T> mine = window.queries(entry);
    rows_[entry] = 0;
    if (mine.tokens == 0 || attended.tokens < mine.tokens) return;
    detail::store_lse_entry<T, 64><<<dim3(unsigned(mine.tokens), unsigned(heads_)), 64, 0, stream>>>(
        mine, attended, lse, mine.dim, row_address(entry));
    check(cudaGetLastError(), "launch of store_lse");
    rows_[entry] = mine.tokens;
  }
  /// Called when the window has changed.
  void forget(std::size_t entry) { rows_[entry] = 0; }
  void copy(layer_major order, index_t id, index_t to, cudaStream_t stream) {
    const index_t layers = index_t(rows_.size()) / order.sequences;
    for (index_t layer = 0; layer < layers; ++layer) rows_[order.index({layer, to})] = rows_[order.index({layer, id})];
    const offset_t count = offset_t(row());
    copy_in_layers(lse_.data(), layers, order.sequences * count, id * count, to * count, count, stream);
  }

  /// The log-sum-exps of an entry whose window has `rows` rows, [1, rows, q_heads]; data null: not known.
  rows_view<const float> lse(std::size_t entry, index_t rows) const {
    if (rows == 0 || rows_[entry] != rows) return {};
    return nhd_rows<const float>(row_address(entry), rows, heads_, 1);
  }

  offset_t bytes_per_entry() const { return offset_t(row() * sizeof(float)); }

 private:
  std::size_t row() const { return std::size_t(window_) * std::size_t(heads_); }
  float* row_address(std::size_t entry) const { return lse_.data() + std::size_t(entry) * row(); }

  index_t window_ = 0, heads_ = 0;
  host_vector<index_t> rows_;  // by entry; 0: not known
  device_buffer<float> lse_, written_;
};

/// Used instead where every choice computes log-sum-exps itself.
template <class T>
struct no_window_lse {
  no_window_lse(index_t, index_t, index_t) {}
  rows_view<float> output(index_t) const { return {}; }
  void forget(std::size_t) {}
  void copy(layer_major, index_t, index_t, cudaStream_t) const {}
  void store(std::size_t, const query_window<T>&, const rows_view<const T>&, const rows_view<float>&,
             cudaStream_t) const {}
  rows_view<const float> lse(std::size_t, index_t) const { return {}; }
  offset_t bytes_per_entry() const { return 0; }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
