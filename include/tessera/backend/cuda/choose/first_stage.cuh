// The first stage on the device: what a recipe's scorer observes of prompts and steps, and what it chooses from that.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../core/model_shape.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../planned.hpp"
#include "../../../runtime/kept_lengths.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../cache_options.hpp"
#include "../device/copy.cuh"
#include "../observe/observers.cuh"
#include "../store/kv_store.cuh"
#include "../store/step_table.cuh"
#include "detail/group_members.cuh"
#include "detail/model_counts.cuh"
#include "score_and_choose.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// How much of each layer earlier choices have settled since a turn's prompt began: nothing, for recipes that do not
/// settle.
template <class Recipe, bool Settles = Recipe::retain_type::settles>
class settled_layers {
  using store_type = kv_store<typename Recipe::layout_type>;

 public:
  settled_layers(const model_shape&, const cache_options&) {}
  void begin_turn(sequence_layer, const store_type&) {}
  void end_chunk(sequence_layer, const store_type&, index_t) {}
  void copy(index_t, index_t) {}
  const prompt_reach* on_device(const prompt_reach&, cudaStream_t) const { return nullptr; }
};
/// The same, for recipes that settle.
template <class Recipe>
class settled_layers<Recipe, true> {
  using store_type = kv_store<typename Recipe::layout_type>;

 public:
  settled_layers(const model_shape& shape, const cache_options& options)
      : layers_(shape.layers),
        order_{options.sequences},
        heads_(std::size_t(shape.layers) * std::size_t(options.sequences)) {}

  /// Called when a turn's prompt begins: everything that a layer's heads store now is from earlier turns.
  void begin_turn(sequence_layer owner, const store_type& store) {
    settled_heads& heads = heads_[order_.index(owner)];
    heads.earlier = heads.settled = store.held_by_head(owner);
  }
  /// Called when a layer has chosen among its part of a prompt: everything that it stores is settled, except the newest
  /// `reconsidered` tokens.
  void end_chunk(sequence_layer owner, const store_type& store, index_t reconsidered) {
    settled_heads& heads = heads_[order_.index(owner)];
    heads.settled = store.held_by_head(owner);
    for (index_t& tokens : heads.settled) tokens -= reconsidered;
  }
  void copy(index_t id, index_t to) {
    for (index_t layer = 0; layer < layers_; ++layer)
      heads_[order_.index({layer, to})] = heads_[order_.index({layer, id})];
  }
  const settled_heads& heads(sequence_layer owner) const { return heads_[order_.index(owner)]; }
  /// Valid until the next call.
  const prompt_reach* on_device(const prompt_reach& reach, cudaStream_t stream) const {
    return set_number(reach_.data(), reach, stream);
  }

 private:
  index_t layers_;
  layer_major order_;
  host_vector<settled_heads> heads_;
  device_buffer<prompt_reach> reach_{1};
};

/// Chooses nothing. Every first stage has an observer and these members:
///   observer()                           see observe/observers.cuh
///   fit(recipe, ...), adopt(fitted)      operations for another budget; use them from now on
///   require_covered(policies)            tessera::error where a budget is larger than that of the operations
///   set_budgets(...)                     budgets of a batch's sequences, for choices in steps
///   max_sequences(), max_kept_tokens()   sequences of one choice; tokens that one head of it keeps
///   members()                            which query heads choose together
///   settled()                            how much of a prompt earlier choices have settled
///   count_over_model(...)                before the layers of a sequence choose: what each will keep where one
///                                        threshold runs over the model; synchronises then
///   keeps_everything(...)                whether a layer keeps all that it stores, whatever the scores
///   bound(...), bound_in_step(...)       an upper bound of what a choice leaves of a layer
///   choose(...), choose_in_step(...)     of one sequence when its prompt, or a chunk of it, ends; of a batch in steps
template <class Recipe, bool Chooses = Recipe::retain_type::chooses>
class first_stage {
  using store_type = kv_store<typename Recipe::layout_type>;
  using view_type = typename store_type::view_type;

 public:
  using observer_type = no_observer<Recipe>;
  static constexpr bool heads_are_even = false;
  struct operations {};

  first_stage(const Recipe& recipe, const model_shape& shape, const cache_options& options, const device_info& device)
      : observer_(recipe, shape, options, device, 1), settled_(shape, options), members_(1, shape) {}
  operations fit(const Recipe&, const device_info&) const { return {}; }
  void adopt(operations&&) {}
  void require_covered(const planned<Recipe>&) const {}
  template <class PoliciesOf>
  void set_budgets(const host_vector<index_t>&, const PoliciesOf&, index_t, cudaStream_t) {}
  host_vector<detail::gathered_column> gathered() const { return {}; }
  index_t max_sequences() const { return 1; }
  index_t max_kept_tokens() const { return 1; }
  static index_t max_kept_tokens(const operations&) { return 1; }
  observer_type& observer() { return observer_; }
  const observer_type& observer() const { return observer_; }
  const group_members& members() const { return members_; }
  settled_layers<Recipe, false>& settled() { return settled_; }
  void count_over_model(index_t, const store_type&, const planned<Recipe>&, const layer_roles&, cudaStream_t) {}
  bool keeps_everything(sequence_layer, const token_bound&, const planned<Recipe>&) const { return true; }
  kept_bound bound(sequence_layer, const store_type&, const planned<Recipe>&, index_t) const { return {}; }
  token_bound bound_in_step(index_t, const token_bound& held, const planned<Recipe>&, index_t) const { return held; }
  kept_slots choose(sequence_layer, const store_type&, const planned<Recipe>&, const logit_rule&, const prompt_reach&,
                    const index_t*, index_t, cudaStream_t) {
    return {};
  }
  selection_view choose_in_step(index_t, const index_t*, const store_type&, const view_type&, const planned<Recipe>&,
                                const logit_rule&, const index_t*, index_t, index_t, cudaStream_t) const {
    return {};
  }

 private:
  observer_type observer_;
  settled_layers<Recipe, false> settled_;
  group_members members_;
};

/// Chooses by the recipe's policy.
/// Memory   scores of sequences * kv_heads * tokens (of one sequence where steps choose nothing), remembered queries,
///          and what scoring, budget and selection need. All of it is allocated when this is made.
template <class Recipe>
class first_stage<Recipe, true> {
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using store_type = kv_store<layout>;
  using view_type = scored_view_type<Recipe>;
  using policy = decltype(planned<Recipe>::first);
  using scorer = typename policy::scorer_type;
  static constexpr bool joins = joining_scope<typename policy::scope_type>;
  static constexpr bool in_steps = fires_in_steps<typename Recipe::schedule_type>;

 public:
  using observer_type = typename observer_of<Recipe>::type;
  static constexpr bool heads_are_even = keeps_heads_even<typename policy::budget_type>;

  /// What the budget's choices need.
  struct operations {
    index_t max_kept, budget;
    score_and_choose<view_type, policy> choose;
    device_buffer<unsigned char> scratch;
  };

  first_stage(const Recipe& recipe, const model_shape& shape, const cache_options& options, const device_info& device)
      : shape_(shape),
        options_(options),
        members_(reading_members(recipe.retain, shape.q_heads / shape.kv_heads), shape),
        batch_(in_steps ? options.sequences : 1),
        observer_(recipe, shape, options, device, batch_),
        counts_(shape, options, device),
        settled_(shape, options),
        operations_(fit(recipe, device)),
        budgets_(batch_),
        tails_(batch_),
        longer_tails_(batch_),
        tail_follows_budget_(scorer::observed != observes::window &&
                             recipe.retain.scorer.protected_tail(1) != recipe.retain.scorer.protected_tail(1 << 20)) {
    require(!weighted_scorer<scorer> || !shape.output_projection, "output_projection", "given",
            "null: the device weighs values as they are", "leave it out, or take the CPU's cache");
    if constexpr (searching_layout<layout>)
      require(!searches_strategies(recipe.layout), "strategy", "searched",
              "fixed on the device where tokens are dropped", "take strategy=fixed, or the CPU's cache");
  }

  operations fit(const Recipe& recipe, const device_info& device) const {
    const index_t kept = max_kept(recipe);
    operations made{kept,
                    recipe.retain.budget.tokens,
                    {recipe.retain.planned(recipe.retain.plan(options_.tokens)),
                     {batch_, shape_.kv_heads, members_.q_heads(), observer_type::queries_at_once(recipe, options_),
                      options_.tokens, kept},
                     device},
                    {}};
    made.scratch = device_buffer<unsigned char>(made.choose.workspace_bytes());
    return made;
  }
  void adopt(operations&& fitted) { operations_ = std::move(fitted); }

  /// Errors   a budget larger than that for which the operations were made.
  void require_covered(const planned<Recipe>& policies) const {
    if constexpr (!Recipe::retain_type::plans && !Recipe::retain_type::over_model) {
      const index_t tokens = policies.first.budget.tokens;
      if (tokens > operations_.budget) {
        fail("budget of a sequence", tokens, "at most the recipe's, which is " + std::to_string(operations_.budget),
             "raise the recipe's budget");
      }
    }
  }
  /// The budgets of a batch's sequences, for choices in steps. `added`: newest tokens that stay whatever their score.
  template <class PoliciesOf>
  void set_budgets(const host_vector<index_t>& ids, const PoliciesOf& policies_of, index_t added, cudaStream_t stream) {
    if constexpr (in_steps) {
      budgets_.set(ids, [&](index_t id) { return policies_of(id).first.budget.tokens; }, stream);
      if (!tail_follows_budget_) return;
      const auto tail = [&](index_t id) {
        const auto& first = policies_of(id).first;
        return (std::max)(added, first.scorer.protected_tail(first.budget.tokens));
      };
      (added > 0 ? longer_tails_ : tails_).set(ids, tail, stream);
    }
  }
  host_vector<detail::gathered_column> gathered() const {
    if (!in_steps) return {};
    if (!tail_follows_budget_) return {budgets_.gathered()};
    return {budgets_.gathered(), tails_.gathered(), longer_tails_.gathered()};
  }
  index_t max_sequences() const { return batch_; }
  index_t max_kept_tokens() const { return operations_.max_kept; }
  static index_t max_kept_tokens(const operations& fitted) { return fitted.max_kept; }
  observer_type& observer() { return observer_; }
  const observer_type& observer() const { return observer_; }
  const group_members& members() const { return members_; }
  settled_layers<Recipe>& settled() { return settled_; }

  void count_over_model(index_t id, const store_type& store, const planned<Recipe>& policies, const layer_roles& roles,
                        cudaStream_t stream) {
    counts_.allot(id, store, policies, roles, stream);
  }

  /// In a model with one threshold, must be called after `count_over_model`.
  bool keeps_everything(sequence_layer owner, const token_bound& held, const planned<Recipe>& policies) const {
    if constexpr (Recipe::retain_type::over_model) return counts_.bound(owner.layer).total == held.total;
    return keeps_all(policies.first.budget, extent(owner.layer, held.longest, tail(owner, held, policies)));
  }
  /// An upper bound of what a layer keeps when a prompt, or a chunk of it, ends. It is given by head where lengths
  /// decide. `seen`: how much of the turn's prompt has been processed.
  kept_bound bound(sequence_layer owner, const store_type& store, const planned<Recipe>& policies,
                   [[maybe_unused]] index_t seen) const {
    if constexpr (Recipe::retain_type::over_model) {
      return counts_.bound(owner.layer);
    } else {
      const token_bound& held = store.bound(owner);
      const layer_extent layer = extent(owner.layer, held.longest, tail(owner, held, policies));
      if constexpr (Recipe::retain_type::settles) {
        return kept_by_lengths(policies.first.budget, layer, store.held_by_head(owner), settled_.heads(owner), seen,
                               shape_.kv_heads);
      } else {
        return {bound_kept_of(policies, layer, held), {}};
      }
    }
  }
  /// An upper bound of what a choice in a step leaves; the newest `added` tokens stay.
  token_bound bound_in_step(index_t layer, const token_bound& held, const planned<Recipe>& policies,
                            index_t added) const {
    const index_t kept_tail = policies.first.scorer.protected_tail(policies.first.budget.tokens);
    return bound_kept_of(policies, extent(layer, held.longest, (std::max)(added, kept_tail)), held);
  }

  /// Chooses what a layer of one sequence keeps, or lets through, when its prompt ends; its next token will be at
  /// *next. Where query heads choose apart, it chooses for one member of the group. The slots lie in this object's
  /// memory until the next call. `reach`: what earlier choices have settled of the turn's prompt.
  kept_slots choose(sequence_layer owner, const store_type& store, const planned<Recipe>& policies,
                    const logit_rule& rule, const prompt_reach& reach, const index_t* next, index_t member,
                    cudaStream_t stream) {
    const newest_rows<T> queries = observer_.queries(owner, reach, next, stream);
    choose_problem<view_type, T> problem =
        this->problem(store, store.scored_view(owner, stream), queries, owner.layer, 0);
    problem.reach = settled_.on_device(reach, stream);
    return {run(policies, problem, queries, rule, member, stream),
            bound(owner, store, policies, reach.prompt_tokens())};
  }
  /// Chooses what a layer of a batch keeps, or lets through, within a step. `ids` and `next`, the position of the next
  /// token, lie on the device, by sequence of the batch. The newest `added` tokens stay whatever their score.
  selection_view choose_in_step(index_t layer, const index_t* ids, const store_type& store, const view_type& view,
                                const planned<Recipe>& policies, const logit_rule& rule, const index_t* next,
                                index_t added, index_t member, cudaStream_t stream) const {
    const newest_rows<T> queries = observer_.queries_in_step(layer, ids, view.sequences, next, stream);
    choose_problem<view_type, T> problem = this->problem(store, view, queries, layer, added);
    problem.budgets = budgets_.batch();
    if (tail_follows_budget_) problem.tails = (added > 0 ? longer_tails_ : tails_).batch();
    return run(policies, problem, queries, rule, member, stream);
  }

 private:
  /// An upper bound of the tokens that one head keeps, whatever the scores. With a plan, it holds only for the prompt
  /// that the plan was made for.
  index_t max_kept(const Recipe& recipe) const {
    if constexpr (Recipe::retain_type::plans || Recipe::retain_type::over_model) {
      return options_.tokens;
    } else {
      return max_retained(
          recipe.retain, shape_.layers, joins ? 1 : shape_.kv_heads, options_.tokens,
          (std::max)(options_.step_tokens, recipe.retain.scorer.protected_tail(recipe.retain.budget.tokens)));
    }
  }
  layer_extent extent(index_t layer, index_t longest, index_t kept_tail) const {
    return {layer, shape_.layers, joins ? 1 : shape_.kv_heads, kept_tail, longest};
  }
  index_t tail(sequence_layer owner, const token_bound& held, const planned<Recipe>& policies) const {
    return observer_.tail(owner, held.longest, policies);
  }
  /// Where heads choose together, the budget is given one of them.
  token_bound bound_kept_of(const planned<Recipe>& policies, const layer_extent& layer, const token_bound& held) const {
    token_bound kept = bound_kept(policies.first.budget, layer);
    if (joins) kept.total *= shape_.kv_heads;
    return {(std::min)(kept.longest, held.longest), (std::min)(kept.total, held.total)};
  }

  /// The newest `added` tokens stay whatever their score, or more where the scorer says so.
  choose_problem<view_type, T> problem(const store_type& store, const view_type& view, const newest_rows<T>& queries,
                                       index_t layer, index_t added) const {
    choose_problem<view_type, T> problem;
    problem.view = view;
    problem.layer = layer;
    problem.layers = shape_.layers;
    problem.valid = queries.valid;
    problem.first_position = queries.first_position;
    problem.counts = counts_.counts(layer);
    if constexpr (Recipe::needs_segments) problem.segments = store.segments(view);
    problem.tail = added;
    observer_.complete(problem, store);
    return problem;
  }
  selection_view run(const planned<Recipe>& policies, choose_problem<view_type, T>& problem,
                     const newest_rows<T>& queries, const logit_rule& rule, index_t member, cudaStream_t stream) const {
    problem.q = members_.rows(queries.q, member);
    problem.q.heads = members_.q_heads();
    problem.lse = members_.rows(queries.lse, member);
    problem.rule = members_.rule(rule, member, stream);
    return operations_.choose.run(policies.first, problem, operations_.scratch.data(), stream);
  }

  model_shape shape_;
  cache_options options_;
  group_members members_;
  index_t batch_;
  observer_type observer_;
  model_counts<Recipe> counts_;
  settled_layers<Recipe> settled_;
  operations operations_;
  id_values<index_t> budgets_, tails_, longer_tails_;  // of choices in steps; longer ones have the step's tokens
  bool tail_follows_budget_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
