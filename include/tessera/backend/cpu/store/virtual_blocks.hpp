// A page table for every head, on the CPU.
#pragma once

#include "../../../core/engine/one_head.hpp"
#include "page_checks.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Fills a block table with one row for every (sequence, kv_head), for kernels that know one length a sequence: see
/// `one_head_view`. Entries behind a head's last slot are -1.
/// Shapes   blocks [sequences * kv_heads, max_blocks]; the view's table is one of pages.
/// Errors   as virtual_ids_of_page says; a head with more pages than `max_blocks`: tessera::error.
template <class View>
void virtual_blocks(const View& view, index_t max_blocks, index_t* blocks, const page_pool& pool = {}) {
  const index_t ids = virtual_ids_of_page(view, max_blocks, pool);
  require_pages(view, {pool.pages, max_blocks});
  for (index_t row = 0; row < view.sequences * view.kv_heads; ++row) {
    const index_t b = row / view.kv_heads, h = row % view.kv_heads, used = ceil_div(view.length(b, h), view.table.page);
    const index_t* pages = view.table.pages(b, h);
    for (index_t i = 0; i < max_blocks; ++i) {
      blocks[offset_t(row) * max_blocks + i] = i >= used ? no_index : ids ? pages[i] * ids + h : pages[i];
    }
  }
}

}  // namespace cpu
TESSERA_NAMESPACE_END
