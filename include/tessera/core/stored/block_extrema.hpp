// The index of paged retrieval over an engine's own blocks: smallest and largest key values, where the blocks lie.
#pragma once

#include <type_traits>

#include "../config.hpp"
#include "../views.hpp"
#include "page_extrema.hpp"

TESSERA_NAMESPACE_BEGIN

/// Extrema of the pages of every block of an engine's pool, by the block's id and not by the sequence: sequences that
/// share a block share its extrema, and rows of a batch may change places between steps.
///
/// A page is a run of `page` slots; a block of the engine has a whole number of them. A page's row is found through the
/// table that finds its keys: page i of the block with id `b` is page number b * (block / page) + i of a pool of pages.
/// Shapes   e.g. [blocks * pages of a block, kv_heads, 2, D]: the smaller values, then the larger ones. Elements of a
///          row stand side by side; other strides are the engine's.
/// Values   those of stored keys, exactly. What is not finite is left out; NaN where a page has nothing else. A page of
///          one slot stores its key twice, whatever it is.
template <class T, int D>
struct block_extrema_view {
  T* data = nullptr;
  index_t page = 16;
  row_strides strides;  ///< `outer` from block to block, `token` from page to page within one; `dim` is 1
  offset_t side = D;    ///< from a page's smaller values to its larger ones

  TESSERA_HD T* lower(offset_t block, index_t page_of_block, index_t head) const {
    return data + block * strides.outer + page_of_block * strides.token + head * strides.head;
  }
  /// The same extrema, only read.
  template <std::same_as<const T> Read>
  requires(!std::is_const_v<T>) TESSERA_HD constexpr operator block_extrema_view<Read, D>() const {
    return {data, page, strides, side};
  }
};

/// Extrema [pages, kv_heads, 2, D] without gaps, of blocks of `block` slots.
template <int D, class T>
TESSERA_HD block_extrema_view<T, D> block_extrema(T* data, index_t page, index_t block, index_t kv_heads) {
  const offset_t each = offset_t(kv_heads) * 2 * D;
  return {data, page, {block / page * each, 2 * D, each, 1}, D};
}

TESSERA_NAMESPACE_END
