// Lines of a prompt's attention matrix: which keys the rows of a prompt chunk attend.
#pragma once

#include <cstdint>

#include "../host/host_vector.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The lines of one query head. A row at position p attends the key at position k where k is a vertical line or p - k a
/// slash line; k <= p. Lines are given by positions, not slots, so that they stay valid when tokens are dropped.
struct line_set {
  host_vector<index_t> vertical;  ///< positions of keys, ascending
  host_vector<index_t> slash;     ///< how far keys lie behind the query, ascending
};

/// What the rows of one chunk attend.
struct prompt_lines {
  index_t first = 0, next = 0;  ///< the chunk's rows have the positions [first, next)
  index_t dense_from = 0;       ///< rows from this position on attend everything; `next`: none does
  host_vector<index_t> rows;    ///< positions of the rows by whose attention the lines were chosen, ascending
  host_vector<line_set> heads;  ///< by query head; empty where all rows are dense
};

/// Columns that join what a first stage chooses, as bits by query head: bit s of a row is slot s. [sequences, q_heads,
/// words] of one layer, by id.
struct joined_columns {
  const std::uint32_t* bits = nullptr;  ///< null: none
  index_t words = 0;
};

TESSERA_NAMESPACE_END
