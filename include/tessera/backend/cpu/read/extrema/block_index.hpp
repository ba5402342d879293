// The index of paged retrieval over an engine's own blocks on the CPU: filled by block as the engine writes keys.
#pragma once

#include <limits>

#include "../../../../core/engine/read_problem.hpp"
#include "../../kernel/executor.hpp"
#include "../../kernel/rows.hpp"
#include "../../store/page_checks.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
namespace detail {

/// Writes the extrema of the stored slots [begin, end) of one page.
template <class View>
void index_page(const index_blocks_problem<View>& p, index_t sequence, index_t head, index_t begin, index_t end) {
  using T = typename View::element_type;
  constexpr int D = View::k_dim;
  const slot_address address = p.view.table.locate(sequence, head, begin);
  T* const low = p.index.lower(address.outer, index_t(address.row / p.index.page), head);
  T* const high = low + p.index.side;
  constexpr float none = std::numeric_limits<float>::quiet_NaN();
  float key[D], least[D], largest[D];
  std::fill_n(least, D, none);
  std::fill_n(largest, D, none);
  for (index_t slot = begin; slot < end; ++slot) {
    load_key(p.view, sequence, head, slot, key);
    for (int d = 0; d < D; ++d) {
      const float value = View::is_raw ? key[d] : float(T(key[d]));
      least[d] = p.index.page == 1 ? value : lower_with(least[d], value);
      largest[d] = p.index.page == 1 ? value : upper_with(largest[d], value);
    }
  }
  for (int d = 0; d < D; ++d) low[d] = T(least[d]), high[d] = T(largest[d]);
}

}  // namespace detail

/// Brings the index of an engine's blocks up to date with keys that the engine has written.
///
/// Shapes   as index_blocks_problem says.
/// Values   those of cpu::page_index over the same keys, bit for bit.
/// Errors   shapes that do not fit, tables that leave the pool: tessera::error, before anything is written.
/// Cost     reads the keys of the pages that hold new slots, once a (sequence, kv_head), and writes these pages. The
///          workers share out kv_heads: sequences that share a block write the same values one after the other.
template <class View>
void index_blocks(const index_blocks_problem<View>& p, executor& workers) {
  p.check();
  if (p.view.sequences <= 0) return;
  require_memory(p.view, true, false);
  require_pages(p.view, p.pool);
  const index_t page = p.index.page;
  offset_t slots = 0;
  for (index_t b = 0; b < p.view.sequences; ++b) {
    require(p.first_slot(b) >= 0, "first new slot of sequence " + std::to_string(b), p.first_slot(b), "at least 0",
            "pass the slot at which the new tokens begin");
    for (index_t h = 0; h < p.view.kv_heads; ++h) slots += (std::max)(0, p.view.length(b, h) - p.first_slot(b));
  }
  workers.for_each(
      p.view.kv_heads,
      [&](index_t h, int) {
        for (index_t b = 0; b < p.view.sequences; ++b) {
          const index_t n = p.view.length(b, h), first = p.first_slot(b);
          for (index_t begin = first / page * page; first < n && begin < n; begin += page)
            detail::index_page(p, b, h, begin, (std::min)(n - begin, page) + begin);
        }
      },
      double(slots) * View::k_dim * 2);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
