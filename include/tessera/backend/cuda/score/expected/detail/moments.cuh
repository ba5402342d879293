// Mean and covariance of future queries, as the kernels of Expected Attention read them, and sums of exponentials.
#pragma once

#include <cuda_fp16.h>

#include "../../../../../core/prompt/query_statistics.hpp"
#include "../../../device/check.cuh"
#include "../../../device/memory.cuh"
#include "../../../device/softmax.cuh"
#include "wide_product.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int moments_threads = 256, moments_blocks = 8;  // of a query head

/// The order of channels in what score_expected reads. For products of four warps, a lane's eight neighbouring channels
/// are placed where products read one lane's elements of two steps.
template <int D>
TESSERA_HD constexpr int place_of_channel(int channel) {
  if constexpr (!(compiled_for_hopper && fits_wide_products<D>)) return channel;
  const int c = channel % 32;
  return channel - c + c / 4 % 2 * 16 + c / 2 % 2 * 8 + c / 8 * 2 + c % 2;
}

/// What score_expected reads of one query head. k' Sigma k is the sum over i >= j of k[i] k[j] L[i, j], where L is
/// Sigma's lower triangle with everything off its diagonal doubled. Two 16-bit elements (high and low) hold at least 16
/// bits of mantissa.
/// Shapes   mean [heads, D]; high, low [heads, D, D], row j has column j of L * 2^-shift; shift [heads]. The order of
///          channels, and the triangle, follow place_of_channel.
template <class T>
struct moment_rows {
  float* mean;
  T* high;
  T* low;
  int* shift;
};

/// One block per pair of elements: the mean of RoPE's rotations over `future` positions from each sequence's next one
/// on.
/// Shapes   turns [sequences, pairs].
template <int Threads>
__global__ void __launch_bounds__(Threads)
    mean_turns_entry(const float* frequencies, const index_t* next, index_t future, double2* turns) {
  __shared__ double2 parts[Threads];
  const int pair = blockIdx.x;
  const index_t sequence = blockIdx.y;
  double2 own{0, 0};
  for (index_t p = index_t(threadIdx.x); p < future; p += Threads) {
    double sine, cosine;
    sincos(double(__fmul_rn(float(next[sequence] + p), frequencies[pair])), &sine, &cosine);
    own.x += cosine, own.y += sine;
  }
  parts[threadIdx.x] = own;
  __syncthreads();
  for (int half = Threads / 2; half > 0; half /= 2) {
    if (int(threadIdx.x) < half) {
      parts[threadIdx.x].x += parts[threadIdx.x + half].x;
      parts[threadIdx.x].y += parts[threadIdx.x + half].y;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) turns[offset_t(sequence) * gridDim.x + pair] = {parts[0].x / future, parts[0].y / future};
}

/// x a query head, y a sequence, z a share of the covariance's elements.
template <class T, int D>
__global__ void __launch_bounds__(moments_threads)
    moments_entry(const query_statistics* statistics, const double2* turns, const __grid_constant__ moment_rows<T> to) {
  constexpr int pairs = D / 2;
  __shared__ double means[D];
  __shared__ double2 turn[pairs];
  __shared__ float parts[moments_threads];
  const index_t heads = index_t(gridDim.x), head = index_t(blockIdx.x), row = index_t(blockIdx.y) * heads + head;
  const query_statistics seen = statistics[blockIdx.y];
  const double once = 1 / double((max)(seen.counts[head], offset_t(1)));
  const double* products = seen.products + offset_t(head) * D * D;
  for (int d = threadIdx.x; d < D; d += moments_threads) means[d] = seen.sums[offset_t(head) * D + d] * once;
  for (int d = threadIdx.x; d < pairs; d += moments_threads) turn[d] = turns[offset_t(blockIdx.y) * pairs + d];
  __syncthreads();
  const auto covariance = [&](int i, int j) {
    return products[(max)(i, j) * D + (min)(i, j)] * once - means[i] * means[j];
  };
  /// Calls take(i, j, Sigma[i, j]) for elements i and i + pairs beside j and j + pairs.
  const auto rotated = [&](int i, int j, const auto& take) {
    const double2 u = turn[i], v = turn[j];
    const double c00 = covariance(i, j), c01 = covariance(i, j + pairs);
    const double c10 = covariance(i + pairs, j), c11 = covariance(i + pairs, j + pairs);
    const double t00 = c00 * u.x - c10 * u.y, t10 = c00 * u.y + c10 * u.x;
    const double t01 = c01 * u.x - c11 * u.y, t11 = c01 * u.y + c11 * u.x;
    take(i, j, t00 * v.x - t01 * v.y);
    take(i, j + pairs, t00 * v.y + t01 * v.x);
    take(i + pairs, j, t10 * v.x - t11 * v.y);
    take(i + pairs, j + pairs, t10 * v.y + t11 * v.x);
  };
  float largest = 0;  // the largest element of a covariance lies on its diagonal
  for (int i = threadIdx.x; i < pairs; i += moments_threads)
    rotated(i, i, [&](int, int, double x) { largest = fmaxf(largest, fabsf(float(x))); });
  parts[threadIdx.x] = largest;
  __syncthreads();
  for (int half = moments_threads / 2; half > 0; half /= 2) {
    if (int(threadIdx.x) < half) parts[threadIdx.x] = fmaxf(parts[threadIdx.x], parts[threadIdx.x + half]);
    __syncthreads();
  }
  const int shift = parts[0] > 0 && parts[0] < infinity ? ilogbf(parts[0]) : 0;
  if (blockIdx.z == 0) {
    if (threadIdx.x == 0) to.shift[row] = shift;
    for (int d = threadIdx.x; d < pairs; d += moments_threads) {
      const double a = means[d], b = means[d + pairs];
      to.mean[offset_t(row) * D + place_of_channel<D>(d)] = float(a * turn[d].x - b * turn[d].y);
      to.mean[offset_t(row) * D + place_of_channel<D>(d + pairs)] = float(a * turn[d].y + b * turn[d].x);
    }
  }
  T *high = to.high + offset_t(row) * D * D, *low = to.low + offset_t(row) * D * D;
  const auto put = [&](int i, int j, double x) {
    i = place_of_channel<D>(i), j = place_of_channel<D>(j);
    const float scaled = i < j ? 0.0f : float(scalbn(i > j ? 2 * x : x, -shift));
    const T upper = T(scaled);
    high[j * D + i] = upper;
    low[j * D + i] = T(scaled - float(upper));
  };
  for (int at = int(blockIdx.z) * moments_threads + threadIdx.x; at < pairs * pairs;
       at += moments_blocks * moments_threads)
    rotated(at / pairs, at % pairs, put);
}

}  // namespace detail

/// Estimates mean and covariance of future queries, for every (sequence, query head), from those of the prompt.
/// Shapes   statistics [sequences], next [sequences], frequencies [D / 2], turns [sequences, D / 2].
/// Cost     two small launches.
template <class T, int D>
void make_moments(const query_statistics* statistics, const float* frequencies, const index_t* next, index_t future,
                  index_t sequences, index_t q_heads, double2* turns, const detail::moment_rows<T>& to,
                  cudaStream_t stream) {
  detail::mean_turns_entry<128><<<dim3(D / 2, unsigned(sequences)), 128, 0, stream>>>(frequencies, next, future, turns);
  detail::moments_entry<T, D>
      <<<dim3(unsigned(q_heads), unsigned(sequences), detail::moments_blocks), detail::moments_threads, 0, stream>>>(
          statistics, turns, to);
  check(cudaGetLastError(), "launch of moments");
}

// What the kernels of Expected Attention share: what they read and write, and sums of exponentials.

namespace detail {

template <class View>
struct expected_problem {
  using T = typename View::element_type;
  View view;  // values are not read
  moment_rows<T> moments;
  float scale;
  float* logits;      // [sequences, q_heads, capacity]
  exp_sum* partials;  // [sequences, q_heads, blocks]
  index_t group, capacity;
};

/// Two neighbours of a row as fp32.
template <class T>
__device__ __forceinline__ float2 unpacked_pair(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, bf16>) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(bits));
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
