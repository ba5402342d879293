// Which segment of the text each new token belongs to, on the GPU: flags become numbers in a column beside the tokens.
#pragma once

#include "../../../core/engine/move_problem.hpp"
#include "../device/launch.cuh"
#include "../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A block a sequence: a thread a token, tile by tile. A run is what lies between two flags; it is cut after
/// most_segment_tokens, so a token's number follows from its place in the run and from the pieces of the runs before
/// it.
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
  index_t run = -before.tokens, segment = before.segment;  // where the open run begins, and its first piece
  for (index_t first = 0; first < tokens; first += Threads) {
    const index_t token = first + thread;
    const bool inside = token < tokens, flag = inside && ends[token] != 0;
    const unsigned of_warp = __ballot_sync(~0u, flag);
    if (lane == 0) flags[warp] = of_warp;
    __syncthreads();
    // The last flag before this token, of its warp or of one before it.
    const auto behind_last = [&](int w, unsigned earlier) {
      while (earlier == 0 && w > 0) earlier = flags[--w];
      return earlier ? first + w * 32 + 32 - __clz(earlier) : run;
    };
    const index_t begin = behind_last(warp, of_warp & ((1u << lane) - 1));
    const index_t pieces = flag ? ceil_div(token + 1 - begin, most_segment_tokens) : 0;
    const index_t number = segment + scan.before(pieces) + (token - begin) / most_segment_tokens;
    if (inside) {
      for (index_t h = 0; h < heads; ++h) p.segments.at(b, h, heads, p.view.length(b, h) + token) = number;
    }
    segment += scan.total();
    run = behind_last(warps, 0);
    __syncthreads();  // flags and scan are free again
  }
  if (thread == 0) {
    const index_t open = tokens - run;
    p.texts[b] = {segment + open / most_segment_tokens, open % most_segment_tokens};
  }
}

/// Where the texts of a batch stand, alike in all layers.
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

/// Fills the segment column for the tokens that `problem` appends, and moves its texts on. Before the lengths advance.
/// The numbers of segment_cursor::take.   Cost  one launch: a block a sequence, which reads a byte a token.
/// `overlaps`: from sm_90 on it begins while the launch before it on the stream ends, and lets the next one begin.
template <class View, class E>
void number_segments(const append_problem<View, E>& problem, bool overlaps, cudaStream_t stream) {
  constexpr int threads = 256;
  launch(detail::number_segments_entry<threads, View, E>,
         {.blocks = dim3(unsigned(problem.view.sequences)), .threads = dim3(threads), .overlapping = overlaps}, stream,
         "launch of number_segments", problem);
}

}  // namespace cuda
TESSERA_NAMESPACE_END
