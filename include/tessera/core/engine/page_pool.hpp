// An engine's pages: how many there are, and which of them an eviction leaves empty.
#pragma once

#include <string>

#include "../error.hpp"
#include "../views.hpp"

TESSERA_NAMESPACE_BEGIN

/// What the host needs to check tables of pages. 0: unknown, and not checked.
struct page_pool {
  index_t pages = 0;       ///< in the pool: table entries are 0 to pages - 1
  index_t max_blocks = 0;  ///< entries of a table row, where tables are dense
};

/// Errors   pages of no slots, tables with different numbers of a sequence's heads: tessera::error.
template <class View>
void require_tables(const View& view) {
  if (view.table.page < 1) fail("slots of a page", view.table.page, "at least 1", "pass the page size of the pool");
  if (view.sequences <= 0) return;
  const index_t tables = view.table.tables(view.kv_heads);
  if (tables < 1 || view.kv_heads < tables || view.kv_heads % tables != 0) {
    fail("tables of a sequence", tables, "1, or one for each kv_head, which are " + std::to_string(view.kv_heads),
         "pass kv_heads as the tables have them");
  }
}

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

  /// Errors   impossible shapes, missing memory: tessera::error.
  void check() const {
    require_tables(view);
    require(layers >= 1, "layers", layers, "at least 1", "pass how many layers share the tables");
    require(spare_tokens >= 0, "spare_tokens", spare_tokens, "at least 0", "pass for how many more tokens pages stay");
    require(view.sequences <= 0 || (page_counts && freed && freed_count),
            "memory of page_counts, freed and freed_count", "null", "memory behind each",
            "pass the pages that rows hold, and memory for what comes out");
  }
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
