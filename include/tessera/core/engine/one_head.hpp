// Heads of uneven length for kernels that know one length a sequence: every head as a sequence of its own.
#pragma once

#include <algorithm>
#include <string>

#include "../error.hpp"
#include "page_pool.hpp"

TESSERA_NAMESPACE_BEGIN

/// How many strides from head to head a page is long: virtual page id = page * this + head, in units of that stride
/// (TANGRAM). 0: pages hold one head, and ids stay.
/// Errors   pages of K and V that are cut into heads differently; ids beyond 31 bits: tessera::error.
template <class View>
index_t virtual_ids_of_page(const View& view, const page_pool& pool = {}) {
  const auto strides_of = [](const row_strides& s) {
    require(s.head == 0 || s.outer % s.head == 0, "stride from page to page", s.outer,
            "a multiple of that from head to head, " + std::to_string(s.head), "pad the pages");
    return s.head == 0 ? 0 : s.outer / s.head;
  };
  const offset_t ids = strides_of(view.k_strides);
  if constexpr (!View::is_latent) {
    require(ids == strides_of(view.v_strides), "heads in a page of V", strides_of(view.v_strides),
            "those of K, " + std::to_string(ids), "lay K and V out alike");
  }
  require(ids * (std::max)(1, pool.pages) < offset_t(1) << 31, "virtual page ids", ids * pool.pages, "below 2^31",
          "use [pages, heads, page, dim], which has fewer");
  return index_t(ids);
}

/// The same for rows of `max_blocks` entries that `virtual_blocks` fills.
/// Errors   rows without entries, pages of no slots: tessera::error.
template <class View>
index_t virtual_ids_of_page(const View& view, index_t max_blocks, const page_pool& pool) {
  static_assert(page_table<decltype(View::table)>, "tessera: virtual page ids are made from a table of pages");
  require(max_blocks >= 1, "max_blocks", max_blocks, "at least 1", "pass how many entries a row of blocks has");
  require_tables(view);
  return virtual_ids_of_page(view, pool);
}

/// A view of one head over sequences * kv_heads sequences, row = sequence * kv_heads + head, behind `blocks` as
/// `virtual_blocks` fills it. Queries for it: [sequences * kv_heads, tokens, group, dim].
/// Shapes   blocks [sequences * kv_heads, max_blocks].
/// Errors   lengths, positions or scales that do not follow one another head by head: tessera::error.
template <class E, int D, class Table, int Dv>
kv_view<E, D, block_table, Dv> one_head_view(const kv_view<E, D, Table, Dv>& view, const index_t* blocks,
                                             index_t max_blocks) {
  const offset_t ids = virtual_ids_of_page(view);
  const auto by_head = [&](offset_t sequence, offset_t head, const char* name) {
    require(head != 0 && (view.sequences <= 1 || sequence == head * view.kv_heads), name, sequence,
            "kv_heads times that from head to head, " + std::to_string(head * view.kv_heads),
            "keep them as [sequences, kv_heads, ..]");
  };
  kv_view<E, D, block_table, Dv> result;
  result.k = view.k;
  result.v = view.v;
  result.k_strides = {ids ? view.k_strides.head : view.k_strides.outer, 0, view.k_strides.token, view.k_strides.dim};
  result.v_strides = {ids ? view.v_strides.head : view.v_strides.outer, 0, view.v_strides.token, view.v_strides.dim};
  result.sequences = view.sequences * view.kv_heads;
  result.kv_heads = 1;
  by_head(view.length_strides.sequence, view.length_strides.head, "stride of lengths from sequence to sequence");
  result.lengths = view.lengths;
  result.length_strides = {view.length_strides.head, 0};
  result.positions = view.positions;
  result.position_begin = view.position_begin;
  result.order = view.order;
  if (view.positions && !view.position_begin) {
    by_head(view.position_strides.sequence, view.position_strides.head,
            "stride of positions from sequence to sequence");
    result.position_strides = {view.position_strides.head, 0};
  }
  if constexpr (kv_view<E, D, Table, Dv>::encoding_type::scaled) {
    require(view.scales.outer == ids * view.scales.head || ids == 0, "stride of scales from page to page",
            view.scales.outer, std::to_string(ids * view.scales.head), "lay scales out as K and V");
    result.scales = view.scales;
    if (ids) result.scales.outer = view.scales.head;
    result.scales.head = 0;
  }
  result.table = {blocks, view.table.page, max_blocks};
  return result;
}

TESSERA_NAMESPACE_END
