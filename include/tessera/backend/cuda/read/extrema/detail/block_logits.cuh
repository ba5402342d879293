// Logits of the pages of an engine's blocks, and what a softmax over visible slots needs of every tile of pages.
#pragma once

#include "block_products.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Shared memory of a block behind the storage: queries, weights of products, sums, and which channels are read.
template <class View, class Scorer>
struct block_shared {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim;
  using rows_type = block_rows<View, Scorer>;
  TESSERA_HD static constexpr std::size_t weights_at(index_t rows) { return std::size_t(rows) * D * sizeof(T); }
  TESSERA_HD static constexpr std::size_t sums_at(index_t rows) {
    return weights_at(rows) + products_of<View, Scorer>::shared_bytes;
  }
  TESSERA_HD static constexpr std::size_t masks_at(index_t rows) {
    return sums_at(rows) + std::size_t(chunk_rows) * rows_type::pitch * sizeof(float);
  }
  TESSERA_HD static constexpr std::size_t bytes(index_t rows) {
    return masks_at(rows) + rows_type::chunks * sizeof(unsigned);
  }
};

inline constexpr int block_logits_blocks = 2;  // of a multiprocessor

/// Logits of pages from an index by block: what page_logits_entry does from one by row. It also writes each sequence's
/// plan for the choice that follows: `plan`, and the sequence's own numbers of tokens to read and of channels.
template <class View, class Scorer>
__global__ void __launch_bounds__(page_threads, block_logits_blocks)
    block_logits_entry(const __grid_constant__ choose_by_blocks_problem<View> p, Scorer scorer, read_plan plan,
                       read_plan* plans, const __grid_constant__ page_scratch scratch) {
  using T = typename View::element_type;
  constexpr int D = View::k_dim;
  using shared = block_shared<View, Scorer>;
  using rows_type = typename shared::rows_type;
  extern __shared__ uint4 page_memory[];
  __shared__ page_query_storage<D> s;
  auto* bytes = reinterpret_cast<unsigned char*>(page_memory);
  const int thread = int(threadIdx.x), lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const index_t row = index_t(blockIdx.y), sequence = row / p.view.kv_heads, head = row % p.view.kv_heads;
  if (p.reads) plan.read = (max)(1, (min)(p.reads[sequence], plan.read));
  if (p.channels) plan.channels = (max)(1, (min)(p.channels[sequence], index_t(D)));
  plan.tail = (min)(plan.tail, plan.read);
  if (blockIdx.x == 0 && head == 0 && thread == 0) plans[sequence] = plan;
  const index_t n = p.view.length(sequence, head), pages = plan.pages_of(n);
  const index_t run_pages = scratch.tiles_each * tile_pages, next_run = index_t(gridDim.x) * run_pages;
  const index_t first_run = index_t(blockIdx.x) * run_pages;
  if (first_run >= pages || n <= plan.read) return;

  const index_t group = p.q.heads / p.view.kv_heads, rows = p.q.tokens * group;
  T* const q = reinterpret_cast<T*>(bytes);
  const int channels = (min)(plan.channels, index_t(D));
  read_page_query<page_threads>(s, q, p, scorer, channels, sequence, head, n);
  if (blockIdx.x == 0 && thread < p.q.tokens) scratch.runs[row * max_step_tokens + thread] = s.runs[thread];
  auto* const sums = reinterpret_cast<float*>(bytes + shared::sums_at(rows));  // [chunk_rows, pitch]
  auto* const masks = reinterpret_cast<unsigned*>(bytes + shared::masks_at(rows));
  for (int c = thread; c < rows_type::chunks; c += page_threads) {
    unsigned mask = 0;
    for (int e = 0; e < rows_type::chunk; ++e) mask |= unsigned(s.rank[c * rows_type::chunk + e] < channels) << e;
    masks[c] = mask;
  }
  __syncthreads();  // the masks are there
  products_of<View, Scorer> products(rows_type{p, scorer, plan, s, q, masks, sequence, head, lane, warp, channels < D},
                                     bytes + shared::weights_at(rows));
  for (index_t first_row = 0; first_row < rows; first_row += chunk_rows) {
    const index_t held = (min)(index_t(chunk_rows), rows - first_row);
    products.prepare(first_row, rows);
    __syncthreads();  // weights in shared memory are there
    for (index_t first = first_run; first < pages; first += next_run) {
      const index_t begin = first / tile_pages, end = ceil_div((min)(pages, first + run_pages), index_t(tile_pages));
      typename rows_type::pages found = products.find(begin, pages);
      for (index_t tile = begin; tile < end; ++tile) {
        products.run(found, held, sums);
        if (tile + 1 < end) found = products.find(tile + 1, pages);  // arrives while this tile is finished
        __syncthreads();
        for (index_t r = warp; r < held; r += page_warps) {
          finish_tile<Scorer>(*reinterpret_cast<const float4*>(sums + r * rows_type::pitch + lane * 4), p.rule,
                              s.scale[first_row + r], s.usable[first_row + r], s.runs[(first_row + r) / group], n,
                              plan.page, pages, tile, row, first_row + r, scratch);
        }
        __syncthreads();  // before the next tile's sums, or the next rows' weights, overwrite these
      }
    }
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
