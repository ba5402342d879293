// Logits of the pages of an engine's blocks: an index by block holds the channels of a page side by side.
#pragma once

#include "../../../../../core/engine/read_problem.hpp"
#include "page_scores.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Elements in 16 bytes.
template <class T>
inline constexpr int elements_of_16_bytes = 16 / int(sizeof(T));

template <class T>
__device__ void floats_of(const uint4& raw, float (&x)[elements_of_16_bytes<T>]) {
  T elements[elements_of_16_bytes<T>];
  __builtin_memcpy(elements, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < elements_of_16_bytes<T>; ++i) x[i] = float(elements[i]);
}

/// Shared memory of a block behind the storage: the queries, every row's weights of a channel's extrema, and products.
template <class T, int D>
struct block_shared {
  static constexpr int chunk = elements_of_16_bytes<T>, chunks = D / chunk;
  /// Rows of weights of either side: a row of padding behind a chunk, so that neighbours begin in different banks.
  static constexpr int weight_rows = D + chunks;
  static constexpr int weights_of_side = weight_rows * (chunk_rows / 4);
  TESSERA_HD static constexpr std::size_t weights_at(index_t rows) { return std::size_t(rows) * D * sizeof(T); }
  TESSERA_HD static constexpr std::size_t sums_at(index_t rows) {
    return weights_at(rows) + 2 * std::size_t(weights_of_side) * 16;
  }
  TESSERA_HD static constexpr std::size_t masks_at(index_t rows) {
    return sums_at(rows) + std::size_t(chunk_rows) * tile_pages * sizeof(float);
  }
  TESSERA_HD static constexpr std::size_t bytes(index_t rows) { return masks_at(rows) + chunks * sizeof(unsigned); }

  TESSERA_HD static constexpr int weight_row(int channel) { return (channel + channel / chunk) * (chunk_rows / 4); }
};

/// Products of a warp's pages with a chunk of rows. Four neighbouring lanes have two pages; each has every fourth chunk
/// of 16 bytes of both sides.
template <class View, class Scorer>
struct block_products {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim;
  using shared = block_shared<T, D>;
  static constexpr int chunk = shared::chunk, chunks = shared::chunks, pages_of_lane = 2;
  static_assert(page_warps * 8 * pages_of_lane == tile_pages);

  const choose_by_blocks_problem<View>& p;
  const read_plan& plan;
  const float4* const weights;
  const unsigned* const masks;  // of each chunk, which of its channels are read
  const index_t sequence, head;
  const int lane;
  const bool single;  // pages of one slot have one side

  /// acc [pages_of_lane, chunk_rows], complete in every lane of the four.
  __device__ void run(index_t first, index_t pages, bool many, float (&acc)[pages_of_lane][chunk_rows]) const {
    const T* rows[pages_of_lane];
#pragma unroll
    for (int i = 0; i < pages_of_lane; ++i) {
      const index_t at = first + i;
      rows[i] = nullptr;
      if (at < pages) {
        const slot_address address = p.view.table.locate(sequence, head, at * plan.page);
        rows[i] = p.index.lower(address.outer, plan.page_of(index_t(address.row)), head);
      }
    }
#pragma unroll 2
    for (int c = lane % 4; c < chunks; c += 4) {
      const unsigned mask = masks[c];
      if (mask == 0) continue;
      uint4 raw[pages_of_lane][2];
#pragma unroll
      for (int i = 0; i < pages_of_lane; ++i) {
        const bool there = rows[i] != nullptr;
        const T* const from = there ? rows[i] + c * chunk : nullptr;
        raw[i][0] = there ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
        raw[i][1] =
            there && !single ? __ldg(reinterpret_cast<const uint4*>(from + p.index.side)) : make_uint4(0, 0, 0, 0);
      }
      float low[pages_of_lane][chunk], high[pages_of_lane][chunk];
#pragma unroll
      for (int i = 0; i < pages_of_lane; ++i) floats_of<T>(raw[i][0], low[i]), floats_of<T>(raw[i][1], high[i]);
      if (mask + 1 != 1u << chunk) {  // a channel that is not read may hold NaN
#pragma unroll
        for (int e = 0; e < chunk; ++e) {
          if ((mask >> e & 1) != 0) continue;
#pragma unroll
          for (int i = 0; i < pages_of_lane; ++i) low[i][e] = high[i][e] = 0;
        }
      }
#pragma unroll
      for (int e = 0; e < chunk; ++e) {
        const float4* const of = weights + shared::weight_row(c * chunk + e);
        add(of, low, high, e, 0, acc);
        if (many) add(of, low, high, e, 1, acc);
      }
    }
#pragma unroll
    for (int i = 0; i < pages_of_lane; ++i) {
#pragma unroll
      for (int r = 0; r < chunk_rows; ++r) acc[i][r] = lanes_sum<4>(acc[i][r]);
    }
  }

 private:
  __device__ static void add(const float4* of, const float (&low)[pages_of_lane][chunk],
                             const float (&high)[pages_of_lane][chunk], int e, int half,
                             float (&acc)[pages_of_lane][chunk_rows]) {
    const float4 lower = of[half], upper = of[shared::weights_of_side + half];
#pragma unroll
    for (int i = 0; i < pages_of_lane; ++i) {
      acc[i][half * 4] += lower.x * low[i][e] + upper.x * high[i][e];
      acc[i][half * 4 + 1] += lower.y * low[i][e] + upper.y * high[i][e];
      acc[i][half * 4 + 2] += lower.z * low[i][e] + upper.z * high[i][e];
      acc[i][half * 4 + 3] += lower.w * low[i][e] + upper.w * high[i][e];
    }
  }
};

/// Logits of pages from an index by block: what page_logits_entry does from one by row. It also writes each sequence's
/// plan for the choice that follows: `plan`, and the sequence's own number of tokens to read.
template <class View, class Scorer>
__global__ void __launch_bounds__(page_threads, 2)
    block_logits_entry(const __grid_constant__ choose_by_blocks_problem<View> p, Scorer scorer, read_plan plan,
                       read_plan* plans, const __grid_constant__ page_scratch to) {
  using T = typename View::element_type;
  constexpr int D = View::k_dim;
  using shared = block_shared<T, D>;
  using products = block_products<View, Scorer>;
  extern __shared__ uint4 page_memory[];
  __shared__ page_query_storage<D> s;
  auto* bytes = reinterpret_cast<unsigned char*>(page_memory);
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const index_t row = index_t(blockIdx.y), sequence = row / p.view.kv_heads, head = row % p.view.kv_heads;
  if (p.reads) plan.read = (max)(1, (min)(p.reads[sequence], plan.read));
  plan.tail = (min)(plan.tail, plan.read);
  if (blockIdx.x == 0 && head == 0 && thread == 0) plans[sequence] = plan;
  const index_t n = p.view.length(sequence, head), pages = plan.pages_of(n);
  const index_t run_pages = to.tiles_each * tile_pages, next_run = index_t(gridDim.x) * run_pages;
  const index_t first_run = index_t(blockIdx.x) * run_pages;
  if (first_run >= pages || n <= plan.read) return;

  const index_t group = p.q.heads / p.view.kv_heads, rows = p.q.tokens * group;
  T* q = reinterpret_cast<T*>(bytes);
  const int channels = (min)(plan.channels, index_t(D));
  const bool single = plan.page == 1;
  read_page_query<page_threads>(s, q, p, scorer, channels, sequence, head, n);
  if (blockIdx.x == 0 && thread < p.q.tokens) to.runs[row * max_step_tokens + thread] = s.runs[thread];
  auto* const weights = reinterpret_cast<float*>(bytes + shared::weights_at(rows));
  auto* const sums = reinterpret_cast<float*>(bytes + shared::sums_at(rows));  // [chunk_rows, tile_pages]
  auto* const masks = reinterpret_cast<unsigned*>(bytes + shared::masks_at(rows));
  for (int c = thread; c < shared::chunks; c += page_threads) {
    unsigned mask = 0;
    for (int e = 0; e < shared::chunk; ++e) mask |= unsigned(s.rank[c * shared::chunk + e] < channels) << e;
    masks[c] = mask;
  }
  const products multiply{p, plan, reinterpret_cast<const float4*>(weights), masks, sequence, head, lane, single};
  for (index_t chunk = 0; chunk < rows; chunk += chunk_rows) {
    const index_t held = (min)(index_t(chunk_rows), rows - chunk);
    for (int i = thread; i < D * chunk_rows; i += page_threads) {
      const int d = i / chunk_rows, r = i % chunk_rows;
      const float x = r < held && s.usable[chunk + r] ? float(q[(chunk + r) * D + d]) : 0.0f;
      const bool upper = !single && scorer.takes_upper(x, s.total[d]);
      float* const of = weights + shared::weight_row(d) * 4 + r;
      of[0] = upper ? 0.0f : x;
      of[shared::weights_of_side * 4] = upper ? x : 0.0f;
    }
    __syncthreads();  // weights and masks are there
    for (index_t first = first_run; first < pages; first += next_run) {
      const index_t end = (min)(pages, first + run_pages);
      for (index_t tile = first / tile_pages; tile * tile_pages < end; ++tile) {
        float acc[products::pages_of_lane][chunk_rows] = {};
        const int local = warp * 16 + lane / 4 * products::pages_of_lane;
        multiply.run(tile * tile_pages + local, pages, held > 4, acc);
#pragma unroll
        for (int r = 0; r < chunk_rows; ++r) {
          if (r % 4 != lane % 4) continue;  // each of the four lanes stores its rows
#pragma unroll
          for (int i = 0; i < products::pages_of_lane; ++i) sums[r * tile_pages + local + i] = acc[i][r];
        }
        __syncthreads();
        for (index_t r = warp; r < held; r += page_warps) {
          finish_tile<Scorer>(reinterpret_cast<const float4*>(sums)[r * 32 + lane], p.rule, s.scale[chunk + r],
                              s.usable[chunk + r], s.runs[(chunk + r) / group], n, plan.page, pages, tile, row,
                              chunk + r, to);
        }
        __syncthreads();  // before the next tile's sums, or the next chunk's weights, overwrite these
      }
    }
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
