// What a policy of prompts sees of one query head: the attention of a few of a chunk's rows, and how long lines are.
#pragma once

#include <algorithm>
#include <span>

#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The rows of a chunk at the positions [first, next) against everything stored up to them. A head need not hold every
/// position; a line has as many entries as there are stored keys on it.
struct sampled_attention {
  index_t first = 0, next = 0;
  std::span<const index_t> rows;           ///< positions of the sampled rows, ascending
  std::span<const index_t> positions;      ///< [slots], ascending
  std::span<const index_t> slot_at;        ///< [next]: the slot of a position, no_index where it is not stored
  std::span<const index_t> stored_before;  ///< [next + 1]: slots below a position
  /// [rows, slots]: each row's softmax over the slots that it sees, 0 for others, never NaN. A policy may write over
  /// it.
  float* weights = nullptr;

  index_t slots() const { return index_t(positions.size()); }
  float* row(index_t r) const { return weights + offset_t(r) * slots(); }

  /// Entries of a line in the whole chunk, sampled or not.
  index_t vertical_length(index_t slot) const { return next - (std::max)(first, positions[std::size_t(slot)]); }
  index_t slash_length(index_t distance) const {
    return stored_before[std::size_t(next - distance)] - stored_before[std::size_t((std::max)(0, first - distance))];
  }
  /// The slot on a slash line that sampled row r sees; no_index: none.
  index_t slot_on_slash(index_t r, index_t distance) const {
    const index_t at = rows[std::size_t(r)] - distance;
    return at < 0 ? no_index : slot_at[std::size_t(at)];
  }
};

TESSERA_NAMESPACE_END
