// The first stage on the device: what a recipe's scorer observes of prompts and steps, and what it chooses by it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../../core/model_shape.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../layout/packed_rows.hpp"
#include "../../../planned.hpp"
#include "../../../runtime/kept_lengths.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../choose/score_and_choose.cuh"
#include "../score/expected/query_sums.cuh"
#include "../score/queries/group_members.cuh"
#include "../score/queries/query_ring.cuh"
#include "../score/queries/query_window.cuh"
#include "../store/kv_store.cuh"
#include "cache_options.hpp"
#include "numbers.cuh"
#include "prompt_end/model_counts.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Nothing is chosen.
template <class Recipe, bool Chooses = Recipe::retain_type::chooses>
class first_stage {
  using T = typename Recipe::layout_type::element_type;
  using store_type = kv_store<typename Recipe::layout_type>;
  using view_type = typename store_type::view_type;
  using policies_type = planned<Recipe>;

 public:
  static constexpr bool with_scores = false;
  first_stage(const Recipe&, const model_shape& shape, const cache_options&, const device_info&) : members_(1, shape) {}
  void adopt(first_stage&&) {}
  index_t most_sequences() const { return 1; }
  index_t most_tokens_kept() const { return 1; }
  void count_over_model(index_t, const store_type&, const policies_type&, const layer_roles&, cudaStream_t) const {}
  bool keeps_everything(sequence_layer, const token_bound&, const policies_type&) const { return true; }
  kept_bound bound(sequence_layer, const store_type&, const policies_type&, index_t) const { return {}; }
  kept_slots choose(sequence_layer, const store_type&, const policies_type&, const logit_rule&, const prompt_reach&,
                    const index_t*, cudaStream_t, index_t = 0) const {
    return {};
  }
  void forget(index_t) {}
  void copy(index_t, index_t, cudaStream_t) {}
  void begin_turn(sequence_layer, const store_type&) {}
  void end_chunk(sequence_layer, const store_type&, index_t) {}
  void observe_prompt(sequence_layer, const store_type&, const policies_type&, const logit_rule&,
                      const rows_view<const T>&, index_t, cudaStream_t) {}
  rows_view<float> lse_room(index_t) const { return {}; }
  void observe_attention(sequence_layer, const rows_view<const T>&, const rows_view<float>&, cudaStream_t) const {}
  void observe_step(index_t, const index_t*, const store_type&, const view_type&, const policies_type&,
                    const logit_rule&, const rows_view<const T>&, const index_t*, cudaStream_t) const {}
  index_t chooser(index_t layer, const policies_type&, const layer_roles&) const { return layer; }
  const group_members& members() const { return members_; }
  offset_t bytes_of_place() const { return 0; }

 private:
  group_members members_;
};

/// Remembers or accumulates what is scored, and chooses by it: of one sequence when its prompt ends, of a batch in
/// steps.
/// Memory   scores of sequences * kv_heads * tokens (of one sequence where steps choose nothing), remembered queries,
///          and what scoring, budget and selection need; all of it allocated when this is made.
template <class Recipe>
class first_stage<Recipe, true> {
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using store_type = kv_store<layout>;
  using view_type = typename store_type::view_type;
  using policy = decltype(std::declval<planned<Recipe>>().first);
  using scorer = typename policy::scorer_type;
  static constexpr observes observed = scorer::observed;
  static constexpr bool joins = joining_scope<typename policy::scope_type>;
  static constexpr bool newest = joins_rows_by<scorer> == row_join::newest;
  static constexpr bool in_steps = fires_in_steps<typename Recipe::schedule_type>;
  static constexpr bool settles = Recipe::retain_type::settles, follows = Recipe::retain_type::follows;
  static constexpr bool over_model = Recipe::retain_type::over_model;
  /// Whether a choice takes its rows' log-sum-exps from the prompt's attention, which goes over the same keys. Only
  /// where chunks matter anyway: attention of few rows is split, so that bits would hang on the pieces in which a
  /// prompt comes.
  static constexpr bool takes_lse = observed == observes::window &&
                                    Recipe::schedule_type::fires_at(moment::chunk_end) &&
                                    !Recipe::prefill_type::chooses_lines && !packing_layout<layout>;
  static constexpr index_t observed_at_once = 512;  // queries of one accumulating call: bounds its workspace

  using window_type = std::conditional_t<follows, query_ring<T>, query_window<T>>;
  using lse_type = std::conditional_t<takes_lse, window_lse<T>, no_window_lse>;
  using sums_type = std::conditional_t<observed == observes::statistics, query_sums<T, layout::k_dim>, no_query_sums>;
  using observer_type = attentive_score_where<view_type, scorer, observed == observes::every_query>;

 public:
  static constexpr bool with_scores = lies_beside_tokens(observed);

  first_stage(const Recipe& recipe, const model_shape& shape, const cache_options& options, const device_info& device)
      : shape_(shape),
        members_(reading_members(recipe.retain, shape.q_heads / shape.kv_heads), shape),
        order_{options.sequences},
        most_(most_kept(recipe, shape, options)),
        batch_(in_steps ? options.sequences : 1),
        observe_(batch_, shape.kv_heads, shape.q_heads, queries_at_once(recipe, options), options.tokens, device),
        choose_(recipe.retain.planned(recipe.retain.plan(options.tokens)),
                {batch_, shape.kv_heads, members_.q_heads(), queries_at_once(recipe, options), options.tokens, most_},
                device),
        counts_(shape, options, device),
        observe_scratch_(observe_.workspace_bytes()),
        choose_scratch_(choose_.workspace_bytes()),
        settled_(settles ? std::size_t(shape.layers) * std::size_t(options.sequences) : 0) {
    require(!weighted_scorer<scorer> || !shape.output_projection, "output_projection", "given",
            "null: the device weighs values as they are", "leave it out, or take the CPU's cache");
    if constexpr (follows) {
      window_ = window_type(shape.layers, options.sequences, batch_, recipe.retain.scorer.window, options.step_tokens,
                            shape.q_heads, layout::k_dim);
    } else if constexpr (observed == observes::window) {
      window_ =
          window_type(shape.layers * options.sequences, recipe.retain.scorer.window, shape.q_heads, layout::k_dim);
    }
    if constexpr (takes_lse)
      lse_ = lse_type(shape.layers * options.sequences, recipe.retain.scorer.window, shape.q_heads);
    if constexpr (observed == observes::statistics) {
      shape.check_rope(layout::k_dim);
      sums_ = sums_type(shape.layers * options.sequences, shape.q_heads, shape.rope_frequencies);
    }
  }

  /// Takes another budget's operations; what was remembered stays.
  void adopt(first_stage&& fitted) {
    if constexpr (observed == observes::window) std::swap(fitted.window_, window_);
    if constexpr (observed == observes::statistics) std::swap(fitted.sums_, sums_);
    std::swap(fitted.lse_, lse_);
    std::swap(fitted.settled_, settled_);
    *this = std::move(fitted);
  }

  /// Queries of a chunk whose last one is at `next` - 1; the store holds the chunk's tokens already.
  void observe_prompt(sequence_layer owner, const store_type& store, const planned<Recipe>& policies,
                      const logit_rule& rule, const rows_view<const T>& q, index_t next, cudaStream_t stream) {
    if constexpr (follows) {
      window_.remember(owner, nullptr, q, set_number(position_.data(), next - q.tokens, stream), stream);
    } else if constexpr (observed == observes::window) {
      window_.remember(order_.index(owner), q, stream);
      lse_.forget(order_.index(owner));
    } else if constexpr (observed == observes::statistics) {
      sums_.add(order_.index(owner), q, next - q.tokens, policies.first.scorer.sinks, stream);
    }
    if constexpr (observed == observes::every_query) {
      const index_t asked = policies.first.queries_needed(q.tokens);
      for (index_t done = q.tokens - asked; done < q.tokens; done += observed_at_once) {
        rows_view<const T> some = q;
        some.data += done * q.token_stride;
        some.tokens = (std::min)(observed_at_once, q.tokens - done);
        observe(store, store.view(owner), policies, rule, some,
                set_number(position_.data(), next - q.tokens + done, stream), stream);
      }
    }
  }
  /// Where the attention of a prompt's newest `tokens` tokens writes log-sum-exps for `observe_attention`; data null:
  /// nowhere.
  rows_view<float> lse_room(index_t tokens) const { return lse_.room(tokens); }
  /// A layer's newest queries have been attended over all that it stores; `lse`: of those that `lse_room` has room for
  /// at least.
  void observe_attention(sequence_layer owner, const rows_view<const T>& q, const rows_view<float>& lse,
                         cudaStream_t stream) {
    lse_.take(order_.index(owner), window_, q, lse, stream);
  }
  /// Queries of a step that has been attended, for a batch; `ids` and `first_position` lie on the device.
  void observe_step(index_t layer, const index_t* ids, const store_type& store, const view_type& view,
                    const planned<Recipe>& policies, const logit_rule& rule, const rows_view<const T>& q,
                    const index_t* first_position, cudaStream_t stream) const {
    if constexpr (follows) window_.remember({layer, 0}, ids, q, first_position, stream);
    if constexpr (observed == observes::every_query && in_steps) {
      rows_view<const T> asked = q;
      if (newest && q.tokens > 1) {
        asked.data += (q.tokens - 1) * q.token_stride;
        asked.tokens = 1;
        first_position = add_number(position_.data(), first_position, q.tokens - 1, q.sequences, stream);
      }
      observe(store, view, policies, rule, asked, first_position, stream);
    }
  }

  /// The layer whose choice this one takes when a prompt ends: its own, or an earlier one's.
  index_t chooser(index_t layer, [[maybe_unused]] const planned<Recipe>& policies,
                  [[maybe_unused]] const layer_roles& roles) const {
    if constexpr (Recipe::retain_type::reuses) {
      index_t place = 0;
      for (index_t before = 0; before < layer; ++before) place += roles.follows_recipe(before);
      for (index_t back = place - policies.first.scope.chooser(place); back > 0; back -= roles.follows_recipe(layer)) {
        --layer;
      }
    }
    return layer;
  }
  /// Forgets a turn's queries, but for those of a window that follows the conversation.
  void forget(index_t id) {
    for (index_t layer = 0; layer < shape_.layers; ++layer) forget({layer, id});
  }
  /// What lasts from turn to turn, to an id that goes on from another one's.
  void copy(index_t from, index_t to, cudaStream_t stream) { window_.copy(from, to, stream); }
  /// A turn's prompt begins: what a layer's heads hold now is from earlier.
  void begin_turn([[maybe_unused]] sequence_layer owner, [[maybe_unused]] const store_type& store) {
    if constexpr (settles) {
      settled_heads& here = settled_[order_.index(owner)];
      here.earlier = here.settled = store.held_by_head(owner);
    }
  }
  /// A layer has chosen among what it had of a prompt: what it holds is settled but for the newest `again` tokens.
  void end_chunk([[maybe_unused]] sequence_layer owner, [[maybe_unused]] const store_type& store,
                 [[maybe_unused]] index_t again) {
    if constexpr (settles) {
      settled_heads& here = settled_[order_.index(owner)];
      here.settled = store.held_by_head(owner);
      for (index_t& tokens : here.settled) tokens -= again;
    }
    forget(owner);
  }

  /// Bounds of what a layer of one sequence keeps when its prompt, or a chunk of it, ends; `held` is the store's, and
  /// `seen` how much of the turn's prompt there has been. Where lengths decide, by head.
  kept_bound bound(sequence_layer owner, const store_type& store, const planned<Recipe>& policies,
                   [[maybe_unused]] index_t seen) const {
    const token_bound& held = store.bound(owner);
    const index_t newest = tail(owner, held.longest, policies);
    if constexpr (settles) {
      const settled_heads& here = settled_[order_.index(owner)];
      return kept_by_lengths(policies.first.budget, extent(owner.layer, held.longest, newest),
                             store.held_by_head(owner), here, seen, shape_.kv_heads);
    } else if constexpr (over_model) {
      return counts_.bound(owner.layer);
    } else {
      const token_bound most = most_of(policies, extent(owner.layer, held.longest, newest));
      return {{(std::min)(most.longest, held.longest), (std::min)(most.total, held.total)}, {}};
    }
  }
  /// A sequence's prompt ends: what each layer will keep of it, where one threshold runs over the model. Synchronises
  /// then.
  void count_over_model(index_t id, const store_type& store, const planned<Recipe>& policies, const layer_roles& roles,
                        cudaStream_t stream) {
    counts_.allot(id, store, policies, roles, stream);
  }

  /// Whether a layer keeps all that it holds, whatever the scores; behind `count_over_model`, in a model with one
  /// threshold.
  bool keeps_everything(sequence_layer owner, const token_bound& held, const planned<Recipe>& policies) const {
    if constexpr (over_model) return counts_.bound(owner.layer).total == held.total;
    return keeps_all(policies.first.budget, extent(owner.layer, held.longest, tail(owner, held.longest, policies)));
  }
  /// Bounds of what a step leaves in place, and by how much every head's room grows for certain.
  token_bound bound_in_step(index_t layer, const token_bound& held, const planned<Recipe>& policies,
                            index_t own) const {
    const token_bound most = most_of(policies, extent(layer, held.longest, (std::max)(own, step_tail(policies))));
    return {(std::min)(most.longest, held.longest), (std::min)(most.total, held.total)};
  }
  static constexpr bool heads_are_even = keeps_heads_even<typename policy::budget_type>;

  /// What a layer of one sequence keeps, or lets through, when its prompt ends at position `next`; for one place in the
  /// group where query heads choose apart. The slots lie in this object's memory until the next call.
  /// `reach`: what earlier choices have settled of the turn's prompt, for a recipe that settles.
  kept_slots choose(sequence_layer owner, const store_type& store, const planned<Recipe>& policies,
                    const logit_rule& rule, const prompt_reach& reach, const index_t* device_next, cudaStream_t stream,
                    index_t member = 0) {
    newest_rows<T> asked{{}, nullptr, device_next};
    if constexpr (follows) {
      asked = window_.gather(owner, nullptr, 1, device_next, stream);
    } else if constexpr (observed == observes::window) {
      asked.q = window_.queries(order_.index(owner));
      asked.lse = lse_.of(order_.index(owner), asked.q.tokens);
      asked.first_position = set_number(position_.data(), reach.end - asked.q.tokens, stream);
    }
    if constexpr (settles) set_number(reach_.data(), reach, stream);
    if constexpr (observed == observes::statistics)
      set_number(statistics_.data(), sums_.of(order_.index(owner), stream), stream);
    const selection_view chosen = choose_slots(policies, rule, store, store.view(owner), asked,
                                               settles ? reach_.data() : nullptr, 0, owner.layer, member, stream);
    return {chosen, bound(owner, store, policies, reach.seen())};
  }
  /// What a layer of a batch keeps, or lets through, within a step; on the device by sequence of the batch: `ids`, and
  /// `next`, the position of the next token. The newest `own` tokens stay whatever their score.
  selection_view choose_in_step(index_t layer, const index_t* ids, const store_type& store, const view_type& view,
                                const planned<Recipe>& policies, const logit_rule& rule, const index_t* next,
                                index_t own, cudaStream_t stream, index_t member = 0) const {
    newest_rows<T> asked{{}, nullptr, next};
    if constexpr (follows) asked = window_.gather({layer, 0}, ids, view.sequences, next, stream);
    return choose_slots(policies, rule, store, view, asked, nullptr, own, layer, member, stream);
  }
  const group_members& members() const { return members_; }
  /// The most sequences of one choice, and the most tokens that a head of it keeps.
  index_t most_sequences() const { return batch_; }
  index_t most_tokens_kept() const { return most_; }
  offset_t bytes_of_place() const {
    if constexpr (observed == observes::window) return window_.bytes_per_place() + lse_.bytes_per_place();
    if constexpr (observed == observes::statistics) return sums_.bytes_per_place();
    return 0;
  }

 private:
  void forget([[maybe_unused]] sequence_layer owner) {
    if constexpr (observed == observes::window && !follows) window_.forget(order_.index(owner));
    if constexpr (observed == observes::statistics) sums_.forget(order_.index(owner));
  }
  static index_t queries_at_once(const Recipe& recipe, const cache_options& options) {
    if constexpr (observed == observes::window) return recipe.retain.scorer.window;
    return (std::max)(observed_at_once, options.step_tokens);
  }
  /// The most tokens that one head keeps, whatever the scores; with a plan, known only for the prompt that it is made
  /// for.
  static index_t most_kept(const Recipe& recipe, const model_shape& shape, const cache_options& options) {
    const index_t capacity = options.tokens;
    if constexpr (Recipe::retain_type::plans || over_model) {
      return capacity;
    } else {
      return tessera::cuda::most_kept(
          recipe.retain, shape.layers, joins ? 1 : shape.kv_heads, capacity,
          (std::max)(options.step_tokens, recipe.retain.scorer.protected_tail(recipe.retain.budget.tokens)));
    }
  }

  static index_t step_tail(const planned<Recipe>& policies) {
    return policies.first.scorer.protected_tail(policies.first.budget.tokens);
  }
  layer_extent extent(index_t layer, index_t longest, index_t kept_tail) const {
    return {layer, shape_.layers, joins ? 1 : shape_.kv_heads, kept_tail, longest};
  }
  /// Where heads choose together, the budget sees one of them.
  token_bound most_of(const planned<Recipe>& policies, const layer_extent& layer) const {
    token_bound most = bound_kept(policies.first.budget, layer);
    if (joins) most.total *= shape_.kv_heads;
    return most;
  }
  /// Of a layer that stores `held` tokens.
  index_t tail([[maybe_unused]] sequence_layer owner, [[maybe_unused]] index_t held,
               const planned<Recipe>& policies) const {
    if constexpr (follows) return (std::min)(policies.first.scorer.window, held);
    if constexpr (observed == observes::window && !follows) return window_.queries(order_.index(owner)).tokens;
    return policies.first.scorer.protected_tail(policies.first.budget.tokens);
  }

  void observe(const store_type& store, const view_type& view, const planned<Recipe>& policies, const logit_rule& rule,
               const rows_view<const T>& q, const index_t* first_position, cudaStream_t stream) const {
    score_problem<view_type> problem;
    problem.view = view;
    problem.q = q;
    problem.first_position = first_position;
    problem.rule = rule;
    problem.scores = store.scores();
    problem.offsets = view.position_begin;
    problem.accumulate = !newest;
    observe_.run(problem, policies.first.scorer, observe_scratch_.data(), stream);
  }

  /// The newest `own` tokens stay whatever their score, or more where the scorer says so.
  selection_view choose_slots(const planned<Recipe>& policies, const logit_rule& rule, const store_type& store,
                              const view_type& view, const newest_rows<T>& asked, const prompt_reach* reach,
                              index_t own, index_t layer, index_t member, cudaStream_t stream) const {
    choose_problem<view_type, T> problem;
    problem.view = view;
    problem.layer = layer;
    problem.layers = shape_.layers;
    problem.q = members_.of(asked.q, member);
    problem.q.heads = members_.q_heads();
    problem.lse = members_.of(asked.lse, member);
    problem.valid = asked.valid;
    problem.first_position = asked.first_position;
    problem.reach = reach;
    problem.rule = members_.rule(rule, member, stream);
    if constexpr (over_model) problem.counts = counts_.of(layer);
    if constexpr (with_scores) problem.scores = {store.scores(), 0, 0, view.position_begin};
    if constexpr (Recipe::needs_segments) problem.segments = store.segments(view);
    problem.tail = own;
    if constexpr (observed == observes::statistics) {
      problem.statistics = statistics_.data();
      problem.rope_frequencies = sums_.frequencies();
    }
    return choose_.run(policies.first, problem, choose_scratch_.data(), stream);
  }

  model_shape shape_;
  group_members members_;
  layer_major order_;
  index_t most_, batch_;
  observer_type observe_;
  score_and_choose<view_type, policy> choose_;
  model_counts<Recipe> counts_;
  device_buffer<unsigned char> observe_scratch_, choose_scratch_;
  window_type window_;
  lse_type lse_;
  sums_type sums_;
  device_buffer<query_statistics> statistics_{1};
  device_buffer<index_t> position_{std::size_t(batch_)};
  device_buffer<prompt_reach> reach_{1};
  host_vector<settled_heads> settled_;  // in that order, of a recipe that settles
};

}  // namespace cuda
TESSERA_NAMESPACE_END
