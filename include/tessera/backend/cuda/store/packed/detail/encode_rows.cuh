// Whole rows become packed rows on the device: rotated, the strongest channels of each chosen, and the means of blocks
// beside them.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../../core/sequence_layer.hpp"
#include "../../../device/kernel.cuh"
#include "../../../device/mma.cuh"
#include "../../../device/tuning.cuh"
#include "../packed_view.cuh"
#include "pack_vector.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Rows in a segment's basis: products on the tensor cores that are exact but for the sums' rounding.

namespace detail {

/// Two floats, and parts[i]: a pair of 16 bits of each; a float is the sum of its three parts.
template <class T>
__device__ __forceinline__ void split_pair(float x, float y, std::uint32_t (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if constexpr (std::is_same_v<T, bf16>) {  // cut off, not rounded: three times 8 bits are a float's 24
      parts[i] = __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
      x -= __uint_as_float(__float_as_uint(x) & 0xffff0000u), y -= __uint_as_float(__float_as_uint(y) & 0xffff0000u);
    } else {
      parts[i] = pack_pair<T>(x, y);
      const __half2 taken = reinterpret_cast<const __half2&>(parts[i]);
      x -= __low2float(taken), y -= __high2float(taken);
    }
  }
}

/// Turns 32 rows into `channels` channels of a basis [channels, D], by one warp: turned [32, stride] <- rows basis^T.
///
/// `row_of(i)` points to row i, on 16 bytes, or is null for one that is not there. Of every few groups of 8 channels
/// one warp of `sharers` turns those of its `share`; all channels up to the next multiple of 8 are written.
///
/// The order of a product's terms is free: a lane takes 8 neighbours of a row in one load, and the basis alike.
template <class T, int D, class RowOf>
__device__ void rotate_rows(const RowOf& row_of, const float* basis, int channels, int share, int sharers,
                            float* turned, int stride) {
  constexpr int together = 4;  // groups of 8 channels
  const int lane = int(threadIdx.x) % 32, r = lane / 4, q = lane % 4;
  const T* rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) rows[i] = row_of(r + i * 8);
  // Each warp takes as many groups at once, up to four.
  const int each = (min)(together, ceil_div(ceil_div(channels, 8), sharers)) * 8;
#pragma unroll 1
  for (int first = share * each; first < channels; first += sharers * each) {
    const int end = (min)(channels, first + each);
    float acc[2][together][4] = {};
#pragma unroll 1
    for (int in = q * 8; in - q * 8 < D; in += 32) {
      std::uint32_t a[2][2][4];  // by 16 rows, by half of the 32 channels
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 x = rows[i] && (D % 32 == 0 || in < D) ? *reinterpret_cast<const uint4*>(rows[i] + in) : uint4{};
        a[i / 2][0][i % 2] = x.x, a[i / 2][0][i % 2 + 2] = x.y;
        a[i / 2][1][i % 2] = x.z, a[i / 2][1][i % 2 + 2] = x.w;
      }
#pragma unroll
      for (int n = 0; n < together; ++n) {
        const int c = first + n * 8 + r;
        float4 low{}, high{};
        if (c < end && (D % 32 == 0 || in < D)) {
          const auto* from = reinterpret_cast<const float4*>(basis + offset_t(c) * D + in);
          low = from[0], high = from[1];
        }
        std::uint32_t b[4][3];
        split_pair<T>(low.x, low.y, b[0]), split_pair<T>(low.z, low.w, b[1]);
        split_pair<T>(high.x, high.y, b[2]), split_pair<T>(high.z, high.w, b[3]);
#pragma unroll
        for (int part = 0; part < 3; ++part) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            multiply<T>(acc[m][n], a[m][0], b[0][part], b[1][part]);
            multiply<T>(acc[m][n], a[m][1], b[2][part], b[3][part]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < together; ++n) {
      if (first + n * 8 >= end) break;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float* at = turned + (m * 16 + r) * stride + first + n * 8 + q * 2;
        at[0] = acc[m][n][0], at[1] = acc[m][n][1];
        at += 8 * stride;
        at[0] = acc[m][n][2], at[1] = acc[m][n][3];
      }
    }
  }
}

}  // namespace detail

/// Which rows become packed ones: `count` whole rows of every head from `first` on, of a head with fewer due rows those
/// of them that are due, as that many more rows of the sequence's segment `segment`, or of its last one. Rows of the
/// segment must be a multiple of its block before.
template <class View>
struct encode_problem {
  View view;
  index_t first = 0, count = 0;
  const index_t* due = nullptr;  ///< [sequences, kv_heads], on the device: the oldest whole rows; null: all of these
  index_t segment = no_index;    ///< of every sequence; none: the last

  /// Of a row, sequence * kv_heads + head.
  __device__ index_t count_of(index_t row) const { return due ? (max)(0, (min)(due[row] - first, count)) : count; }
};

/// `count` whole rows of a layer of a sequence, from `first` on, that join its segment `segment`. The segment has
/// `stored` rows before; `slot` is where the device counts them.
struct joining_rows {
  sequence_layer owner;
  index_t segment, slot, stored, first, count;
};

namespace detail {

inline constexpr int encoding_warps = 5, encoding_threads = encoding_warps * 32, largest_encoded_block = 128;
/// Of a chunk whose vectors are packed by warps, because there are so few chunks that the time is one vector's.
inline constexpr int max_rows_by_warps = 16;

/// Behind the rows stand the means of their blocks, added in the rows' order. By all threads.
__device__ inline void average_blocks(float* turned, int stride, int rows, int block, int channels) {
#pragma unroll 1
  for (int b = int(threadIdx.x) / 32; b * block < rows; b += encoding_warps) {
    const float* from = turned + b * block * stride;
    const int in_block = (min)(block, rows - b * block);
#pragma unroll 1
    for (int c = int(threadIdx.x) % 32; c < channels; c += 32) {
      float sum = 0;
      for (int r = 0; r < in_block; ++r) sum += from[r * stride + c];
      turned[(rows + b) * stride + c] = sum / float(in_block);
    }
  }
}

/// Floats from one turned vector to the next: an odd number, so that a thread a vector reads its channels without a
/// bank conflict.
constexpr int encoding_stride(index_t channels) { return int(ceil_div(channels, index_t(8)) * 8) | 1; }
constexpr std::size_t encoding_bytes(int stride, index_t vectors) {
  return std::size_t(stride) * std::size_t(vectors) * sizeof(float);
}
/// How many vectors, rows and means, a thread block holds in `limit` bytes: one a thread, or as many whole warps as
/// fit.
constexpr index_t encoded_together(int stride, std::size_t limit) {
  index_t vectors = encoding_threads;
  while (vectors > 32 && encoding_bytes(stride, vectors) > limit) vectors -= 32;
  return vectors;
}

/// What a block makes of its rows: packed rows of keys and their means, of values, or of few rows, where blocks are to
/// spare, each apart.
enum class encoded_part { keys_and_means, values, keys, means };

/// Rows of one head. They are turned by warps, 32 rows or some of their channels each, and packed by a thread a row, of
/// few rows by a warp a row.
template <class View, int D>
__device__ void encode_side(const encode_problem<View>& p, index_t sequence, index_t head, encoded_part part,
                            index_t chunk, index_t chunk_rows, int stride, float* turned) {
  using T = typename View::element_type;
  const int thread = int(threadIdx.x), warp = thread / 32;
  const bool keys = part != encoded_part::values;
  // Rows come while tables are read; where only the device knows how many there are, none is asked for.
  if (chunk_rows <= max_rows_by_warps && !p.due) {
    constexpr int row_lines = ceil_div(D * 2, 128);
#pragma unroll 1
    for (int i = thread; i < int((min)(chunk_rows, p.count - chunk * chunk_rows)) * row_lines; i += encoding_threads) {
      const index_t slot = p.first + chunk * chunk_rows + i / row_lines;
      prefetch_line((keys ? p.view.whole.key(sequence, head, slot) : p.view.whole.value(sequence, head, slot)) +
                    i % row_lines * 64);
    }
  }
  const device_segment& segment =
      p.view.segment(sequence, p.segment != no_index ? p.segment : p.view.count(sequence) - 1);
  const packed_vectors& to = keys ? segment.k : segment.v;
  const index_t count = p.count_of(sequence * p.view.whole.kv_heads + head);
  const index_t from = chunk * chunk_rows, held = segment.rows[head];
  const int rows = int((min)(chunk_rows, count - from)), channels = int(to.format.channels);
  if (rows <= 0) return;
  const int tiles = (rows + 31) / 32, tile = warp % tiles, share = warp / tiles, sharers = encoding_warps / tiles;
  const auto row_of = [&](int i) -> const T* {
    const index_t row = tile * 32 + i, slot = p.first + from + row;
    if (row >= rows) return nullptr;
    return keys ? p.view.whole.key(sequence, head, slot) : p.view.whole.value(sequence, head, slot);
  };
  float* own = turned + tile * 32 * stride;
  if (const float* basis = to.basis_of(head, D)) {
    if (share < sharers) rotate_rows<T, D>(row_of, basis, channels, share, sharers, own, stride);
  } else if (share == 0) {
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      const T* row = row_of(i);
      for (int c = thread % 32; row && c < channels; c += 32) own[i * stride + c] = float(row[c]);
    }
  }
  __syncthreads();
  const int block = part == encoded_part::keys_and_means || part == encoded_part::means ? int(segment.block) : 0;
  if (block > 0) {
    average_blocks(turned, stride, rows, block, channels);
    __syncthreads();
  }
  const int first = part == encoded_part::means ? rows : 0, last = rows + (block > 0 ? ceil_div(rows, block) : 0);
  const auto plane_of = [&](int i) -> const packed_vectors& { return i < rows ? to : segment.means; };
  const auto address_of = [&](int i) {
    const index_t row = i < rows ? held + from + i : (held + from) / block + i - rows;
    if constexpr (View::rows_in == packed_rows_in::planes) return packed_row_address{0, row};
    return plane_of(i).locate(row);
  };
  if (chunk_rows <= max_rows_by_warps) {
#pragma unroll 1
    for (int i = first + warp; i < last; i += encoding_warps)
      pack_vector_by_warp<D>(to.format, plane_of(i), head, address_of(i), turned + i * stride);
  } else if (thread < last) {
    pack_vector<D>(to.format, plane_of(thread), head, address_of(thread), turned + thread * stride);
  }
}

/// blockIdx: chunk of rows, (sequence, kv_head), and, by problem, what of them: keys and means, values; or keys,
/// values, means.
template <class View>
__global__ void __launch_bounds__(encoding_threads, 3)
    encode_rows_entry(const __grid_constant__ problem_list<encode_problem<View>> list, index_t parts,
                      index_t chunk_rows, int stride) {
  constexpr int k_dim = View::k_dim, v_dim = View::v_dim;
  extern __shared__ float turned_rows[];
  wait_for_earlier();
  let_later_begin();
  const index_t problem = index_t(blockIdx.z) / parts, of_problem = index_t(blockIdx.z) % parts;
  const encode_problem<View>& p = list.problems[problem];
  const index_t heads = p.view.whole.kv_heads, sequence = index_t(blockIdx.y) / heads,
                head = index_t(blockIdx.y) % heads, chunk = index_t(blockIdx.x);
  const encoded_part part = of_problem == 1   ? encoded_part::values
                            : of_problem == 2 ? encoded_part::means
                            : parts == 2      ? encoded_part::keys_and_means
                                              : encoded_part::keys;
  if (k_dim == v_dim || part != encoded_part::values)
    encode_side<View, k_dim>(p, sequence, head, part, chunk, chunk_rows, stride, turned_rows);
  else
    encode_side<View, v_dim>(p, sequence, head, part, chunk, chunk_rows, stride, turned_rows);
}

/// The rows count from now on. One thread a (sequence, kv_head), blockIdx.y: the problem. It reads before the launch
/// that packs them has ended: that one has waited for all before it, and writes no lengths.
template <class View>
__global__ void __launch_bounds__(128)
    count_encoded_entry(const __grid_constant__ problem_list<encode_problem<View>> list) {
  let_later_begin();
  const encode_problem<View>& p = list.problems[blockIdx.y];
  const index_t heads = p.view.whole.kv_heads, lane_row = index_t(blockIdx.x * 128 + threadIdx.x);
  const bool mine = lane_row < p.view.whole.sequences * heads;
  index_t *rows = nullptr, counted = 0;
  if (mine) {
    const index_t sequence = lane_row / heads;
    const device_segment& segment =
        p.view.segment(sequence, p.segment != no_index ? p.segment : p.view.count(sequence) - 1);
    rows = segment.rows + lane_row % heads;
    counted = *rows + p.count_of(lane_row);
  }
  wait_for_earlier();
  if (mine) *rows = counted;
}

}  // namespace detail

/// Packs whole rows into a segment, whose bases and sets are there: see `find_bases`.
///
/// Returns  rows as `pack_row` packs the same rotated vectors, ties to the lower group, NaN last; sums of the rotation
///          round as fp32 sums of exact products do. Whole rows stay where they are; the segment's lengths grow.
/// Errors   before the launch: rows not on 16 bytes, blocks above 128 rows.
/// Cost     two launches for 32 problems; rows are read once, a basis once for 32 rows, out of the L2. Recordable.
///          65,536 tokens of 8 heads of 128 channels: 0.75 ms; by a warp for each row it was 4.75 ms. A tail of 32
///          tokens: 12.8 us on an H100; by a thread for each row it was 18.7 (CUDA 13.0).
template <class View>
class encode_rows {
  using T = typename View::element_type;
  static_assert(View::whole_type::is_raw && sizeof(T) == 2, "tessera: the device packs raw rows of fp16 and bf16");

 public:
  /// `block`: of the segments, or where theirs differ a multiple of each; 0: no means. `channels`: the most that a
  /// vector has in them. `least_block`: of any segment; 0: `block`.
  explicit encode_rows(index_t block, index_t channels = (std::max)(View::k_dim, View::v_dim), index_t least_block = 0)
      : means_(block > 0), stride_(detail::encoding_stride(channels)) {
    require(block >= 0 && block <= detail::largest_encoded_block, "block", block,
            "at most " + std::to_string(detail::largest_encoded_block), "take shorter blocks");
    const device_info device = device_info::current();
    entry_ = {detail::encode_rows_entry<View>};
    vectors_ = detail::encoded_together(stride_, entry_.shared_limit(device));
    entry_.require_shared(shared_bytes(), device, "packing rows", "use a device with more of it");
    // A block's rows lie in one thread block, and each of its threads has a row or a mean.
    const index_t least = least_block > 0 ? least_block : block;
    chunk_rows_ = block > 0 ? vectors_ / (least + 1) * least / block * block : vectors_;
    require(chunk_rows_ > 0, "block", block,
            "one that a thread block holds with its means, in all " + std::to_string(vectors_) + " vectors",
            "take shorter blocks");
    short_rows_ = block > 0 ? (std::min)(ceil_div(index_t(8), block) * block, chunk_rows_) : 8;
    resident_ = 2 * device.multiprocessors;
    overlaps_ = entry_.overlaps();
  }

  void run(const encode_problem<View>& problem, cudaStream_t stream) const { run(&problem, 1, stream); }
  /// Several problems at once. Each has as many sequences and kv_heads as the others, and no two are of the same
  /// segment.
  void run(const encode_problem<View>* problems, std::size_t count, cudaStream_t stream) const {
    for (std::size_t i = 0; i < count; ++i) {
      const auto& whole = problems[i].view.whole;
      require_rows_on_16_bytes("whole keys", whole.k, whole.k_strides);
      require_rows_on_16_bytes("whole values", whole.v, whole.v_strides);
    }
    in_lists(problems, count, [&](const problem_list<encode_problem<View>>& list, index_t some) {
      index_t rows = 0;
      for (index_t i = 0; i < some; ++i) rows = (std::max)(rows, list.problems[i].count);
      const index_t lanes = list.problems[0].view.whole.sequences * list.problems[0].view.whole.kv_heads;
      if (lanes > 0 && rows > 0) launch_list(list, some, lanes, rows, stream);
    });
  }

 private:
  void launch_list(const problem_list<encode_problem<View>>& list, index_t some, index_t lanes, index_t rows,
                   cudaStream_t stream) const {
    // Few rows, as of a tail: short chunks, and means apart, while all blocks run at once.
    const offset_t short_chunks = offset_t(ceil_div(rows, short_rows_)) * lanes * some;
    const bool few = short_chunks * 2 <= resident_, apart = means_ && short_chunks * 3 <= resident_;
    const index_t chunk_rows = few ? short_rows_ : chunk_rows_, parts = apart ? 3 : 2;
    entry_.launch({.blocks = dim3(unsigned(ceil_div(rows, chunk_rows)), unsigned(lanes), unsigned(parts * some)),
                   .threads = dim3(detail::encoding_threads),
                   .shared_bytes = shared_bytes(),
                   .overlapping = overlaps_},
                  stream, "launch of encode_rows", list, parts, chunk_rows, stride_);
    launch(detail::count_encoded_entry<View>,
           {.blocks = dim3(unsigned(ceil_div(lanes, 128)), unsigned(some)),
            .threads = dim3(128),
            .overlapping = overlaps_},
           stream, "launch of count_encoded", list);
  }
  std::size_t shared_bytes() const { return detail::encoding_bytes(stride_, vectors_); }
  bool means_;
  int stride_;           // floats from one turned row to the next
  index_t vectors_ = 0;  // rows and means that a thread block holds
  index_t chunk_rows_, short_rows_, resident_;
  bool overlaps_ = false;
  device_kernel<problem_list<encode_problem<View>>, index_t, index_t, int> entry_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
