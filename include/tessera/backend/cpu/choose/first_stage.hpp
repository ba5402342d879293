// The first stage on the CPU: the observer of a recipe's scorer, and its choices.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/model_shape.hpp"
#include "../../../core/plan/ranked_tokens.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../planned.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../kernel/scratch.hpp"
#include "../observe/observers.hpp"
#include "../store/kv_store.hpp"
#include "detail/model_counts.hpp"
#include "score_and_choose.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// A moment at which a layer of a sequence chooses.
struct choice_moment {
  index_t next = 0;                     ///< position of the next token
  index_t tail = 0;                     ///< newest tokens that always stay
  const prompt_reach* reach = nullptr;  ///< of a prompt; null in steps
};

/// Chooses nothing. Every first stage has an observer and these members:
///   observer()             see observe/observers.hpp
///   count_over_model(...)  before the layers of a sequence choose: counts the tokens that each layer will keep, where
///                          one threshold holds for the model
///   choose(...)            fills `selections` with the tokens that stay: one selection, or one for each member of a
///                          group whose query heads choose apart. Fills the ranked tokens (null: not wanted). Returns
///                          whether it chooses at all
template <class Recipe, bool Chooses = Recipe::retain_type::chooses>
class first_stage {
 public:
  using store_type = kv_store<typename Recipe::layout_type>;
  using observer_type = no_observer<Recipe>;

  explicit first_stage(const model_shape& shape) : observer_(shape) {}
  observer_type& observer() { return observer_; }
  const observer_type& observer() const { return observer_; }
  void count_over_model(index_t, store_type&, const planned<Recipe>&, const layer_roles&) {}
  bool choose(sequence_layer, store_type&, const planned<Recipe>&, const logit_rule&, const choice_moment&,
              host_vector<selection>&, ranked_tokens*, executor&) {
    return false;
  }

 private:
  observer_type observer_;
};

/// Chooses by the recipe's policy.
template <class Recipe>
class first_stage<Recipe, true> {
  using problem_type = first_stage_problem<Recipe>;
  using policy_type = decltype(planned<Recipe>::first);

 public:
  using store_type = kv_store<typename Recipe::layout_type>;
  using observer_type = typename observer_of<Recipe>::type;

  explicit first_stage(const model_shape& shape) : shape_(shape), observer_(shape), counts_(shape) {}
  observer_type& observer() { return observer_; }
  const observer_type& observer() const { return observer_; }

  void count_over_model(index_t id, store_type& store, const planned<Recipe>& policies, const layer_roles& roles) {
    counts_.allot(policies.first, id, store, roles);
  }

  bool choose(sequence_layer owner, store_type& store, const planned<Recipe>& policies, const logit_rule& rule,
              const choice_moment& when, host_vector<selection>& selections, ranked_tokens* ranked, executor& workers) {
    problem_type problem = this->problem(owner, store, rule, when);
    choice_inputs inputs;
    observer_.complete(problem, owner, store, policies, when.next, inputs);
    const index_t members = reading_members(policies.first, shape_.q_heads / shape_.kv_heads);
    selections.resize(std::size_t(members));
    if (ranked) {
      ranked->positions.assign(std::size_t(shape_.kv_heads * members), {});
      ranked->scores.assign(std::size_t(shape_.kv_heads * members), {});
    }
    for (index_t m = 0; m < members; ++m) {
      const group_member<float> queries(problem.q, problem.rule, m, members);
      problem_type part = problem;
      part.q = queries.q;
      part.rule = queries.rule;
      const layer_scores scores =
          score_and_choose(policies.first, part, selections[std::size_t(m)], *choosing_, workers);
      if (ranked) note_ranked(problem.view, scores, m, members, *ranked);
    }
    return true;
  }

 private:
  problem_type problem(sequence_layer owner, store_type& store, const logit_rule& rule,
                       const choice_moment& when) const {
    problem_type result;
    result.view = store.view(owner);
    result.layer = owner.layer;
    result.layers = shape_.layers;
    result.tail = when.tail;
    if (Recipe::retain_type::settles) result.reach = when.reach;
    result.rule = rule;
    result.q.heads = shape_.q_heads;
    result.counts = counts_.counts(owner.layer);
    if (shape_.output_projection) {
      constexpr int v_dim = Recipe::layout_type::v_dim;
      result.projection = shape_.output_projection + offset_t(owner.layer) * shape_.q_heads * v_dim * shape_.hidden;
      result.hidden = shape_.hidden;
    }
    if (Recipe::needs_segments) {
      const columns& beside = store.beside(owner);
      result.segments = {beside.segments(), 0, 0, beside.begins().data()};
    }
    return result;
  }
  void note_ranked(const typename store_type::view_type& view, const layer_scores& scores, index_t member,
                   index_t members, ranked_tokens& ranked) {
    ranked.blocks = choosing_.memory.retaining.blocks;
    for (index_t h = 0; scores.scores && h < shape_.kv_heads; ++h) {
      const std::size_t row = std::size_t(h * members + member);
      const index_t first = (std::min)(scores.settled_of(h), scores.candidates(h));  // what is settled did not compete
      ranked.scores[row].assign(scores.head(h) + first, scores.head(h) + scores.candidates(h));
      for (index_t i = first; i < scores.candidates(h); ++i) ranked.positions[row].push_back(view.position(0, h, i));
    }
  }

  model_shape shape_;
  observer_type observer_;
  model_counts<policy_type> counts_;
  scratch<choose_workspace<Recipe::layout_type::k_dim>> choosing_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
