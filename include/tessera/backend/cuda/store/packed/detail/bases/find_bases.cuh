// The bases of segments on the device: the uncentred second moments of whole rows, and their eigenvectors by Jacobi's
// rotations.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../../../math/ordered.hpp"
#include "../../../../device/alignment.cuh"
#include "../../../../device/kernel.cuh"
#include "../../../../device/mma.cuh"
#include "../../../../device/tuning.cuh"
#include "../../../../device/warp.cuh"
#include "../../packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int moment_warps = 8, moment_threads = moment_warps * 32, moment_tile_rows = 64;

/// A block sums x x^T over one piece of the rows of one head, K or V, for up to 128 rows of the matrix: 16 a warp.
/// Products of 16-bit numbers are exact; sums are fp32.
template <class View, int D, bool Keys>
__device__ void sum_moment(const View& view, index_t sequence, index_t head, index_t first, index_t rows, index_t strip,
                           float* to, unsigned char* shared) {
  using T = typename View::element_type;
  constexpr staged_rows staged{D / 8};
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
  const int tile = int(strip) * moment_warps + warp;  // rows tile * 16, ... of the matrix
  const bool works = tile < D / 16;
  const std::uint32_t address = shared_address(shared);
  float acc[D / 8][4] = {};
  for (index_t begin = 0; begin < rows; begin += moment_tile_rows) {
    __syncthreads();
    for (int i = int(threadIdx.x); i < moment_tile_rows * (D / 8); i += moment_threads) {
      const int row = i / (D / 8), c = i % (D / 8);
      uint4 x{};
      if (begin + row < rows) {
        const index_t slot = first + begin + row;
        const auto* source = Keys ? view.whole.key(sequence, head, slot) : view.whole.value(sequence, head, slot);
        x = *reinterpret_cast<const uint4*>(source + c * 8);
      }
      *reinterpret_cast<uint4*>(shared + staged.offset(row, c)) = x;
    }
    __syncthreads();
    if (!works) continue;
#pragma unroll 1
    for (int step = 0; step < moment_tile_rows / 16; ++step) {
      std::uint32_t a[4], b[4];
      load_matrices_transposed(a,
                               address + staged.offset(step * 16 + in_matrix + matrix / 2 * 8, tile * 2 + matrix % 2));
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        load_matrices_transposed(b,
                                 address + staged.offset(step * 16 + in_matrix + matrix % 2 * 8, n * 2 + matrix / 2));
        multiply<T>(acc[n * 2], a, b[0], b[1]);
        multiply<T>(acc[n * 2 + 1], a, b[2], b[3]);
      }
    }
  }
  if (!works) return;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    float* at = to + (tile * 16 + lane / 4) * D + n * 8 + lane % 4 * 2;
    at[0] = acc[n][0], at[1] = acc[n][1];
    at += 8 * D;
    at[0] = acc[n][2], at[1] = acc[n][3];
  }
}

/// blockIdx: piece and strip, (sequence, kv_head), K or V. to [pieces, lanes, k_dim * k_dim + v_dim * v_dim].
template <class View>
__global__ void __launch_bounds__(moment_threads)
    second_moments_entry(const __grid_constant__ View view, index_t first, index_t count, index_t piece_rows,
                         index_t strips, float* to) {
  constexpr int D = View::k_dim, Dv = View::v_dim;
  extern __shared__ uint4 shared_memory[];
  wait_for_earlier();
  const index_t heads = view.whole.kv_heads, lane_row = index_t(blockIdx.y);
  const index_t piece = index_t(blockIdx.x) / strips, strip = index_t(blockIdx.x) % strips;
  const index_t begin = piece * piece_rows, rows = (min)(piece_rows, count - begin);
  float* sums = to + (offset_t(piece) * gridDim.y + lane_row) * (D * D + Dv * Dv);
  auto* shared = reinterpret_cast<unsigned char*>(shared_memory);
  if (blockIdx.z == 0)
    sum_moment<View, D, true>(view, lane_row / heads, lane_row % heads, first + begin, rows, strip, sums, shared);
  else
    sum_moment<View, Dv, false>(view, lane_row / heads, lane_row % heads, first + begin, rows, strip, sums + D * D,
                                shared);
}

/// Adds the pieces in their order.
template <int Threads>
__global__ void __launch_bounds__(Threads) add_pieces_entry(float* sums, index_t pieces, offset_t each) {
  wait_for_earlier();
  const offset_t i = offset_t(blockIdx.x) * Threads + threadIdx.x;
  if (i >= each) return;
  float sum = sums[i];
  for (index_t piece = 1; piece < pieces; ++piece) sum += sums[piece * each + i];
  sums[i] = sum;
}

}  // namespace detail

/// Sums x x^T over whole rows from `first` on of every head, for keys and for values.
///
/// Returns  [lanes, k_dim * k_dim + v_dim * v_dim] fp32 at the beginning of the workspace: of each (sequence, kv_head)
///          its keys' matrix and its values'. Same input, same bits.
/// Cost     two launches; rows are read once for 128 rows of the matrix.
template <class View>
class second_moments {
  static constexpr int D = View::k_dim, Dv = View::v_dim, largest = D > Dv ? D : Dv;
  static constexpr index_t strips = ceil_div(largest / 16, detail::moment_warps), piece_rows = 4096;
  static_assert(View::whole_type::is_raw && sizeof(typename View::element_type) == 2,
                "tessera: the device packs raw rows of fp16 and bf16");

 public:
  /// Floats of a (sequence, kv_head).
  static constexpr std::size_t lane_floats = std::size_t(D) * D + std::size_t(Dv) * Dv;
  static index_t pieces(index_t count) { return (std::max)(1, ceil_div(count, piece_rows)); }
  static std::size_t workspace_bytes(index_t lanes, index_t count) {
    return std::size_t(pieces(count)) * std::size_t(lanes) * lane_floats * sizeof(float);
  }

  const float* run(const View& view, index_t first, index_t count, void* workspace, cudaStream_t stream) const {
    const index_t lanes = view.whole.sequences * view.whole.kv_heads;
    auto* sums = static_cast<float*>(workspace);
    if (lanes == 0) return sums;
    require_rows_on_16_bytes("whole keys", view.whole.k, view.whole.k_strides);
    require_rows_on_16_bytes("whole values", view.whole.v, view.whole.v_strides);
    launch(detail::second_moments_entry<View>,
           {.blocks = dim3(unsigned(pieces(count) * strips), unsigned(lanes), 2),
            .threads = dim3(detail::moment_threads),
            .shared_bytes = std::size_t(staged_rows{largest / 8}.bytes()) * detail::moment_tile_rows},
           stream, "launch of second_moments", view, first, count, piece_rows, strips, sums);
    const offset_t total = offset_t(lanes) * offset_t(lane_floats);
    launch(detail::add_pieces_entry<256>, {.blocks = dim3(unsigned((total + 255) / 256)), .threads = dim3(256)}, stream,
           "launch of add_pieces", sums, pieces(count), total);
    return sums;
  }
};

/// Where bases are written: `run` of them side by side; each run begins `step` floats behind the previous one. The
/// channel of rank c is row c * spread % channels; 1: in order.
struct basis_targets {
  index_t run = 1;
  offset_t step = 0;
  index_t spread = 1;
  TESSERA_HD offset_t begin(index_t i, offset_t each) const { return i / run * step + i % run * each; }
};

namespace detail {

inline constexpr int jacobi_threads = 1024, jacobi_sweeps = 16;

/// The rotation of one pair of rows and columns.
struct jacobi_turn {
  float cosine, sine;
  int p, q;
};

/// The pair that thread i of dim / 2 turns in a round, so that every index is in one pair and every pair has met after
/// dim - 1 rounds.
__device__ inline int2 pair_of_round(int i, int round, int dim) {
  const int around = dim - 1;
  const int p = i == 0 ? dim - 1 : (round + i) % around, q = i == 0 ? round : (round - i + around) % around;
  return p < q ? make_int2(p, q) : make_int2(q, p);
}

/// The rotation that makes element (p, q) 0; none where the element is below `least`.
__device__ inline jacobi_turn turn_of(const float* a, int stride, int2 pq, float least) {
  const float off = a[pq.x * stride + pq.y];
  jacobi_turn turn{1, 0, pq.x, pq.y};
  if (!(fabsf(off) > least)) return turn;
  const float theta = (a[pq.y * stride + pq.y] - a[pq.x * stride + pq.x]) / (2 * off);
  const float t = copysignf(1.0f, theta) / (fabsf(theta) + sqrtf(theta * theta + 1));
  turn.cosine = rsqrtf(t * t + 1), turn.sine = t * turn.cosine;
  // rsqrtf is good to 2 ulp; one step of Newton keeps the product of 1,000 rotations at length 1.
  const float length = turn.cosine * turn.cosine + turn.sine * turn.sine, mend = 1.5f - 0.5f * length;
  turn.cosine *= mend, turn.sine *= mend;
  return turn;
}

__device__ __forceinline__ void turn_two(const jacobi_turn& turn, float& x, float& y) {
  const float before = x;
  x = turn.cosine * before - turn.sine * y, y = turn.sine * before + turn.cosine * y;
}

/// One block finds the eigenvectors of one symmetric matrix [dim, dim]. `a` and `v` [dim, stride] are its work, in
/// shared memory or in global. Elements below 2e-8 of the trace count as zero: they are rounding.
template <int Threads>
__device__ void jacobi(float* a, float* v, int dim, int stride, jacobi_turn* turns, float& shared_trace) {
  const int thread = int(threadIdx.x), lane = thread % 32, pairs = dim / 2;
  if (thread == 0) {
    float trace = 0;
    for (int i = 0; i < dim; ++i) trace += a[i * stride + i];
    shared_trace = trace;
  }
  __syncthreads();
  const float least = 2e-8f * shared_trace;
  for (int sweep = 0; sweep < jacobi_sweeps; ++sweep) {
    bool turned = false;
    for (int round = 0; round < dim - 1; ++round) {
      if (thread < pairs) {
        turns[thread] = turn_of(a, stride, pair_of_round(thread, round, dim), least);
        turned = turned || turns[thread].sine != 0;
      }
      __syncthreads();
      for (int pair = thread / 32; pair < pairs; pair += Threads / 32) {  // rows of both
        const jacobi_turn turn = turns[pair];
        if (turn.sine == 0) continue;
        for (int k = lane; k < dim; k += 32) {
          turn_two(turn, a[turn.p * stride + k], a[turn.q * stride + k]);
          turn_two(turn, v[turn.p * stride + k], v[turn.q * stride + k]);
        }
      }
      __syncthreads();
      for (int pair = thread / 32; pair < pairs; pair += Threads / 32) {  // columns
        const jacobi_turn turn = turns[pair];
        if (turn.sine == 0) continue;
        for (int k = lane; k < dim; k += 32) turn_two(turn, a[k * stride + turn.p], a[k * stride + turn.q]);
      }
      __syncthreads();
    }
    if (!__syncthreads_or(turned)) break;
  }
}

/// Rows of `v` that are nearly orthonormal, made so to rounding by one step of Newton and Schulz: v = (3 I - v v^T) v /
/// 2. What a thousand turns leave, 4e-5 at 128 channels, is squared. `a` is work.
template <int Threads>
__device__ void make_orthonormal(float* a, float* v, int dim, int stride) {
  for (int i = int(threadIdx.x); i < dim * dim; i += Threads) {
    const int row = i / dim, column = i % dim;
    float dot = 0;
    for (int k = 0; k < dim; ++k) dot += v[row * stride + k] * v[column * stride + k];
    a[row * stride + column] = (row == column ? 1.5f : 0.0f) - 0.5f * dot;
  }
  __syncthreads();
  // A column of v at a time: it is read whole before it is written.
  for (int column = int(threadIdx.x) / 32; column < dim; column += Threads / 32) {
    const int lane = int(threadIdx.x) % 32;
    float made[largest_head_dim / 32];
#pragma unroll
    for (int j = 0; j < largest_head_dim / 32; ++j) {
      const int row = j * 32 + lane;
      made[j] = 0;
      for (int k = 0; row < dim && k < dim; ++k) made[j] += a[row * stride + k] * v[k * stride + column];
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < largest_head_dim / 32; ++j) {
      if (j * 32 + lane < dim) v[(j * 32 + lane) * stride + column] = made[j];
    }
  }
  __syncthreads();
}

/// One block makes one basis. matrices [count] every `step` floats; bases [channels, dim] each, where `targets` says;
/// work [count, 2, dim, dim] where matrices do not fit in shared memory, else null.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    find_bases_entry(const float* matrices, offset_t step, int dim, int channels, float* bases, basis_targets targets,
                     float* work, index_t* not_finite) {
  extern __shared__ uint4 shared_memory[];
  auto* turns = reinterpret_cast<jacobi_turn*>(shared_memory);  // [dim / 2]
  float* values = reinterpret_cast<float*>(turns + dim / 2);    // [dim], and the trace
  wait_for_earlier();
  const int thread = int(threadIdx.x), stride = work ? dim : dim + 1;  // odd: columns lie in other banks
  float* a = work ? work + offset_t(blockIdx.x) * 2 * dim * dim : values + dim + 1;
  float* v = a + dim * stride;
  const float* matrix = matrices + offset_t(blockIdx.x) * step;
  bool finite = true;
  for (int i = thread; i < dim * dim; i += Threads) {
    const int row = i / dim, column = i % dim;
    const float x = row <= column ? matrix[i] : matrix[column * dim + row];  // symmetric to the bit
    finite = finite && x - x == 0;
    a[row * stride + column] = x;
    v[row * stride + column] = row == column ? 1.0f : 0.0f;
  }
  finite = __syncthreads_and(finite);
  if (thread == 0) not_finite[blockIdx.x] = finite ? 0 : 1;
  if (finite) jacobi<Threads>(a, v, dim, stride, turns, values[dim]);
  for (int i = thread; i < dim; i += Threads) values[i] = finite ? a[i * stride + i] : 0.0f;
  __syncthreads();
  if (finite) make_orthonormal<Threads>(a, v, dim, stride);
  // A warp a vector: its rank, then its sign, by which the first of the largest components is positive.
  const int lane = thread % 32;
  for (int i = thread / 32; i < dim; i += Threads / 32) {
    index_t larger = 0;
    std::uint64_t top = 0;
    for (int j = lane; j < dim; j += 32) {
      larger += rank_key(values[j], j) > rank_key(values[i], i);
      const std::uint64_t key = rank_key(fabsf(v[i * stride + j]), j);
      top = key > top ? key : top;
    }
    larger = warp_sum(larger);
    for (int step_of = 16; step_of > 0; step_of /= 2) {
      const std::uint64_t other = __shfl_xor_sync(~0u, top, step_of);
      top = other > top ? other : top;
    }
    if (larger >= channels) continue;
    const float sign = v[i * stride + rank_index(top)] < 0 ? -1.0f : 1.0f;
    const offset_t row = offset_t(larger) * targets.spread % channels;
    float* to = bases + targets.begin(index_t(blockIdx.x), offset_t(channels) * dim) + row * dim;
    for (int j = lane; j < dim; j += 32) to[j] = sign * v[i * stride + j];
  }
}

}  // namespace detail

/// bases [count, channels, dim] = the eigenvectors of symmetric matrices [dim, dim] with the largest eigenvalues, the
/// largest first, each turned so that the first of its largest components is positive; see layout/packed/rotated.hpp.
///
/// Returns  not_finite [count]: 1 for a matrix with NaN or infinity, whose basis is then that of the engine's first
///          channels.
/// Cost     one thread block a matrix. Recordable; same input, same bits.
/// cuSOLVER's cusolverDnXsyevBatched takes 3.5 ms for 512 matrices of 128 (H200, CUDA 13.0), but it is a library to
/// link.
template <int Threads>
class basis_finder {
 public:
  basis_finder(int dim, const device_info& device) : dim_(dim) {
    require(dim % 2 == 0 && dim >= 2 && dim <= largest_head_dim, "dim of the bases", dim, "an even number up to 256",
            "take a supported head dim");
    entry_ = {detail::find_bases_entry<Threads>};
    in_shared_ = entry_.allow_shared(fixed_bytes() + 2 * matrix_bytes(), device);
  }

  std::size_t workspace_bytes(index_t count) const {
    return in_shared_ ? 0 : std::size_t(count) * 2 * std::size_t(dim_) * std::size_t(dim_) * sizeof(float);
  }

  /// Each matrix begins `step` floats behind the previous one. Bases are written side by side, or to `targets`.
  void run(const float* matrices, offset_t step, index_t count, index_t channels, float* bases, index_t* not_finite,
           void* workspace, cudaStream_t stream, basis_targets targets = {}) const {
    if (count == 0) return;
    if (targets.step == 0) targets.run = count;
    require(channels >= 1 && channels <= dim_, "channels", channels, "1 to " + std::to_string(dim_),
            "pass how many of the channels stay");
    entry_.launch({.blocks = dim3(unsigned(count)),
                   .threads = dim3(Threads),
                   .shared_bytes = fixed_bytes() + (in_shared_ ? 2 * matrix_bytes() : 0)},
                  stream, "launch of find_bases", matrices, step, dim_, int(channels), bases, targets,
                  in_shared_ ? nullptr : static_cast<float*>(workspace), not_finite);
  }

 private:
  std::size_t fixed_bytes() const {
    return std::size_t(dim_ / 2) * sizeof(detail::jacobi_turn) + (std::size_t(dim_) + 1) * 4;
  }
  std::size_t matrix_bytes() const { return std::size_t(dim_) * (std::size_t(dim_) + 1) * sizeof(float); }
  int dim_;
  bool in_shared_ = false;
  device_kernel<const float*, offset_t, int, int, float*, basis_targets, float*, index_t*> entry_;
};
/// A template, so that a source that finds no bases compiles no kernel.
using find_bases = basis_finder<detail::jacobi_threads>;

}  // namespace cuda
TESSERA_NAMESPACE_END
