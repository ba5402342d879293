// Pages that an eviction leaves empty, on the CPU.
#pragma once

#include <algorithm>
#include <string>

#include "../../../core/engine/page_pool.hpp"
#include "../../../core/error.hpp"
#include "page_checks.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Finds the pages at the end of heads table row that no head of the row needs any more, as cuda::free_pages does. The
/// table does not change: pages are the engine's.
/// Shapes   as free_pages_problem says.
/// Errors   impossible shapes; a row with fewer pages than its tokens need, or more than its table has entries; an
///          entry that is no page of the pool: tessera::error, before anything is written.
template <class View>
void free_pages(const free_pages_problem<View>& p) {
  const auto& table = p.view.table;
  p.check();
  if (p.view.sequences <= 0) return;
  const index_t tables = table.tables(p.view.kv_heads), rows = p.view.sequences * tables;
  const index_t heads = p.view.kv_heads / tables;  // of a row
  const auto longest = [&](index_t row) {
    index_t most = 0;
    for (index_t i = 0; i < p.layers * heads; ++i) {
      most = (std::max)(most, p.length(i / heads, row / tables, row % tables * heads + i % heads));
    }
    return most;
  };
  const auto pages_of = [&](index_t row) { return table.pages(row / tables, row % tables * heads); };
  for (index_t row = 0; row < rows; ++row) {
    const index_t held = p.page_counts[row], least = ceil_div(longest(row), table.page);
    const offset_t most =
        p.pool.max_blocks > 0 ? (std::min<offset_t>)(p.pool.max_blocks, p.freed_stride) : p.freed_stride;
    if (held < least || held > most) {
      fail("pages that row " + std::to_string(row) + " of the tables holds", held,
           std::to_string(least) + " to " + std::to_string(most),
           "pass how many pages heads row held before the eviction");
    }
    for (index_t i = 0; p.pool.pages > 0 && i < held; ++i) {
      const index_t id = pages_of(row)[i];
      if (id >= 0 && id < p.pool.pages) continue;
      fail("entry " + std::to_string(i) + " of table row " + std::to_string(row), id,
           "a page of the pool, 0 to " + std::to_string(p.pool.pages - 1), "pass the tables as they were");
    }
  }
  for (index_t row = 0; row < rows; ++row) {
    const index_t held = p.page_counts[row], stay = (std::min)(held, p.pages_for(longest(row)));
    std::copy(pages_of(row) + stay, pages_of(row) + held, p.freed + row * p.freed_stride);
    p.freed_count[row] = held - stay;
    p.page_counts[row] = stay;
  }
}

}  // namespace cpu
TESSERA_NAMESPACE_END
