// The observer of every query on the device: scores that lie beside the tokens and grow with each of them.
#pragma once

#include <algorithm>

#include "../score/score.cuh"
#include "observer.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// A score beside each token, made by something else than queries that the cache sees (KVzip's second reading).
template <class Recipe>
class stored_scores_observer : public no_observer<Recipe> {
 public:
  static constexpr bool with_scores = true;
  using typename no_observer<Recipe>::store_type;
  using no_observer<Recipe>::no_observer;

  void complete(first_stage_problem<Recipe>& problem, const store_type& store) const {
    problem.scores = {store.scores(), 0, 0, problem.view.position_begin};
  }
};

/// Adds what every query so far gives to the scores that lie beside the tokens.
template <class Recipe>
class accumulating_observer : public stored_scores_observer<Recipe> {
  using base = stored_scores_observer<Recipe>;
  using scorer_type = typename Recipe::retain_type::scorer_type;
  static constexpr bool newest = joins_rows_by<scorer_type> == row_join::newest;
  static constexpr bool in_steps = fires_in_steps<typename Recipe::schedule_type>;

 public:
  using typename base::store_type, typename base::view_type, typename base::T;

  accumulating_observer(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                        const device_info& device, index_t batch)
      : base(recipe, shape, options, device, batch),
        score_(batch, shape.kv_heads, shape.q_heads, base::queries_at_once(recipe, options), options.tokens, device),
        scratch_(score_.workspace_bytes()),
        position_(std::size_t(batch)) {}

  void observe_prompt(sequence_layer owner, const store_type& store, const planned<Recipe>& policies,
                      const logit_rule& rule, const rows_view<const T>& q, index_t next, cudaStream_t stream) {
    const index_t needed = policies.first.queries_needed(q.tokens);
    for (index_t done = q.tokens - needed; done < q.tokens; done += observed_at_once) {
      rows_view<const T> some = q;
      some.data += done * q.token_stride;
      some.tokens = (std::min)(observed_at_once, q.tokens - done);
      score(store, store.view(owner), policies, rule, some,
            set_number(position_.data(), next - q.tokens + done, stream), stream);
    }
  }
  /// Where nothing is chosen in steps, their queries are not observed.
  void observe_step(index_t, const index_t*, const store_type& store, const view_type& view,
                    const planned<Recipe>& policies, const logit_rule& rule, const rows_view<const T>& q,
                    const index_t* first_position, cudaStream_t stream) const {
    if constexpr (in_steps) {
      rows_view<const T> queries = q;
      if (newest && q.tokens > 1) {
        queries.data += (q.tokens - 1) * q.token_stride;
        queries.tokens = 1;
        first_position = add_number(position_.data(), first_position, q.tokens - 1, q.sequences, stream);
      }
      score(store, view, policies, rule, queries, first_position, stream);
    }
  }

 private:
  void score(const store_type& store, const view_type& view, const planned<Recipe>& policies, const logit_rule& rule,
             const rows_view<const T>& q, const index_t* first_position, cudaStream_t stream) const {
    score_problem<view_type> problem;
    problem.view = view;
    problem.q = q;
    problem.first_position = first_position;
    problem.rule = rule;
    problem.scores = store.scores();
    problem.offsets = view.position_begin;
    problem.accumulate = !newest;
    score_.run(problem, policies.first.scorer, scratch_.data(), stream);
  }

  attentive_score<view_type, scorer_type> score_;
  device_buffer<unsigned char> scratch_;
  device_buffer<index_t> position_;
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::every_query) struct observer_of<Recipe> {
  using type = accumulating_observer<Recipe>;
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::rereading) struct observer_of<Recipe> {
  using type = stored_scores_observer<Recipe>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
