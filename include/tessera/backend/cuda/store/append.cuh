// Appends new tokens on the GPU: converts and writes rows, fills columns, advances lengths.
#pragma once

#include <algorithm>

#include "../../../core/engine/move_problem.hpp"
#include "../../../core/views.hpp"
#include "../device/kernel.cuh"
#include "../device/warp.cuh"
#include "pack.cuh"
#include "slot_order.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Numbers the text segments of new tokens on the GPU: flags at segment ends become numbers in a column beside the
// tokens.

namespace detail {

/// One block numbers one sequence, tile by tile, with one thread per token. A run ends with a flagged token and is cut
/// into pieces of max_segment_tokens tokens. A token's number is the number of all earlier pieces plus the index of its
/// piece in its own run.
template <int Threads, class View, class E>
__global__ void __launch_bounds__(Threads) number_segments_entry(const __grid_constant__ append_problem<View, E> p) {
  constexpr int warps = Threads / 32;
  __shared__ block_scan<Threads, index_t> scan;
  __shared__ unsigned flags[warps];
  wait_for_earlier();
  let_later_begin();
  const index_t b = blockIdx.x, heads = p.view.kv_heads;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const index_t tokens = p.new_tokens ? (min)((max)(p.new_tokens[b], 0), p.k.tokens) : p.k.tokens;
  const std::uint8_t* ends = p.boundaries + offset_t(b) * p.k.tokens;
  const segment_cursor before = p.texts[b];
  index_t run = -before.tokens,
          segment = before.segment;  // where the open run begins, and the number of its first piece
  for (index_t first = 0; first < tokens; first += Threads) {
    const index_t token = first + thread;
    const bool inside = token < tokens, flag = inside && ends[token] != 0;
    const unsigned of_warp = __ballot_sync(~0u, flag);
    if (lane == 0) flags[warp] = of_warp;
    __syncthreads();
    // The index behind the last flag before this token, in its own warp or in an earlier one.
    const auto behind_last = [&](int w, unsigned earlier) {
      while (earlier == 0 && w > 0) earlier = flags[--w];
      return earlier ? first + w * 32 + 32 - __clz(earlier) : run;
    };
    const index_t begin = behind_last(warp, of_warp & ((1u << lane) - 1));
    const index_t pieces = flag ? ceil_div(token + 1 - begin, max_segment_tokens) : 0;
    const index_t number = segment + scan.exclusive_sum(pieces) + (token - begin) / max_segment_tokens;
    if (inside) {
      for (index_t h = 0; h < heads; ++h) p.segments.entry(b, h, heads, p.view.length(b, h) + token) = number;
    }
    segment += scan.total();
    run = behind_last(warps, 0);
    __syncthreads();  // flags and scan are free again
  }
  if (thread == 0) {
    const index_t open = tokens - run;
    p.texts[b] = {segment + open / max_segment_tokens, open % max_segment_tokens};
  }
}

/// The state of a batch's texts, the same in all layers.
inline constexpr int texts_at_a_time = 64;
struct some_texts {
  segment_cursor texts[texts_at_a_time];
};
template <int Threads>
__global__ void __launch_bounds__(Threads)
    set_texts_entry(const __grid_constant__ some_texts given, index_t count, index_t stride, segment_cursor* to) {
  if (index_t(threadIdx.x) < count) to[blockIdx.x * stride + threadIdx.x] = given.texts[threadIdx.x];
}

}  // namespace detail

/// Fills the segment column for the tokens that `problem` appends, and advances its texts. Must be called before the
/// lengths advance. The numbers equal those of segment_cursor::advance. `overlaps`: from sm_90 on the launch begins
/// while the previous one on the stream ends, and the next one may begin before this one ends.
/// Cost     one launch with one block per sequence, which reads one byte per token.
template <class View, class E>
void number_segments(const append_problem<View, E>& problem, bool overlaps, cudaStream_t stream) {
  constexpr int threads = 256;
  launch(detail::number_segments_entry<threads, View, E>,
         {.blocks = dim3(unsigned(problem.view.sequences)), .threads = dim3(threads), .overlapping = overlaps}, stream,
         "launch of number_segments", problem);
}

using tessera::append_problem;  // core/engine/move_problem.hpp: the same on both backends

namespace detail {

inline constexpr int append_threads = 256;
inline constexpr int append_chunk = 8;  // elements that one thread converts at a time
inline constexpr int in_flight = 4;     // chunks of a thread

/// The bits of eight stored elements, loaded before they are used.
template <class E>
struct raw_chunk {
  static constexpr int words = append_chunk * int(sizeof(E)) / 16;
  uint4 word[words];
  __device__ void load(const E* from, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int w = 0; w < words; ++w) word[w] = __ldg(reinterpret_cast<const uint4*>(from) + w);
    } else {
      std::uint32_t parts[4 * words];
#pragma unroll
      for (int i = 0; i < 4 * words; ++i) {
        if constexpr (sizeof(E) == 4)
          parts[i] = bits_as<std::uint32_t>(from[i]);
        else
          parts[i] = from[i * 2].bits | std::uint32_t(from[i * 2 + 1].bits) << 16;
      }
#pragma unroll
      for (int w = 0; w < words; ++w)
        word[w] = make_uint4(parts[w * 4], parts[w * 4 + 1], parts[w * 4 + 2], parts[w * 4 + 3]);
    }
  }
  __device__ std::uint32_t part(int i) const {
    const uint4& w = word[i / 4];
    return i % 4 == 0 ? w.x : i % 4 == 1 ? w.y : i % 4 == 2 ? w.z : w.w;
  }
  __device__ float value(int i) const {
    if constexpr (sizeof(E) == 4)
      return bits_as<float>(part(i));
    else
      return float(bits_as<E>(static_cast<std::uint16_t>(part(i / 2) >> (i % 2 * 16))));
  }
};

/// Two 16-bit elements as a round trip through fp32 on the CPU leaves them. It changes only NaN, which becomes quiet;
/// in fp16 every NaN also gets the same payload.
template <class T>
__device__ std::uint32_t quieted(std::uint32_t pair) {
  constexpr std::uint32_t highest = std::is_same_v<T, bf16> ? 0x7f807f80u : 0x7c007c00u;
  const std::uint32_t nan = __vcmpgtu2(pair & 0x7fff7fffu, highest);
  if constexpr (std::is_same_v<T, bf16>)
    return pair | (nan & 0x00400040u);
  else
    return (pair & ~nan) | (nan & ((pair & 0x80008000u) | 0x7e007e00u));
}

/// Stores eight elements as T, converted exactly as the CPU converts them.
template <class T, class E>
__device__ void store_chunk(T* to, offset_t stride, bool aligned, const raw_chunk<E>& chunk) {
  if (aligned) {
    constexpr int words = append_chunk * int(sizeof(T)) / 16;
#pragma unroll
    for (int w = 0; w < words; ++w) {
      std::uint32_t parts[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = w * 4 + i;
        if constexpr (sizeof(T) == 4)
          parts[i] = bits_as<std::uint32_t>(chunk.value(at));
        else if constexpr (std::is_same_v<T, E>)
          parts[i] = quieted<T>(chunk.part(at));
        else
          parts[i] = T(chunk.value(at * 2)).bits | std::uint32_t(T(chunk.value(at * 2 + 1)).bits) << 16;
      }
      reinterpret_cast<uint4*>(to)[w] = make_uint4(parts[0], parts[1], parts[2], parts[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < append_chunk; ++i) to[i * stride] = T(chunk.value(i));
  }
}

template <class View, class E>
__device__ index_t tokens_of(const append_problem<View, E>& p, index_t sequence) {
  return p.new_tokens ? (min)((max)(p.new_tokens[sequence], 0), p.k.tokens) : p.k.tokens;
}

/// What the blocks of one blockIdx.x append: a sequence, or one kv_head of it where heads have lengths of their own.
struct append_share {
  index_t sequence, first_head, heads, tokens, length;

  template <class View, class E>
  __device__ explicit append_share(const append_problem<View, E>& p) {
    const index_t groups = p.view.length_strides.head ? p.view.kv_heads : 1;
    sequence = index_t(blockIdx.x) / groups, first_head = index_t(blockIdx.x) % groups;
    heads = p.view.kv_heads / groups;
    tokens = tokens_of(p, sequence);
    length = p.view.length(sequence, first_head);
  }
  template <class View, class E>
  __device__ void fill_columns(const append_problem<View, E>& p, index_t head, index_t token,
                               disorder_word word) const {
    const index_t slot = length + token;
    if (p.positions.data) {
      const index_t position = (p.first_position ? p.first_position[sequence] : length) + token;
      index_t* at = &p.positions.entry(sequence, head, p.view.kv_heads, slot);
      if (word && token == 0 && slot > 0 && at[-1] >= position) note_disorder(word, sequence, head, slot);
      *at = position;
    }
    if (p.scores.data) p.scores.entry(sequence, head, p.view.kv_heads, slot) = 0;
  }
  /// Advances the length if a single block appends the whole part. Otherwise other blocks still read the length, and
  /// advance_entry advances it.
  template <class View, class E>
  __device__ void advance(const append_problem<View, E>& p) const {
    if (gridDim.y > 1 || !p.lengths) return;
    __syncthreads();  // every thread has read the old length
    if (threadIdx.x == 0) {
      p.lengths[sequence * p.view.length_strides.sequence + first_head * p.view.length_strides.head] = length + tokens;
    }
  }
};

/// Where launches overlap: waits for the previous launch, then lets the next one, usually attention, be set up while
/// rows are appended.
__device__ __forceinline__ void begin_append(bool overlaps) {
  if (!overlaps) return;
  wait_for_earlier();
  let_later_begin();
}

/// A block writes its share of raw rows, chunk by chunk.
template <class View, class E>
__global__ void __launch_bounds__(append_threads)
    append_entry(const __grid_constant__ append_problem<View, E> p, bool aligned_from, bool aligned_to, bool overlaps,
                 disorder_word word) {
  constexpr int k_chunks = View::k_dim / append_chunk, chunks = k_chunks + View::v_dim / append_chunk;
  begin_append(overlaps);
  const append_share share(p);
  const index_t b = share.sequence;
  const offset_t work = offset_t(share.tokens) * share.heads * chunks, step = offset_t(gridDim.y) * append_threads;
  struct chunk_address {
    index_t part, token, head;
  };
  const auto find = [&](offset_t i) {
    const index_t row = index_t(i / chunks);
    return chunk_address{index_t(i % chunks), row / share.heads, share.first_head + row % share.heads};
  };
  for (offset_t base = offset_t(blockIdx.y) * append_threads + threadIdx.x; base < work; base += step * in_flight) {
    raw_chunk<E> chunk[in_flight];
#pragma unroll
    for (int u = 0; u < in_flight; ++u) {
      if (base + u * step >= work) break;
      const chunk_address address = find(base + u * step);
      chunk[u].load(address.part < k_chunks
                        ? p.k.row(b, address.token, address.head) + address.part * append_chunk
                        : p.v.row(b, address.token, address.head) + (address.part - k_chunks) * append_chunk,
                    aligned_from);
    }
#pragma unroll
    for (int u = 0; u < in_flight; ++u) {
      if (base + u * step >= work) break;
      const chunk_address address = find(base + u * step);
      const index_t slot = share.length + address.token;
      if (address.part < k_chunks) {
        const offset_t stride = p.view.k_strides.dim;
        store_chunk(p.view.key(b, address.head, slot) + address.part * append_chunk * stride, stride, aligned_to,
                    chunk[u]);
      } else {
        const offset_t stride = p.view.v_strides.dim;
        store_chunk(p.view.value(b, address.head, slot) + (address.part - k_chunks) * append_chunk * stride, stride,
                    aligned_to, chunk[u]);
      }
      if (address.part == 0) share.fill_columns(p, address.head, address.token, word);
    }
  }
  share.advance(p);
}

/// A lane's eight elements of a row of blocks: its lanes find a block's range together, the first of them writes the
/// block's ends. All lanes of a warp call it. `row` is where the row goes, `channel` the lane's first element.
template <class Block, class Chunk>
__device__ void store_block_part(Block* row, offset_t stride, int channel, bool takes, const Chunk& chunk) {
  static_assert(
      requires { &Block::code_bits; },
      "tessera: the device writes rows of single elements and of code_group; rows of other blocks are the engine's");
  float low = infinity, high = -infinity;
  bool finite = true;
  if (takes) {
#pragma unroll
    for (int d = 0; d < append_chunk; ++d) {
      const float x = chunk.value(d);
      low = fminf(low, x), high = fmaxf(high, x), finite &= x - x == 0;
    }
  }
  constexpr int lanes = Block::elements / append_chunk;
  // Blocks need not have a power of two of lanes: every lane looks at all of its block.
  const int own = int(threadIdx.x) % 32, begin = own - channel / append_chunk % lanes;
  float least = low, largest = high;
  bool all = finite;
#pragma unroll
  for (int i = 0; i < lanes; ++i) {
    const int other = (min)(begin + i, 31);
    least = fminf(least, __shfl_sync(~0u, low, other)), largest = fmaxf(largest, __shfl_sync(~0u, high, other));
    all &= __shfl_sync(~0u, int(finite), other) != 0;
  }
  if (!takes) return;
  const Block made = Block::of_range(least, largest, all);
  Block& to = row[channel / Block::elements * stride];
  const int first = channel % Block::elements;
  if (first == 0) to.lowest = made.lowest, to.step = made.step;
  std::uint32_t word = 0;
#pragma unroll
  for (int d = 0; d < append_chunk; ++d) word |= made.code_bits(chunk.value(d), d);
  if constexpr (Block::bits * append_chunk == 32) {
    to.codes[first / append_chunk] = word;
  } else {
    reinterpret_cast<std::uint16_t*>(to.codes)[first / append_chunk] = std::uint16_t(word);
  }
}

/// The same for encoded rows. Neighbouring lanes encode a row together, because its scale depends on all of its
/// elements. The bits equal those of encode_row.
template <class View, class E>
__global__ void __launch_bounds__(append_threads)
    append_encoded_entry(const __grid_constant__ append_problem<View, E> p, bool aligned_from, bool aligned_to,
                         bool overlaps, disorder_word word) {
  using encoding = typename View::encoding_type;
  using stored = typename encoding::stored_type;
  constexpr int max_chunks = (View::k_dim > View::v_dim ? View::k_dim : View::v_dim) / append_chunk;
  constexpr int lanes = max_chunks <= 8 ? 8 : max_chunks <= 16 ? 16 : 32, rows_at_once = append_threads / lanes;
  begin_append(overlaps);
  const append_share share(p);
  const int lane = threadIdx.x % lanes;
  const offset_t rows = offset_t(share.tokens) * share.heads * 2;  // of K and V in turn
  for (offset_t first = offset_t(blockIdx.y) * rows_at_once; first < rows;
       first += offset_t(gridDim.y) * rows_at_once) {
    const offset_t i = (min)(first + threadIdx.x / lanes, rows - 1);  // all lanes join lanes_max
    const bool is_key = i % 2 == 0, mine = first + threadIdx.x / lanes < rows;
    const index_t token = index_t(i / 2) / share.heads, head = share.first_head + index_t(i / 2) % share.heads;
    const index_t slot = share.length + token;
    const bool takes = lane < (is_key ? View::k_dim : View::v_dim) / append_chunk;
    raw_chunk<E> chunk;
    float scale = 1;
    if (takes) {
      chunk.load((is_key ? p.k : p.v).row(share.sequence, token, head) + lane * append_chunk, aligned_from);
    }
    if constexpr (static_scales<encoding>) {
      scale = is_key ? p.view.key_scale(share.sequence, head, slot) : p.view.value_scale(share.sequence, head, slot);
    } else if constexpr (encoding::scaled) {
      float largest = 0;
      if (takes) {
#pragma unroll
        for (int d = 0; d < append_chunk; ++d) {
          const float size = fabsf(chunk.value(d));
          if (size < infinity ? size > largest : finite_only<encoding>) largest = size < infinity ? size : infinity;
        }
      }
      scale = row_scale<encoding>(lanes_max<lanes>(largest));
    }
    stored* const row = is_key ? p.view.key(share.sequence, head, slot) : p.view.value(share.sequence, head, slot);
    const offset_t stride = is_key ? p.view.k_strides.dim : p.view.v_strides.dim;
    if constexpr (element_block<stored>) {
      store_block_part(row, stride, lane * append_chunk, takes && mine, chunk);  // all lanes join
    } else if (takes && mine) {
      stored* const to = row + lane * append_chunk * stride;
      alignas(16) stored elements[append_chunk];
#pragma unroll
      for (int d = 0; d < append_chunk; ++d) elements[d] = encode_element<encoding>(chunk.value(d), scale);
      if (aligned_to && sizeof(stored) == 1) {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(elements);
      } else {
#pragma unroll
        for (int d = 0; d < append_chunk; ++d) to[d * stride] = elements[d];
      }
    }
    if (!mine) continue;
    if (lane == 0) {
      if constexpr (encoding::scaled && !static_scales<encoding>) {
        const offset_t at = p.view.scales.index(p.view.table.locate(share.sequence, head, slot), head);
        (is_key ? p.view.scales.k : p.view.scales.v)[at] = scale;
      }
      if (is_key) share.fill_columns(p, head, token, word);
    }
  }
  share.advance(p);
}

template <class View, class E>
__global__ void __launch_bounds__(append_threads) advance_entry(const __grid_constant__ append_problem<View, E> p) {
  const index_t groups_of_heads = p.view.length_strides.head ? p.view.kv_heads : 1;
  const index_t row = index_t(blockIdx.x) * append_threads + index_t(threadIdx.x);
  if (row >= p.view.sequences * groups_of_heads) return;
  const index_t b = row / groups_of_heads, h = row % groups_of_heads;
  p.lengths[b * p.view.length_strides.sequence + h * p.view.length_strides.head] =
      p.view.length(b, h) + tokens_of(p, b);
}

}  // namespace detail

/// Appends new K and V rows of every (sequence, kv_head) in the view's format, and advances the lengths on the device.
///
/// Lengths are per (sequence, head), or per sequence where length_strides.head is 0.
/// Errors   invalid shapes, memory and scales, as far as the host knows them: tessera::error, before anything is
///          launched. A later call reports new positions that do not follow the stored ones, as it reports
///          watch_order's findings. Where the view's `order` says that positions ascend, they are not checked.
/// Workspace  none.
/// Cost     reads and writes each new row once. One launch for the few tokens of a decode step; a second, tiny one for
///          a prefill chunk; one more where segments are numbered.
template <class View, class E>
class append {
  static_assert(!View::is_latent,
                "tessera: on the device an engine writes its latent rows itself; append them on the CPU");

 public:
  /// `overlaps`: from sm_90 on the launch begins while the previous one on the stream ends, and the next one may begin
  /// before this one ends.
  append(index_t sequences, index_t kv_heads, bool overlaps = true)
      : sequences_(sequences), kv_heads_(kv_heads), overlaps_(overlaps) {
    require(sequences >= 0 && kv_heads >= 1, "kv_heads", kv_heads, "1 or more", "pass the model's head count");
  }

  std::size_t workspace_bytes() const { return 0; }

  void run(const append_problem<View, E>& problem, void*, cudaStream_t stream) const {
    const auto& p = problem;
    require(p.view.sequences >= 0 && p.view.sequences <= sequences_ && p.view.kv_heads == kv_heads_,
            "sequences and kv_heads", std::to_string(p.view.sequences) + " and " + std::to_string(p.view.kv_heads),
            "0 to " + std::to_string(sequences_) + ", and " + std::to_string(kv_heads_),
            "construct append for the largest batch");
    p.check();
    if (p.view.sequences == 0 || p.k.tokens == 0) return;
    detail::disorder_word word = nullptr;
    if (p.positions.data && p.view.order != slot_order::ascending) {
      const auto& found = detail::found_disorder::of_process();
      found.report();
      word = found.word();
    }
    const index_t groups = p.view.sequences * (p.view.length_strides.head ? kv_heads_ : 1);
    const offset_t rows = offset_t(p.k.tokens) * (p.view.sequences * kv_heads_ / groups);
    const offset_t work = rows * ((View::k_dim + View::v_dim) / detail::append_chunk);
    // A single block does up to eight rounds of a part: that takes less time than a second launch.
    const offset_t blocks =
        work <= 8 * detail::append_threads
            ? 1
            : std::clamp<offset_t>(work / (4 * detail::append_threads), 2, (std::max)(2, 2048 / groups));
    const bool from = rows_on_16_bytes(p.k) && rows_on_16_bytes(p.v);
    const bool to = rows_on_16_bytes(p.view.k, p.view.k_strides) && rows_on_16_bytes(p.view.v, p.view.v_strides);
    const auto entry = [] {
      if constexpr (View::is_raw)
        return detail::append_entry<View, E>;
      else
        return detail::append_encoded_entry<View, E>;
    }();
    static const bool can = can_overlap(entry);
    const bool overlaps = can && overlaps_;
    if (p.segments.data) number_segments(p, overlaps, stream);
    launch(entry,
           {.blocks = dim3(unsigned(groups), unsigned(blocks)),
            .threads = dim3(detail::append_threads),
            .overlapping = overlaps},
           stream, "append launch", p, from, to, overlaps, word);
    if (blocks > 1 && p.lengths) {
      detail::advance_entry<View, E>
          <<<unsigned(ceil_div(groups, detail::append_threads)), detail::append_threads, 0, stream>>>(p);
      check(cudaGetLastError(), "append launch");
    }
  }

 private:
  index_t sequences_, kv_heads_;
  bool overlaps_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
