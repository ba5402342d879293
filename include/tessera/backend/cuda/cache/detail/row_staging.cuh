// Rows of a step that are packed, laid out by sequence for the layers of a cache, and its outputs packed again.
#pragma once

#include <algorithm>

#include "../../../../core/model_shape.hpp"
#include "../../../../core/views.hpp"
#include "../../../../runtime/turn/batch.hpp"
#include "../../device/kernel.cuh"
#include "../../device/memory.cuh"
#include "../../store/step_table.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int staging_threads = 256;

/// Where the rows of each sequence lie among packed ones. Device pointers; `lengths` null: all have `tokens`.
struct packed_places {
  const index_t *begins, *lengths;
  index_t tokens;
  __device__ index_t length(index_t b) const { return lengths ? lengths[b] : tokens; }
};

/// blockIdx.x: a token of a sequence. Rows behind a sequence's tokens become zeros.
template <class T>
__global__ void __launch_bounds__(staging_threads)
    lay_out_entry(rows_view<const T> packed, rows_view<T> by_sequence, packed_places at) {
  const index_t b = index_t(blockIdx.x) / at.tokens, t = index_t(blockIdx.x) % at.tokens;
  const bool inside = t < at.length(b);
  for (index_t i = threadIdx.x; i < packed.heads * by_sequence.dim; i += staging_threads) {
    const index_t head = i / by_sequence.dim, d = i % by_sequence.dim;
    by_sequence.row(b, t, head)[d] = inside ? packed.row(0, at.begins[b] + t, head)[d] : T(0.0f);
  }
}
template <class T>
__global__ void __launch_bounds__(staging_threads)
    pack_rows_entry(rows_view<const T> by_sequence, rows_view<T> packed, packed_places at) {
  const index_t b = index_t(blockIdx.x) / at.tokens, t = index_t(blockIdx.x) % at.tokens;
  if (t >= at.length(b)) return;
  for (index_t i = threadIdx.x; i < packed.heads * by_sequence.dim; i += staging_threads) {
    const index_t head = i / by_sequence.dim, d = i % by_sequence.dim;
    packed.row(0, at.begins[b] + t, head)[d] = by_sequence.row(b, t, head)[d];
  }
}

}  // namespace detail

/// Lays out the rows of packed steps. Memory is taken when such a step is prepared for the first time, and when one is
/// larger than all before.
/// Cost     two launches for a layer's rows and outputs, or four with k and v; each row is read and written once.
template <class T, class Out>
class row_staging {
 public:
  explicit row_staging(const model_shape& shape) : shape_(shape) {}

  /// Makes room for a step whose rows have k_dim and v_dim elements.
  void prepare(const batch& step, index_t k_dim, index_t v_dim) {
    if (!step.is_packed()) return;
    const std::size_t tokens = std::size_t(step.sequences()) * std::size_t(step.tokens);
    const auto fit = [&](auto& buffer, index_t heads, index_t dim) {
      using buffer_type = std::remove_reference_t<decltype(buffer)>;
      const std::size_t count = tokens * std::size_t(heads) * std::size_t(dim);
      if (count > buffer.size()) buffer = buffer_type(count);
    };
    fit(q_, shape_.q_heads, k_dim), fit(k_, shape_.kv_heads, k_dim), fit(v_, shape_.kv_heads, v_dim);
    fit(out_, shape_.q_heads, v_dim), fit(lse_, shape_.q_heads, 1);
  }

  struct rows {
    rows_view<const T> q, k, v;
    rows_view<Out> out;
    rows_view<float> lse;
  };
  /// A layer's rows by sequence, and room for its outputs. k and v without data: only queries.
  rows lay_out(const batch& step, const step_table& table, const index_t* lengths, const rows_view<const T>& q,
               const rows_view<const T>& k, const rows_view<const T>& v, index_t v_dim, bool with_lse,
               cudaStream_t stream) const {
    const detail::packed_places at{table.begins(), lengths, step.tokens};
    rows made;
    made.q = laid_out(step, q, q_.data(), at, stream);
    if (k.data) made.k = laid_out(step, k, k_.data(), at, stream), made.v = laid_out(step, v, v_.data(), at, stream);
    made.out = nhd_rows(out_.data(), step.tokens, shape_.q_heads, v_dim, step.sequences());
    if (with_lse) made.lse = nhd_rows(lse_.data(), step.tokens, shape_.q_heads, 1, step.sequences());
    return made;
  }
  /// Packs a layer's outputs.
  void pack(const batch& step, const step_table& table, const index_t* lengths, const rows& made,
            const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) const {
    const detail::packed_places at{table.begins(), lengths, step.tokens};
    const unsigned blocks = unsigned(step.sequences() * step.tokens);
    detail::pack_rows_entry<Out><<<blocks, detail::staging_threads, 0, stream>>>(made.out, out, at);
    if (lse.data) detail::pack_rows_entry<float><<<blocks, detail::staging_threads, 0, stream>>>(made.lse, lse, at);
    check(cudaGetLastError(), "launch of pack_rows");
  }

 private:
  static rows_view<const T> laid_out(const batch& step, const rows_view<const T>& packed, T* to,
                                     const detail::packed_places& at, cudaStream_t stream) {
    const rows_view<T> by_sequence = nhd_rows(to, step.tokens, packed.heads, packed.dim, step.sequences());
    detail::lay_out_entry<T>
        <<<unsigned(step.sequences() * step.tokens), detail::staging_threads, 0, stream>>>(packed, by_sequence, at);
    check(cudaGetLastError(), "launch of lay_out");
    return by_sequence;
  }

  model_shape shape_;
  device_buffer<T> q_, k_, v_;
  device_buffer<Out> out_;
  device_buffer<float> lse_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
