// The observer of what queries are like on the device: sums from which their mean and covariance follow.
#pragma once

#include "../score/expected/query_sums.cuh"
#include "observer.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What the queries of a turn's prompt are like (Expected Attention); forgotten when it ends.
/// Errors   a model without rope_frequencies: tessera::error.
template <class Recipe>
class statistics_observer : public no_observer<Recipe> {
  using base = no_observer<Recipe>;
  static constexpr int k_dim = Recipe::layout_type::k_dim;

 public:
  using typename base::store_type, typename base::T;

  statistics_observer(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                      const device_info& device, index_t batch)
      : base(recipe, shape, options, device, batch),
        layers_(shape.layers),
        order_{options.sequences},
        sums_(entries(shape, options), shape.q_heads, shape.rope_frequencies) {}

  void forget(index_t id) {
    for (index_t layer = 0; layer < layers_; ++layer) forget({layer, id});
  }
  void forget(sequence_layer owner) { sums_.forget(order_.index(owner)); }

  void observe_prompt(sequence_layer owner, const store_type&, const planned<Recipe>& policies, const logit_rule&,
                      const rows_view<const T>& q, index_t next, cudaStream_t stream) {
    sums_.add(order_.index(owner), q, next - q.tokens, policies.first.scorer.sinks, stream);
  }
  newest_rows<T> queries(sequence_layer owner, const prompt_reach&, const index_t* next, cudaStream_t stream) {
    set_number(statistics_.data(), sums_.of(order_.index(owner), stream), stream);
    return {{}, nullptr, next};
  }
  void complete(first_stage_problem<Recipe>& problem, const store_type&) const {
    problem.statistics = statistics_.data();
    problem.rope_frequencies = sums_.frequencies();
  }
  offset_t bytes_of_layer() const { return sums_.bytes_per_place(); }

 private:
  static index_t entries(const model_shape& shape, const cache_options& options) {
    shape.check_rope(k_dim);
    return shape.layers * options.sequences;
  }

  index_t layers_;
  layer_major order_;
  query_sums<T, k_dim> sums_;
  device_buffer<query_statistics> statistics_{1};
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::statistics) struct observer_of<Recipe> {
  using type = statistics_observer<Recipe>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
