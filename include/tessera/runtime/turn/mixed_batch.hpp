// The work of one pass through a model: chunks of prompts and steps of an answer, in one call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../core/error.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/types.hpp"
#include "batch.hpp"

TESSERA_NAMESPACE_BEGIN

/// What one sequence gets in a pass through the model.
struct batch_item {
  index_t id = 0;
  index_t tokens = 1;
  bool is_prompt = false;  ///< a chunk of a prompt; else a step of 1 to 8 tokens
};

/// Chunks of prompts and one step of the other sequences. `prepare` of a cache makes it, every layer gets it. The rows
/// of all items are packed: item i has those from indptr[i] to indptr[i + 1].
struct mixed_batch {
  host_vector<batch_item> items;
  host_vector<index_t> indptr;           ///< [items + 1]
  host_vector<std::uint8_t> boundaries;  ///< [rows], of a recipe that needs segments
  batch step;                            ///< of the items that are steps; no sequences: none is
  host_vector<index_t> positions;        ///< [items], of their first tokens
  index_t first_row = 0;                 ///< of the step, where its rows lie as those of a step alone

  index_t rows() const { return indptr.empty() ? 0 : indptr.back(); }
  bool has_step() const { return !step.ids.empty(); }
  /// Whether the items' rows are where `indptr` says: false if somebody has changed the batch.
  bool is_whole() const {
    bool whole = indptr.size() == items.size() + 1 && positions.size() == items.size();
    for (std::size_t i = 0; whole && i < items.size(); ++i) whole = indptr[i + 1] - indptr[i] == items[i].tokens;
    const bool lies_inside = step.is_packed()
                                 ? step.rows == rows()
                                 : first_row >= 0 && first_row + offset_t(step.tokens) * step.sequences() <= rows();
    return whole && lies_inside && (boundaries.empty() || boundaries.size() == std::size_t(rows()));
  }
  /// Rows of one item.
  template <class Rows>
  Rows rows_of(const Rows& all, std::size_t item) const {
    return part(all, indptr[item], items[item].tokens, 1);
  }
  /// Rows of the step as `decode` takes them.
  template <class Rows>
  Rows step_rows(const Rows& all) const {
    return step.is_packed() ? all : part(all, first_row, step.tokens, step.sequences());
  }

  /// Lays out the rows of items, and finds the step among them.
  /// Errors   no items; an item without tokens; a sequence twice: tessera::error.
  static mixed_batch laid_out(const host_vector<batch_item>& items) {
    require(!items.empty(), "items of a batch", 0, "at least 1", "pass what the sequences get");
    mixed_batch made;
    made.items = items;
    made.indptr.push_back(0);
    host_vector<index_t> ids, lengths;
    bool side_by_side = true;
    for (const batch_item& item : items) {
      require(item.tokens >= 1 && offset_t(made.indptr.back()) + item.tokens <= max_rows, "tokens of an item",
              item.tokens, "at least 1, and 2^24 in all items", "leave out sequences that get nothing");
      ids.push_back(item.id);
      if (!item.is_prompt) {
        const index_t begin = made.indptr.back();
        if (made.step.ids.empty()) made.first_row = begin;
        side_by_side = side_by_side && begin == made.first_row + offset_t(made.step.ids.size()) * item.tokens;
        made.step.ids.push_back(item.id);
        made.step.begins.push_back(begin);
        lengths.push_back(item.tokens);
        made.step.tokens = (std::max)(made.step.tokens, item.tokens);
      }
      made.indptr.push_back(made.indptr.back() + item.tokens);
    }
    batch::require_different(ids);
    const bool alike = std::all_of(lengths.begin(), lengths.end(), [&](index_t n) { return n == made.step.tokens; });
    if (!alike) made.step.lengths = lengths;
    if (alike && side_by_side) made.step.begins.clear();
    made.step.rows = made.step.is_packed() ? made.rows() : 0;
    return made;
  }

 private:
  static constexpr index_t max_rows = 1 << 24;
  template <class Rows>
  static Rows part(const Rows& all, index_t first, index_t tokens, index_t sequences) {
    Rows some = all;
    if (some.data) some.data += offset_t(first) * all.token_stride;
    some.tokens = tokens, some.sequences = sequences;
    some.sequence_stride = offset_t(tokens) * all.token_stride;
    return some;
  }
};

TESSERA_NAMESPACE_END
