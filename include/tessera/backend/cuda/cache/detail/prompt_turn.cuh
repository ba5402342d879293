// The prompt's part of a turn: changes of a cache's layers on the device.
#pragma once

#include <algorithm>

#include "../../../../runtime/turn/prompt_chunk.hpp"
#include "../../observe/set_scores.cuh"
#include "parts.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The prompt's part of a turn. Arguments have been checked. Calls throw before anything is launched.
template <class Recipe, class Out>
class prompt_turn {
  using parts_type = cache_parts<Recipe, Out>;
  using T = typename parts_type::T;
  static constexpr bool filters = parts_type::filters;
  /// Whether what a choice leaves is packed with it.
  static constexpr bool drops_packed = packing_layout<typename Recipe::layout_type> && Recipe::retain_type::drops;

 public:
  explicit prompt_turn(parts_type& parts) : parts_(parts) {}

  /// Appends a chunk to a layer and observes its queries.
  void append(sequence_layer owner, const planned<Recipe>& policies, const prompt_chunk& chunk,
              const rows_view<const T>& q, const rows_view<const T>& k, const rows_view<const T>& v,
              cudaStream_t stream) {
    if (chunk.begins) parts_.first.settled().begin_turn(owner, parts_.store);
    // Packs tokens of earlier steps, or of the chunk before.
    const bool packs = chunk.begins || parts_.store.packs_chunks();
    parts_.store.plan_packing(packs ? sequence_layers{owner} : sequence_layers{},
                              chunk.begins ? packing_moment::step_end : packing_moment::chunk_end, 0, stream);
    parts_.make_room({owner}, k.tokens, stream);
    parts_.store.commit_packing(stream);
    parts_.store.append_rows(parts_.store.view(owner), k, v,
                             set_number(parts_.chunk_position.data(), chunk.first, stream), nullptr,
                             parts_.marks.of_chunk(chunk.marks, k.tokens, stream), stream);
    parts_.store.grew(owner, k.tokens);
    if (chunk.begins) parts_.read_stage.candidates().end_lists(owner, stream);
    if (!parts_.roles.follows_recipe(owner.layer)) return;
    parts_.store.observe_prompt(owner, q, stream);
    if (choosing_layer<Recipe>(owner.layer, policies, parts_.roles) != owner.layer) return;
    parts_.first.observer().observe_prompt(owner, parts_.store, policies, parts_.roles.rule(owner.layer), q,
                                           chunk.first + k.tokens, stream);
  }

  /// Called before `coming` more tokens of a prompt are appended to a layer that chooses in chunks: the layer keeps its
  /// share so far.
  /// Errors   what it keeps and the new tokens are more than a head holds: tessera::error, and nothing has changed.
  void end_chunk(sequence_layer owner, const planned<Recipe>& policies, const prompt_reach& reach, index_t reconsidered,
                 index_t coming, cudaStream_t stream) {
    const token_bound held = parts_.store.bound(owner);
    const bool follows = parts_.roles.follows_recipe(owner.layer);
    if (follows && !parts_.first.keeps_everything(owner, held, policies)) {
      const kept_bound kept = parts_.first.bound(owner, parts_.store, policies, reach.prompt_tokens());
      require_tokens_of_head(offset_t(kept.longest) + coming, parts_.options.tokens);
      parts_.plan_beside_step(parts_.store, [&] { parts_.store.plan_keep({owner}, {kept}, stream); }, stream);
      const index_t* next = set_number(parts_.next.data() + owner.id, reach.end, stream);
      parts_.store.keep(owner, chosen(owner, policies, reach, next, 0, stream), stream);
    } else if (follows) {
      require_tokens_of_head(offset_t(held.longest) + coming, parts_.options.tokens);
    }
    parts_.first.settled().end_chunk(owner, parts_.store, reconsidered);
    parts_.first.observer().forget(owner);
  }

  void attend(sequence_layer owner, const Recipe& recipe, index_t first, const rows_view<const T>& q,
              const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    prefill_problem<typename parts_type::view_type, Out> problem{
        parts_.store.view(owner),       q,   set_number(parts_.chunk_position.data(), first, stream),
        parts_.roles.rule(owner.layer), out, lse};
    if (!parts_.roles.follows_recipe(owner.layer)) return parts_.step_attention.prompt(problem, stream);
    if (!lse.data) problem.lse = parts_.first.observer().lse_room(q.tokens);
    parts_.prompts.attend(owner, recipe, problem, first, parts_.step_attention, stream);
    parts_.first.observer().observe_attention(owner, q, problem.lse, stream);
  }

  void reread(sequence_layer owner, const planned<Recipe>& policies, const reread_part& part,
              const rows_view<const T>& q, const rows_view<const T>& k, const rows_view<const T>& v,
              const rows_view<Out>& out, cudaStream_t stream) {
    parts_.order.require_finished(owner.id);
    parts_.make_room({owner}, k.tokens, stream);
    parts_.rereader.pass(owner, parts_.store, policies, parts_.roles, parts_.step_attention, q, k, v, out, part,
                         stream);
  }

  void set_scores(sequence_layer owner, index_t first, index_t tokens, const float* scores, cudaStream_t stream) {
    const auto view = parts_.store.view(owner);
    cuda::set_scores(view, first, tokens, scores, parts_.store.scores(view), stream);
  }

  /// Called when a prompt has been through a layer. Does the work that needs no other layer.
  void end_layer(sequence_layer owner, const Recipe& recipe, const planned<Recipe>& policies, bool due,
                 const prompt_reach& reach, cudaStream_t stream) {
    parts_.order.require_none_under_way();
    if constexpr (drops_packed) {
      parts_.require_covered(policies);
      keep_and_pack({owner}, policies, due, [&](index_t) { return reach; }, stream);
    } else if constexpr (chooses_by_layer<Recipe>) {
      parts_.require_covered(policies);
      const sequence_layers choosing = plan_choice({owner}, policies, due, reach, stream);
      const index_t* next = set_number(parts_.chunk_position.data(), reach.end, stream);
      kept_slots kept;
      for (const sequence_layer each : choosing) choose(each, policies, due, reach, next, kept, stream);
    }
    parts_.slide({owner}, stream);
    if (parts_.roles.follows_recipe(owner.layer) && packs_by_layer(recipe))
      parts_.store.pack_layer(owner, reach.prompt_tokens(), stream);
  }

  /// Called when a prompt has ended. Where `due`, each layer keeps what the budget allows, or a filter lets it through.
  /// `state` says how far each layer's chunks have chosen, and where the prompt has ended already.
  void end(index_t id, const planned<Recipe>& policies, bool due, const sequence_state<Recipe>& state,
           cudaStream_t stream) {
    const prompt_reach all = state.front().reach();
    parts_.require_covered(policies);
    parts_.slide(parts_.all_layers({id}), stream);
    if (due) parts_.first.count_over_model(id, parts_.store, policies, parts_.roles, stream);
    sequence_layers waiting;
    for (const sequence_layer owner : parts_.all_layers({id})) {
      if (!chooses_by_layer<Recipe> || !state.layers[std::size_t(owner.layer)].ended) waiting.push_back(owner);
    }
    const auto reach_of = [&](index_t layer) { return state.layers[std::size_t(layer)].reach(); };
    if constexpr (drops_packed) {
      keep_and_pack(waiting, policies, due, reach_of, stream);
      set_number(parts_.next.data() + id, all.end, stream);
    } else {
      const sequence_layers choosing = plan_choice(waiting, policies, due, all, stream);
      parts_.plan_beside_step(
          parts_.store,  // the last call that can throw
          [&] {
            parts_.store.plan_packing(parts_.all_layers({id}), packing_moment::prompt_end, all.prompt_tokens(), stream);
          },
          stream);
      const index_t* next = set_number(parts_.next.data() + id, all.end, stream);
      kept_slots kept;  // of the previous layer; a layer that reuses this choice comes next
      for (const sequence_layer owner : choosing)
        choose(owner, policies, due, reach_of(owner.layer), next, kept, stream);
      parts_.store.commit_packing(stream);
    }
    parts_.set_plan(id, policies, stream);
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
      if (parts_.roles.follows_recipe(layer)) parts_.read_stage.refresh({layer, id}, parts_.store, stream);
    }
    parts_.store.expect(id, 0);
    parts_.first.observer().forget(id);
  }

 private:
  /// Layers of packed rows choose, and pack what is due of what they keep. Nothing has changed before all have chosen.
  template <class ReachOf>
  void keep_and_pack(const sequence_layers& waiting, const planned<Recipe>& policies, bool due, const ReachOf& reach_of,
                     cudaStream_t stream) {
    parts_.store.forget_choices();
    try {
      sequence_layers owners;
      index_t prompt = 0;
      for (const sequence_layer owner : waiting) {
        if (!parts_.roles.follows_recipe(owner.layer)) continue;
        owners.push_back(owner);
        const prompt_reach reach = reach_of(owner.layer);
        const token_bound held = parts_.store.bound(owner);
        prompt = reach.prompt_tokens();
        kept_slots kept{{}, {held, {}}};  // everything
        if (due && !parts_.first.keeps_everything(owner, held, policies)) {
          const index_t* next = set_number(parts_.chunk_position.data(), reach.end, stream);
          kept = chosen(owner, policies, reach, next, 0, stream);
        }
        parts_.store.note_choice(owner, kept, stream);
      }
      parts_.plan_beside_step(
          parts_.store,  // the last call that can throw
          [&] { parts_.store.plan_packing(owners, packing_moment::prompt_end, prompt, stream); }, stream);
    } catch (...) {
      parts_.store.forget_choices();
      throw;
    }
    parts_.hold_for_saves(stream);  // forks may read rows that move
    parts_.store.commit_packing(stream);
  }
  kept_slots chosen(sequence_layer owner, const planned<Recipe>& policies, const prompt_reach& reach,
                    const index_t* next, index_t member, cudaStream_t stream) {
    return parts_.first.choose(owner, parts_.store, policies, parts_.roles.rule(owner.layer), reach, next, member,
                               stream);
  }
  /// Plans what layers keep, or let through. Returns those that have something to do. Errors: an index without room for
  /// what stays.
  sequence_layers plan_choice(const sequence_layers& waiting, const planned<Recipe>& policies, bool due,
                              const prompt_reach& reach, cudaStream_t stream) {
    sequence_layers owners;
    host_vector<kept_bound> kept;
    for (const sequence_layer owner : waiting) {
      const index_t layer = owner.layer;
      if (!parts_.roles.follows_recipe(layer)) continue;
      const token_bound held = parts_.store.bound(owner);
      const sequence_layer chooser{choosing_layer<Recipe>(layer, policies, parts_.roles), owner.id};
      if (!filters && (!due || parts_.first.keeps_everything(chooser, held, policies))) {
        parts_.read_stage.reader().require_fits(held.longest);
        continue;
      }
      owners.push_back(owner);
      // Only the device knows how many columns join.
      kept.push_back(due && !parts_.prompts.columns(layer).bits
                         ? parts_.first.bound(chooser, parts_.store, policies, reach.prompt_tokens())
                         : kept_bound{held, {}});
      parts_.read_stage.reader().require_fits(kept.back().longest);
    }
    if (filters)
      parts_.plan_beside_step(
          parts_.read_stage.candidates(), [&] { parts_.read_stage.candidates().plan_pass(owners, kept); }, stream);
    else
      parts_.plan_beside_step(parts_.store, [&] { parts_.store.plan_keep(owners, kept, stream); }, stream);
    return owners;
  }
  /// A layer keeps the chosen slots, or lets them through. The next token will be at *next. `kept`: the previous
  /// layer's choice, for a layer that reuses it. Where the schedule is not `due`, a filter lets everything through.
  void choose(sequence_layer owner, const planned<Recipe>& policies, bool due, const prompt_reach& reach,
              const index_t* next, kept_slots& kept, cudaStream_t stream) {
    const index_t chooser = choosing_layer<Recipe>(owner.layer, policies, parts_.roles);
    for (index_t m = 0; m < parts_.first.members().count(); ++m) {
      if (!due) {
        kept = {{nullptr, parts_.store.lengths(owner)}, {parts_.store.bound(owner), {}}};
      } else if (chooser == owner.layer) {
        kept = chosen(owner, policies, reach, next, m, stream);
      }
      if (!filters) return parts_.store.keep(owner, kept, stream);
      const joined_columns columns = due ? parts_.prompts.columns(chooser) : joined_columns{};
      if (columns.bits) kept.bound = {parts_.store.bound(owner), {}};
      parts_.read_stage.candidates().pass(owner, m, kept, columns, stream);
    }
  }

  parts_type& parts_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
