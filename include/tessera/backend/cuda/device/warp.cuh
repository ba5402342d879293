// Sums, maxima and prefix sums over the lanes of a warp and the threads of a block.
#pragma once

#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The lane in a one-dimensional block. It is read where it is used: values computed from it take no register until
/// then.
__device__ __forceinline__ int lane_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// The sum over a warp, the same on every lane and added in the same order every time.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
/// Two sums at once: neither waits for the other's shuffles.
__device__ __forceinline__ float2 warp_sum(float2 value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float x = __shfl_xor_sync(~0u, value.x, step), y = __shfl_xor_sync(~0u, value.y, step);
    value.x += x, value.y += y;
  }
  return value;
}
__device__ __forceinline__ unsigned warp_sum(unsigned value) { return __reduce_add_sync(~0u, value); }
__device__ __forceinline__ index_t warp_sum(index_t value) { return __reduce_add_sync(~0u, value); }

/// The largest value of a warp; none may be NaN.
__device__ __forceinline__ float warp_max(float value) {
  const int bits = __float_as_int(value), largest = __reduce_max_sync(~0u, bits >= 0 ? bits : bits ^ 0x7fffffff);
  return __int_as_float(largest >= 0 ? largest : largest ^ 0x7fffffff);
}

/// The sum of `Lanes` neighbouring lanes (2, 4, 8 or 16), on each of them.
template <int Lanes, class T>
__device__ __forceinline__ T lanes_sum(T value) {
#pragma unroll
  for (int step = 1; step < Lanes; step *= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
/// The largest value of `Lanes` neighbouring lanes, on each of them; NaN is ignored.
template <int Lanes>
__device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
  for (int step = 1; step < Lanes; step *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

/// `Count` sums over `Lanes` neighbouring lanes at once; both are powers of two, Count <= Lanes. Each lane gets the sum
/// of values[rank % Count]. In each round, half of the lanes continue with one half of the values and half with the
/// other. It takes Count - 1 shuffles, and then log2(Lanes / Count) more.
template <int Lanes, int Count>
__device__ __forceinline__ float lanes_sums(float (&values)[Count], int rank) {
  static_assert(Count <= Lanes && (Count & (Count - 1)) == 0, "tessera: lanes add up a power of two of values");
#pragma unroll
  for (int half = Count / 2; half > 0; half /= 2) {
    const bool upper = rank & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? values[i] : values[i + half], retained = upper ? values[i + half] : values[i];
      values[i] = retained + __shfl_xor_sync(~0u, sent, half);
    }
  }
#pragma unroll
  for (int step = Count; step < Lanes; step *= 2) values[0] += __shfl_xor_sync(~0u, values[0], step);
  return values[0];
}

/// The sum of the values of all lanes up to this one, its own included.
template <class T>
__device__ __forceinline__ T inclusive_sum(T value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}
/// Two sums at once: neither waits for the other's shuffles.
__device__ __forceinline__ uint2 inclusive_sum(uint2 value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned x = __shfl_up_sync(~0u, value.x, step), y = __shfl_up_sync(~0u, value.y, step);
    value.x += lane >= step ? x : 0u, value.y += lane >= step ? y : 0u;
  }
  return value;
}

/// The lanes of a warp as a team that runs one body together; core/one_lane.hpp defines a team. Host bodies exist only
/// because HD templates name them, and are never called.
struct warp_team {
  static constexpr int size = 32;
  TESSERA_HD int rank() const {
#ifdef __CUDA_ARCH__
    return int(threadIdx.x) % 32;
#else
    return 0;
#endif
  }
  template <class T>
  TESSERA_HD T sum(T x) const {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
#endif
    return x;
  }
  TESSERA_HD index_t exclusive_sum(index_t x) const {
#ifdef __CUDA_ARCH__
    return inclusive_sum(x, rank()) - x;
#else
    return x;
#endif
  }
  TESSERA_HD void sync() const {
#ifdef __CUDA_ARCH__
    __syncwarp();
#endif
  }
};

/// The meeting of all threads of a block at one line of the code. Threads at several lines use numbered_barrier.
struct whole_block {
  __device__ static void wait() { __syncthreads(); }
};

/// Prefix sums over the threads of a block, for unsigned and index_t. The object lies in shared memory. All threads
/// call it. A call has one barrier, and another barrier is needed before the next call. A part of a larger block may
/// scan too: it begins at a multiple of `Threads`, and only its threads meet at `Meeting`. cub::BlockScan does the
/// same; decision 0011 says why it is not used.
template <int Threads, class T, class Meeting = whole_block>
struct block_scan {
  static constexpr int warps = Threads / 32;
  static_assert(Threads % 32 == 0 && warps <= 32, "tessera: a block scans up to 32 whole warps");
  T warp_total[warps];

  /// The sum of the values of the threads of lower rank.
  __device__ __forceinline__ T exclusive_sum(T value) {
    const T in_warp = scan_warp(value);
    const int lane = threadIdx.x % 32, warp = threadIdx.x % Threads / 32;
    const T of_lane = lane < warps ? warp_total[lane] : T(0);
    return in_warp - value + warp_sum(lane < warp ? of_lane : T(0));
  }
  /// The sum of all values, after `exclusive_sum`.
  __device__ __forceinline__ T total() const {
    const int lane = threadIdx.x % 32;
    return warp_sum(lane < warps ? warp_total[lane] : T(0));
  }

 private:
  __device__ __forceinline__ T scan_warp(T value) {
    const T in_warp = inclusive_sum(value, int(threadIdx.x) % 32);
    if (threadIdx.x % 32 == 31) warp_total[threadIdx.x % Threads / 32] = in_warp;
    Meeting::wait();
    return in_warp;
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
