// The steps of a turn: changes of a cache's layers on the device.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../../runtime/turn/conversations.hpp"
#include "parts.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The steps of a turn. `prepare` is the host's part; `begin` and `decode` enqueue what a graph may record.
template <class Recipe, class Out>
class step_turn {
  using parts = cache_parts<Recipe, Out>;
  using T = typename parts::T;
  using view_type = typename parts::view_type;
  static constexpr bool filters = parts::filters;

 public:
  explicit step_turn(parts& its) : its_(its) {}

  /// Makes room for a step in every layer, or in none, and notes on the host what the step will append and choose.
  void prepare(const batch& step, const conversations<Recipe>& known, cudaStream_t stream) {
    for (const index_t id : step.ids) its_.order.require_finished(id);
    const sequence_layers owners = its_.all_layers(step.ids);
    make_room(owners, step, known, stream);
    its_.steps.set(step.ids, stream);
    note(owners, step, known);
    if constexpr (Recipe::needs_segments) {
      host_vector<segment_cursor> texts;
      for (const index_t id : step.ids) texts.push_back(known.progress({0, id}).text);
      its_.marks.set(texts, step.boundaries, stream);
    }
  }

  /// The beginning of the device's part: gathers what the batch needs, advances positions and lengths.
  void begin(const batch& step, cudaStream_t stream) {
    const index_t sequences = step.sequences();
    its_.order.begin(step, stream);
    auto columns = its_.store.gathered();
    for (const auto& column : its_.reads.gathered()) columns.push_back(column);
    its_.steps.gather(sequences, columns, stream);
    advance_positions(its_.next.data(), its_.steps.ids(), its_.first_position.data(), its_.next_position.data(),
                      sequences, step.tokens, stream);
    its_.steps.advance(its_.store.length_column(), its_.shape.layers, sequences, step.tokens, stream,
                       its_.stepped.data());
    its_.reads.candidates().join(its_.steps, its_.store.length_column(), sequences, step.tokens, stream);
  }

  /// One layer for every sequence of the batch: append, retrieve, attend, retain.
  void decode(index_t layer, const Recipe& recipe, const batch& step, const planned<Recipe>& policies,
              const rows_view<const T>& q, const rows_view<const T>& k, const rows_view<const T>& v,
              const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    const index_t* first = its_.first_position.data();
    const logit_rule rule = its_.roles.rule(layer);
    const view_type all = its_.store.batch_view(layer, step.sequences());
    its_.store.append_rows(all, k, v, first, its_.marks.of_step(layer), stream);
    if (!its_.roles.follows_recipe(layer)) {
      its_.attends.step(decode_problem<view_type, Out>{all, q, first, rule, out, lse, {}}, stream);
      if (its_.traces_attended) trace(layer, step, {});
      return;
    }
    if (step.evicts_first) choose(layer, step, policies, all, step.tokens, stream);
    selection_view chosen{};
    read(layer, recipe, all, q, out, lse, chosen, stream);
    if (its_.traces_attended) trace(layer, step, chosen);
    its_.first.observer().observe_step(layer, its_.steps.ids(), its_.store, all, policies, rule, q, first, stream);
    if (step.evicts_last) choose(layer, step, policies, all, 0, stream);
  }

 private:
  void make_room(const sequence_layers& owners, const batch& step, const conversations<Recipe>& known,
                 cudaStream_t stream) {
    its_.store.finish_layer(stream);  // so that it does not end within the step and move rows
    its_.slide(owners, stream);
    its_.store.settle(step.ids, false, stream);
    its_.store.plan_packing(owners, 0, stream);
    for (const sequence_layer owner : owners) {
      if (its_.roles.follows_recipe(owner.layer)) its_.reads.require_fits(owner, its_.store, step.tokens);
    }
    its_.store.plan_room(owners, step.tokens, stream);
    try {
      plan_lists(owners, step, known);
    } catch (...) {
      its_.store.abandon();
      throw;
    }
    its_.store.commit_room(owners, stream);
    its_.store.commit_packing(stream);
    its_.reads.candidates().commit_room(owners, stream);
  }
  /// Makes room for the lists of a step, in every layer or in none.
  void plan_lists(const sequence_layers& owners, const batch& step, const conversations<Recipe>& known) {
    host_vector<index_t> longest;
    for (const sequence_layer owner : owners) {
      if (!filters || !step.evicts_last) break;
      token_bound held = its_.store.bound(owner);
      held.longest += step.tokens;
      longest.push_back(its_.roles.follows_recipe(owner.layer) ? bound(owner, held, known, 0).longest : 0);
    }
    its_.reads.candidates().plan_room(owners, step.tokens, longest);
  }
  /// An upper bound of what a step that chooses leaves of a layer with `held` tokens, or lets through. The newest
  /// `added` tokens stay.
  token_bound bound(sequence_layer owner, const token_bound& held, const conversations<Recipe>& known,
                    index_t added) const {
    if (its_.prompts.columns(owner.layer).bits) return held;
    return its_.first.bound_in_step(owner.layer, held, known.sequence(owner.id).policies, added);
  }
  void note(const sequence_layers& owners, const batch& step, const conversations<Recipe>& known) {
    for (const sequence_layer owner : owners) {
      its_.store.grew(owner, step.tokens);
      its_.reads.candidates().grew(owner, step.tokens);
      if (!(step.evicts_first || step.evicts_last) || !its_.roles.follows_recipe(owner.layer)) continue;
      const token_bound held = its_.store.bound(owner),
                        left = bound(owner, held, known, step.evicts_last ? 0 : step.tokens);
      if constexpr (filters) {
        its_.reads.candidates().passed_in_step(owner, left);
      } else if constexpr (parts::in_steps) {
        // The host knows the room that this makes only where all heads are equally long.
        its_.store.shrank(owner, left, its_.first.heads_are_even ? held.longest - left.longest : 0);
      }
    }
  }
  /// Drops the slots that the first stage does not choose, or lets the chosen ones through. The newest `added` tokens
  /// stay.
  void choose(index_t layer, const batch& step, const planned<Recipe>& policies, const view_type& all, index_t added,
              cudaStream_t stream) {
    if constexpr (parts::in_steps) {
      auto& lists = its_.reads.candidates();
      lists.note_read(layer, its_.steps, step.sequences(), its_.stepped_of({layer, 0}),
                      its_.stepped_of({its_.shape.layers + layer, 0}), stream);
      for (index_t m = 0; m < its_.first.members().count(); ++m) {
        const selection_view kept =
            its_.first.choose_in_step(layer, its_.steps.ids(), its_.store, all, policies, its_.roles.rule(layer),
                                      its_.next_position.data(), added, m, stream);
        lists.pass_in_step(layer, m, its_.steps, step.sequences(), kept, its_.first.max_kept_tokens(),
                           its_.prompts.columns(layer), stream);
        if (filters) continue;
        its_.store.keep_in_place(all, kept, stream);
        its_.steps.scatter(its_.store.length_column(), layer, step.sequences(), stream);
      }
      its_.reads.rebuild(layer, its_.steps.ids(), its_.store, all, stream);
    }
  }
  /// Attends what a step reads of a layer that follows the recipe. The step's tokens have been appended.
  void read(index_t layer, const Recipe& recipe, const view_type& all, const rows_view<const T>& q,
            const rows_view<Out>& out, const rows_view<float>& lse, selection_view& chosen, cudaStream_t stream) {
    const group_members& members = its_.first.members();
    const index_t* first = its_.first_position.data();
    for (index_t m = 0; m < members.count(); ++m) {
      const auto view = its_.reads.batch_view(layer, all, m);
      const logit_rule rule = members.rule(its_.roles.rule(layer), m, stream);
      if (its_.reads.reader().choose(layer, its_.reads.shown(its_.store, all, view), q, first, rule, out, lse, chosen,
                                     stream))
        continue;
      its_.attends.step(
          decode_problem<typename parts::read_view_type, Out>{view, members.rows(q, m), first, rule,
                                                              members.rows(out, m), members.rows(lse, m), chosen,
                                                              its_.reads.candidates().usual_row(recipe.budget())},
          stream);
    }
    its_.reads.reader().complete(layer, its_.steps.ids(), its_.reads.batch_view(layer, all), out, stream);
  }
  void trace(index_t layer, const batch& step, const selection_view& read) {
    for (index_t b = 0; b < step.sequences(); ++b) {
      const sequence_layer owner{layer, step.ids[std::size_t(b)]};
      auto& attended = its_.attended[owner];
      attended = its_.downloaded_lists(owner);
      for (index_t h = 0; read.indices && h < its_.shape.kv_heads; ++h) {
        const offset_t row = offset_t(b) * its_.shape.kv_heads + h;
        const auto list = downloaded(read.row(row), std::size_t(downloaded(read.counts + row, 1)[0]));
        const auto all = std::exchange(attended[std::size_t(h)], its_.reads.reader().slots(its_.store, owner, list));
        for (index_t& slot : attended[std::size_t(h)]) slot = all[std::size_t(slot)];
      }
    }
  }

  parts& its_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
