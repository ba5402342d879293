// The prompt's part of a turn: changes of a cache's layers on the device.
#pragma once

#include <algorithm>

#include "../../../../runtime/turn/prompt_chunk.hpp"
#include "parts.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The prompt's part of a turn. Arguments have been checked. Calls throw before anything is launched.
template <class Recipe, class Out>
class prompt_turn {
  using parts = cache_parts<Recipe, Out>;
  using T = typename parts::T;
  static constexpr bool filters = parts::filters;

 public:
  explicit prompt_turn(parts& its) : its_(its) {}

  /// Appends a chunk to a layer and observes its queries.
  void append(sequence_layer owner, const planned<Recipe>& policies, const prompt_chunk& chunk,
              const rows_view<const T>& q, const rows_view<const T>& k, const rows_view<const T>& v,
              cudaStream_t stream) {
    if (chunk.begins) its_.first.settled().begin_turn(owner, its_.store);
    its_.store.plan_packing(chunk.begins ? sequence_layers{owner} : sequence_layers{}, 0, stream);  // of steps' tokens
    its_.make_room({owner}, k.tokens, stream);
    its_.store.commit_packing(stream);
    its_.store.append_rows(its_.store.view(owner), k, v, set_number(its_.chunk_position.data(), chunk.first, stream),
                           its_.marks.of_chunk(chunk.marks, k.tokens, stream), stream);
    its_.store.grew(owner, k.tokens);
    if (chunk.begins) its_.reads.candidates().end_lists(owner, stream);
    if (!its_.roles.follows_recipe(owner.layer)) return;
    its_.store.observe_prompt(owner, q, stream);
    if (choosing_layer<Recipe>(owner.layer, policies, its_.roles) != owner.layer) return;
    its_.first.observer().observe_prompt(owner, its_.store, policies, its_.roles.rule(owner.layer), q,
                                         chunk.first + k.tokens, stream);
  }

  /// Called before more of a prompt is appended to a layer that chooses in chunks: the layer keeps its share so far.
  void end_chunk(sequence_layer owner, const planned<Recipe>& policies, const prompt_reach& reach,
                 index_t reconsidered, cudaStream_t stream) {
    if (its_.roles.follows_recipe(owner.layer) &&
        !its_.first.keeps_everything(owner, its_.store.bound(owner), policies)) {
      const kept_bound kept = its_.first.bound(owner, its_.store, policies, reach.prompt_tokens());
      its_.plan_beside_step(its_.store, [&] { its_.store.plan_keep({owner}, {kept}, stream); });
      const index_t* next = set_number(its_.next.data() + owner.id, reach.end, stream);
      its_.store.keep(owner, chosen(owner, policies, reach, next, 0, stream), stream);
    }
    its_.first.settled().end_chunk(owner, its_.store, reconsidered);
    its_.first.observer().forget(owner);
  }

  void attend(sequence_layer owner, const Recipe& recipe, index_t first, const rows_view<const T>& q,
              const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    prefill_problem<typename parts::view_type, Out> problem{its_.store.view(owner),
                                                            q,
                                                            set_number(its_.chunk_position.data(), first, stream),
                                                            its_.roles.rule(owner.layer),
                                                            out,
                                                            lse};
    if (!its_.roles.follows_recipe(owner.layer)) return its_.attends.prompt(problem, stream);
    if (!lse.data) problem.lse = its_.first.observer().lse_room(q.tokens);
    its_.prompts.attend(owner, recipe, problem, first, its_.attends, stream);
    its_.first.observer().observe_attention(owner, q, problem.lse, stream);
  }

  void reread(sequence_layer owner, const planned<Recipe>& policies, const reread_part& part,
              const rows_view<const T>& q, const rows_view<const T>& k, const rows_view<const T>& v,
              const rows_view<Out>& out, cudaStream_t stream) {
    its_.order.require_finished(owner.id);
    its_.make_room({owner}, k.tokens, stream);
    its_.rereads.pass(owner, its_.store, policies, its_.roles, its_.attends, q, k, v, out, part, stream);
  }

  /// Called when a prompt of `tokens` tokens has been through a layer: does what needs no other layer.
  void end_layer(sequence_layer owner, const Recipe& recipe, index_t tokens, cudaStream_t stream) {
    its_.order.require_none_under_way();
    its_.slide({owner}, stream);
    if (its_.roles.follows_recipe(owner.layer) && packs_by_layer(recipe)) its_.store.pack_layer(owner, tokens, stream);
  }

  /// Called when a prompt has ended. Where `due`, each layer keeps what the budget allows, or lets it through.
  void end(index_t id, const planned<Recipe>& policies, bool due, const prompt_reach& reach, cudaStream_t stream) {
    its_.reads.require_covered(policies);
    const sequence_layers choosing = plan_choice(id, policies, due, reach, stream);
    its_.plan_beside_step(its_.store, [&] {
      its_.store.plan_packing(its_.all_layers({id}), reach.prompt_tokens(), stream);  // the last call that can throw
    });
    set_number(its_.next.data() + id, reach.end, stream);
    kept_slots kept;  // of the previous layer; a layer that reuses its choice follows immediately
    for (const sequence_layer owner : choosing) choose(owner, policies, due, reach, kept, stream);
    its_.store.commit_packing(stream);
    its_.reads.set_plan(id, policies, stream);
    for (index_t layer = 0; layer < its_.shape.layers; ++layer) {
      if (its_.roles.follows_recipe(layer)) its_.reads.refresh({layer, id}, its_.store, stream);
    }
    its_.slide(its_.all_layers({id}), stream);
    its_.store.expect(id, 0);
    its_.first.observer().forget(id);
  }

 private:
  kept_slots chosen(sequence_layer owner, const planned<Recipe>& policies, const prompt_reach& reach,
                    const index_t* next, index_t member, cudaStream_t stream) {
    return its_.first.choose(owner, its_.store, policies, its_.roles.rule(owner.layer), reach, next, member, stream);
  }
  /// Plans what the layers of a sequence keep, or let through. Returns the layers that have something to do.
  sequence_layers plan_choice(index_t id, const planned<Recipe>& policies, bool due, const prompt_reach& reach,
                              cudaStream_t stream) {
    if (due) its_.first.count_over_model(id, its_.store, policies, its_.roles, stream);
    sequence_layers owners;
    host_vector<kept_bound> kept;
    for (index_t layer = 0; (due || filters) && layer < its_.shape.layers; ++layer) {
      const sequence_layer owner{layer, id};
      if (!its_.roles.follows_recipe(layer)) continue;
      const token_bound held = its_.store.bound(owner);
      const sequence_layer chooser{choosing_layer<Recipe>(layer, policies, its_.roles), id};
      if (!filters && its_.first.keeps_everything(chooser, held, policies)) continue;
      owners.push_back(owner);
      // Only the device knows how many columns join.
      kept.push_back(due && !its_.prompts.columns(layer).bits
                         ? its_.first.bound(chooser, its_.store, policies, reach.prompt_tokens())
                         : kept_bound{held, {}});
    }
    if (filters)
      its_.plan_beside_step(its_.reads.candidates(), [&] { its_.reads.candidates().plan_pass(owners, kept); });
    else
      its_.plan_beside_step(its_.store, [&] { its_.store.plan_keep(owners, kept, stream); });
    return owners;
  }
  /// A layer keeps the chosen slots, or lets them through. `kept`: the previous layer's choice, for a layer that reuses
  /// it. Where the schedule is not `due`, a filter lets everything through.
  void choose(sequence_layer owner, const planned<Recipe>& policies, bool due, const prompt_reach& reach,
              kept_slots& kept, cudaStream_t stream) {
    const index_t chooser = choosing_layer<Recipe>(owner.layer, policies, its_.roles);
    for (index_t m = 0; m < its_.first.members().count(); ++m) {
      if (!due) {
        kept = {{nullptr, its_.store.lengths(owner)}, {its_.store.bound(owner), {}}};
      } else if (chooser == owner.layer) {
        kept = chosen(owner, policies, reach, its_.next.data() + owner.id, m, stream);
      }
      if (!filters) return its_.store.keep(owner, kept, stream);
      const joined_columns columns = due ? its_.prompts.columns(chooser) : joined_columns{};
      if (columns.bits) kept.bound = {its_.store.bound(owner), {}};
      its_.reads.candidates().pass(owner, m, kept, columns, stream);
    }
  }

  parts& its_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
