// The parts of a cache on the CPU, and how a layer's choice is planned and committed.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "../../../../concepts/backend.hpp"
#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../../../../runtime/layer_roles.hpp"
#include "../../../../runtime/turn/choosing_layer.hpp"
#include "../../attend/attend_packed.hpp"
#include "../../attend/prompt_attention.hpp"
#include "../../attend/step_log.hpp"
#include "../../choose/first_stage.hpp"
#include "../../read/reading.hpp"
#include "../../store/packed/packed_store.hpp"
#include "draft_rows.hpp"
#include "rereading.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// A planned choice of one layer of a sequence: tokens to keep, or candidates for its steps.
template <class Recipe>
struct layer_choice {
  bool made = false, observed = false;
  host_vector<selection> selections{1};  ///< one, or one for each member of a group whose query heads choose apart
  ranked_tokens ranked;
  typename reading<Recipe>::candidate_sets next_candidates;  ///< of a filter; empty: the present ones stay
};

/// The parts of one recipe's cache. A change of a layer is first planned, which may run out of memory and changes
/// nothing visible. Then `commit` carries it out, or `abandon` forgets it; neither needs memory.
template <class Recipe>
struct cache_parts {
  using layout = typename Recipe::layout_type;
  using choice = layer_choice<Recipe>;
  static_assert(backend_store<kv_store<layout>>);
  static_assert(backend_observer<typename first_stage<Recipe>::observer_type>);
  static_assert(backend_attending<prompt_attending<Recipe>>);

  cache_parts(const model_shape& model, const Recipe& recipe, std::shared_ptr<executor> threads)
      : workers(std::move(threads)),
        shape(model),
        roles(shape, recipe.dense_layers, recipe.attention.rule),
        store(shape.layers, shape.kv_heads,
              {first_stage<Recipe>::observer_type::with_scores, Recipe::needs_segments, recipe.retrieve.mean_block()},
              placement_of(recipe, shape), recipe.layout),
        first(shape),
        read_stage(shape),
        prompts(shape),
        log(shape.layers),
        drafts(shape.layers),
        ranked(shape.layers) {}

  /// Empty choices for `count` layers, or sequences.
  host_vector<choice>& new_choices(index_t count) {
    host_vector<choice>& all = *choices;
    if (all.size() < std::size_t(count)) all.resize(std::size_t(count));
    for (choice& c : all) {
      c.made = c.observed = false;
      c.next_candidates.clear();
    }
    return all;
  }

  /// Of a sliding layer: drops all but its window and the `added` newest tokens.
  void plan_slide(sequence_layer owner, index_t added, choice& made) {
    made.selections.resize(1);
    made.made = store.choose_newest(owner, roles.window(owner.layer), added, made.selections[0]);
    if (made.made) store.plan_keep(owner, made.selections[0]);
  }
  /// Of a layer that follows the recipe. Where nothing is `due` it chooses nothing, and every token is a filter's
  /// candidate.
  void plan_choice(sequence_layer owner, const Recipe& recipe, const planned<Recipe>& policies, bool due,
                   const choice_moment& when, choice& made) {
    made.made = due && first.choose(owner, store, policies, roles.rule(owner.layer), when, made.selections,
                                    traces_ranks ? &made.ranked : nullptr, *workers);
    if (made.made) prompts.join(owner, recipe, made.selections);
    plan_reading(owner, policies, made);
  }
  /// Repeats the choice of another layer among as many tokens.
  void plan_same_choice(sequence_layer owner, const planned<Recipe>& policies, const choice& other, choice& made) {
    made.made = other.made;
    if (other.made) made.selections = other.selections;
    if (other.made && traces_ranks) made.ranked = other.ranked;
    plan_reading(owner, policies, made);
  }
  /// Packs what is due among the tokens that stay.
  void plan_packing(sequence_layer owner, const choice& made, packing_moment when) {
    const bool drops = made.made && Recipe::retain_type::drops;
    store.plan_packing(owner, drops ? &made.selections[0] : nullptr, when, *workers);
  }
  void commit(sequence_layer owner, choice& made) {
    if (made.made && traces_ranks && roles.follows_recipe(owner.layer)) std::swap(ranked[owner], made.ranked);
    if (!made.next_candidates.empty()) {
      read_stage.set_candidates(owner, made.next_candidates);
    } else if (made.made) {
      store.keep(owner, made.selections[0], *workers);
    }
    store.commit_packing(owner, *workers);
  }
  /// Forgets the plans of a layer, and tokens that were appended from position `next` on.
  void abandon(sequence_layer owner, index_t next) {
    store.abandon(owner, next);
    read_stage.abandon(owner, store);
  }

  std::shared_ptr<executor> workers;
  model_shape shape;
  layer_roles roles;
  kv_store<layout> store;
  first_stage<Recipe> first;
  rereading<Recipe> rereader;
  reading<Recipe> read_stage;
  prompt_attending<Recipe> prompts;
  step_log log;
  draft_rows drafts;
  bool traces_ranks = false;
  sequence_table<ranked_tokens> ranked;  ///< of the last choice that was traced
  scratch<host_vector<choice>> choices;
  scratch<decode_workspace> attending;

 private:
  void plan_reading(sequence_layer owner, const planned<Recipe>& policies, choice& made) {
    if (made.made && Recipe::retain_type::drops) store.plan_keep(owner, made.selections[0]);
    read_stage.plan(owner, store, policies, made.made ? &made.selections : nullptr, made.next_candidates);
  }
};

}  // namespace cpu
TESSERA_NAMESPACE_END
