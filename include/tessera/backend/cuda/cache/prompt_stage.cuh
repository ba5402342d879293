// The first stage on the device: what a recipe's scorer observes of prompts, and what it chooses when they end.
#pragma once

#include <algorithm>
#include <utility>

#include "../score/query_window.cuh"
#include "../store/row_store.cuh"
#include "cache_operations.cuh"
#include "cache_options.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Nothing is chosen at all.
template <class Recipe, bool Chooses = Recipe::chooses>
class prompt_stage {
 public:
  prompt_stage(const Recipe&, const model_shape&, const cache_options&, const device_info&) {}
  template <class... Any>
  void observe(const Any&...) {}
  void forget(index_t) {}
  offset_t bytes_per_place() const { return 0; }
};

/// Remembers or accumulates what prompts are scored by, and chooses by it. A place is a (layer, sequence).
template <class Recipe>
class prompt_stage<Recipe, true> {
  static constexpr bool observes_window = Recipe::observed == observes::window;
  static constexpr bool observes_every_query = Recipe::observed == observes::every_query;
  static constexpr index_t observed_at_once = 512;  // queries of one accumulating call: bounds its workspace

 public:
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using store_type = row_store<layout>;
  using view_type = typename store_type::view_type;
  using policy = decltype(std::declval<Recipe>().first_stage(stage_plan{}));

  prompt_stage(const Recipe& recipe, const model_shape& shape, const cache_options& options, const device_info& device)
      : shape_(shape), options_(options), device_(device) {
    if constexpr (observes_window) {
      window_ =
          query_window<T>(shape.layers * options.sequences, recipe.retain.scorer.window, shape.q_heads, layout::k_dim);
    }
  }

  /// Queries of a chunk whose last one is at `next` - 1; the store holds the chunk's tokens already.
  void observe(const Recipe& recipe, const stage_plan& plan, const store_type& store, index_t layer, index_t id,
               const rows_view<const T>& q, index_t next, cudaStream_t stream) {
    if constexpr (observes_window) window_.remember(layer * options_.sequences + id, q, stream);
    if constexpr (observes_every_query) {
      for (index_t done = 0; done < q.tokens; done += observed_at_once) {
        rows_view<const T> some = q;
        some.data += done * q.token_stride;
        some.tokens = std::min(observed_at_once, q.tokens - done);
        operations(recipe).observe(recipe.first_stage(plan), recipe.attention.rule, store.view(layer, id, 1), some,
                                   set_number(position_.data(), next - q.tokens + done, stream), store.scores(),
                                   store.begins(layer, id), stream);
      }
    }
  }

  /// Forgets a turn's queries.
  void forget(index_t id) {
    if constexpr (observes_window) {
      for (index_t layer = 0; layer < shape_.layers; ++layer) window_.forget(layer * options_.sequences + id);
    }
  }

  struct choice {
    selection_view chosen;  ///< lies in this object's memory until the next call
    kept_bound bound;
  };

  /// What a layer keeps, or lets through, of one sequence; `next` is on the device and the host.
  choice choose(const Recipe& recipe, const stage_plan& plan, const store_type& store, index_t layer, index_t id,
                index_t next, const index_t* device_next, cudaStream_t stream) {
    const policy stage = recipe.first_stage(plan);
    index_t tail = stage.scorer.protected_tail(stage.budget.tokens);
    const index_t* position = device_next;
    rows_view<const T> window;
    if constexpr (observes_window) {
      window = window_.queries(layer * options_.sequences + id);
      tail = window.tokens;
      position = set_number(position_.data(), next - tail, stream);
    }
    const selection_view chosen = operations(recipe).choose(stage, recipe.attention.rule, store.view(layer, id, 1),
                                                            window, position, store.scores(), tail, layer, stream);
    return {chosen, bound(stage, store, layer, id, tail)};
  }

  kept_bound bound(const policy& stage, const store_type& store, index_t layer, index_t id, index_t tail) const {
    const auto& here = store.at(layer, id);
    const kept_bound most = bound_kept(stage.budget, layer, shape_.layers, tail, shape_.kv_heads, here.longest);
    return {std::min(most.longest, here.longest), std::min(most.total, here.total)};
  }

  /// The most tokens that a head keeps; with a plan, known only for the prompt that it is made for.
  index_t most(const Recipe& recipe, const stage_plan& plan) const {
    if (Recipe::plans) return options_.tokens;
    const policy stage = recipe.first_stage(plan);
    return most_kept(stage.budget, stage.scorer.protected_tail(stage.budget.tokens), shape_, options_.tokens);
  }

  /// Notes on the host what the end of a step will drop in place.
  void note_eviction(const Recipe& recipe, const stage_plan& plan, store_type& store, index_t layer, index_t id) const {
    const policy stage = recipe.first_stage(plan);
    const index_t before = store.at(layer, id).longest;
    if (before <= stage.budget.tokens) return;
    const kept_bound after = bound(stage, store, layer, id, stage.scorer.protected_tail(stage.budget.tokens));
    // Only where all heads are known to be equally long is the room that this makes known too.
    constexpr bool even = keeps_heads_even<typename policy::budget_type>;
    store.shrank(layer, id, after.longest, after.total, even ? before - after.longest : 0);
  }

  const auto& mover(const Recipe& recipe) { return operations(recipe).mover(); }
  offset_t bytes_per_place() const { return observes_window ? window_.bytes_per_place() : 0; }
  /// Another budget: its scratch is made anew.
  void reset() { operations_ = {}; }

 private:
  auto& operations(const Recipe& recipe) {
    if (!operations_) {
      const stage_plan none = recipe.plan(0);
      operations_.make(recipe.first_stage(none), shape_, 1, observes_window ? 0 : observed_at_once, options_.tokens,
                       most(recipe, none), device_);
    }
    return *operations_;
  }

  model_shape shape_;
  cache_options options_;
  device_info device_;
  query_window<T> window_;
  device_buffer<index_t> position_{1};
  made_on_demand<retain_operations<policy, view_type>> operations_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
