// The prompt of a turn, on the layers of a cache on the CPU.
#pragma once

#include <algorithm>

#include "../../../../runtime/turn/prompt_chunk.hpp"
#include "parts.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The calls of a turn's prompt. Each does all of its work or none; the caller has checked the arguments.
template <class Recipe>
class prompt_turn {
  using parts_type = cache_parts<Recipe>;
  using choice = typename parts_type::choice;

 public:
  explicit prompt_turn(parts_type& parts) : parts_(parts) {}

  /// Appends a chunk to a layer; its queries are observed. A layer that packs chunks packs the one before first: this
  /// stays where the call fails.
  template <class Q, class E>
  void append(sequence_layer owner, const planned<Recipe>& policies, const prompt_chunk& chunk,
              const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v) {
    const bool follows = parts_.roles.follows_recipe(owner.layer);
    choice& made = parts_.new_choices(1).front();
    if (follows && !chunk.begins && parts_.store.packs_chunks()) {
      parts_.store.plan_packing(owner, nullptr, packing_moment::chunk_end, *parts_.workers);
      parts_.store.commit_packing(owner, *parts_.workers);
    }
    try {
      parts_.store.append(owner, k, v, chunk.first, chunk.marks);
      if (!follows) {
        parts_.plan_slide(owner, k.tokens, made);
      } else {
        parts_.store.plan_observation(owner, q);
        if (choosing_layer<Recipe>(owner.layer, policies, parts_.roles) == owner.layer) {
          parts_.first.observer().observe_prompt(owner, parts_.store, policies, parts_.roles.rule(owner.layer), q,
                                                 chunk.first + k.tokens, *parts_.workers);
        }
        parts_.store.observe_prompt(owner, q, k.tokens);
      }
    } catch (...) {
      parts_.store.abandon(owner, chunk.first);
      throw;
    }
    parts_.commit(owner, made);
    parts_.read_stage.end_candidates(owner);
  }

  /// The end of a chunk, in a layer that chooses then: it keeps its share of the prompt so far.
  void end_chunk(sequence_layer owner, const planned<Recipe>& policies, const prompt_reach& reach) {
    if (!parts_.roles.follows_recipe(owner.layer)) return;
    choice& made = parts_.new_choices(1).front();
    made.made =
        parts_.first.choose(owner, parts_.store, policies, parts_.roles.rule(owner.layer), {reach.end, 0, &reach},
                            made.selections, parts_.traces_ranks ? &made.ranked : nullptr, *parts_.workers);
    if (made.made) parts_.store.plan_keep(owner, made.selections[0]);
    parts_.commit(owner, made);
    parts_.first.observer().forget(owner);
    parts_.read_stage.abandon(owner, parts_.store);  // its slots have moved; the end of the prompt builds it anew
  }

  template <class E>
  void attend(sequence_layer owner, const Recipe& recipe, index_t first, const rows_view<const E>& q,
              const attention_output& output) {
    const auto view = parts_.store.view(owner);
    const query_rows<E> queries{q, &first};
    const logit_rule rule = parts_.roles.rule(owner.layer);
    if (!parts_.roles.follows_recipe(owner.layer))
      return prefill_attention(view, queries, rule, output, *parts_.workers);
    parts_.prompts.attend(owner, recipe, view, queries, rule, output, *parts_.workers);
  }

  /// Reads tokens once more, at positions from `part.begin` on. They attend to everything and to themselves, and their
  /// queries score the part's tokens; nothing else stays of them.
  template <class Q, class E>
  void reread(sequence_layer owner, const planned<Recipe>& policies, const reread_part& part,
              const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v,
              const attention_output& output) {
    const logit_rule rule = parts_.roles.rule(owner.layer);
    try {
      parts_.store.append(owner, k, v, part.begin);
      prefill_attention(parts_.store.view(owner), query_rows<Q>{q, &part.begin}, rule, output, *parts_.workers);
      if (parts_.roles.follows_recipe(owner.layer))
        parts_.rereader.score(owner, parts_.store, policies, rule, q, part, *parts_.workers);
    } catch (...) {
      parts_.store.abandon(owner, part.begin);
      throw;
    }
    parts_.store.abandon(owner, part.begin);
  }

  /// The end of a prompt in one layer: does what needs no other layer.
  void end_layer(sequence_layer owner, const Recipe& recipe, const planned<Recipe>& policies, bool due,
                 const prompt_reach& reach) {
    choice& made = parts_.new_choices(1).front();
    try {
      if (!parts_.roles.follows_recipe(owner.layer)) {
        parts_.plan_slide(owner, 0, made);
      } else if (chooses_by_layer<Recipe>) {
        parts_.plan_choice(owner, recipe, policies, due, {reach.end, 0, &reach}, made);
        parts_.plan_packing(owner, made, packing_moment::prompt_end);
      } else if (packs_by_layer(recipe)) {
        parts_.plan_packing(owner, made, packing_moment::prompt_end);
      }
    } catch (...) {
      parts_.abandon(owner, reach.end);
      throw;
    }
    parts_.commit(owner, made);
  }

  /// The end of a prompt. Where `due`, each layer keeps the budget's tokens, or makes them candidates. `state` says how
  /// far each layer's chunks have chosen, and where the prompt has ended already.
  void end(index_t id, const Recipe& recipe, const planned<Recipe>& policies, bool due,
           const sequence_state<Recipe>& state) {
    const index_t layers = parts_.shape.layers;
    host_vector<choice>& choices = parts_.new_choices(layers);
    try {
      parts_.first.count_over_model(id, parts_.store, policies, parts_.roles);
      for (index_t layer = 0; layer < layers; ++layer) {
        if (!chooses_by_layer<Recipe> || !state.layers[std::size_t(layer)].ended)
          plan_end({layer, id}, recipe, policies, due, state.layers[std::size_t(layer)].reach(), choices);
      }
    } catch (...) {
      for (index_t layer = 0; layer < layers; ++layer) parts_.abandon({layer, id}, state.front().next_position);
      throw;
    }
    for (index_t layer = 0; layer < layers; ++layer) parts_.commit({layer, id}, choices[std::size_t(layer)]);
    parts_.store.expect(id, 0);
    parts_.first.observer().end_turn(id);
  }

 private:
  void plan_end(sequence_layer owner, const Recipe& recipe, const planned<Recipe>& policies, bool due,
                const prompt_reach& reach, host_vector<choice>& choices) {
    choice& made = choices[std::size_t(owner.layer)];
    if (!parts_.roles.follows_recipe(owner.layer)) return parts_.plan_slide(owner, 0, made);
    const index_t chooser = choosing_layer<Recipe>(owner.layer, policies, parts_.roles);
    if (chooser != owner.layer) {
      parts_.plan_same_choice(owner, policies, choices[std::size_t(chooser)], made);
    } else {
      parts_.plan_choice(owner, recipe, policies, due, {reach.end, 0, &reach}, made);
    }
    parts_.plan_packing(owner, made, packing_moment::prompt_end);
  }

  parts_type& parts_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
