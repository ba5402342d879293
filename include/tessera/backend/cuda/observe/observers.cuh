// Observers on the device: what the scorer of a first stage observes of a conversation, by layer and sequence.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../../core/engine/choose_problem.hpp"
#include "../../../core/model_shape.hpp"
#include "../../../core/prompt/prompt_reach.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../layout/packed_rows.hpp"
#include "../../../planned.hpp"
#include "../cache_options.hpp"
#include "../device/copy.cuh"
#include "../score/expected/query_sums.cuh"
#include "../score/score.cuh"
#include "../store/kv_store.cuh"
#include "../store/packed/packed_store.cuh"
#include "detail/query_ring.cuh"
#include "detail/query_window.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The rows that a recipe's first stage scores: where some are packed, they are turned back into whole ones.
template <class Recipe>
using scored_view_type =
    decltype(std::declval<const kv_store<typename Recipe::layout_type>&>().scored_view({}, cudaStream_t{}));
/// The problem that a choice by a recipe's first stage fills in.
template <class Recipe>
using first_stage_problem = choose_problem<scored_view_type<Recipe>, typename Recipe::layout_type::element_type>;

/// An upper bound of the queries in one call of an observer that accumulates. It bounds the observer's workspace.
inline constexpr index_t observed_at_once = 512;

/// The observer of a recipe whose first stage chooses by position alone, or not at all. Every observer is made with
/// (recipe, shape, options, device, batch), where `batch` bounds the sequences of one choice, and has these members:
///   with_scores                          whether the store holds a score beside each token
///   queries_at_once(recipe, options)     an upper bound of the rows of queries that one call scores
///   forget(id), forget(owner)            forgets what was observed of a turn, except what lasts from turn to turn
///   copy(from, to, stream)               copies what it knows to an id that continues another one
///   transfer(id, next, archive, stream)  saves what lasts, or loads it; next(layer): the layer's next position
///   observe_prompt(...)                  called after a chunk's tokens were appended: observes the chunk's queries,
///                                        the last of which is at position `next` - 1
///   lse_room(tokens)                     memory to which the attention of a prompt's newest tokens writes log-sum-exps
///                                        for `observe_attention`; data null: it writes none
///   observe_attention(...)               called when a layer's newest queries have attended all that it stores; `lse`:
///                                        of at least as many queries as `lse_room` has room for
///   observe_step(...)                    called after a batch's step has attended: observes the step's queries; `ids`
///                                        and `first_position` lie on the device
///   queries(owner, reach, next, stream)  the queries that a prompt's choice uses; `next` lies on the device
///   queries_in_step(...)                 the queries that a batch's choice uses
///   tail(owner, held, policies)          how many of the newest of `held` tokens stay whatever their score
///   complete(problem, store)             adds what was observed to the problem of a choice
///   bytes_of_layer()                     bytes that it holds for one layer of one sequence
template <class Recipe>
class no_observer {
 public:
  static constexpr bool with_scores = false;
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using store_type = kv_store<layout>;
  using view_type = typename store_type::view_type;

  no_observer(const Recipe&, const model_shape&, const cache_options&, const device_info&, index_t) {}
  static index_t queries_at_once(const Recipe&, const cache_options& options) {
    return (std::max)(observed_at_once, options.step_tokens);
  }
  void forget(index_t) {}
  void forget(sequence_layer) {}
  void copy(index_t, index_t, cudaStream_t) {}
  template <class Next, class Archive>
  void transfer(index_t, const Next&, Archive&, cudaStream_t) {}
  void observe_prompt(sequence_layer, const store_type&, const planned<Recipe>&, const logit_rule&,
                      const rows_view<const T>&, index_t, cudaStream_t) {}
  rows_view<float> lse_room(index_t) const { return {}; }
  void observe_attention(sequence_layer, const rows_view<const T>&, const rows_view<float>&, cudaStream_t) {}
  void observe_step(index_t, const index_t*, const store_type&, const view_type&, const planned<Recipe>&,
                    const logit_rule&, const rows_view<const T>&, const index_t*, cudaStream_t) const {}
  newest_rows<T> queries(sequence_layer, const prompt_reach&, const index_t* next, cudaStream_t) {
    return {{}, nullptr, next};
  }
  newest_rows<T> queries_in_step(index_t, const index_t*, index_t, const index_t* next, cudaStream_t) const {
    return {{}, nullptr, next};
  }
  index_t tail(sequence_layer, index_t, const planned<Recipe>& policies) const {
    return policies.first.scorer.protected_tail(policies.first.budget.tokens);
  }
  void complete(first_stage_problem<Recipe>&, const store_type&) const {}
  offset_t bytes_of_layer() const { return 0; }
};

/// The observer of a recipe, by what its scorer observes. Each kind of observation has a specialisation.
template <class Recipe>
struct observer_of {
  using type = no_observer<Recipe>;
};

/// Observes the last queries of a turn's prompt, until it ends.
///
/// A choice could take its rows' log-sum-exps from the prompt's attention, which covers the same keys. It does so only
/// where chunks change results anyway. The reason: attention of few rows is split over the keys, so the bits would
/// depend on how a prompt is cut into chunks.
template <class Recipe>
class window_observer : public no_observer<Recipe> {
  using base = no_observer<Recipe>;
  static constexpr bool takes_lse = Recipe::schedule_type::fires_at(moment::chunk_end) &&
                                    !Recipe::prefill_type::chooses_lines &&
                                    !packing_layout<typename Recipe::layout_type>;

 public:
  using typename base::store_type, typename base::T;

  window_observer(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                  const device_info& device, index_t batch)
      : base(recipe, shape, options, device, batch),
        layers_(shape.layers),
        order_{options.sequences},
        window_(shape.layers * options.sequences, recipe.retain.scorer.window, shape.q_heads,
                Recipe::layout_type::k_dim),
        lse_(shape.layers * options.sequences, recipe.retain.scorer.window, shape.q_heads) {}

  static index_t queries_at_once(const Recipe& recipe, const cache_options&) { return recipe.retain.scorer.window; }
  void forget(index_t id) {
    for (index_t layer = 0; layer < layers_; ++layer) forget({layer, id});
  }
  void forget(sequence_layer owner) { window_.forget(order_.index(owner)); }
  void copy(index_t id, index_t to, cudaStream_t stream) {
    window_.copy(order_, id, to, stream);
    lse_.copy(order_, id, to, stream);
  }

  void observe_prompt(sequence_layer owner, const store_type&, const planned<Recipe>&, const logit_rule&,
                      const rows_view<const T>& q, index_t, cudaStream_t stream) {
    window_.remember(order_.index(owner), q, stream);
    lse_.forget(order_.index(owner));
  }
  rows_view<float> lse_room(index_t tokens) const { return lse_.output(tokens); }
  void observe_attention(sequence_layer owner, const rows_view<const T>& q, const rows_view<float>& lse,
                         cudaStream_t stream) {
    lse_.store(order_.index(owner), window_, q, lse, stream);
  }
  newest_rows<T> queries(sequence_layer owner, const prompt_reach& reach, const index_t*, cudaStream_t stream) {
    const rows_view<const T> q = window_.queries(order_.index(owner));
    return {q, nullptr, set_number(position_.data(), reach.end - q.tokens, stream),
            lse_.lse(order_.index(owner), q.tokens)};
  }
  index_t tail(sequence_layer owner, index_t, const planned<Recipe>&) const {
    return window_.queries(order_.index(owner)).tokens;
  }
  offset_t bytes_of_layer() const { return window_.bytes_per_entry() + lse_.bytes_per_entry(); }

 private:
  index_t layers_;
  layer_major order_;
  query_window<T> window_;
  std::conditional_t<takes_lse, window_lse<T>, no_window_lse<T>> lse_;
  device_buffer<index_t> position_{1};
};

/// Observes the newest queries of a conversation, in prompts and in steps, as long as the conversation lasts.
template <class Recipe>
class following_observer : public no_observer<Recipe> {
  using base = no_observer<Recipe>;

 public:
  using typename base::store_type, typename base::view_type, typename base::T;

  following_observer(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                     const device_info& device, index_t batch)
      : base(recipe, shape, options, device, batch),
        layers_(shape.layers),
        window_(shape.layers, options.sequences, batch, recipe.retain.scorer.window, options.step_tokens, shape.q_heads,
                Recipe::layout_type::k_dim) {}

  static index_t queries_at_once(const Recipe& recipe, const cache_options&) { return recipe.retain.scorer.window; }
  void copy(index_t id, index_t to, cudaStream_t stream) { window_.copy(id, to, stream); }
  template <class Next, class Archive>
  void transfer(index_t id, const Next& next, Archive& archive, cudaStream_t stream) {
    for (index_t layer = 0; layer < layers_; ++layer) window_.transfer({layer, id}, next(layer), archive, stream);
  }

  void observe_prompt(sequence_layer owner, const store_type&, const planned<Recipe>&, const logit_rule&,
                      const rows_view<const T>& q, index_t next, cudaStream_t stream) {
    window_.remember(owner, nullptr, q, set_number(position_.data(), next - q.tokens, stream), stream);
  }
  void observe_step(index_t layer, const index_t* ids, const store_type&, const view_type&, const planned<Recipe>&,
                    const logit_rule&, const rows_view<const T>& q, const index_t* first_position,
                    cudaStream_t stream) const {
    window_.remember({layer, 0}, ids, q, first_position, stream);
  }
  newest_rows<T> queries(sequence_layer owner, const prompt_reach&, const index_t* next, cudaStream_t stream) {
    return window_.gather(owner, nullptr, 1, next, stream);
  }
  newest_rows<T> queries_in_step(index_t layer, const index_t* ids, index_t sequences, const index_t* next,
                                 cudaStream_t stream) const {
    return window_.gather({layer, 0}, ids, sequences, next, stream);
  }
  index_t tail(sequence_layer, index_t held, const planned<Recipe>& policies) const {
    return (std::min)(policies.first.scorer.window, held);
  }
  offset_t bytes_of_layer() const { return window_.bytes_per_entry(); }

 private:
  index_t layers_;
  query_ring<T> window_;
  device_buffer<index_t> position_{1};
};

/// The observer of a scorer that looks at a window of queries.
template <class Recipe>
requires(Recipe::retain_type::observed == observes::window) struct observer_of<Recipe> {
  using type = std::conditional_t<Recipe::retain_type::follows, following_observer<Recipe>, window_observer<Recipe>>;
};

/// Holds a score beside each token. The scores do not come from the queries of prompts and steps (KVzip's second
/// reading).
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

/// Adds the weights of every query to the scores that are stored beside the tokens.
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

/// The observer of a scorer of every query.
template <class Recipe>
requires(Recipe::retain_type::observed == observes::every_query) struct observer_of<Recipe> {
  using type = accumulating_observer<Recipe>;
};

/// The observer of a scorer that reads a text again, or whose scores the engine gives.
template <class Recipe>
requires(Recipe::retain_type::rereads || Recipe::retain_type::takes_scores) struct observer_of<Recipe> {
  using type = stored_scores_observer<Recipe>;
};

/// Collects statistics of the queries of a turn's prompt (Expected Attention), until it ends.
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
  void copy(index_t id, index_t to, cudaStream_t stream) {
    for (index_t layer = 0; layer < layers_; ++layer)
      sums_.copy(order_.index({layer, id}), order_.index({layer, to}), stream);
  }

  void observe_prompt(sequence_layer owner, const store_type&, const planned<Recipe>& policies, const logit_rule&,
                      const rows_view<const T>& q, index_t next, cudaStream_t stream) {
    sums_.add(order_.index(owner), q, next - q.tokens, policies.first.scorer.sinks, stream);
  }
  newest_rows<T> queries(sequence_layer owner, const prompt_reach&, const index_t* next, cudaStream_t stream) {
    set_number(statistics_.data(), sums_.statistics(order_.index(owner), stream), stream);
    return {{}, nullptr, next};
  }
  void complete(first_stage_problem<Recipe>& problem, const store_type&) const {
    problem.statistics = statistics_.data();
    problem.rope_frequencies = sums_.frequencies();
  }
  offset_t bytes_of_layer() const { return sums_.bytes_per_entry(); }

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

/// The observer of a scorer that uses statistics of queries.
template <class Recipe>
requires(Recipe::retain_type::observed == observes::statistics) struct observer_of<Recipe> {
  using type = statistics_observer<Recipe>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
