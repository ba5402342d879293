// A page table for every head, on the device.
#pragma once

#include "../../../core/engine/one_head.hpp"
#include "../device/check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// One thread block handles one (sequence, kv_head).
template <class View, int Threads>
__global__ void __launch_bounds__(Threads)
    virtual_blocks_entry(const __grid_constant__ View view, index_t ids, index_t max_blocks, index_t* blocks) {
  const index_t row = blockIdx.x, b = row / view.kv_heads, h = row % view.kv_heads;
  const index_t used = ceil_div(view.length(b, h), view.table.page);
  const index_t* pages = view.table.pages(b, h);
  for (index_t i = threadIdx.x; i < max_blocks; i += Threads) {
    blocks[offset_t(row) * max_blocks + i] = i >= used ? no_index : ids ? pages[i] * ids + h : pages[i];
  }
}

}  // namespace detail

/// Fills a block table with one row for every (sequence, kv_head), for kernels that take one length per sequence: see
/// `one_head_view`. Entries behind a head's last slot are -1. The device's cpu::virtual_blocks.
/// Shapes   blocks [sequences * kv_heads, max_blocks]; the view's table is one of pages; all on the device.
/// Errors   as virtual_ids_of_page says: tessera::error. Not checked, because the host does not know it: heads with
///          more pages than `max_blocks`.
/// Cost     one launch, no workspace.
template <class View>
void virtual_blocks(const View& view, index_t max_blocks, index_t* blocks, cudaStream_t stream,
                    const page_pool& pool = {}) {
  const index_t ids = virtual_ids_of_page(view, max_blocks, pool);
  const index_t rows = view.sequences * view.kv_heads;
  if (rows <= 0) return;
  detail::virtual_blocks_entry<View, 128><<<unsigned(rows), 128, 0, stream>>>(view, ids, max_blocks, blocks);
  check(cudaGetLastError(), "launch of virtual_blocks");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
