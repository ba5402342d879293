// The newest queries of every conversation, from prompts and steps, on the device: for scorers whose window moves
// along.
#pragma once

#include <algorithm>

#include "../../../../core/sequence_layer.hpp"
#include "../../../../core/views.hpp"
#include "../../device/kernel.cuh"
#include "../../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// A batch's newest queries, oldest first; all on the device.
template <class T>
struct newest_rows {
  rows_view<const T> q;           ///< [sequences, window, q_heads, k_dim]
  const index_t* valid;           ///< [sequences], how many rows of the window are valid, from the first on
  const index_t* first_position;  ///< [sequences], position of the first row
  rows_view<const float> lse{};   ///< [sequences, window, q_heads], as attention gives it; data null: not known
};

namespace detail {

/// Rows of one layer by id, [sequences, rows, heads, dim]. The query at position p lies in row p % rows.
template <class T>
struct query_rings {
  T* data;
  const index_t* ids;  // by sequence of the batch; null: the sequence itself
  index_t rows, heads;
  int dim;

  __device__ T* row(index_t sequence, index_t position, index_t head) const {
    const offset_t id = ids ? ids[sequence] : sequence;
    return data + ((id * rows + position % rows) * heads + head) * dim;
  }
};

/// blockIdx: x a token from `skip` on, y a query head, z a sequence.
///
/// In steps it waits after its work, which is safe: queries, positions and readers of the ring are older than the
/// previous launch. That launch is attention, which waited for them before it let this one begin (9.7 us a step of
/// LoopServe instead of 10.7; H100, CUDA 13.0). In a prompt the previous launch writes the position, so this one waits
/// first.
template <class T, int Threads>
__global__ void __launch_bounds__(Threads)
    remember_newest_entry(rows_view<const T> q, index_t skip, const index_t* first, query_rings<T> to) {
  const bool of_step = to.ids != nullptr;
  if (!of_step) wait_for_earlier();
  let_later_begin();
  const index_t token = skip + index_t(blockIdx.x), head = blockIdx.y, sequence = blockIdx.z;
  const T* from = q.row(sequence, token, head);
  T* row = to.row(sequence, first[sequence] + token, head);
  for (int d = threadIdx.x; d < to.dim; d += Threads) row[d] = from[d];
  if (of_step) wait_for_earlier();  // a launch that waits for this one thus waits for earlier ones too
}

/// blockIdx: x a row of the window, y a query head, z a sequence, whose next token will be at `next`.
template <class T, int Threads>
__global__ void __launch_bounds__(Threads) gather_newest_entry(query_rings<T> from, const index_t* next, index_t window,
                                                               T* to, index_t* valid, index_t* first) {
  wait_for_earlier();
  let_later_begin();
  const index_t i = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  const index_t end = next[sequence], count = (min)(window, end);
  if (i == 0 && head == 0 && threadIdx.x == 0) {
    valid[sequence] = count;
    first[sequence] = end - count;
  }
  T* row = to + ((offset_t(sequence) * window + i) * from.heads + head) * from.dim;
  const T* source = from.row(sequence, end - count + i, head);
  for (int d = threadIdx.x; d < from.dim; d += Threads) row[d] = i < count ? source[d] : T(0);
}

}  // namespace detail

/// Stores the last `window` queries of every (layer, sequence) by their positions, so that neither the host nor a
/// recorded step counts them. A conversation's window at position n is its last min(window, n) queries. A ring has room
/// for the window and for the longest step. So a step that is abandoned has not overwritten rows of the window.
/// Memory   (layers * sequences * (window + step) + batch * window) * q_heads * k_dim elements.
template <class T>
class query_ring {
 public:
  query_ring() = default;
  query_ring(index_t layers, index_t sequences, index_t batch, index_t window, index_t step, index_t q_heads, int k_dim)
      : sequences_(sequences),
        window_(window),
        ring_(window + step),
        heads_(q_heads),
        dim_(k_dim),
        rows_(std::size_t(layers) * std::size_t(sequences) * std::size_t(ring_) * std::size_t(row())),
        gathered_(std::size_t(batch) * std::size_t(window) * std::size_t(row())),
        valid_(std::size_t(batch)),
        first_(std::size_t(batch)) {}

  /// Stores the last queries of rows whose first row is at position first[sequence]. `ids`: those of the batch, on the
  /// device; null: the owner alone.
  void remember(sequence_layer owner, const index_t* ids, const rows_view<const T>& q, const index_t* first,
                cudaStream_t stream) const {
    const index_t added = (std::min)(q.tokens, window_);
    if (added == 0) return;
    const dim3 grid{unsigned(added), unsigned(heads_), unsigned(q.sequences)};
    launch_overlapping<detail::remember_newest_entry<T, 64>>(grid, 64, stream, "launch of remember_newest", q,
                                                             q.tokens - added, first, rings(owner, ids));
  }

  /// The windows of a batch whose next tokens will be at next[sequence]. Valid until the next call.
  newest_rows<T> gather(sequence_layer owner, const index_t* ids, index_t batch, const index_t* next,
                        cudaStream_t stream) const {
    const dim3 grid{unsigned(window_), unsigned(heads_), unsigned(batch)};
    launch_overlapping<detail::gather_newest_entry<T, 64>>(grid, 64, stream, "launch of gather_newest",
                                                           rings(owner, ids), next, window_, gathered_.data(),
                                                           valid_.data(), first_.data());
    return {nhd_rows<const T>(gathered_.data(), window_, heads_, dim_, batch), valid_.data(), first_.data()};
  }

  void copy(index_t from, index_t to, cudaStream_t stream) const {
    const index_t layers = index_t(rows_.size() / std::size_t(sequences_ * ring_ * row()));
    for (index_t layer = 0; layer < layers; ++layer) {
      copy_on_device(rings({layer, to}, nullptr).data, rings({layer, from}, nullptr).data, std::size_t(ring_ * row()),
                     stream);
    }
  }

  /// Saves a window as floats, [rows, q_heads, k_dim], or loads one. Waits for the stream.
  template <class Archive>
  void transfer(sequence_layer owner, index_t next, Archive& archive, cudaStream_t stream) const {
    const index_t newest = (std::min)(window_, next);
    host_vector<float> values;
    host_vector<T> ring(std::size_t(ring_ * row()));
    T* const on_device = rings({owner.layer, owner.id}, nullptr).data;
    const auto row_at = [&](index_t position) { return ring.data() + position % ring_ * row(); };
    if constexpr (!Archive::loads) {
      check(cudaMemcpyAsync(ring.data(), on_device, ring.size() * sizeof(T), cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      for (index_t position = next - newest; position < next; ++position) {
        for (offset_t i = 0; i < row(); ++i) values.push_back(float(row_at(position)[i]));
      }
    }
    archive.numbers(values, offset_t(window_ + 8) * row());
    archive.require(offset_t(values.size()) % row() == 0, "with a part of a query");
    if constexpr (Archive::loads) {
      const index_t rows = (std::min)(newest, index_t(offset_t(values.size()) / row()));
      if (rows == 0) return;
      auto value = values.end() - rows * row();
      for (index_t position = next - rows; position < next; ++position) {
        for (offset_t i = 0; i < row(); ++i) row_at(position)[i] = T(*value++);
      }
      check(cudaMemcpyAsync(on_device, ring.data(), ring.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
            "cudaMemcpyAsync");
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    }
  }

  offset_t bytes_per_entry() const { return ring_ * row() * offset_t(sizeof(T)); }

 private:
  offset_t row() const { return offset_t(heads_) * dim_; }
  detail::query_rings<T> rings(sequence_layer owner, const index_t* ids) const {
    const offset_t entry = offset_t(owner.layer) * sequences_ + (ids ? 0 : owner.id);
    return {rows_.data() + entry * ring_ * row(), ids, ring_, heads_, dim_};
  }

  index_t sequences_ = 0, window_ = 0, ring_ = 0, heads_ = 0;
  int dim_ = 0;
  device_buffer<T> rows_, gathered_;
  device_buffer<index_t> valid_, first_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
