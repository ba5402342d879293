// Gathers small arrays that an engine keeps by id for a batch, and scatters them back, on the device.
#pragma once

#include "step_table.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class T>
void move_rows_by_id(T* by_id, const index_t* ids, index_t count, index_t width, T* rows, bool back,
                     cudaStream_t stream) {
  static_assert(sizeof(T) % 4 == 0, "tessera: rows by id are moved in words of 4 bytes");
  if (count <= 0) return;
  gathered_columns one{};
  one.columns[0] = {reinterpret_cast<const std::uint32_t*>(by_id), reinterpret_cast<std::uint32_t*>(rows), 1,
                    width * index_t(sizeof(T) / 4)};
  gather_entry<64><<<dim3(unsigned(count), 1, 1), 64, 0, stream>>>(one, ids, 0, back);
  check(cudaGetLastError(), "launch of gather_rows");
}

}  // namespace detail

/// rows[i] = by_id[ids[i]]: lengths, or a block table, of the sequences of a batch.
/// Shapes   by_id [any, width]; ids [count]; rows [count, width]; all on the device.   Cost  one launch.
template <class T>
void gather_rows(const T* by_id, const index_t* ids, index_t count, index_t width, T* rows, cudaStream_t stream) {
  detail::move_rows_by_id(const_cast<T*>(by_id), ids, count, width, rows, false, stream);
}

/// by_id[ids[i]] = rows[i]: copies back the lengths that a call has changed.
template <class T>
void scatter_rows(const T* rows, const index_t* ids, index_t count, index_t width, T* by_id, cudaStream_t stream) {
  detail::move_rows_by_id(by_id, ids, count, width, const_cast<T*>(rows), true, stream);
}

}  // namespace cuda
TESSERA_NAMESPACE_END
