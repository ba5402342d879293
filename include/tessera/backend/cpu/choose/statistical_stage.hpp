// The first stage on the CPU of a scorer that goes by what queries are like (Expected Attention).
#pragma once

#include "../../../core/host/host_vector.hpp"
#include "../score/query_sums.hpp"
#include "first_stage.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// By what the queries of a turn's prompt are like; forgotten when it ends.
template <class Recipe>
class first_stage<Recipe, observes::statistics, true> : public choosing<Recipe> {
  using base = choosing<Recipe>;
  static constexpr int k_dim = Recipe::layout_type::k_dim;

 public:
  static constexpr bool with_scores = false;
  explicit first_stage(const model_shape& shape) : base(shape) { shape.check_rope(k_dim); }

  void forget(index_t id) {
    for (index_t layer = 0; layer < this->shape_.layers; ++layer) forget(layer, id);
  }
  void forget(index_t layer, index_t id) { sums(layer, id).clear(); }
  void end_turn(index_t id) { forget(id); }
  void copy(index_t, index_t) {}
  template <class E, class Store>
  void observe_prompt(index_t layer, index_t id, Store&, const planned<Recipe>& policies, const logit_rule&,
                      const rows_view<const E>& q, index_t next, executor& workers) {
    sums(layer, id).prepare(this->shape_.q_heads);
    sums(layer, id).add(q, next - q.tokens, policies.first.scorer.sinks, this->shape_.rope_frequencies.data(), workers);
  }
  template <class... Any>
  offset_t observe_step(const Any&...) {
    return 0;
  }
  template <class... Any>
  void take_back(const Any&...) {}

  template <class Store>
  bool choose(index_t layer, index_t id, Store& stored, const planned<Recipe>& policies, const logit_rule& rule,
              index_t next, index_t, const prompt_reach* reach, host_vector<selection>& kept, ranked_tokens* ranked,
              executor& workers) {
    const query_statistics seen = sums(layer, id).view();
    auto problem = this->problem(layer, id, stored, rule, &next, reach);
    problem.statistics = &seen;
    problem.rope_frequencies = this->shape_.rope_frequencies.data();
    return this->choose_by(policies.first, problem, kept, ranked, workers);
  }
  offset_t bytes(index_t layer, index_t id) const {
    const std::size_t at = index(layer, id);
    return at < all_.size() ? all_[at].bytes() : 0;
  }

 private:
  std::size_t index(index_t layer, index_t id) const {
    return std::size_t(id) * std::size_t(this->shape_.layers) + std::size_t(layer);
  }
  query_sums<k_dim>& sums(index_t layer, index_t id) {
    if (all_.size() <= index(layer, id)) all_.resize(index(layer, id) + 1);
    return all_[index(layer, id)];
  }

  host_vector<query_sums<k_dim>> all_;  // by place
};

}  // namespace cpu
TESSERA_NAMESPACE_END
