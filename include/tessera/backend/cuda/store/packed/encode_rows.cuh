// Whole rows become packed rows on the device: rotated, the strongest channels of each chosen, and the means of blocks beside them.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../channels/top_groups.hpp"
#include "../../device/launch.cuh"
#include "../../device/tuning.cuh"
#include "choose_groups.cuh"
#include "rotate_rows.cuh"
#include "walk_row.cuh"

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

inline constexpr int encoding_warps = 5, encoding_threads = encoding_warps * 32, largest_encoded_block = 128;
/// Of a chunk whose vectors are packed by warps, because there are so few chunks that the time is one vector's.
inline constexpr int most_rows_by_warps = 16;

/// Values as they are written, `bits` each.
template <packed_element Element>
struct written {
  static constexpr int bits = Element == packed_element::fp8 ? 8 : Element == packed_element::int4 ? 4 : 16;
  __device__ static std::uint32_t code(float x, float scale) {
    if constexpr (Element == packed_element::fp16) {
      return __half_as_ushort(__float2half_rn(x));
    } else if constexpr (Element == packed_element::fp8) {
      return fp8(x / scale).bits;
    } else if constexpr (Element == packed_element::int4) {
      std::byte nibble{};
      tessera::detail::put_int4(&nibble, 0, x / scale);
      return std::uint32_t(nibble) & 15u;
    } else {
      return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    }
  }
};

/// The channels of the groups that stay, ascending.
template <int Words>
class kept_channels {
 public:
  __device__ __forceinline__ kept_channels(const std::uint32_t (&chosen)[Words], int group) : group_(group) {
#pragma unroll
    for (int j = 0; j < Words; ++j) groups_.words[j] = __brev(chosen[j]);
    groups_.at = 0;
  }
  /// Not after the last one.
  __device__ __forceinline__ int next() {
    if (left_ == 0) {
      groups_.drop_empty();
      channel_ = int(groups_.template next<0>()) * group_, left_ = group_;
      groups_.count(1);
    }
    --left_;
    return channel_++;
  }

 private:
  bit_stream<Words, 1> groups_;
  int group_, channel_ = 0, left_ = 0;
};

/// Writes the `kept` channels of a row that `walk` gives: 16 bytes at a time, or 4 where each value is divided.
template <packed_element Element, int Words>
__device__ void write_values(kept_channels<Words> walk, int kept, const float* row, float scale, std::byte* to) {
  constexpr int bits = written<Element>::bits, in_word = 32 / bits, words = bits == 16 ? 4 : 1;
#pragma unroll 1
  for (int first = 0; first < kept; first += words * in_word) {
    std::uint32_t made[words];
#pragma unroll
    for (int w = 0; w < words; ++w) {
      made[w] = 0;
#pragma unroll(bits == 16 ? 2 : 1)
      for (int e = 0; e < in_word; ++e) {
        if (first + w * in_word + e >= kept) break;
        made[w] |= written<Element>::code(row[walk.next()], scale) << (e * bits);
      }
    }
    if constexpr (words == 4)
      *reinterpret_cast<uint4*>(to + first * 2) = make_uint4(made[0], made[1], made[2], made[3]);
    else
      *reinterpret_cast<std::uint32_t*>(to + first * bits / 8) = made[0];
  }
}

/// Of a vector whose largest size is `largest`: as pack_row's.
__device__ inline float fitted_scale(packed_element element, float largest) {
  const float fitted = largest / (element == packed_element::fp8 ? 448.0f : 7.0f);
  return fitted > 1e-30f ? fitted : 1.0f;
}
/// Packs one vector, `row` in shared memory, as row i of a plane. By one thread; all threads' planes have one format.
template <int D>
__device__ void pack_vector(const packed_format& format, const packed_vectors& to, index_t head, index_t i,
                            const float* row) {
  constexpr int words = thread_choice<D>::words;
  const int kept = int(format.kept);
  std::uint32_t chosen[words];
  if (format.own_bits) {
    thread_choice<D>(row, int(format.groups()), int(format.group)).choose(kept / int(format.group), chosen);
#pragma unroll
    for (int j = 0; j < words; ++j) {
      if (j < bit_words(format)) to.own_bits_of(head, i)[j] = chosen[j];
    }
  } else {
    const std::uint32_t* set = to.bits_of(head, i);
#pragma unroll
    for (int j = 0; j < words; ++j) chosen[j] = j < bit_words(format) ? set[j] : 0u;
  }
  const kept_channels<words> walk(chosen, int(format.group));
  float scale = 1;
  if (format.scaled()) {
    float largest = 0;
    kept_channels<words> again = walk;
    for (int e = 0; e < kept; ++e) {
      const float x = fabsf(row[again.next()]);
      if (x < infinity) largest = fmaxf(largest, x);
    }
    scale = fitted_scale(format.element, largest);
    to.scales[to.row(head, i)] = scale;
  }
  with_element(format.element,
               [&]<packed_element Element>() { write_values<Element>(walk, kept, row, scale, to.values_of(head, i)); });
}

/// As `pack_vector`, by a warp, a lane every 32nd group: the latency of one row is less, the work of many is more.
template <int D>
__device__ void pack_vector_by_warp(const packed_format& format, const packed_vectors& to, index_t head, index_t i,
                                    const float* row) {
  constexpr int words = thread_choice<D>::words;
  const int group = int(format.group), lane = int(threadIdx.x) % 32;
  std::uint32_t chosen[words] = {};
  if (format.own_bits) {
    choose_groups(row, int(format.groups()), group, int(format.kept) / group, chosen);
#pragma unroll
    for (int j = 0; j < words; ++j) {
      if (lane == j && j < bit_words(format)) to.own_bits_of(head, i)[j] = chosen[j];
    }
  } else {
    const std::uint32_t* set = to.bits_of(head, i);
#pragma unroll
    for (int j = 0; j < words; ++j) chosen[j] = j < bit_words(format) ? set[j] : 0u;
  }
  // Calls for the channels of this lane that stay, with each one's place among the values.
  const auto for_each_kept = [&](const auto& call) {
    int before = 0;
#pragma unroll
    for (int j = 0; j < words; ++j) {
      const int place = (before + __popc(chosen[j] & ((1u << lane) - 1u))) * group, from = (j * 32 + lane) * group;
#pragma unroll 1
      for (int c = 0; (chosen[j] >> lane & 1u) && c < group; ++c) call(from + c, place + c);
      before += __popc(chosen[j]);
    }
  };
  float scale = 1;
  if (format.scaled()) {
    float largest = 0;
    for_each_kept([&](int c, int) {
      const float x = fabsf(row[c]);
      if (x < infinity) largest = fmaxf(largest, x);
    });
    scale = fitted_scale(format.element, lanes_max<32>(largest));
    if (lane == 0) to.scales[to.row(head, i)] = scale;
  }
  with_element(format.element, [&]<packed_element Element>() {
    constexpr int bits = written<Element>::bits, in_word = 32 / bits;
    std::byte* values = to.values_of(head, i);
    if constexpr (bits == 4) {
#pragma unroll 1
      for (int first = 0; first < int(format.kept); first += in_word) {
        std::uint32_t mine = 0;
        for_each_kept([&](int c, int e) {
          if (e / in_word == first / in_word) mine |= written<Element>::code(row[c], scale) << e % in_word * bits;
        });
        mine = __reduce_or_sync(~0u, mine);
        if (lane == 0) *reinterpret_cast<std::uint32_t*>(values + first / 2) = mine;
      }
    } else {
      using stored = std::conditional_t<bits == 8, std::uint8_t, std::uint16_t>;
      const int kept = int(format.kept), padded = bits == 8 ? in_word : 8, end = ceil_div(kept, padded) * padded;
      auto* codes = reinterpret_cast<stored*>(values);
      for_each_kept([&](int c, int e) { codes[e] = stored(written<Element>::code(row[c], scale)); });
      if (kept + lane < end) codes[kept + lane] = 0;
    }
  });
}

/// Behind the rows stand the means of their blocks, added in the rows' order. By all threads.
__device__ inline void average_blocks(float* turned, int stride, int rows, int block, int channels) {
#pragma unroll 1
  for (int b = int(threadIdx.x) / 32; b * block < rows; b += encoding_warps) {
    const float* from = turned + b * block * stride;
    const int in_block = min(block, rows - b * block);
#pragma unroll 1
    for (int c = int(threadIdx.x) % 32; c < channels; c += 32) {
      float sum = 0;
      for (int r = 0; r < in_block; ++r) sum += from[r * stride + c];
      turned[(rows + b) * stride + c] = sum / float(in_block);
    }
  }
}

/// What a block makes of its rows: packed rows of keys and their means, of values, or of few rows, where blocks are to spare, each apart.
enum class encoded_part { keys_and_means, values, keys, means };

/// Rows of one head. They are turned by warps, 32 rows or some of their channels each, and packed by a thread a row, of few rows by a warp a
/// row.
template <class View, int D>
__device__ void encode_side(const encode_problem<View>& p, index_t sequence, index_t head, encoded_part part,
                            index_t chunk, index_t chunk_rows, int stride, float* turned) {
  using T = typename View::element_type;
  const int thread = int(threadIdx.x), warp = thread / 32;
  const bool keys = part != encoded_part::values;
  // Rows come while tables are read; where only the device knows how many there are, none is asked for.
  if (chunk_rows <= most_rows_by_warps && !p.counts) {
    constexpr int row_lines = ceil_div(D * 2, 128);
#pragma unroll 1
    for (int i = thread; i < int(min(chunk_rows, p.count - chunk * chunk_rows)) * row_lines; i += encoding_threads) {
      const index_t slot = p.first + chunk * chunk_rows + i / row_lines;
      prefetch_line((keys ? p.view.whole.key(sequence, head, slot) : p.view.whole.value(sequence, head, slot)) +
                    i % row_lines * 64);
    }
  }
  const device_segment& segment =
      p.view.segment(sequence, p.segment != no_index ? p.segment : p.view.count(sequence) - 1);
  const packed_vectors& to = keys ? segment.k : segment.v;
  const index_t count = p.counts ? min(p.counts[sequence], p.count) : p.count;
  const index_t from = chunk * chunk_rows, held = segment.rows[head];
  const int rows = int(min(chunk_rows, count - from)), channels = int(to.format.channels);
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
  const auto place_of = [&](int i) { return i < rows ? held + from + i : (held + from) / block + i - rows; };
  if (chunk_rows <= most_rows_by_warps) {
#pragma unroll 1
    for (int i = first + warp; i < last; i += encoding_warps)
      pack_vector_by_warp<D>(to.format, plane_of(i), head, place_of(i), turned + i * stride);
  } else if (thread < last) {
    pack_vector<D>(to.format, plane_of(thread), head, place_of(thread), turned + thread * stride);
  }
}

/// blockIdx: chunk of rows, (sequence, kv_head), what of them: keys and means, values; or keys, values, means.
template <class View>
__global__ void __launch_bounds__(encoding_threads, 3)
    encode_rows_entry(const __grid_constant__ encode_problem<View> p, index_t chunk_rows, int stride) {
  constexpr int k_dim = View::k_dim, v_dim = View::v_dim;
  extern __shared__ float turned_rows[];
  wait_for_earlier();
  let_later_begin();
  const index_t heads = p.view.whole.kv_heads, sequence = index_t(blockIdx.y) / heads,
                head = index_t(blockIdx.y) % heads, chunk = index_t(blockIdx.x);
  const encoded_part part = blockIdx.z == 1   ? encoded_part::values
                            : blockIdx.z == 2 ? encoded_part::means
                            : gridDim.z == 2  ? encoded_part::keys_and_means
                                              : encoded_part::keys;
  if (k_dim == v_dim || part != encoded_part::values)
    encode_side<View, k_dim>(p, sequence, head, part, chunk, chunk_rows, stride, turned_rows);
  else
    encode_side<View, v_dim>(p, sequence, head, part, chunk, chunk_rows, stride, turned_rows);
}

/// The rows count from now on. One thread a (sequence, kv_head). It reads before the launch that packs them has ended: that one has waited for
/// all before it, and writes no lengths.
template <class View>
__global__ void __launch_bounds__(128) count_encoded_entry(const __grid_constant__ encode_problem<View> p) {
  let_later_begin();
  const index_t heads = p.view.whole.kv_heads, lane_row = index_t(blockIdx.x * 128 + threadIdx.x);
  const bool mine = lane_row < p.view.whole.sequences * heads;
  index_t *rows = nullptr, counted = 0;
  if (mine) {
    const index_t sequence = lane_row / heads;
    const device_segment& segment =
        p.view.segment(sequence, p.segment != no_index ? p.segment : p.view.count(sequence) - 1);
    rows = segment.rows + lane_row % heads;
    counted = *rows + (p.counts ? min(p.counts[sequence], p.count) : p.count);
  }
  wait_for_earlier();
  if (mine) *rows = counted;
}

}  // namespace detail

/// Packs whole rows into a segment, whose bases and sets are there: see `find_bases`.
///
/// Returns  rows as `pack_row` packs the same rotated vectors, ties to the lower group, NaN last; sums of the rotation round as fp32
///          sums of exact products do. Whole rows stay where they are; the segment's lengths grow.
/// Errors   before the launch: rows not on 16 bytes, blocks above 128 rows.
/// Cost     two launches; rows are read once, a basis once for 32 rows, out of the L2. Recordable. 65,536 tokens of 8 heads of 128
///          channels: 0.75 ms; by a warp for each row it was 4.75 ms. A tail of 32 tokens: 12.8 us on an
///          H100; by a thread for each row it was 18.7 (CUDA 13.0).
template <class View>
class encode_rows {
  using T = typename View::element_type;
  static_assert(View::whole_type::is_raw && sizeof(T) == 2, "tessera: the device packs raw rows of fp16 and bf16");

 public:
  /// `block`: of the segments, or where theirs differ a multiple of each; 0: no means. `channels`: the most that a vector has in them.
  /// `least_block`: of any segment; 0: `block`.
  explicit encode_rows(index_t block, index_t channels = std::max(View::k_dim, View::v_dim), index_t least_block = 0)
      : means_(block > 0),
        stride_(int(ceil_div(channels, 8) * 8) | 1) {  // odd: a thread a row reads its channels without a conflict
    require(block >= 0 && block <= detail::largest_encoded_block, "block", block,
            "at most " + std::to_string(detail::largest_encoded_block), "take shorter blocks");
    // A block's rows lie in one thread block, and each of its threads has a row or a mean.
    const index_t least = least_block > 0 ? least_block : block;
    chunk_rows_ = block > 0 ? detail::encoding_threads / (least + 1) * least / block * block : detail::encoding_threads;
    require(chunk_rows_ > 0, "block", block, "one that a thread block holds with its means", "take shorter blocks");
    short_rows_ = block > 0 ? std::min(ceil_div(index_t(8), block) * block, chunk_rows_) : 8;
    resident_ = 2 * device_info::current().multiprocessors;
    entry_ = detail::encode_rows_entry<View>;
    overlaps_ = can_overlap(entry_);
    check(
        cudaFuncSetAttribute(entry_, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(detail::encoding_threads * (std::max(View::k_dim, View::v_dim) + 1) * sizeof(float))),
        "cudaFuncSetAttribute");
  }

  void run(const encode_problem<View>& problem, cudaStream_t stream) const {
    const index_t lanes = problem.view.whole.sequences * problem.view.whole.kv_heads;
    if (lanes == 0 || problem.count == 0) return;
    require_rows_on_16_bytes("whole keys", problem.view.whole.k, problem.view.whole.k_strides);
    require_rows_on_16_bytes("whole values", problem.view.whole.v, problem.view.whole.v_strides);
    // Few rows, as of a tail: short chunks, and means apart, while all blocks run at once.
    const offset_t short_chunks = offset_t(ceil_div(problem.count, short_rows_)) * lanes;
    const bool few = short_chunks * 2 <= resident_, apart = means_ && short_chunks * 3 <= resident_;
    const index_t chunk_rows = few ? short_rows_ : chunk_rows_;
    launch(entry_,
           {.blocks = dim3(unsigned(ceil_div(problem.count, chunk_rows)), unsigned(lanes), apart ? 3 : 2),
            .threads = dim3(detail::encoding_threads),
            .shared_bytes = shared_bytes(),
            .overlapping = overlaps_},
           stream, "launch of encode_rows", problem, chunk_rows, stride_);
    launch(detail::count_encoded_entry<View>,
           {.blocks = dim3(unsigned(ceil_div(lanes, 128))), .threads = dim3(128), .overlapping = overlaps_}, stream,
           "launch of count_encoded", problem);
  }

 private:
  std::size_t shared_bytes() const { return std::size_t(stride_) * detail::encoding_threads * sizeof(float); }
  bool means_;
  index_t chunk_rows_, short_rows_, resident_;
  int stride_;  // floats from one turned row to the next
  bool overlaps_ = false;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  void (*entry_)(encode_problem<View>, index_t, int) = nullptr;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
