// The steps of a turn: changes of a cache's layers on the device.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../../runtime/turn/conversations.hpp"
#include "../../../../runtime/turn/draft.hpp"
#include "parts.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The steps of a turn. `prepare` is the host's part; `begin` and `decode` enqueue what a graph may record.
template <class Recipe, class Out>
class step_turn {
  using parts_type = cache_parts<Recipe, Out>;
  using T = typename parts_type::T;
  using view_type = typename parts_type::view_type;
  static constexpr bool filters = parts_type::filters;

 public:
  explicit step_turn(parts_type& parts) : parts_(parts) {}

  /// Makes room for a step in every layer, or in none, and notes on the host what the step will append and choose.
  void prepare(const batch& step, const conversations<Recipe>& known, cudaStream_t stream) {
    for (const index_t id : step.ids) {
      parts_.order.require_finished(id);
      if (known.sequence(id).budgets.options().has_shares()) parts_.require_covered(known.sequence(id).policies);
    }
    const sequence_layers owners = parts_.all_layers(step.ids);
    parts_.staging.prepare(step, view_type::k_dim, view_type::v_dim);
    make_room(owners, step, known, stream);
    parts_.steps.set(step.ids, stream);
    if (step.is_packed()) parts_.steps.set_begins(step.begins, stream);
    if constexpr (parts_type::takes_uneven_steps) {
      host_vector<index_t> lengths;
      for (index_t b = 0; b < step.sequences(); ++b) lengths.push_back(step.tokens_of(b));
      parts_.steps.set_lengths(lengths, stream);
    }
    set_budgets(step, known, stream);
    note(owners, step, known);
    if constexpr (Recipe::needs_segments) {
      host_vector<segment_cursor> texts;
      for (const index_t id : step.ids) texts.push_back(known.progress({0, id}).text);
      parts_.marks.set(texts, step.boundaries, stream);
    }
  }

  /// The beginning of the device's part: gathers what the batch needs, advances positions and lengths.
  void begin(const batch& step, cudaStream_t stream) {
    const index_t sequences = step.sequences();
    parts_.order.begin(step, stream);
    gather(sequences, stream);
    advance_positions(parts_.next.data(), parts_.steps.ids(), parts_.first_position.data(), parts_.next_position.data(),
                      sequences, step.tokens, lengths(), stream);
    parts_.steps.advance(parts_.store.length_column(), parts_.shape.layers, sequences, step.tokens, lengths(), stream,
                         parts_.stepped.data());
    parts_.read_stage.candidates().join(parts_.steps, parts_.store.length_column(), sequences, step.tokens, stream);
  }

  /// One layer for every sequence of the batch: append, retrieve, attend, retain.
  void decode(index_t layer, const Recipe& recipe, const batch& step, const planned<Recipe>& policies,
              const rows_view<const T>& q, const rows_view<const T>& k, const rows_view<const T>& v,
              const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    const index_t* first = parts_.first_position.data();
    const logit_rule rule = parts_.roles.rule(layer);
    const view_type all = parts_.store.batch_view(layer, step.sequences());
    parts_.store.append_rows(all, k, v, first, lengths(), parts_.marks.of_step(layer), stream);
    if (!parts_.roles.follows_recipe(layer)) {
      parts_.step_attention.step(decode_problem<view_type, Out>{all, q, first, rule, out, lse, {}}, stream);
      if (parts_.traces_attended) trace(layer, step, {});
      return;
    }
    if (step.evicts_first) choose(layer, step, policies, all, step.tokens, stream);
    selection_view chosen{};
    read(layer, recipe, all, q, first, out, lse, chosen, stream);
    if (parts_.traces_attended) trace(layer, step, chosen);
    parts_.first.observer().observe_step(layer, parts_.steps.ids(), parts_.store, all, policies, rule, q, first,
                                         stream);
    if (step.evicts_last) choose(layer, step, policies, all, 0, stream);
  }

  /// `decode` of a step whose rows may be packed.
  void decode_rows(index_t layer, const Recipe& recipe, const batch& step, const planned<Recipe>& policies,
                   const rows_view<const T>& q, const rows_view<const T>& k, const rows_view<const T>& v,
                   const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    if (!step.is_packed()) return decode(layer, recipe, step, policies, q, k, v, out, lse, stream);
    const auto rows =
        parts_.staging.lay_out(step, parts_.steps, lengths(), q, k, v, view_type::v_dim, lse.data != nullptr, stream);
    decode(layer, recipe, step, policies, rows.q, rows.k, rows.v, rows.out, rows.lse, stream);
    parts_.staging.pack(step, parts_.steps, lengths(), rows, out, lse, stream);
  }
  /// `attend` of a step whose rows may be packed.
  void attend_rows(index_t layer, const Recipe& recipe, const batch& step, const rows_view<const T>& q,
                   const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    if (!step.is_packed()) return attend(layer, recipe, step, q, out, lse, stream);
    const auto rows =
        parts_.staging.lay_out(step, parts_.steps, lengths(), q, {}, {}, view_type::v_dim, lse.data != nullptr, stream);
    attend(layer, recipe, step, rows.q, rows.out, rows.lse, stream);
    parts_.staging.pack(step, parts_.steps, lengths(), rows, out, lse, stream);
  }

  /// Attention of other queries over what a layer has after `decode`; changes nothing.
  void attend(index_t layer, const Recipe& recipe, const batch& step, const rows_view<const T>& q,
              const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    const view_type all = parts_.store.batch_view(layer, step.sequences());
    selection_view chosen{};
    if (parts_.roles.follows_recipe(layer))
      return read(layer, recipe, all, q, parts_.first_position.data(), out, lse, chosen, stream);
    parts_.step_attention.step(
        decode_problem<view_type, Out>{all, q, parts_.first_position.data(), parts_.roles.rule(layer), out, lse, {}},
        stream);
  }

  // --- drafts --------------------------------------------------------------------------------------------------------

  /// The host's part of a draft.
  void prepare_draft(const draft_step& draft, cudaStream_t stream) {
    for (const index_t id : draft.step.ids) parts_.order.require_finished(id);
    parts_.store.finish_layer(stream);  // now, because within the draft it would move rows
    parts_.steps.set(draft.step.ids, stream);
    parts_.drafts.set(draft, stream);
  }
  /// The beginning of the device's part: gathers what the batch needs. Nothing advances.
  void begin_draft(const draft_step& draft, cudaStream_t stream) {
    parts_.order.begin(draft.step, stream);
    gather(draft.sequences(), stream);
    parts_.drafts.begin(parts_.next.data(), parts_.steps.ids(), draft.sequences(), parts_.first_position.data(),
                        stream);
  }
  /// One layer of a draft: its tokens attend to what a step reads, and to each other.
  void draft(index_t layer, const Recipe& recipe, const draft_step& draft, const rows_view<const T>& q,
             const rows_view<const T>& k, const rows_view<const T>& v, const rows_view<Out>& out,
             const rows_view<float>& lse, cudaStream_t stream) {
    const index_t batch = draft.sequences();
    const logit_rule rule = parts_.roles.rule(layer);
    const rows_view<float> sums = lse.data ? lse : parts_.drafts.sums(batch, draft.step.tokens);
    const view_type all = parts_.store.batch_view(layer, batch);
    // Queries without a window that read everything differ in nothing that their positions decide.
    const bool together = !Recipe::retrieve_type::retrieves && rule.sliding_window <= 0;
    for (index_t t = 0; t < draft.step.tokens;) {
      const index_t tokens = together ? (std::min)(draft.step.tokens - t, parts_.options.step_tokens) : 1;
      const auto some = [&](auto rows) {
        rows.data += offset_t(t) * rows.token_stride;
        rows.tokens = tokens;
        return rows;
      };
      const index_t* first = together ? parts_.first_position.data() : parts_.drafts.positions(t, batch);
      selection_view chosen{};
      if (parts_.roles.follows_recipe(layer)) {
        read(layer, recipe, all, some(q), first, some(out), some(sums), chosen, stream);
      } else {
        parts_.step_attention.step(decode_problem<view_type, Out>{all, some(q), first, rule, some(out), some(sums), {}},
                                   stream);
      }
      t += tokens;
    }
    parts_.drafts.attend(layer, parts_.steps.ids(), rule, q, k, v, out, sums, stream);
  }

  /// The host's part of a step of accepted tokens.
  void plan_accepted(const batch& step, const host_vector<accepted_tokens>& accepted,
                     const conversations<Recipe>& known, cudaStream_t stream) {
    parts_.drafts.set_nodes(
        accepted, [&](const host_vector<index_t>& nodes, index_t* to) { step_table::write(nodes, to, stream); });
    prepare(step, known, stream);  // last: it notes what the step appends
  }
  /// The device's part: everything of the step but its outputs.
  void commit_accepted(const Recipe& recipe, const batch& step, const planned<Recipe>& policies, cudaStream_t stream) {
    begin(step, stream);
    parts_.drafts.gather(parts_.steps.ids(), step.sequences(), step.tokens, stream);
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
      append_accepted(layer, recipe, step, policies, stream);
      parts_.order.decoded(layer, stream);
    }
  }

 private:
  void append_accepted(index_t layer, const Recipe& recipe, const batch& step, const planned<Recipe>& policies,
                       cudaStream_t stream) {
    const auto rows = parts_.drafts.accepted(layer, step.sequences(), step.tokens);
    const index_t* first = parts_.first_position.data();
    const view_type all = parts_.store.batch_view(layer, step.sequences());
    parts_.store.append_rows(all, rows.k, rows.v, first, lengths(), parts_.marks.of_step(layer), stream);
    if (!parts_type::uses_queries || !parts_.roles.follows_recipe(layer)) return;
    if (step.evicts_first) choose(layer, step, policies, all, step.tokens, stream);
    if constexpr (parts_type::reading_type::has_index) {  // which takes in new rows when a reader chooses
      selection_view chosen{};
      read(layer, recipe, all, rows.q, first, rows.out, {}, chosen, stream);
    }
    parts_.first.observer().observe_step(layer, parts_.steps.ids(), parts_.store, all, policies,
                                         parts_.roles.rule(layer), rows.q, first, stream);
    if (step.evicts_last) choose(layer, step, policies, all, 0, stream);
  }
  /// Copies what the batch needs of every part side by side.
  void gather(index_t sequences, cudaStream_t stream) {
    auto columns = parts_.store.gathered();
    for (const auto& column : parts_.read_stage.gathered()) columns.push_back(column);
    for (const auto& column : parts_.first.gathered()) columns.push_back(column);
    parts_.steps.gather(sequences, columns, stream);
  }
  /// On the device, the tokens of each sequence; null where all have as many.
  const index_t* lengths() const { return parts_type::takes_uneven_steps ? parts_.steps.lengths() : nullptr; }
  /// Budgets that have grown since the last step, and newest tokens that stay when a choice comes before the step
  /// reads.
  void set_budgets(const batch& step, const conversations<Recipe>& known, cudaStream_t stream) {
    const auto policies_of = [&](index_t id) -> const planned<Recipe>& { return known.sequence(id).policies; };
    host_vector<index_t> growing;
    for (const index_t id : step.ids) {
      if (known.sequence(id).budgets.options().has_shares()) growing.push_back(id);
    }
    if (!growing.empty()) {
      parts_.read_stage.set_reads(growing, policies_of, stream);
      parts_.first.set_budgets(growing, policies_of, 0, stream);
    }
    if (step.evicts_first) parts_.first.set_budgets(step.ids, policies_of, step.tokens, stream);
  }
  void make_room(const sequence_layers& owners, const batch& step, const conversations<Recipe>& known,
                 cudaStream_t stream) {
    parts_.store.finish_layer(stream);  // now, because within the step it would move rows
    parts_.slide(owners, stream);
    parts_.store.settle(step.ids, false, stream);
    for (const sequence_layer owner : owners) {
      if (parts_.roles.follows_recipe(owner.layer)) parts_.read_stage.require_fits(owner, parts_.store, step.tokens);
    }
    parts_.store.plan_packing(owners, packing_moment::step_end, 0, stream);
    const bool drops = parts_type::in_steps && !filters && (step.evicts_first || step.evicts_last);
    parts_.store.plan_room(owners, step.tokens, drops, stream);
    try {
      plan_lists(owners, step, known);
    } catch (...) {
      parts_.store.abandon();
      throw;
    }
    parts_.store.commit_room(owners, stream);
    parts_.store.commit_packing(stream);
    parts_.read_stage.candidates().commit_room(owners, stream);
  }
  /// Makes room for the lists of a step, in every layer or in none.
  void plan_lists(const sequence_layers& owners, const batch& step, const conversations<Recipe>& known) {
    host_vector<index_t> longest;
    for (const sequence_layer owner : owners) {
      if (!filters || !step.evicts_last) break;
      token_bound held = parts_.store.bound(owner);
      held.longest += step.tokens;
      longest.push_back(parts_.roles.follows_recipe(owner.layer) ? bound(owner, held, known, 0).longest : 0);
    }
    parts_.read_stage.candidates().plan_room(owners, step.tokens, longest);
  }
  /// An upper bound of what a step that chooses leaves of a layer with `held` tokens, or lets through. The newest
  /// `added` tokens stay.
  token_bound bound(sequence_layer owner, const token_bound& held, const conversations<Recipe>& known,
                    index_t added) const {
    if (parts_.prompts.columns(owner.layer).bits) return held;
    return parts_.first.bound_in_step(owner.layer, held, known.sequence(owner.id).policies, added);
  }
  void note(const sequence_layers& owners, const batch& step, const conversations<Recipe>& known) {
    for (std::size_t i = 0; i < owners.size(); ++i) {
      const sequence_layer owner = owners[i];
      const index_t tokens = step.tokens_of(index_t(i) / parts_.shape.layers);
      parts_.store.grew(owner, tokens);
      parts_.read_stage.candidates().grew(owner, tokens);
      if (!(step.evicts_first || step.evicts_last) || !parts_.roles.follows_recipe(owner.layer)) continue;
      const token_bound held = parts_.store.bound(owner),
                        left = bound(owner, held, known, step.evicts_last ? 0 : step.tokens);
      if constexpr (filters) {
        parts_.read_stage.candidates().passed_in_step(owner, left);
      } else if constexpr (parts_type::in_steps) {
        // The host knows the room that the choice makes only where all heads are equally long.
        parts_.store.shrank(owner, left, parts_.first.heads_are_even ? held.longest - left.longest : 0);
      }
    }
  }
  /// Drops the slots that the first stage does not choose, or lets the chosen ones through. The newest `added` tokens
  /// stay.
  void choose(index_t layer, const batch& step, const planned<Recipe>& policies, const view_type& all, index_t added,
              cudaStream_t stream) {
    if constexpr (parts_type::in_steps) {
      auto& lists = parts_.read_stage.candidates();
      lists.note_read(layer, parts_.steps, step.sequences(), parts_.stepped_of({layer, 0}),
                      parts_.stepped_of({parts_.shape.layers + layer, 0}), stream);
      for (index_t m = 0; m < parts_.first.members().count(); ++m) {
        const selection_view kept =
            parts_.first.choose_in_step(layer, parts_.steps.ids(), parts_.store, all, policies,
                                        parts_.roles.rule(layer), parts_.next_position.data(), added, m, stream);
        lists.pass_in_step(layer, m, parts_.steps, step.sequences(), kept, parts_.first.max_kept_tokens(),
                           parts_.prompts.columns(layer), stream);
        if (filters) continue;
        parts_.store.keep_in_place(all, kept, stream);
        parts_.steps.scatter(parts_.store.length_column(), layer, step.sequences(), stream);
      }
      parts_.read_stage.rebuild(layer, parts_.steps.ids(), parts_.store, all, stream);
    }
  }
  /// Attends what a step reads of a layer that follows the recipe. The step's tokens have been appended. `first`: the
  /// position of each sequence's first query, on the device.
  void read(index_t layer, const Recipe& recipe, const view_type& all, const rows_view<const T>& q,
            const index_t* first, const rows_view<Out>& out, const rows_view<float>& lse, selection_view& chosen,
            cudaStream_t stream) {
    const group_members& members = parts_.first.members();
    for (index_t m = 0; m < members.count(); ++m) {
      const auto view = parts_.read_stage.batch_view(layer, all, m);
      const logit_rule rule = members.rule(parts_.roles.rule(layer), m, stream);
      if (parts_.read_stage.reader().choose(layer, parts_.read_stage.shown(parts_.store, all, view), q, first, rule,
                                            out, lse, chosen, stream))
        continue;
      parts_.step_attention.step(
          decode_problem<typename parts_type::read_view_type, Out>{
              view, members.rows(q, m), first, rule, members.rows(out, m), members.rows(lse, m), chosen,
              parts_.read_stage.candidates().usual_row(recipe.budget())},
          stream);
    }
    parts_.read_stage.reader().complete(layer, parts_.steps.ids(), parts_.read_stage.batch_view(layer, all), out,
                                        stream);
  }
  void trace(index_t layer, const batch& step, const selection_view& read) {
    for (index_t b = 0; b < step.sequences(); ++b) {
      const sequence_layer owner{layer, step.ids[std::size_t(b)]};
      auto& attended = parts_.attended[owner];
      attended = parts_.downloaded_lists(owner);
      for (index_t h = 0; read.indices && h < parts_.shape.kv_heads; ++h) {
        const offset_t row = offset_t(b) * parts_.shape.kv_heads + h;
        const auto list = downloaded(read.row(row), std::size_t(downloaded(read.counts + row, 1)[0]));
        const auto all =
            std::exchange(attended[std::size_t(h)], parts_.read_stage.reader().slots(parts_.store, owner, h, list));
        for (index_t& slot : attended[std::size_t(h)]) slot = all[std::size_t(slot)];
      }
    }
  }

  parts_type& parts_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
