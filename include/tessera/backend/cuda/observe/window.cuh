// Observers of the newest queries on the device: those of a turn's prompt, or those of the whole conversation.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../../layout/packed_rows.hpp"
#include "../score/queries/query_window.cuh"
#include "observer.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The last queries of a turn's prompt, which are remembered until it ends.
///
/// A choice takes its rows' log-sum-exps from the prompt's attention, which goes over the same keys, only where chunks
/// matter anyway: attention of few rows is split, so that bits would hang on the pieces in which a prompt comes.
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

  void observe_prompt(sequence_layer owner, const store_type&, const planned<Recipe>&, const logit_rule&,
                      const rows_view<const T>& q, index_t, cudaStream_t stream) {
    window_.remember(order_.index(owner), q, stream);
    lse_.forget(order_.index(owner));
  }
  rows_view<float> lse_room(index_t tokens) const { return lse_.room(tokens); }
  void observe_attention(sequence_layer owner, const rows_view<const T>& q, const rows_view<float>& lse,
                         cudaStream_t stream) {
    lse_.take(order_.index(owner), window_, q, lse, stream);
  }
  newest_rows<T> queries(sequence_layer owner, const prompt_reach& reach, const index_t*, cudaStream_t stream) {
    const rows_view<const T> q = window_.queries(order_.index(owner));
    return {q, nullptr, set_number(position_.data(), reach.end - q.tokens, stream),
            lse_.of(order_.index(owner), q.tokens)};
  }
  index_t tail(sequence_layer owner, index_t, const planned<Recipe>&) const {
    return window_.queries(order_.index(owner)).tokens;
  }
  offset_t bytes_of_layer() const { return window_.bytes_per_place() + lse_.bytes_per_place(); }

 private:
  index_t layers_;
  layer_major order_;
  query_window<T> window_;
  std::conditional_t<takes_lse, window_lse<T>, no_window_lse<T>> lse_;
  device_buffer<index_t> position_{1};
};

/// The newest queries of a conversation, those of steps too; they are remembered as long as it lasts.
template <class Recipe>
class following_observer : public no_observer<Recipe> {
  using base = no_observer<Recipe>;

 public:
  using typename base::store_type, typename base::view_type, typename base::T;

  following_observer(const Recipe& recipe, const model_shape& shape, const cache_options& options,
                     const device_info& device, index_t batch)
      : base(recipe, shape, options, device, batch),
        window_(shape.layers, options.sequences, batch, recipe.retain.scorer.window, options.step_tokens,
                shape.q_heads, Recipe::layout_type::k_dim) {}

  static index_t queries_at_once(const Recipe& recipe, const cache_options&) { return recipe.retain.scorer.window; }
  void copy(index_t id, index_t to, cudaStream_t stream) { window_.copy(id, to, stream); }

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
  offset_t bytes_of_layer() const { return window_.bytes_per_place(); }

 private:
  query_ring<T> window_;
  device_buffer<index_t> position_{1};
};

template <class Recipe>
requires(Recipe::retain_type::observed == observes::window) struct observer_of<Recipe> {
  using type = std::conditional_t<Recipe::retain_type::follows, following_observer<Recipe>, window_observer<Recipe>>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
