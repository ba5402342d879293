// What a cache does when a prompt ends, and with the scores that an engine gives for it.
#pragma once

#include "../basic_cache.hpp"

TESSERA_NAMESPACE_BEGIN

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::end_layer(index_t layer, index_t id, queue_type queue) {
  const default_float_mode mode;
  const sequence_layer owner{layer, id};
  conversations_.check_layer_end(owner);
  const bool due = recipe_.schedule.due(moment::prompt_end, conversations_.clock_of_prompt_end(id));
  if (due) require_scores(owner);
  backend_.end_layer(owner, recipe_, conversations_.plan_layer_end(recipe_, owner), due, conversations_.reach(owner),
                     queue);
  conversations_.end_layer(owner);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::end_prefill(index_t id, queue_type queue) {
  const default_float_mode mode;
  const planned<Recipe> policies = conversations_.plan_prompt_end(recipe_, id);
  const bool due = recipe_.schedule.due(moment::prompt_end, conversations_.clock_of_prompt_end(id));
  for (index_t layer = 0; due && layer < shape_.layers; ++layer) require_scores({layer, id});
  backend_.end_prompt(id, recipe_, policies, due, conversations_.sequence(id), queue);
  conversations_.end_prompt(id, policies);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::set_scores(index_t layer, index_t id, index_t first, index_t tokens,
                                              const float* scores, queue_type queue)
    requires(Recipe::retain_type::takes_scores) {
  const sequence_layer owner{layer, id};
  conversations_.progress(owner).require_scores_fit(first, tokens);
  detours_.require_none(id);
  require(scores != nullptr || tokens == 0, "memory of scores", "null", "memory behind it", "pass the scores");
  if (backend_.roles().follows_recipe(layer)) backend_.set_scores(owner, first, tokens, scores, queue);
  conversations_.set_scores(owner, first, tokens);
}

template <class Recipe, class Backend>
void basic_cache<Recipe, Backend>::require_scores(sequence_layer owner) const {
  if constexpr (Recipe::retain_type::takes_scores) {
    const planned<Recipe>& policies = conversations_.sequence(owner.id).policies;
    if (choosing_layer<Recipe>(owner.layer, policies, backend_.roles()) != owner.layer) return;
    const layer_progress& state = conversations_.progress(owner);
    require(state.scored == state.next_position || !backend_.roles().follows_recipe(owner.layer),
            "tokens with scores in layer " + std::to_string(owner.layer), state.scored,
            "all, which are " + std::to_string(state.next_position),
            "call set_scores for every chunk before its layer chooses");
  }
}

TESSERA_NAMESPACE_END
