// What a second stage reads over an engine's own blocks: the index of their keys, and the slots that a step attends.
#pragma once

#include <algorithm>
#include <string>

#include "../logit_rule.hpp"
#include "../model_shape.hpp"
#include "../plan/stage_plan.hpp"
#include "../stored/block_extrema.hpp"
#include "page_pool.hpp"

TESSERA_NAMESPACE_BEGIN

/// Errors   an index without memory, pages that do not divide the view's blocks: tessera::error.
template <class View, class Index>
void require_block_index(const View& view, const Index& index) {
  require(index.page >= 1 && view.table.page >= 1 && view.table.page % index.page == 0, "page of the index", index.page,
          "a divisor of the engine's block, which is " + std::to_string(view.table.page),
          "index pages that lie within a block");
  require(index.data || view.sequences <= 0, "data of the index", "null", "memory for the extrema of every block",
          "allocate [blocks * pages of a block, kv_heads, 2, dim] beside the pool");
}

/// Keys that an engine has written, and the index that follows. On the device every pointer is a device pointer.
///
/// A page that holds a new slot is made anew from all of its keys, so that a call may be repeated, and rows that were
/// taken back may be written again. The other pages are not touched: neither their keys nor their extrema are read.
template <class View>
struct index_blocks_problem {
  static_assert(paged_table<decltype(View::table)>, "tessera: an index by block needs a view behind a table of blocks");
  using T = typename View::element_type;

  View view;                                   ///< lengths count the new tokens; values are not read
  block_extrema_view<T, View::k_dim> index{};  ///< of the pool's blocks
  const index_t* first_slots = nullptr;        ///< [sequences], the first new slot of each; null: all slots are new
  index_t new_tokens = 0;                      ///< usual upper bound of a sequence's new slots: it sizes the device's
                                               ///< launch, and more are indexed too; 0: `pool.max_blocks` blocks
  page_pool pool{};                            ///< for the CPU's checks

  /// Errors   those of require_block_index.
  void check() const {
    require_block_index(view, index);
    require(new_tokens >= 0, "new_tokens", new_tokens, "at least 0", "pass how many tokens a sequence has got");
  }
  TESSERA_HD index_t first_slot(index_t sequence) const { return first_slots ? first_slots[sequence] : 0; }
};

/// What a step chooses by, and where the choice goes; on the device every pointer is a device pointer.
///
/// Blocks that a choice reads must be indexed: with the step's own tokens, too. A block that sequences share holds as
/// many tokens of each of them.
template <class View>
struct choose_by_blocks_problem {
  static_assert(paged_table<decltype(View::table)>, "tessera: a choice by block needs a view behind a table of blocks");
  using T = typename View::element_type;

  View view;  ///< what steps may read; lengths count the step's own tokens; rows are not read
  block_extrema_view<const T, View::k_dim> index{};
  index_t read = 0;                         ///< tokens that a step attends of each kv_head
  const index_t* reads = nullptr;           ///< [sequences], in place of `read`: 1 to `read`; null: `read`
  const index_t* channels = nullptr;        ///< [sequences], of a key that an estimate reads, 1 to k_dim, in place of
                                            ///< the scorer's; null: the scorer's
  rows_view<const T> q{};                   ///< [sequences, tokens, q_heads, k_dim], whose keys are stored already
  const index_t* first_position = nullptr;  ///< [sequences], of the step's first token
  logit_rule rule{};
  index_t* out = nullptr;  ///< [rows, out_stride], ascending slots of the view; row = sequence * kv_heads + head
  offset_t out_stride = 0;
  index_t* counts = nullptr;  ///< [rows]
  page_pool pool{};           ///< for the CPU's checks

  /// Errors   queries of another shape, rows of `out` that are too short, missing memory: tessera::error.
  void check(index_t max_chosen) const {
    require_block_index(view, index);
    require(read >= 1, "read", read, "at least 1", "pass how many tokens a step attends");
    require_head_counts(q.heads, view.kv_heads);
    require(q.sequences == view.sequences && q.tokens >= 1, "sequences and tokens of q",
            std::to_string(q.sequences) + " and " + std::to_string(q.tokens),
            std::to_string(view.sequences) + " and at least 1", "pass the step's queries of every sequence");
    require_dim(q, View::k_dim, "q");
    require(out_stride >= max_chosen, "out_stride", out_stride, "at least " + std::to_string(max_chosen),
            "make room for max_chosen_slots() slots a row");
    require(view.sequences <= 0 || (q.data && first_position && out && counts && view.lengths),
            "memory of q, first_position, lengths, out and counts", "null", "memory behind each",
            "pass the step's rows, and memory for what is chosen");
  }
};

/// An upper bound of the slots that a step chooses of a row of at most `capacity` tokens: whole pages, of which the
/// newest `tail` slots fill some.
inline index_t max_chosen_slots(index_t read, index_t page, index_t tail, index_t capacity) {
  const offset_t forced = offset_t((std::max)(tail, 1)) + 2 * offset_t(page);
  return index_t((std::min<offset_t>)(capacity, (std::max<offset_t>)(forced, offset_t(read) + page - 1)));
}

TESSERA_NAMESPACE_END
