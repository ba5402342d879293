// The decode steps of a turn, on the layers of a cache on the CPU.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../../runtime/turn/conversations.hpp"
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
    for (std::size_t b = 0; b < step.ids.size(); ++b) {
      try {
        parts_.store.expect(step.ids[b], step.tokens_of(index_t(b)));
      } catch (...) {
        while (b-- > 0) parts_.store.expect(step.ids[b], 0);
        throw;
      }
    }
    for (const index_t id : step.ids) parts_.store.settle(id);
  }

  /// One layer for every sequence of the batch: append, retrieve, attend, retain.
  template <class E>
  void decode(index_t layer, const Recipe& recipe, const batch& step, const conversations<Recipe>& known,
              const rows_view<const E>& q, const rows_view<const E>& k, const rows_view<const E>& v,
              const attention_output& output) {
    host_vector<choice>& choices = parts_.new_choices(step.sequences());
    parts_.log.begin(step.sequences());
    const auto owner = [&](index_t b) { return sequence_layer{layer, step.ids[std::size_t(b)]}; };
    const auto first = [&](index_t b) { return known.progress(owner(b)).next_position; };
    try {
      for (index_t b = 0; b < step.sequences(); ++b) {
        decode_sequence(owner(b), recipe, step, b, known.sequence(owner(b).id).policies, first(b),
                        known.step_marks(layer, step, b), step.rows_of(q, b), step.rows_of(k, b), step.rows_of(v, b),
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

  /// Attention of other queries over what a layer has after `decode`; changes nothing.
  template <class E>
  void attend(index_t layer, const batch& step, const conversations<Recipe>& known, const rows_view<const E>& q,
              const attention_output& output) {
    for (index_t b = 0; b < step.sequences(); ++b) {
      const sequence_layer owner{layer, step.ids[std::size_t(b)]};
      const index_t first = known.progress(owner).next_position - step.tokens_of(b);
      const rows_view<const E> queries = step.rows_of(q, b);
      const attention_output to{step.rows_of(output.out, b), step.rows_of(output.lse, b)};
      const logit_rule rule = parts_.roles.rule(layer);
      if (!parts_.roles.follows_recipe(layer)) {
        decode_attention(parts_.store.view(owner), query_rows<E>{queries, &first}, rule, nullptr, to, *parts_.attending,
                         *parts_.workers);
        continue;
      }
      const planned<Recipe>& policies = known.sequence(owner.id).policies;
      for (index_t m = 0, members = parts_.read_stage.members(owner); m < members; ++m) {
        const group_member<E> part(queries, rule, m, members);
        read(owner, policies, parts_.read_stage.view(owner, parts_.store, m), query_rows<E>{part.q, &first}, part.rule,
             {every_head(to.out, m, members), every_head(to.lse, m, members)});
      }
    }
  }

 private:
  template <class E>
  void decode_sequence(sequence_layer owner, const Recipe& recipe, const batch& step, index_t b,
                       const planned<Recipe>& policies, index_t first, const segment_marks& marks,
                       const rows_view<const E>& q, const rows_view<const E>& k, const rows_view<const E>& v,
                       const attention_output& output, choice& made) {
    const index_t next = first + k.tokens;
    const logit_rule rule = parts_.roles.rule(owner.layer);
    parts_.store.append(owner, k, v, first, marks);
    if (!parts_.roles.follows_recipe(owner.layer))
      return decode_all(owner, b, query_rows<E>{q, &first}, k.tokens, output, made);
    parts_.read_stage.append(owner, parts_.store, k.tokens);
    if constexpr (Recipe::schedule_type::fires_at(moment::step_begin)) {
      if (step.evicts_first) {  // the step reads what will stay; the rest is dropped when the whole batch has succeeded
        parts_.plan_choice(owner, recipe, policies, true, {next, k.tokens, nullptr}, made);
        attend(owner, b, policies, parts_.read_stage.view_of(owner, parts_.store, made.selections[0]),
               query_rows<E>{q, &first}, rule, output);
        return parts_.plan_packing(owner, made, false);
      }
    }
    const index_t members = parts_.read_stage.members(owner);
    for (index_t m = 0; m < members; ++m) {
      const group_member<E> part(q, rule, m, members);
      attend(owner, b, policies, parts_.read_stage.view(owner, parts_.store, m), query_rows<E>{part.q, &first},
             part.rule, {every_head(output.out, m, members), every_head(output.lse, m, members)}, m);
    }
    parts_.log.add_bytes(
        b, parts_.first.observer().observe_step(b, owner, parts_.store, policies, rule, q, next, *parts_.workers));
    made.observed = true;
    if (step.evicts_last) {
      parts_.plan_choice(owner, recipe, policies, true, {next, 0, nullptr}, made);
      if (Recipe::retain_type::follows) parts_.log.note_keys(b, parts_.store.lengths(owner), layout::key_bytes());
    }
    parts_.plan_packing(owner, made, false);
  }
  /// A step of a layer that keeps and reads everything, or slides.
  template <class E>
  void decode_all(sequence_layer owner, index_t b, const query_rows<E>& queries, index_t tokens,
                  const attention_output& output, choice& made) {
    const auto all = parts_.store.view(owner);
    decode_attention(all, queries, parts_.roles.rule(owner.layer), nullptr, output, *parts_.attending, *parts_.workers);
    parts_.log.note(b, all, nullptr, parts_.store.token_bytes(), parts_.store.uneven_bytes(all, nullptr));
    parts_.plan_slide(owner, tokens, made);
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
