// Whole rows become packed rows on the device: rotated, the strongest channels of each chosen, and the means of blocks beside them.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../channels/top_groups.hpp"
#include "../../device/launch.cuh"
#include "../../device/mma.cuh"
#include "../../device/tuning.cuh"
#include "choose_groups.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Which rows become packed ones: `count` whole rows of every head from `first` on, as rows `counts[sequence]` or `count` more of the
/// sequence's segment `segment`, or of its last one. Rows of the segment must be a multiple of its block before.
template <class View>
struct encode_problem {
  View view;
  index_t first = 0, count = 0;
  const index_t* counts = nullptr;  ///< [sequences], on the device: at most `count` each; null: `count`
  index_t segment = no_index;       ///< of every sequence; none: the last
};

namespace detail {

inline constexpr int encoding_warps = 8, encoding_threads = encoding_warps * 32, encoded_together = encoding_warps * 16;

/// Memory of a block: 128 rows as they are, one part of the rotation, and in its place the rotated rows.
template <int D>
struct encode_memory {
  TESSERA_HD static constexpr staged_rows rows() { return {D / 8}; }
  static constexpr int given = staged_rows{D / 8}.bytes() * encoded_together;
  static constexpr int turned_stride = D + 1;  // floats: a warp reads channels side by side
  static constexpr int basis = staged_rows{D / 8}.bytes() * D, turned = turned_stride * encoded_together * 4;
  static constexpr int codes = encoding_warps * D;  // of int4: a byte each before they are joined
  static constexpr int bytes = given + (basis > turned ? basis : turned) + codes;
};

/// Part `part` of a float as numbers of 16 bits whose sum it is: the first, what is left of it, and so on.
template <class T>
__device__ __forceinline__ T part_of(float x, int part) {
  T one(x);
  for (int i = 0; i < part; ++i) {
    x -= float(one);
    one = T(x);
  }
  return one;
}

/// Chooses groups of one vector, whose channel c is `row[c]`, and writes them as row i. By one warp. bit_of says which groups stay
/// where rows share a set.
__device__ inline void pack_in_warp(const packed_vectors& to, index_t head, index_t i, const float* row,
                                    unsigned char* codes) {
  constexpr int most = most_group_words;
  const packed_format& format = to.format;
  const int lane = int(threadIdx.x) % 32, group = int(format.group), groups = int(format.groups());
  const int wanted = int(format.kept) / group;
  std::uint32_t chosen[most];  // words of bits, alike in all lanes
  if (format.own_bits) {
    choose_groups(row, groups, group, wanted, chosen);
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (j * 32 < groups && lane == j) to.bits[to.row(head, i) * bit_words(format) + j] = chosen[j];
    }
  } else {
    const std::uint32_t* set = to.bits_of(head, i);
#pragma unroll
    for (int j = 0; j < most; ++j) chosen[j] = j < int(bit_words(format)) ? set[j] : 0u;
  }
  float scale = 1;
  const auto for_each_kept = [&](const auto& visit) {
    int before = 0;
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (j * 32 >= groups) break;
      const int place = before + __popc(chosen[j] & ((1u << lane) - 1u));
      if ((chosen[j] >> lane) & 1u) {
        for (int e = 0; e < group; ++e) visit(row[(j * 32 + lane) * group + e], place * group + e);
      }
      before += __popc(chosen[j]);
    }
  };
  if (format.scaled()) {
    float largest = 0;
    for_each_kept([&](float x, int) {
      if (fabsf(x) < infinity) largest = fmaxf(largest, fabsf(x));
    });
    const float fitted = warp_max(largest) / (format.element == packed_element::fp8 ? 448.0f : 7.0f);
    scale = fitted > 1e-30f ? fitted : 1.0f;  // as pack_row's
    if (lane == 0) to.scales[to.row(head, i)] = scale;
  }
  std::byte* values = to.values_of(head, i);
  switch (format.element) {
    case packed_element::fp16:
      return for_each_kept([&](float x, int at) { reinterpret_cast<std::uint16_t*>(values)[at] = fp16(x).bits; });
    case packed_element::fp8:
      return for_each_kept([&](float x, int at) { reinterpret_cast<std::uint8_t*>(values)[at] = fp8(x / scale).bits; });
    case packed_element::int4: {
      for_each_kept([&](float x, int at) {
        std::byte nibble{};
        tessera::detail::put_int4(&nibble, 0, x / scale);
        codes[at] = static_cast<unsigned char>(nibble);
      });
      __syncwarp();
      for (int b = lane; b * 2 < int(format.kept); b += 32) {
        const unsigned high = b * 2 + 1 < int(format.kept) ? codes[b * 2 + 1] & 15u : 0u;
        values[b] = std::byte((codes[b * 2] & 15u) | high << 4);
      }
      __syncwarp();
      return;
    }
    default:
      for_each_kept([&](float x, int at) { reinterpret_cast<std::uint16_t*>(values)[at] = bf16(x).bits; });
  }
}

/// Rows of one head, K or V: 16 a warp. The rotation is multiplied in three parts of 16 bits, which together are its fp32: rows are exact as they
/// are, so that only sums round.
template <class View, int D, bool Keys>
__device__ void encode_side(const encode_problem<View>& p, index_t sequence, index_t head, index_t chunk,
                            index_t chunk_rows, unsigned char* shared) {
  using T = typename View::element_type;
  using memory = encode_memory<D>;
  constexpr int threads = encoding_threads;
  const device_segment& segment =
      p.view.segment(sequence, p.segment != no_index ? p.segment : p.view.count(sequence) - 1);
  const packed_vectors to = Keys ? segment.k : segment.v;
  const index_t count = p.counts ? min(p.counts[sequence], p.count) : p.count;
  const index_t from = chunk * chunk_rows, rows = min(chunk_rows, count - from);
  if (rows <= 0) return;
  unsigned char *given = shared, *basis_rows = shared + memory::given;
  float* turned = reinterpret_cast<float*>(basis_rows);
  unsigned char* codes = shared + memory::bytes - memory::codes;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  for (int i = int(threadIdx.x); i < encoded_together * (D / 8); i += threads) {
    const int row = i / (D / 8), c = i % (D / 8);
    uint4 x{};
    if (row < rows) {
      const index_t slot = p.first + from + row;
      const auto* source = Keys ? p.view.whole.key(sequence, head, slot) : p.view.whole.value(sequence, head, slot);
      x = *reinterpret_cast<const uint4*>(source + c * 8);
    }
    *reinterpret_cast<uint4*>(given + memory::rows().place(row, c)) = x;
  }
  const float* basis = to.basis_of(head, D);
  const int channels = int(to.format.channels), padded = int(whole_channels(to.format.channels));
  if (basis) {
    float acc[D / 8][4] = {};
    for (int part = 0; part < 3; ++part) {
      __syncthreads();
      for (int i = int(threadIdx.x); i < padded * (D / 8); i += threads) {
        const int c = i / (D / 8), chunk8 = i % (D / 8);
        std::uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const auto bits = [&](int d) -> std::uint32_t {
            return c < channels ? part_of<T>(basis[offset_t(c) * D + chunk8 * 8 + d], part).bits : 0u;
          };
          words[j] = bits(j * 2) | bits(j * 2 + 1) << 16;
        }
        *reinterpret_cast<uint4*>(basis_rows + memory::rows().place(c, chunk8)) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
      __syncthreads();
      const std::uint32_t a_rows = shared_address(given), b_rows = shared_address(basis_rows);
      const int in_matrix = lane % 8, matrix = lane / 8;
#pragma unroll 1
      for (int step = 0; step < D / 16; ++step) {
        std::uint32_t a[4], b[4];
        load_matrices(a, a_rows + memory::rows().place(warp * 16 + in_matrix + matrix % 2 * 8, step * 2 + matrix / 2));
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
          if (n * 16 >= padded) break;
          load_matrices(b, b_rows + memory::rows().place(n * 16 + in_matrix + matrix / 2 * 8, step * 2 + matrix % 2));
          multiply<T>(acc[n * 2], a, b[0], b[1]);
          multiply<T>(acc[n * 2 + 1], a, b[2], b[3]);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      if (n * 8 >= padded) break;
      float* at = turned + (warp * 16 + lane / 4) * memory::turned_stride + n * 8 + lane % 4 * 2;
      at[0] = acc[n][0], at[1] = acc[n][1];
      at += 8 * memory::turned_stride;
      at[0] = acc[n][2], at[1] = acc[n][3];
    }
  } else {
    __syncthreads();
    for (int i = int(threadIdx.x); i < encoded_together * D; i += threads) {
      const int row = i / D, c = i % D;
      T x;
      x.bits = *reinterpret_cast<const std::uint16_t*>(given + memory::rows().place(row, c / 8) + c % 8 * 2);
      turned[row * memory::turned_stride + c] = float(x);
    }
  }
  __syncthreads();
  const index_t held = segment.rows[head];
  for (int row = warp; row < int(rows); row += encoding_warps) {
    pack_in_warp(to, head, held + from + row, turned + row * memory::turned_stride, codes + warp * D);
  }
  if (!Keys || segment.block == 0) return;
  __syncthreads();  // the first row of each block becomes its mean
  const int block = int(segment.block), blocks = int(ceil_div(rows, index_t(block)));
  for (int b = warp; b < blocks; b += encoding_warps) {
    float* mean = turned + b * block * memory::turned_stride;
    const int in_block = min(block, int(rows) - b * block);
    for (int c = lane; c < channels; c += 32) {
      float sum = 0;
      for (int r = 0; r < in_block; ++r) sum += mean[r * memory::turned_stride + c];
      mean[c] = sum / float(in_block);
    }
    __syncwarp();
    pack_in_warp(segment.means, head, (held + from) / block + b, mean, codes + warp * D);
  }
}

/// blockIdx: chunk of rows, (sequence, kv_head), K or V.
template <class View>
__global__ void __launch_bounds__(encoding_threads)
    encode_rows_entry(const __grid_constant__ encode_problem<View> p, index_t chunk_rows) {
  extern __shared__ uint4 shared_memory[];
  wait_for_earlier();
  const index_t heads = p.view.whole.kv_heads, sequence = index_t(blockIdx.y) / heads,
                head = index_t(blockIdx.y) % heads;
  auto* shared = reinterpret_cast<unsigned char*>(shared_memory);
  if (blockIdx.z == 0)
    encode_side<View, View::k_dim, true>(p, sequence, head, index_t(blockIdx.x), chunk_rows, shared);
  else
    encode_side<View, View::v_dim, false>(p, sequence, head, index_t(blockIdx.x), chunk_rows, shared);
}

/// The rows count from now on. One thread a (sequence, kv_head).
template <class View>
__global__ void __launch_bounds__(128) count_encoded_entry(const __grid_constant__ encode_problem<View> p) {
  wait_for_earlier();
  const index_t heads = p.view.whole.kv_heads, lane_row = index_t(blockIdx.x * 128 + threadIdx.x);
  if (lane_row >= p.view.whole.sequences * heads) return;
  const index_t sequence = lane_row / heads;
  const device_segment& segment =
      p.view.segment(sequence, p.segment != no_index ? p.segment : p.view.count(sequence) - 1);
  segment.rows[lane_row % heads] += p.counts ? min(p.counts[sequence], p.count) : p.count;
}

}  // namespace detail

/// Packs whole rows into a segment, whose bases and sets are there: see `find_bases`.
///
/// Returns  rows as `pack_row` packs the same rotated vectors, ties to the lower group, NaN last; sums of the rotation round as fp32
///          sums of exact products do. Whole rows stay where they are; the segment's lengths grow.
/// Errors   before the launch: rows not on 16 bytes, blocks above 128 rows.
/// Cost     two launches; rows are read once, a basis once for 128 rows. Recordable.
template <class View>
class encode_rows {
  using T = typename View::element_type;
  static_assert(View::whole_type::is_raw && sizeof(T) == 2, "tessera: the device packs raw rows of fp16 and bf16");

 public:
  /// `block`: of the segments; 0: no means.
  explicit encode_rows(index_t block) {
    require(block >= 0 && block <= detail::encoded_together, "block", block,
            "at most " + std::to_string(detail::encoded_together), "take shorter blocks");
    // A block's rows lie in one thread block.
    chunk_rows_ = block > 0 ? detail::encoded_together / block * block : detail::encoded_together;
    entry_ = detail::encode_rows_entry<View>;
    check(cudaFuncSetAttribute(entry_, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes())),
          "cudaFuncSetAttribute");
  }

  void run(const encode_problem<View>& problem, cudaStream_t stream) const {
    const index_t lanes = problem.view.whole.sequences * problem.view.whole.kv_heads;
    if (lanes == 0 || problem.count == 0) return;
    require_rows_on_16_bytes("whole keys", problem.view.whole.k, problem.view.whole.k_strides);
    require_rows_on_16_bytes("whole values", problem.view.whole.v, problem.view.whole.v_strides);
    launch(entry_,
           {.blocks = dim3(unsigned(ceil_div(problem.count, chunk_rows_)), unsigned(lanes), 2),
            .threads = dim3(detail::encoding_threads),
            .shared_bytes = shared_bytes()},
           stream, "launch of encode_rows", problem, chunk_rows_);
    launch(detail::count_encoded_entry<View>, {.blocks = dim3(unsigned(ceil_div(lanes, 128))), .threads = dim3(128)},
           stream, "launch of count_encoded", problem);
  }

 private:
  static std::size_t shared_bytes() {
    return std::size_t(std::max(detail::encode_memory<View::k_dim>::bytes, detail::encode_memory<View::v_dim>::bytes));
  }
  index_t chunk_rows_;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  void (*entry_)(encode_problem<View>, index_t) = nullptr;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
