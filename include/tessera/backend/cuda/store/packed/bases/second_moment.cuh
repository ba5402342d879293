// The uncentred second moments of whole rows on the device.
#pragma once

#include <algorithm>

#include "../../../device/launch.cuh"
#include "../../../device/mma.cuh"
#include "../packed_view.cuh"

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
      *reinterpret_cast<uint4*>(shared + staged.place(row, c)) = x;
    }
    __syncthreads();
    if (!works) continue;
#pragma unroll 1
    for (int step = 0; step < moment_tile_rows / 16; ++step) {
      std::uint32_t a[4], b[4];
      load_matrices_transposed(a,
                               address + staged.place(step * 16 + in_matrix + matrix / 2 * 8, tile * 2 + matrix % 2));
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        load_matrices_transposed(b, address + staged.place(step * 16 + in_matrix + matrix % 2 * 8, n * 2 + matrix / 2));
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

/// The sums of x x^T over whole rows `first`, ... of every head, of keys and of values.
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
  static constexpr std::size_t each = std::size_t(D) * D + std::size_t(Dv) * Dv;
  static index_t pieces(index_t count) { return (std::max)(1, ceil_div(count, piece_rows)); }
  static std::size_t workspace_bytes(index_t lanes, index_t count) {
    return array_bytes<float>(std::size_t(pieces(count)) * std::size_t(lanes) * each);
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
    const offset_t total = offset_t(lanes) * offset_t(each);
    launch(detail::add_pieces_entry<256>, {.blocks = dim3(unsigned((total + 255) / 256)), .threads = dim3(256)}, stream,
           "launch of add_pieces", sums, pieces(count), total);
    return sums;
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
