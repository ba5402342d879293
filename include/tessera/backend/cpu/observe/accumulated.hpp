// The observer of every query on the CPU: scores that lie beside the tokens and grow with each of them.
#pragma once

#include "../../../core/host/host_vector.hpp"
#include "../kernel/scratch.hpp"
#include "../score/score.hpp"
#include "observer.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// A score beside each token, made by something else than queries that the cache sees (KVzip's second reading).
template <class Recipe>
class stored_scores : public no_observer<Recipe> {
 public:
  static constexpr bool with_scores = true;
  using typename no_observer<Recipe>::store_type;
  using no_observer<Recipe>::no_observer;

  void complete(first_stage_problem<Recipe>& problem, sequence_layer owner, store_type& store,
                const planned<Recipe>&, index_t, choice_inputs&) const {
    columns& beside = store.beside(owner);
    problem.scores = {beside.scores(), 0, 0, beside.begins().data()};
  }
};

/// Adds what every query so far gives to the scores that lie beside the tokens.
template <class Recipe>
class accumulating_observer : public stored_scores<Recipe> {
  using scorer_type = typename Recipe::retain_type::scorer_type;
  static constexpr bool in_steps = fires_in_steps<typename Recipe::schedule_type>;

 public:
  using typename stored_scores<Recipe>::store_type;
  using stored_scores<Recipe>::stored_scores;

  template <class E>
  void observe_prompt(sequence_layer owner, store_type& store, const planned<Recipe>& policies, const logit_rule& rule,
                      const rows_view<const E>& q, index_t next, executor& workers) {
    if (q.tokens == 0) return;
    columns& beside = store.beside(owner);
    const auto score = [&](index_t begin, index_t end) {
      rows_view<const E> queries = q;
      queries.data = q.row(0, begin, 0);
      queries.tokens = end - begin;
      const index_t first = next - q.tokens + begin;
      score_rows(store.view(owner), query_rows<E>{queries, &first}, rule, policies.first.scorer, beside.scores(),
                 beside.begins().data(), *scoring_, workers);
    };
    if constexpr (sampling_scorer<scorer_type>) {
      const auto takes = [&](index_t t) { return policies.first.scorer.takes(next - q.tokens + t); };
      for (index_t begin = 0, end; begin < q.tokens; begin = end) {
        for (end = begin + 1; end < q.tokens && takes(end) == takes(begin);) ++end;
        if (takes(begin)) score(begin, end);
      }
    } else {
      score(joins_rows_by<scorer_type> == row_join::newest ? q.tokens - 1 : 0, q.tokens);
    }
  }

  /// Where nothing is chosen in steps, their queries are not observed.
  template <class E>
  offset_t observe_step(index_t b, sequence_layer owner, store_type& store, const planned<Recipe>& policies,
                        const logit_rule& rule, const rows_view<const E>& q, index_t next, executor& workers) {
    if (!in_steps) return 0;
    auto& before = *before_;
    if (before.size() <= std::size_t(b)) before.resize(std::size_t(b) + 1);
    before[std::size_t(b)] = store.beside(owner).all_scores();
    observe_prompt(owner, store, policies, rule, q, next, workers);
    offset_t read = 0;
    for (const index_t length : store.lengths(owner)) read += length * offset_t(sizeof(float));
    return read;
  }
  void abandon(index_t b, sequence_layer owner, store_type& store) {
    if (in_steps) store.beside(owner).set_scores((*before_)[std::size_t(b)]);
  }

 private:
  scratch<score_workspace<Recipe::layout_type::k_dim>> scoring_;
  scratch<host_vector<host_vector<float>>> before_;  // by sequence of a batch: scores before the step
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::every_query) struct observer_of<Recipe> {
  using type = accumulating_observer<Recipe>;
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::rereading) struct observer_of<Recipe> {
  using type = stored_scores<Recipe>;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
