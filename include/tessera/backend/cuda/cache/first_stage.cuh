// The first stage on the device: what a recipe's scorer observes of prompts and steps, and what it chooses by it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../../core/model_shape.hpp"
#include "../../../planned.hpp"
#include "../choose/retain.cuh"
#include "../score/query_window.cuh"
#include "../score/score.cuh"
#include "../score/score_positions.cuh"
#include "../store/kv_store.cuh"
#include "cache_options.hpp"
#include "numbers.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Nothing is chosen.
template <class Recipe, bool Chooses = Recipe::retain_type::chooses>
class first_stage {
 public:
  static constexpr bool with_scores = false;
  first_stage(const Recipe&, const model_shape&, const cache_options&, const device_info&) {}
  void adopt(first_stage&&) {}
  index_t most_sequences() const { return 1; }
  index_t most_tokens_kept() const { return 1; }
  template <class... Any>
  bool keeps_everything(const Any&...) const {
    return true;
  }
  template <class... Any>
  held_bound bound(const Any&...) const {
    return {};
  }
  template <class... Any>
  kept_slots choose(const Any&...) const {
    return {};
  }
  void forget(index_t) {}
  template <class... Any>
  void observe_prompt(const Any&...) {}
  template <class... Any>
  void observe_step(const Any&...) const {}
  offset_t bytes_of_place() const { return 0; }
};

/// Remembers or accumulates what is scored, and chooses by it: of one sequence when its prompt ends, of a batch in steps.
/// Memory   scores of sequences * kv_heads * tokens (of one sequence where steps choose nothing), remembered queries, and
///          what scoring, budget and selection need; all of it allocated when this is made.
template <class Recipe>
class first_stage<Recipe, true> {
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using store_type = kv_store<layout>;
  using view_type = typename store_type::view_type;
  using policy = decltype(std::declval<planned<Recipe>>().first);
  using scorer = typename policy::scorer_type;
  static constexpr observes observed = scorer::observed;
  static constexpr bool in_steps = fires_in_steps<typename Recipe::schedule_type>;
  static constexpr index_t observed_at_once = 512;  // queries of one accumulating call: bounds its workspace

  struct no_score {
    no_score(index_t, index_t, index_t, index_t, index_t, const device_info&) {}
    std::size_t workspace_bytes() const { return 0; }
  };
  template <class S, bool Attentive>
  struct score_of {
    using type = no_score;
  };
  template <class S>
  struct score_of<S, true> {
    using type = attentive_score<view_type, S>;
  };
  using score_type = typename score_of<scorer, observed != observes::nothing>::type;

 public:
  static constexpr bool with_scores = observed == observes::every_query;

  first_stage(const Recipe& recipe, const model_shape& shape, const cache_options& options, const device_info& device)
      : shape_(shape),
        sequences_(options.sequences),
        capacity_(options.tokens),
        most_(most_kept(recipe, shape, options)),
        batch_(in_steps ? options.sequences : 1),
        score_(batch_, shape.kv_heads, shape.q_heads, queries_at_once(recipe, options), options.tokens, device),
        choose_(recipe.retain.planned(recipe.retain.plan(options.tokens)), batch_, shape.kv_heads, options.tokens,
                most_, device),
        raw_(with_scores ? 0 : std::size_t(batch_) * std::size_t(shape.kv_heads) * std::size_t(options.tokens)),
        score_scratch_(score_.workspace_bytes()),
        choose_scratch_(choose_.workspace_bytes()) {
    if constexpr (observed == observes::window) {
      window_ =
          query_window<T>(shape.layers * options.sequences, recipe.retain.scorer.window, shape.q_heads, layout::k_dim);
    }
  }

  /// Takes another budget's operations; what was remembered stays.
  void adopt(first_stage&& fitted) {
    if constexpr (observed == observes::window) std::swap(fitted.window_, window_);
    *this = std::move(fitted);
  }

  /// Queries of a chunk whose last one is at `next` - 1; the store holds the chunk's tokens already.
  void observe_prompt(index_t layer, index_t id, const store_type& store, const planned<Recipe>& policies,
                      const logit_rule& rule, const rows_view<const T>& q, index_t next, cudaStream_t stream) {
    if constexpr (observed == observes::window) window_.remember(layer * sequences_ + id, q, stream);
    if constexpr (observed == observes::every_query) {
      for (index_t done = 0; done < q.tokens; done += observed_at_once) {
        rows_view<const T> some = q;
        some.data += done * q.token_stride;
        some.tokens = std::min(observed_at_once, q.tokens - done);
        observe_step(store, store.view(layer, id), policies, rule, some,
                     set_number(position_.data(), next - q.tokens + done, stream), stream);
      }
    }
  }
  /// Queries of a step that has been attended, for a batch.
  void observe_step(const store_type& store, const view_type& view, const planned<Recipe>& policies,
                    const logit_rule& rule, const rows_view<const T>& q, const index_t* first_position,
                    cudaStream_t stream) const {
    if constexpr (observed == observes::every_query) {
      score(policies.first, rule, view, q, first_position, store.scores(), view.position_begin, 0, true, stream);
    }
  }

  /// Forgets a turn's queries.
  void forget(index_t id) {
    if constexpr (observed == observes::window) {
      for (index_t layer = 0; layer < shape_.layers; ++layer) window_.forget(layer * sequences_ + id);
    }
  }

  /// Bounds of what a layer of one sequence keeps when its prompt ends.
  held_bound bound(index_t layer, index_t id, const held_bound& held, const planned<Recipe>& policies) const {
    const kept_bound most = bound_kept(policies.first.budget, extent(layer, held.longest, tail(layer, id, policies)));
    return {std::min(most.longest, held.longest), std::min(most.total, held.total)};
  }
  /// Whether a layer keeps all that it holds, whatever the scores.
  bool keeps_everything(index_t layer, index_t id, const held_bound& held, const planned<Recipe>& policies) const {
    return keeps_all(policies.first.budget, extent(layer, held.longest, tail(layer, id, policies)));
  }
  /// Bounds of what a step leaves in place, and by how much every head's room grows for certain.
  held_bound bound_in_step(index_t layer, const held_bound& held, const planned<Recipe>& policies, index_t own) const {
    const kept_bound most =
        bound_kept(policies.first.budget, extent(layer, held.longest, std::max(own, step_tail(policies))));
    return {std::min(most.longest, held.longest), std::min(most.total, held.total)};
  }
  static constexpr bool heads_are_even = keeps_heads_even<typename policy::budget_type>;

  /// What a layer of one sequence keeps, or lets through, when its prompt ends at position `next`. The slots lie in this
  /// object's memory until the next call.
  kept_slots choose(index_t layer, index_t id, const store_type& store, const planned<Recipe>& policies,
                    const logit_rule& rule, index_t next, const index_t* device_next, cudaStream_t stream) {
    const index_t* position = device_next;
    rows_view<const T> window;
    if constexpr (observed == observes::window) {
      window = window_.queries(layer * sequences_ + id);
      position = set_number(position_.data(), next - window.tokens, stream);
    }
    const selection_view chosen = choose_slots(policies, rule, store, store.view(layer, id), window, position,
                                               tail(layer, id, policies), layer, stream);
    return {chosen, bound(layer, id, store.bound(layer, id), policies)};
  }
  /// What a layer of a batch keeps within a step; `next`: by sequence of the batch, the position of the next token. The
  /// newest `own` tokens stay whatever their score.
  selection_view choose_in_step(index_t layer, const store_type& store, const view_type& view,
                                const planned<Recipe>& policies, const logit_rule& rule, const index_t* next,
                                index_t own, cudaStream_t stream) const {
    return choose_slots(policies, rule, store, view, {}, next, std::max(own, step_tail(policies)), layer, stream);
  }

  /// The most sequences of one choice, and the most tokens that a head of it keeps.
  index_t most_sequences() const { return batch_; }
  index_t most_tokens_kept() const { return most_; }
  offset_t bytes_of_place() const {
    if constexpr (observed == observes::window) return window_.bytes_per_place();
    return 0;
  }

 private:
  static index_t queries_at_once(const Recipe& recipe, const cache_options& options) {
    if constexpr (observed == observes::window) return recipe.retain.scorer.window;
    return std::max(observed_at_once, options.step_tokens);
  }
  /// The most tokens that one head keeps, whatever the scores; with a plan, known only for the prompt that it is made for.
  static index_t most_kept(const Recipe& recipe, const model_shape& shape, const cache_options& options) {
    const index_t capacity = options.tokens;
    if constexpr (Recipe::retain_type::plans) {
      return capacity;
    } else {
      const auto& budget = recipe.retain.budget;
      const index_t longest_tail = std::max(options.step_tokens, recipe.retain.scorer.protected_tail(budget.tokens));
      index_t most = std::min(capacity, budget.tokens);
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        // A turn of few queries has a short tail, which leaves some layers more.
        for (const index_t tail : {0, longest_tail}) {
          most = std::max(most, bound_kept(budget, {layer, shape.layers, shape.kv_heads, tail, capacity}).longest);
        }
      }
      return most;
    }
  }

  static index_t step_tail(const planned<Recipe>& policies) {
    return policies.first.scorer.protected_tail(policies.first.budget.tokens);
  }
  layer_extent extent(index_t layer, index_t longest, index_t kept_tail) const {
    return {layer, shape_.layers, shape_.kv_heads, kept_tail, longest};
  }
  index_t tail(index_t layer, index_t id, const planned<Recipe>& policies) const {
    if constexpr (observed == observes::window) return window_.queries(layer * sequences_ + id).tokens;
    return policies.first.scorer.protected_tail(policies.first.budget.tokens);
  }

  selection_view choose_slots(const planned<Recipe>& policies, const logit_rule& rule, const store_type& store,
                              const view_type& view, const rows_view<const T>& q, const index_t* position,
                              index_t kept_tail, index_t layer, cudaStream_t stream) const {
    score_rows in;
    in.sequences = view.sequences;
    in.kv_heads = view.kv_heads;
    in.lengths = view.lengths;
    in.length_strides = {view.length_strides.sequence, view.length_strides.head};
    in.tail = kept_tail;
    if constexpr (with_scores) {
      in.scores = store.scores();
      in.offsets = view.position_begin;
    } else {
      in.scores = raw_.data();
      in.row_stride = capacity_;
      if constexpr (observed == observes::nothing) {
        score_positions(view, position, policies.first.scorer, raw_.data(), capacity_, stream);
      } else {
        score(policies.first, rule, view, q, position, raw_.data(), nullptr, capacity_, false, stream);
      }
    }
    return choose_.run(policies.first, in, layer, shape_.layers, choose_scratch_.data(), stream);
  }

  void score(const policy& policies, const logit_rule& rule, const view_type& view, const rows_view<const T>& q,
             const index_t* first_position, float* scores, const offset_t* begins, offset_t stride, bool accumulate,
             cudaStream_t stream) const {
    score_problem<view_type> problem;
    problem.view = view;
    problem.q = q;
    problem.first_position = first_position;
    problem.rule = rule;
    problem.scores = scores;
    problem.offsets = begins;
    problem.row_stride = stride;
    problem.accumulate = accumulate;
    score_.run(problem, policies.scorer, score_scratch_.data(), stream);
  }

  model_shape shape_;
  index_t sequences_, capacity_, most_, batch_;
  score_type score_;
  choose_kept<policy> choose_;
  device_buffer<float> raw_;
  device_buffer<unsigned char> score_scratch_, choose_scratch_;
  query_window<T> window_;
  device_buffer<index_t> position_{1};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
