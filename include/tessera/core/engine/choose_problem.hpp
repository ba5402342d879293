// What a first stage chooses from, on both backends.
#pragma once

#include <string>

#include "../error.hpp"
#include "../logit_rule.hpp"
#include "../prompt/prompt_reach.hpp"
#include "../prompt/query_statistics.hpp"
#include "../stored/slot_column.hpp"
#include "page_pool.hpp"

TESSERA_NAMESPACE_BEGIN

/// What a batch stores of one layer, and what its scorer has observed; on the device every pointer is a device pointer.
///
/// A scorer of a window needs `q` and `first_position`; one of positions needs `first_position`; one of every query
/// needs `scores`; one of statistics needs `statistics`. A policy of segments needs `segments`. A scorer of contents
/// reads the view's rows. `tails` and `budgets` replace the policy's numbers where sequences differ.
template <class View, class E = typename View::element_type>
struct choose_problem {
  View view;          ///< values are read by scorers of values alone
  index_t layer = 0;  ///< of `layers`: for budgets that differ over them
  index_t layers = 1;
  rows_view<const E> q{};                   ///< [sequences, n_q, q_heads, k_dim], the last n_q queries of each prompt,
                                            ///< ascending; where scores accumulate, its heads alone are looked at: how
                                            ///< many a mean over heads divides by
  const index_t* valid = nullptr;           ///< [sequences], how many of the n_q count, the first ones; null: all
  const index_t* first_position = nullptr;  ///< [sequences], of the first query; without queries, of the next token
  rows_view<const float> lse{};  ///< [sequences, n_q, q_heads] from the engine; NaN and +infinity: that row's
                                 ///< is computed here; data null: all are
  bool lse_complete = false;     ///< every row has one: the device does not check
  logit_rule rule{};
  slot_column<const float> scores{};      ///< accumulated scores
  index_t tail = 0;                       ///< newest tokens that stay whatever their score; the scorer may want more
  const index_t* tails = nullptr;         ///< [sequences], in place of it and of the scorer's
  const index_t* budgets = nullptr;       ///< [sequences], in place of the budget's tokens
  page_pool pool{};                       ///< for the CPU's checks
  slot_column<const index_t> segments{};  ///< which segment of the text each slot belongs to, ascending
  const float* projection = nullptr;      ///< [q_heads, v_dim, hidden] of this layer, to weigh values by; null: none
  index_t hidden = 0;                     ///< of the projection
  const prompt_reach* reach = nullptr;    ///< [sequences], what earlier choices have settled; null: everything competes
  /// [sequences], for a scorer of statistics; with it `first_position` is the next token's and q.heads the query heads.
  const query_statistics* statistics = nullptr;
  const float* rope_frequencies = nullptr;  ///< [k_dim / 2], for a scorer of statistics
  const index_t* counts = nullptr;          ///< [kv_heads] of one sequence: tokens to keep, in place of the budget's
  index_t granularity = 1;                  ///< counts of heads are multiples of it, whole pages: see count_whole_pages

  /// Errors   no such layer, no heads, nothing given that the policy needs of each sequence: tessera::error.
  void check(bool by_position, bool by_statistics) const {
    require(layers >= 1 && layer >= 0 && layer < layers, "layer", layer, "0 to layers - 1",
            "pass which layer of how many is asked about");
    require(granularity >= 1, "granularity", granularity, "at least 1", "pass the slots of a page, or 1");
    require(view.kv_heads >= 1, "kv_heads", view.kv_heads, "at least 1", "pass the model's head counts");
    require(!by_statistics || (statistics && rope_frequencies), "statistics and rope_frequencies", "null",
            "what the prompt's queries are like, and how RoPE turns them", "add them up: query_sums");
    require(!by_statistics || (q.heads >= 1 && q.heads % view.kv_heads == 0), "query heads of the statistics", q.heads,
            "a multiple of kv_heads, which is " + std::to_string(view.kv_heads), "set q.heads");
    require(first_position || !by_position, "first_position", "null", "a position for each sequence",
            "say where the queries, or the next tokens, are");
  }
};

/// Throws tessera::error if a scorer of a window has no queries: without scores the earliest tokens would stay. The CPU
/// checks this only if tokens are stored. A GPU's host does not know whether any are, and always checks.
template <class View, class E>
void require_queries(const choose_problem<View, E>& p) {
  require(p.q.tokens > 0, "queries", "none", "the last ones of each prompt, which this scorer observes",
          "set q and first_position");
}

TESSERA_NAMESPACE_END
