// The first stage on the CPU of a scorer that goes by what queries are like (Expected Attention).
#pragma once

#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
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
  explicit first_stage(const model_shape& shape) : base(shape), sums_(shape.layers) { shape.check_rope(k_dim); }

  void open(index_t id) { sums_.open(id); }
  void forget(index_t id) {
    for (index_t layer = 0; layer < this->shape_.layers; ++layer) forget({layer, id});
  }
  void forget(sequence_layer owner) { sums_[owner].clear(); }
  void end_turn(index_t id) { forget(id); }
  void copy(index_t, index_t) {}
  template <class E, class Store>
  void observe_prompt(sequence_layer owner, Store&, const planned<Recipe>& policies, const logit_rule&,
                      const rows_view<const E>& q, index_t next, executor& workers) {
    sums_[owner].prepare(this->shape_.q_heads);
    sums_[owner].add(q, next - q.tokens, policies.first.scorer.sinks, this->shape_.rope_frequencies.data(), workers);
  }
  template <class... Any>
  offset_t observe_step(const Any&...) {
    return 0;
  }
  template <class... Any>
  void take_back(const Any&...) {}

  template <class Store>
  bool choose(sequence_layer owner, Store& stored, const planned<Recipe>& policies, const logit_rule& rule,
              index_t next, index_t, const prompt_reach* reach, host_vector<selection>& kept, ranked_tokens* ranked,
              executor& workers) {
    const query_statistics seen = sums_[owner].view();
    auto problem = this->problem(owner, stored, rule, &next, reach);
    problem.statistics = &seen;
    problem.rope_frequencies = this->shape_.rope_frequencies.data();
    return this->choose_by(policies.first, problem, kept, ranked, workers);
  }
  offset_t bytes(sequence_layer owner) const { return sums_[owner].bytes(); }

 private:
  sequence_table<query_sums<k_dim>> sums_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
