// An engine's pages: how many there are, and which of them an eviction leaves empty.
#pragma once

#include "views.hpp"

TESSERA_NAMESPACE_BEGIN

/// What tables cannot say of themselves, so that the host can check them. 0: not said, and not checked.
struct page_pool {
  index_t pages = 0;       ///< in the pool: table entries are 0 to pages - 1
  index_t max_blocks = 0;  ///< entries of a table row, where tables are dense
};

/// Which pages the rows of a batch still need. On the device every pointer is a device pointer.
///
/// A table row is a sequence, or a (sequence, kv_head) where heads have tables of their own: row = sequence *
/// table.tables(kv_heads) + head. A row needs the pages of its longest head in any layer that shares the table (vLLM: one
/// table for all layers), and of `room` tokens more.
template <page_table Table>
struct free_pages_problem {
  struct strides {
    offset_t layer = 0;
    offset_t sequence = 0;
    offset_t head = 0;
  };
  Table table;
  index_t sequences = 0;
  index_t kv_heads = 1;
  index_t layers = 1;
  const index_t* lengths = nullptr;  ///< after the eviction, by (layer, sequence, kv_head)
  strides length_strides{};
  index_t room = 0;
  index_t* held = nullptr;    ///< [rows], pages of a row's table: those before; gets how many stay, its first ones
  index_t* freed = nullptr;   ///< [rows, freed_stride], gets the pages that nobody needs, in the order of the table
  offset_t freed_stride = 0;  ///< at least what a row may hold
  index_t* freed_count = nullptr;  ///< [rows]
  page_pool pool{};

  TESSERA_HD index_t tables() const { return table.tables(kv_heads); }
  /// Pages that a row needs whose longest head holds so many tokens.
  TESSERA_HD index_t pages_for(index_t tokens) const {
    return index_t((offset_t(tokens) + room + table.page - 1) / table.page);
  }
};

TESSERA_NAMESPACE_END
