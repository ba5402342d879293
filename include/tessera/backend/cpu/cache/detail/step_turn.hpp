// The decode steps of a turn, on the layers of a cache on the CPU.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../../runtime/turn/conversations.hpp"
#include "../../../../runtime/turn/draft.hpp"
#include "parts.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The calls of a step. Each does all of its work or none; the caller has checked the arguments.
template <class Recipe>
class step_turn {
  using parts_type = cache_parts<Recipe>;
  using choice = typename parts_type::choice;
  using layout = typename Recipe::layout_type;

 public:
  explicit step_turn(parts_type& parts) : parts_(parts) {}

  /// Reserves memory for a step in every layer, or in none.
  void prepare(const batch& step) {
    const bool drops = Recipe::retain_type::drops && (step.evicts_first || step.evicts_last);
    const bool moves_rows = drops || packing_layout<layout> || parts_.roles.some_slide();
    for (std::size_t b = 0; b < step.ids.size(); ++b) {
      try {
        parts_.store.expect(step.ids[b], step.tokens_of(index_t(b)), moves_rows);
      } catch (...) {
        while (b-- > 0) parts_.store.expect(step.ids[b], 0);
        throw;
      }
    }
    for (const index_t id : step.ids) parts_.store.settle(id);
  }

  /// One layer for every sequence of the batch: append, retrieve, attend, retain.
  template <class Q, class E>
  void decode(index_t layer, const Recipe& recipe, const batch& step, const conversations<Recipe>& known,
              const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v,
              const attention_output& output) {
    host_vector<choice>& choices = parts_.new_choices(step.sequences());
    parts_.log.begin(step.sequences());
    const auto owner = [&](index_t b) { return sequence_layer{layer, step.ids[std::size_t(b)]}; };
    const auto first = [&](index_t b) { return known.progress(owner(b)).next_position; };
    try {
      for (index_t b = 0; b < step.sequences(); ++b) {
        parts_.store.append(owner(b), step.rows_of(k, b), step.rows_of(v, b), first(b),
                            known.step_marks(layer, step, b));
        decode_sequence(owner(b), recipe, step, b, known.sequence(owner(b).id).policies, first(b), step.rows_of(q, b),
                        {step.rows_of(output.out, b), step.rows_of(output.lse, b)}, choices[std::size_t(b)]);
      }
    } catch (...) {
      for (index_t b = 0; b < step.sequences(); ++b) {
        if (choices[std::size_t(b)].observed) parts_.first.observer().abandon(b, owner(b), parts_.store);
        parts_.abandon(owner(b), first(b));
      }
      throw;
    }
    for (index_t b = 0; b < step.sequences(); ++b) {
      parts_.commit(owner(b), choices[std::size_t(b)]);
      parts_.log.commit(b, owner(b));
    }
  }

  /// One layer of a draft, for every sequence of the batch: its tokens attend to what a step reads, and to each other.
  template <class Q, class E>
  void draft(index_t layer, const draft_step& draft, const conversations<Recipe>& known, rows_view<const Q> q,
             rows_view<const E> k, rows_view<const E> v, const attention_output& output) {
    q.dim = k.dim = layout::k_dim, v.dim = layout::v_dim;
    host_vector<float> sums;
    rows_view<float> lse = output.lse;
    if (!lse.data) {
      sums.resize(std::size_t(q.sequences) * std::size_t(q.tokens) * std::size_t(q.heads));
      lse = nhd_rows(sums.data(), q.tokens, q.heads, 1, q.sequences);
    }
    for (index_t b = 0; b < draft.sequences(); ++b) {
      const sequence_layer owner{layer, draft.step.ids[std::size_t(b)]};
      const draft_tree& tree = draft.tree_of(b);
      const attention_output to{draft.step.rows_of(output.out, b), draft.step.rows_of(lse, b)};
      const auto queries = draft.step.rows_of(q, b), keys = draft.step.rows_of(k, b), values = draft.step.rows_of(v, b);
      const logit_rule rule = parts_.roles.rule(layer);
      const index_t next = known.progress(owner).next_position;
      // Queries without a window that read everything differ in nothing that their positions decide.
      const bool together =
          !Recipe::retrieve_type::retrieves && rule.sliding_window <= 0 && !parts_.prompts.has_slashes(owner);
      for (index_t t = 0, tokens = together ? tree.tokens() : 1; t < tree.tokens(); t += tokens) {
        const auto some = [&](auto rows) {
          rows.data += offset_t(t) * rows.token_stride;
          rows.tokens = tokens;
          return rows;
        };
        const index_t first = next + tree.depth(t);
        attend_stored(owner, known, query_rows<Q>{some(queries), &first}, {some(to.out), some(to.lse)});
      }
      attend_draft(tree, rule, queries, keys, values, to, *parts_.workers);
      parts_.drafts.store(owner, draft.step.number, queries, keys, values);
    }
  }

  /// Plans everything of a step but its attention, in every layer: append, observe, choose. Where it throws, nothing
  /// has changed. `commit_accepted` carries it out.
  void plan_accepted(const Recipe& recipe, const batch& step, const host_vector<accepted_tokens>& accepted,
                     const conversations<Recipe>& known) {
    const index_t layers = parts_.shape.layers;
    prepare(step);
    const auto owner = [&](index_t item) {
      return sequence_layer{item % layers, step.ids[std::size_t(item / layers)]};
    };
    const index_t items = step.sequences() * layers;
    host_vector<choice>& choices = parts_.new_choices(items);
    try {
      index_t b = 0;
      for (const accepted_tokens& part : accepted) {
        if (part.nodes.empty()) continue;
        for (index_t layer = 0; layer < layers; ++layer) {
          const index_t item = b * layers + layer;
          const auto rows = parts_.drafts.rows_of_nodes(owner(item), part.nodes);
          append_accepted(owner(item), recipe, step, item, known, known.step_marks(layer, step, b), rows.q_rows,
                          rows.k_rows, rows.v_rows, choices[std::size_t(item)]);
        }
        ++b;
      }
    } catch (...) {
      for (index_t item = 0; item < items; ++item) {
        if (choices[std::size_t(item)].observed) parts_.first.observer().abandon(item, owner(item), parts_.store);
        parts_.abandon(owner(item), known.progress(owner(item)).next_position);
      }
      for (const index_t id : step.ids) parts_.store.expect(id, 0);
      throw;
    }
  }
  void commit_accepted(const batch& step) {
    for (index_t b = 0; b < step.sequences(); ++b) {
      for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
        parts_.commit({layer, step.ids[std::size_t(b)]},
                      (*parts_.choices)[std::size_t(b * parts_.shape.layers + layer)]);
      }
    }
  }

  /// Attention of other queries over what a layer has after `decode`; changes nothing.
  template <class E>
  void attend(index_t layer, const batch& step, const conversations<Recipe>& known, const rows_view<const E>& q,
              const attention_output& output) {
    for (index_t b = 0; b < step.sequences(); ++b) {
      const sequence_layer owner{layer, step.ids[std::size_t(b)]};
      const index_t first = known.progress(owner).next_position - step.tokens_of(b);
      attend_stored(owner, known, query_rows<E>{step.rows_of(q, b), &first},
                    {step.rows_of(output.out, b), step.rows_of(output.lse, b)});
    }
  }

 private:
  /// Attends what a step reads of the stored tokens.
  template <class E>
  void attend_stored(sequence_layer owner, const conversations<Recipe>& known, const query_rows<E>& queries,
                     const attention_output& to) {
    const logit_rule rule = parts_.roles.rule(owner.layer);
    if (!parts_.roles.follows_recipe(owner.layer))
      return decode_attention(parts_.store.view(owner), queries, rule, nullptr, to, *parts_.attending, *parts_.workers);
    const planned<Recipe>& policies = known.sequence(owner.id).policies;
    for (index_t m = 0, members = parts_.read_stage.members(owner); m < members; ++m) {
      const group_member<E> part(queries.q, rule, m, members);
      show(owner, m, *queries.first_position, queries.q.tokens, [&](const auto& view) {
        read(owner, policies, view, query_rows<E>{part.q, queries.first_position}, part.rule,
             {every_head(to.out, m, members), every_head(to.lse, m, members)});
      });
    }
  }
  /// Calls `visit(view)` with what a step of `tokens` tokens may read of a layer, the first at position `first`.
  template <class Visit>
  void show(sequence_layer owner, index_t member, [[maybe_unused]] index_t first, [[maybe_unused]] index_t tokens,
            const Visit& visit) {
    if constexpr (Recipe::retain_type::chooses && !Recipe::retain_type::drops &&
                  lasting_pattern<typename Recipe::prefill_type>) {
      if (parts_.prompts.has_slashes(owner)) {
        const selection joined =
            parts_.prompts.with_slashes(owner, parts_.read_stage.list(owner, member), member,
                                        parts_.read_stage.members(owner), first, tokens, parts_.store.lengths(owner));
        return visit(parts_.read_stage.view_of(owner, parts_.store, joined));
      }
    }
    visit(parts_.read_stage.view(owner, parts_.store, member));
  }
  /// Appends accepted rows, observes their queries, and plans what is due. `item`: the observer's place for it.
  template <class E>
  void append_accepted(sequence_layer owner, const Recipe& recipe, const batch& step, index_t item,
                       const conversations<Recipe>& known, const segment_marks& marks, const rows_view<const E>& q,
                       const rows_view<const E>& k, const rows_view<const E>& v, choice& made) {
    const planned<Recipe>& policies = known.sequence(owner.id).policies;
    const index_t first = known.progress(owner).next_position, next = first + k.tokens;
    parts_.store.append(owner, k, v, first, marks);
    if (!parts_.roles.follows_recipe(owner.layer)) return parts_.plan_slide(owner, k.tokens, made);
    parts_.read_stage.append(owner, parts_.store, k.tokens);
    const bool chooses_first = Recipe::schedule_type::fires_at(moment::step_begin) && step.evicts_first;
    if (chooses_first) {
      parts_.plan_choice(owner, recipe, policies, true, {next, k.tokens, nullptr}, made);
    } else {
      parts_.first.observer().observe_step(item, owner, parts_.store, policies, parts_.roles.rule(owner.layer), q, next,
                                           *parts_.workers);
      made.observed = true;
      if (step.evicts_last) parts_.plan_choice(owner, recipe, policies, true, {next, 0, nullptr}, made);
    }
    parts_.plan_packing(owner, made, packing_moment::step_end);
  }
  /// A step of a layer behind the append of its rows.
  template <class E>
  void decode_sequence(sequence_layer owner, const Recipe& recipe, const batch& step, index_t b,
                       const planned<Recipe>& policies, index_t first, const rows_view<const E>& q,
                       const attention_output& output, choice& made) {
    const index_t next = first + q.tokens;
    const logit_rule rule = parts_.roles.rule(owner.layer);
    if (!parts_.roles.follows_recipe(owner.layer)) return decode_all(owner, b, query_rows<E>{q, &first}, output, made);
    parts_.read_stage.append(owner, parts_.store, q.tokens);
    if constexpr (Recipe::schedule_type::fires_at(moment::step_begin)) {
      if (step.evicts_first) {  // the step reads what will stay; the rest is dropped when the whole batch has succeeded
        parts_.plan_choice(owner, recipe, policies, true, {next, q.tokens, nullptr}, made);
        attend(owner, b, policies, parts_.read_stage.view_of(owner, parts_.store, made.selections[0]),
               query_rows<E>{q, &first}, rule, output);
        return parts_.plan_packing(owner, made, packing_moment::step_end);
      }
    }
    const index_t members = parts_.read_stage.members(owner);
    for (index_t m = 0; m < members; ++m) {
      const group_member<E> part(q, rule, m, members);
      show(owner, m, first, q.tokens, [&](const auto& view) {
        attend(owner, b, policies, view, query_rows<E>{part.q, &first}, part.rule,
               {every_head(output.out, m, members), every_head(output.lse, m, members)}, m);
      });
    }
    parts_.log.add_bytes(
        b, parts_.first.observer().observe_step(b, owner, parts_.store, policies, rule, q, next, *parts_.workers));
    made.observed = true;
    if (step.evicts_last) {
      parts_.plan_choice(owner, recipe, policies, true, {next, 0, nullptr}, made);
      if (Recipe::retain_type::follows) parts_.log.note_keys(b, parts_.store.lengths(owner), layout::key_bytes());
    }
    parts_.plan_packing(owner, made, packing_moment::step_end);
  }
  /// A step of a layer that keeps and reads everything, or slides.
  template <class E>
  void decode_all(sequence_layer owner, index_t b, const query_rows<E>& queries, const attention_output& output,
                  choice& made) {
    const auto all = parts_.store.view(owner);
    decode_attention(all, queries, parts_.roles.rule(owner.layer), nullptr, output, *parts_.attending, *parts_.workers);
    parts_.log.note(b, all, nullptr, parts_.store.token_bytes(), parts_.store.uneven_bytes(all, nullptr));
    parts_.plan_slide(owner, queries.q.tokens, made);
  }
  /// Attends what the reader chooses of a view, for one member of a group whose query heads read apart.
  template <class View, class E>
  void attend(sequence_layer owner, index_t b, const planned<Recipe>& policies, const View& view,
              const query_rows<E>& queries, const logit_rule& rule, const attention_output& output,
              index_t member = 0) {
    const auto [chosen, bytes] = read(owner, policies, view, queries, rule, output);
    parts_.log.note(b, view, chosen, parts_.store.token_bytes(), bytes + parts_.store.uneven_bytes(view, chosen),
                    member, parts_.read_stage.members(owner));
  }
  /// Returns the slots that were attended, null: all, and the bytes that were read beside them.
  template <class View, class E>
  std::pair<const selection_view*, offset_t> read(sequence_layer owner, const planned<Recipe>& policies,
                                                  const View& view, const query_rows<E>& queries,
                                                  const logit_rule& rule, const attention_output& output) {
    offset_t bytes = 0;
    const selection_view* chosen =
        parts_.read_stage.choose(owner, view, queries, rule, policies, bytes, *parts_.workers);
    decode_attention(view, queries, rule, chosen, output, *parts_.attending, *parts_.workers);
    parts_.read_stage.complete(owner, view, queries.q.tokens, output.out);
    return {chosen, bytes};
  }

  parts_type& parts_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
