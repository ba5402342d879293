// MosaicKV's scorer: how much a step's queries like the mean key of a block.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// How the rows of a step (its tokens and the query heads of the group) become one score.
enum class row_reduction { sum, max };

/// Scores a block of packed tokens by the dot products of the step's queries with the block's packed mean key: their
/// sum over the rows, or the largest. Not scaled and not capped: only the order counts. Elements of queries that are
/// not finite are left out of a sum, and a row that scores NaN of the largest, lest one head choose for its whole
/// group.
///
/// Shapes   one score a block and kv_head. The means lie beside the packed keys (layout/packed_rows.hpp).
/// Cost     one packed product a block with `sum`, for the queries are added first; one a row and block with `max`.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 4.2. Differs: one choice for a kv_head; the paper does not say how query
///          heads join.
struct block_mean {
  static constexpr const char* name = "block_mean";
  static constexpr observes observed = observes::step;
  static constexpr bool comparable_across_heads = false;
  static constexpr bool reads_means = true;

  row_reduction reduce = row_reduction::sum;

  TESSERA_HD float weigh(float logit, float) const { return logit; }
  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const {}

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("reduce", self.reduce, one_word_of{"sum or max"}, "how the query heads of a group join in a block's score");
  }
};

static_assert(check_scorer<block_mean>());

TESSERA_NAMESPACE_END
