// An engine's pages: how many there are, and which of them an eviction leaves empty.
#pragma once

#include "../views.hpp"

TESSERA_NAMESPACE_BEGIN

/// What the host needs to check tables of pages. 0: unknown, and not checked.
struct page_pool {
  index_t pages = 0;       ///< in the pool: table entries are 0 to pages - 1
  index_t max_blocks = 0;  ///< entries of a table row, where tables are dense
};

/// Which pages a batch still needs after an eviction. On the device every pointer is a device pointer.
///
/// A table row is a sequence, or a (sequence, kv_head) where heads have tables of their own: row = sequence *
/// table.tables(kv_heads) + head. It needs the pages of its longest head in any of the layers that share the table
/// (vLLM: all of them), and pages for `spare_tokens` more.
template <class View>
struct free_pages_problem {
  static_assert(page_table<decltype(View::table)>, "tessera: pages are freed of views behind a table of pages");
  View view;                  ///< of the first layer: tables, and lengths after the eviction; rows are not read
  index_t layers = 1;         ///< that share the tables
  offset_t layer_stride = 0;  ///< from one layer's lengths to the next one's
  index_t spare_tokens = 0;
  index_t* page_counts = nullptr;  ///< [table rows], pages of a row; gets how many stay: its first ones
  index_t* freed = nullptr;        ///< [table rows, freed_stride], gets the pages that nobody needs, in table order
  offset_t freed_stride = 0;       ///< at least the largest count of pages of a row
  index_t* freed_count = nullptr;  ///< [table rows]
  page_pool pool{};

  TESSERA_HD index_t length(index_t layer, index_t sequence, index_t head) const {
    return view
        .lengths[layer * layer_stride + sequence * view.length_strides.sequence + head * view.length_strides.head];
  }
  /// Pages that a row needs whose longest head holds so many tokens.
  TESSERA_HD index_t pages_for(index_t tokens) const {
    return index_t((offset_t(tokens) + spare_tokens + view.table.page - 1) / view.table.page);
  }
};

TESSERA_NAMESPACE_END
