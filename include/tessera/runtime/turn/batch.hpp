// One decode step of a cache: its sequences, its tokens, and when the first stage chooses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "../../core/error.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/model_shape.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// One decode step of a cache. `prepare_step` makes it, every layer gets it. An engine that records steps keys its
/// graphs by the number of sequences, `tokens` and the two actions.
struct batch {
  host_vector<index_t> ids;
  index_t tokens = 0;                      ///< of each sequence; of the longest, where they differ
  bool evicts_first = false;               ///< the first stage chooses before the step reads
  bool evicts_last = false;                ///< the first stage chooses when the step has been attended
  host_vector<std::uint8_t> boundaries{};  ///< [sequences, tokens], of a recipe that needs them in steps
  host_vector<index_t> lengths{};          ///< [sequences], their tokens where they differ; else empty
  host_vector<index_t> begins{};           ///< [sequences], the first of their rows where rows are packed; else empty
  index_t rows = 0;                        ///< of all sequences, where they are packed
  /// Number of the step among those of its cache and the cache's copies, from 1. An older step is refused.
  std::uint64_t number = 0;

  index_t sequences() const { return index_t(ids.size()); }
  /// The tokens of the b-th sequence.
  index_t tokens_of(index_t b) const { return std::size_t(b) < lengths.size() ? lengths[std::size_t(b)] : tokens; }
  /// Whether two batches have the same sequences with the same tokens.
  bool takes_as(const batch& other) const {
    return ids == other.ids && tokens == other.tokens && lengths == other.lengths && begins == other.begins &&
           rows == other.rows;
  }
  bool is_packed() const { return !begins.empty(); }
  /// Lengths that are all the same are not told.
  void drop_equal_lengths() {
    if (std::all_of(lengths.begin(), lengths.end(), [&](index_t length) { return length == tokens; })) lengths.clear();
  }
  /// Errors   no sequences; one with less than 1 or more than `max` tokens: tessera::error.
  void check_tokens(index_t max) const {
    require(!ids.empty(), "sequences of the batch", 0, "at least 1", "pass the ids of a batch");
    for (index_t b = 0; b < sequences(); ++b) {
      require(tokens_of(b) >= 1 && tokens_of(b) <= max, "tokens of a decode step", tokens_of(b),
              "1 to " + std::to_string(max), "prefill longer runs");
    }
  }
  /// Whether rows and boundaries are there for each sequence: false if somebody has changed the batch.
  bool is_whole() const {
    const std::size_t flags = ids.size() * std::size_t((std::max)(tokens, index_t(0)));
    bool whole = (boundaries.empty() || boundaries.size() == flags) && (!is_packed() || begins.size() == ids.size());
    for (index_t b = 0; whole && is_packed() && b < sequences(); ++b) {
      const index_t begin = begins[std::size_t(b)];
      whole = begin >= 0 && offset_t(begin) + tokens_of(b) <= rows;
    }
    return whole;
  }
  /// How many sequences the rows of one layer have, of how many tokens.
  index_t row_sequences() const { return is_packed() ? 1 : sequences(); }
  index_t row_tokens() const { return is_packed() ? rows : tokens; }
  /// The rows of the b-th sequence's tokens.
  template <class Rows>
  Rows rows_of(const Rows& all, index_t b) const {
    Rows own = is_packed() ? all : all.sequence(b);
    if (is_packed() && own.data) own.data += offset_t(begins[std::size_t(b)]) * own.token_stride;
    own.tokens = tokens_of(b);
    return own;
  }
  static void require_different(host_vector<index_t> ids) {
    std::sort(ids.begin(), ids.end());
    const auto twice = std::adjacent_find(ids.begin(), ids.end());
    require(twice == ids.end(), "sequence id in a batch", twice == ids.end() ? 0 : *twice, "given once",
            "pass each sequence once a step");
  }
};

/// The largest number of tokens of a decode step.
inline constexpr index_t max_step_tokens = 8;

/// The first of three counts that is not `wanted`; `wanted` where there is none.
inline index_t first_other(index_t wanted, index_t a, index_t b, index_t c) {
  return a != wanted ? a : (b != wanted ? b : c);
}

/// Errors   rows of a layer that are not those of a step: tessera::error.
template <class Q, class E>
void check_step_rows(const model_shape& shape, const batch& step, const rows_view<const Q>& q,
                     const rows_view<const E>& k, const rows_view<const E>& v, index_t k_dim, index_t v_dim) {
  shape.check_rows(q, k, v, k_dim, v_dim);
  const index_t given = first_other(step.row_sequences(), q.sequences, k.sequences, v.sequences);
  if (given != step.row_sequences()) {
    fail("sequences of the batch", given,
         step.is_packed() ? "1, of packed rows" : "as many as ids, which are " + std::to_string(step.sequences()),
         "pass q, k and v of every id");
  }
  const index_t tokens = first_other(step.row_tokens(), q.tokens, k.tokens, v.tokens);
  if (tokens != step.row_tokens()) {
    fail("tokens of a decode step", tokens, "those of prepare_step, which are " + std::to_string(step.row_tokens()),
         "pass q, k and v of the step's tokens");
  }
}
/// Errors   queries and outputs of a layer that are not those of a step; a step that somebody has changed:
///          tessera::error.
template <class E, class Out>
void check_query_rows(const model_shape& shape, const batch& step, const rows_view<const E>& q,
                      const rows_view<Out>& out, const rows_view<float>& lse, index_t k_dim, index_t v_dim) {
  shape.check_output(q, out, lse, k_dim, v_dim);
  if (!q.data) fail("memory of q", "null", "memory behind it", "pass the rows themselves");
  if (!step.is_whole()) fail("step", "changed", "what prepare_step returned", "pass the batch as it is");
  if (q.sequences != step.row_sequences() || q.tokens != step.row_tokens()) {
    fail("queries of a decode step", std::to_string(q.sequences) + " sequences of " + std::to_string(q.tokens),
         std::to_string(step.row_sequences()) + " of " + std::to_string(step.row_tokens()) +
             ", as prepare_step was given",
         "pass the queries of the step's tokens");
  }
}

TESSERA_NAMESPACE_END
