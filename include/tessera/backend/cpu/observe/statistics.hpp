// The observer of what queries are like on the CPU: sums from which their mean and covariance follow.
#pragma once

#include "../score/query_sums.hpp"
#include "observer.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// What the queries of a turn's prompt are like (Expected Attention); forgotten when it ends.
/// Errors   a model without rope_frequencies: tessera::error.
template <class Recipe>
class statistics_observer : public no_observer<Recipe> {
  static constexpr int k_dim = Recipe::layout_type::k_dim;

 public:
  using typename no_observer<Recipe>::store_type;

  explicit statistics_observer(const model_shape& shape)
      : no_observer<Recipe>(shape), shape_(shape), sums_(shape.layers) {
    shape.check_rope(k_dim);
  }

  void open(index_t id) { sums_.open(id); }
  void forget(index_t id) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) forget({layer, id});
  }
  void forget(sequence_layer owner) { sums_[owner].clear(); }
  void end_turn(index_t id) { forget(id); }

  template <class E>
  void observe_prompt(sequence_layer owner, store_type&, const planned<Recipe>& policies, const logit_rule&,
                      const rows_view<const E>& q, index_t next, executor& workers) {
    sums_[owner].prepare(shape_.q_heads);
    sums_[owner].add(q, next - q.tokens, policies.first.scorer.sinks, shape_.rope_frequencies.data(), workers);
  }

  void complete(first_stage_problem<Recipe>& problem, sequence_layer owner, store_type&, const planned<Recipe>&,
                index_t next, choice_inputs& inputs) const {
    inputs.first_position = next;
    inputs.statistics = sums_[owner].view();
    problem.first_position = &inputs.first_position;
    problem.statistics = &inputs.statistics;
    problem.rope_frequencies = shape_.rope_frequencies.data();
  }
  offset_t bytes(sequence_layer owner) const { return sums_[owner].bytes(); }

 private:
  model_shape shape_;
  sequence_table<query_sums<k_dim>> sums_;
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::statistics) struct observer_of<Recipe> {
  using type = statistics_observer<Recipe>;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
