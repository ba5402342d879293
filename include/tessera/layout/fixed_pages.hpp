// Rows in pages of a fixed number of tokens, as serving engines keep them.
#pragma once

#include "../concepts/layout.hpp"
#include "../core/views.hpp"

TESSERA_NAMESPACE_BEGIN

/// Pages [pages, Page, kv_heads, dim], from a pool that all layers and sequences share, and one table of pages for each
/// (layer, sequence), as vLLM has them. All kv_heads of a token lie in one page: heads that hold less than the longest
/// leave their slots of the last pages empty. No row moves when a sequence grows. Pages that are no longer needed after
/// an eviction return to the pool.
template <int Page = 16>
struct fixed_pages {
  static_assert(Page >= 1 && (Page & (Page - 1)) == 0, "tessera: a page holds a power of two of tokens");
  static constexpr const char* name = "fixed_pages";
  static constexpr index_t page = Page;
  using table_type = csr_table;

  /// Pages that `tokens` tokens of all kv_heads of one layer take.
  static constexpr offset_t pages_for(offset_t tokens) { return (tokens + Page - 1) / Page; }
  /// Most pages that a sequence of so many tokens, of the prompt and decoded since, takes in all layers, whatever is
  /// kept.
  static constexpr offset_t upper_bound_pages(offset_t tokens, index_t layers) { return layers * pages_for(tokens); }
};

static_assert(placement<fixed_pages<16>>);

TESSERA_NAMESPACE_END
