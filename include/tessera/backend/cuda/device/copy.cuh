// Asynchronous copies from global to shared memory, the layout of rows there, numbers that the host sets on the device,
// and copies from sequence to sequence.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../core/types.hpp"
#include "check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return std::uint32_t(__cvta_generic_to_shared(p));
}

/// Starts to copy 16 bytes from global to shared memory, bypassing L1. Writes zeros when `valid` is false.
__device__ __forceinline__ void copy_async16(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

/// The same for 4 bytes, through L1.
__device__ __forceinline__ void copy_async4(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
/// The same; writes zeros when `valid` is false.
__device__ __forceinline__ void copy_async4(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

/// An L2 policy for data that is read once: it is evicted first, so that other data stays.
__device__ __forceinline__ std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// Loads a word under that policy.
__device__ __forceinline__ std::uint32_t load_once(const std::uint32_t* from) {
#ifdef __CUDA_ARCH__
  std::uint32_t word;
  asm("ld.global.L2::cache_hint.b32 %0, [%1], %2;" : "=r"(word) : "l"(from), "l"(evict_first_policy()));
  return word;
#else
  return *from;
#endif
}
/// Returns the same address, hidden from the compiler's analysis. All threads of a warp call it. If ptxas of CUDA 13.0
/// sees that all threads share a part of a shared-memory address, it may encode a copy under an L2 policy as an
/// instruction that does not exist.
__device__ __forceinline__ std::uint32_t own_address(std::uint32_t to) {
  return __shfl_sync(~0u, to, int(threadIdx.x) % 32);
}
/// `copy_async4` and `copy_async16` under an L2 policy. If a kernel fails with an illegal instruction, pass `to`
/// through `own_address`.
__device__ __forceinline__ void copy_async4(std::uint32_t to, const void* from, std::uint64_t policy) {
  asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void copy_async16(std::uint32_t to, const void* from, bool valid, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}
/// Copies 4, 8 or 16 bytes under that policy; writes zeros when `valid` is false.
template <int Bytes>
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, bool valid, std::uint64_t policy) {
  if constexpr (Bytes == 16) {
    copy_async16(to, from, valid, policy);
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;" ::"r"(to), "l"(from), "n"(Bytes),
                 "r"(valid ? Bytes : 0), "l"(policy)
                 : "memory");
  }
}
/// Prefetches the 128 bytes around `p` into the L2.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
/// Writes 16 bytes to shared memory, at an address of the kind that asynchronous copies take.
__device__ __forceinline__ void store_shared16(std::uint32_t to, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/// Rows of 16-byte chunks in shared memory, laid out so that matrix loads of 8 rows have no bank conflicts. Chunks are
/// swizzled within 128 bytes where that is possible. Otherwise rows are padded to an odd number of chunks. Swizzled
/// rows are shorter, padded rows are cheaper to address.
struct staged_rows {
  int chunks;
  bool padded = false;  ///< pads rows, whatever their number of chunks
  TESSERA_HD constexpr bool swizzled() const { return !padded && chunks % 8 == 0; }
  TESSERA_HD constexpr int bytes() const { return (swizzled() ? chunks : chunks | 1) * 16; }
  /// Where chunk `chunk` of row `row` begins, in bytes.
  TESSERA_HD constexpr std::uint32_t offset(int row, int chunk) const {
    return std::uint32_t(row * bytes() + (swizzled() ? chunk ^ (row % 8) : chunk) * 16);
  }
};

namespace detail {

template <class T, int Threads>
__global__ void __launch_bounds__(Threads) set_number_entry(T* to, const __grid_constant__ T value) {
  if (threadIdx.x == 0) *to = value;
}

/// Numbers that a launch reads from its parameters.
struct some_numbers {
  static constexpr index_t capacity = 96;
  index_t values[capacity];
};
template <int Threads>
__global__ void __launch_bounds__(Threads)
    set_numbers_entry(const __grid_constant__ some_numbers given, index_t count, index_t* to) {
  if (index_t(threadIdx.x) < count) to[threadIdx.x] = given.values[threadIdx.x];
}

template <int Threads>
__global__ void __launch_bounds__(Threads)
    add_number_entry(index_t* to, const index_t* from, index_t more, index_t count) {
  const index_t i = index_t(blockIdx.x * Threads + threadIdx.x);
  if (i < count) to[i] = from[i] + more;
}

/// Writes, for every sequence of a batch, where its step begins and where the next step will begin. `lengths` [batch]:
/// tokens of each sequence; null: all have `tokens`.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    advance_positions_entry(index_t* next, const index_t* ids, index_t* first, index_t* following, index_t batch,
                            index_t tokens, const index_t* lengths) {
  const index_t b = index_t(blockIdx.x * Threads + threadIdx.x);
  if (b >= batch) return;
  const index_t position = next[ids[b]];
  first[b] = position;
  following[b] = next[ids[b]] = position + (lengths ? lengths[b] : tokens);
}

}  // namespace detail

template <class T>
const T* set_number(T* to, const T& value, cudaStream_t stream) {
  detail::set_number_entry<T, 32><<<1, 32, 0, stream>>>(to, value);
  check(cudaGetLastError(), "launch of set_number");
  return to;
}

/// to [count] = from [count], which lies on the host. The host need not keep it until then.
inline void set_numbers(index_t* to, const index_t* from, index_t count, cudaStream_t stream) {
  for (index_t first = 0; first < count; first += detail::some_numbers::capacity) {
    detail::some_numbers given{};
    const index_t some = (std::min)(count - first, detail::some_numbers::capacity);
    std::copy_n(from + first, some, given.values);
    detail::set_numbers_entry<128><<<1, 128, 0, stream>>>(given, some, to + first);
    check(cudaGetLastError(), "launch of set_numbers");
  }
}

/// to [count] = from [count] + more.
inline const index_t* add_number(index_t* to, const index_t* from, index_t more, index_t count, cudaStream_t stream) {
  detail::add_number_entry<128><<<unsigned((count + 127) / 128), 128, 0, stream>>>(to, from, more, count);
  check(cudaGetLastError(), "launch of add_number");
  return to;
}

/// Advances every sequence of a batch by `tokens`, or by its entry of `lengths` [batch] on the device. Writes where its
/// step begins to `first` [batch]. Writes where the next step will begin to `following` [batch] and to next[id].
inline void advance_positions(index_t* next, const index_t* ids, index_t* first, index_t* following, index_t batch,
                              index_t tokens, const index_t* lengths, cudaStream_t stream) {
  detail::advance_positions_entry<128>
      <<<unsigned((batch + 127) / 128), 128, 0, stream>>>(next, ids, first, following, batch, tokens, lengths);
  check(cudaGetLastError(), "launch of advance_positions");
}

namespace detail {

/// Copies `count` numbers behind `from` of every layer's part of an array to those behind `to`. blockIdx.y: a layer.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    copy_in_layers_entry(std::uint32_t* data, offset_t layer_stride, offset_t from, offset_t to, offset_t count) {
  std::uint32_t* part = data + blockIdx.y * layer_stride;
  for (offset_t i = offset_t(blockIdx.x) * Threads + threadIdx.x; i < count; i += offset_t(gridDim.x) * Threads)
    part[to + i] = part[from + i];
}

}  // namespace detail

/// Copies `count` elements behind `from` of every layer's part of an array to those behind `to`, in one launch. They do
/// not overlap.
template <class T>
void copy_in_layers(T* data, index_t layers, offset_t layer_stride, offset_t from, offset_t to, offset_t count,
                    cudaStream_t stream) {
  static_assert(sizeof(T) % 4 == 0);
  constexpr offset_t words = sizeof(T) / 4;
  if (count <= 0) return;
  const unsigned blocks = unsigned(std::clamp<offset_t>(count * words / 1024, 1, 64));
  detail::copy_in_layers_entry<256><<<dim3(blocks, unsigned(layers)), 256, 0, stream>>>(
      reinterpret_cast<std::uint32_t*>(data), layer_stride * words, from * words, to * words, count * words);
  check(cudaGetLastError(), "launch of copy_in_layers");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
