// Numbers that the host sets on the device, in the order of a stream.
#pragma once

#include "../../../core/types.hpp"
#include "check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class T, int Threads>
__global__ void __launch_bounds__(Threads) set_number_entry(T* to, const __grid_constant__ T value) {
  if (threadIdx.x == 0) *to = value;
}

template <int Threads>
__global__ void __launch_bounds__(Threads)
    add_number_entry(index_t* to, const index_t* from, index_t more, index_t count) {
  const index_t i = index_t(blockIdx.x * Threads + threadIdx.x);
  if (i < count) to[i] = from[i] + more;
}

/// Of every sequence of a batch: where its step begins, and where the next one will.
template <int Threads>
__global__ void __launch_bounds__(Threads) advance_positions_entry(index_t* next, const index_t* ids, index_t* first,
                                                                   index_t* after, index_t batch, index_t tokens) {
  const index_t b = index_t(blockIdx.x * Threads + threadIdx.x);
  if (b >= batch) return;
  const index_t position = next[ids[b]];
  first[b] = position;
  after[b] = next[ids[b]] = position + tokens;
}

}  // namespace detail

template <class T>
const T* set_number(T* to, const T& value, cudaStream_t stream) {
  detail::set_number_entry<T, 32><<<1, 32, 0, stream>>>(to, value);
  check(cudaGetLastError(), "launch of set_number");
  return to;
}

/// to [count] = from [count] + more.
inline const index_t* add_number(index_t* to, const index_t* from, index_t more, index_t count, cudaStream_t stream) {
  detail::add_number_entry<128><<<unsigned((count + 127) / 128), 128, 0, stream>>>(to, from, more, count);
  check(cudaGetLastError(), "launch of add_number");
  return to;
}

/// Of every sequence of a batch: where its step begins, `first` [batch], and where the next one will, `after` [batch]
/// and next[id].
inline void advance_positions(index_t* next, const index_t* ids, index_t* first, index_t* after, index_t batch,
                              index_t tokens, cudaStream_t stream) {
  detail::advance_positions_entry<128>
      <<<unsigned((batch + 127) / 128), 128, 0, stream>>>(next, ids, first, after, batch, tokens);
  check(cudaGetLastError(), "launch of advance_positions");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
