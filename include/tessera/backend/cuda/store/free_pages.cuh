// Finds the pages that an eviction leaves empty, on the device.
#pragma once

#include <string>

#include "../../../core/engine/page_pool.hpp"
#include "../../../core/error.hpp"
#include "../device/check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// One warp handles one table row.
template <class View>
__global__ void __launch_bounds__(32) free_pages_entry(const __grid_constant__ free_pages_problem<View> p) {
  const index_t row = blockIdx.x, lane = threadIdx.x, tables = p.view.table.tables(p.view.kv_heads);
  const index_t each = p.view.kv_heads / tables, sequence = row / tables, first_head = row % tables * each;
  index_t longest = 0;
  for (index_t i = lane; i < p.layers * each; i += 32) {
    longest = (max)(longest, p.length(i / each, sequence, first_head + i % each));
  }
  longest = __reduce_max_sync(~0u, longest);
  const index_t held = p.page_counts[row], stay = (min)(held, p.pages_for(longest)), freed = held - stay;
  __syncwarp();  // all lanes have read `held`
  const index_t* pages = p.view.table.pages(sequence, first_head);
  for (index_t i = lane; i < freed; i += 32) p.freed[row * p.freed_stride + i] = pages[stay + i];
  if (lane == 0) {
    p.page_counts[row] = stay;
    p.freed_count[row] = freed;
  }
}

}  // namespace detail

/// Finds the pages that no head of a table row needs any more: the device's cpu::free_pages. Pages are freed from the
/// end of a row. The table itself does not change, because the engine decides who owns a page.
/// Shapes   as free_pages_problem says.
/// Errors   invalid shapes: tessera::error. Not checked, because the host does not know it: a page count above the
///          length of a row of `freed`.
/// Cost     one launch, no workspace.
template <class View>
void free_pages(const free_pages_problem<View>& p, cudaStream_t stream) {
  p.check();
  require(p.freed_stride >= p.pool.max_blocks, "freed_stride", p.freed_stride,
          "at least the entries of a table row, " + std::to_string(p.pool.max_blocks),
          "make room for all of a row's pages");
  if (p.view.sequences <= 0) return;
  const index_t tables = p.view.table.tables(p.view.kv_heads);
  detail::free_pages_entry<View><<<unsigned(p.view.sequences * tables), 32, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of free_pages");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
