// New tokens behind the stored ones, on the GPU: rows converted and written, columns filled, lengths advanced.
#pragma once

#include <algorithm>

#include "../../../core/views.hpp"
#include "pack.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What to append; every pointer is a device pointer. Row t of `k` and `v` goes to slot length(sequence, head) + t.
template <class View, class E>
struct append_problem {
  View view;                   ///< with room for the new tokens; its lengths are those before
  rows_view<const E> k, v;     ///< [sequences, tokens, kv_heads, dim], dim stride 1
  index_t* lengths = nullptr;  ///< the memory of view.lengths, or another of its strides; gets the lengths after
  const index_t* new_tokens = nullptr;      ///< [sequences], at most k.tokens; null: all of them
  const index_t* first_position = nullptr;  ///< [sequences]; null: positions go on from the length before
  slot_column<index_t> positions{};
  slot_column<float> scores{};  ///< of new tokens: 0
};

namespace detail {

inline constexpr int append_threads = 256;
inline constexpr int append_chunk = 8;  // elements that one thread converts at a time
inline constexpr int in_flight = 4;     // chunks of a thread

/// Eight elements as they come from memory, fetched before anything is done with them.
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

/// Two 16-bit elements after the CPU's round trip through fp32, which changes only NaN: made quiet, in fp16 all one.
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
  return p.new_tokens ? min(max(p.new_tokens[sequence], 0), p.k.tokens) : p.k.tokens;
}

/// A block writes its share of one sequence (of one head where heads have their own lengths). Where one block has it
/// all it advances the length itself; else advance_entry does, because other blocks still read it.
template <class View, class E>
__global__ void __launch_bounds__(append_threads)
    append_entry(const __grid_constant__ append_problem<View, E> p, int aligned_from, int aligned_to) {
  constexpr int k_chunks = View::k_dim / append_chunk, chunks = k_chunks + View::v_dim / append_chunk;
  const index_t groups_of_heads = p.view.length_strides.head ? p.view.kv_heads : 1;
  const index_t heads = p.view.kv_heads / groups_of_heads;
  const index_t b = index_t(blockIdx.x) / groups_of_heads, first_head = index_t(blockIdx.x) % groups_of_heads;
  const index_t tokens = tokens_of(p, b), length = p.view.length(b, first_head);
  const offset_t work = offset_t(tokens) * heads * chunks, step = offset_t(gridDim.y) * append_threads;
  struct place {
    index_t part, token, head;
  };
  const auto find = [&](offset_t i) {
    const index_t row = index_t(i / chunks);
    return place{index_t(i % chunks), row / heads, first_head + row % heads};
  };
  for (offset_t base = offset_t(blockIdx.y) * append_threads + threadIdx.x; base < work; base += step * in_flight) {
    raw_chunk<E> chunk[in_flight];
#pragma unroll
    for (int u = 0; u < in_flight; ++u) {
      if (base + u * step >= work) break;
      const place at = find(base + u * step);
      chunk[u].load(at.part < k_chunks ? p.k.row(b, at.token, at.head) + at.part * append_chunk
                                       : p.v.row(b, at.token, at.head) + (at.part - k_chunks) * append_chunk,
                    aligned_from);
    }
#pragma unroll
    for (int u = 0; u < in_flight; ++u) {
      if (base + u * step >= work) break;
      const place at = find(base + u * step);
      const index_t slot = length + at.token;
      if (at.part < k_chunks) {
        const offset_t stride = p.view.k_strides.dim;
        store_chunk(p.view.key(b, at.head, slot) + at.part * append_chunk * stride, stride, aligned_to, chunk[u]);
      } else {
        const offset_t stride = p.view.v_strides.dim;
        store_chunk(p.view.value(b, at.head, slot) + (at.part - k_chunks) * append_chunk * stride, stride, aligned_to,
                    chunk[u]);
      }
      if (at.part == 0) {
        if (p.positions.data) {
          p.positions.at(b, at.head, p.view.kv_heads, slot) =
              (p.first_position ? p.first_position[b] : length) + at.token;
        }
        if (p.scores.data) p.scores.at(b, at.head, p.view.kv_heads, slot) = 0;
      }
    }
  }
  if (gridDim.y == 1 && p.lengths) {
    __syncthreads();  // every thread has read the length before
    if (threadIdx.x == 0) {
      p.lengths[b * p.view.length_strides.sequence + first_head * p.view.length_strides.head] = length + tokens;
    }
  }
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

/// Appends new K and V rows of every (sequence, kv_head) and advances the lengths on the device.
///
/// Lengths are per (sequence, head), or per sequence with length_strides.head 0. One launch for a decode step's few
/// tokens, a second tiny one for a prefill chunk.   Workspace  none.   Cost  reads and writes each new row once.
template <class View, class E>
class append {
 public:
  append(index_t sequences, index_t kv_heads) : sequences_(sequences), kv_heads_(kv_heads) {
    require(sequences >= 0 && kv_heads >= 1, "kv_heads", kv_heads, "1 or more", "pass the model's head count");
  }

  std::size_t workspace_bytes() const { return 0; }

  void run(const append_problem<View, E>& problem, void*, cudaStream_t stream) const {
    const auto& p = problem;
    require(p.view.sequences == sequences_ && p.view.kv_heads == kv_heads_, "kv_heads", p.view.kv_heads,
            std::to_string(kv_heads_), "pass the shape of the constructor");
    require(p.k.tokens == p.v.tokens, "tokens of v", p.v.tokens, std::to_string(p.k.tokens), "append k and v together");
    if (sequences_ == 0 || p.k.tokens == 0) return;
    const index_t groups = sequences_ * (p.view.length_strides.head ? kv_heads_ : 1);
    const offset_t work = offset_t(p.k.tokens) * (sequences_ * kv_heads_ / groups) * ((View::k_dim + View::v_dim) / 8);
    // Up to eight rounds of one block: shorter than a second launch.
    const offset_t blocks =
        work <= 8 * detail::append_threads
            ? 1
            : std::clamp<offset_t>(work / (4 * detail::append_threads), 2, std::max(2, 2048 / groups));
    const bool from = rows_on_16_bytes(p.k) && rows_on_16_bytes(p.v);
    const bool to = rows_on_16_bytes(p.view.k, p.view.k_strides) && rows_on_16_bytes(p.view.v, p.view.v_strides);
    detail::append_entry<View, E>
        <<<dim3(unsigned(groups), unsigned(blocks)), detail::append_threads, 0, stream>>>(p, from, to);
    check(cudaGetLastError(), "append launch");
    if (blocks > 1 && p.lengths) {
      detail::advance_entry<View, E>
          <<<unsigned(ceil_div(groups, detail::append_threads)), detail::append_threads, 0, stream>>>(p);
      check(cudaGetLastError(), "append launch");
    }
  }

 private:
  index_t sequences_, kv_heads_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
