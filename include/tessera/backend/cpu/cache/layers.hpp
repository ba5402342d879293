// What a cache's layers hold on the CPU, and what a turn does to them: store, first stage, reading and attention in
// order.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../../../runtime/prompt_pages.hpp"
#include "../../../runtime/turn/conversations.hpp"
#include "../attend/attend_packed.hpp"
#include "../attend/prompt_attention.hpp"
#include "../attend/step_log.hpp"
#include "../choose/first_stage.hpp"
#include "../choose/model_counts.hpp"
#include "../choose/statistical_stage.hpp"
#include "../read/reading.hpp"
#include "../store/packed/packed_store.hpp"
#include "rereading.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Every verb does all of its work or none: what may run out of memory comes first, then what others can see; what was
/// added on the way is taken back. Arguments have been checked.
template <class Recipe>
class layers {
 public:
  using layout = typename Recipe::layout_type;

  layers(const model_shape& shape, const Recipe& recipe, std::shared_ptr<executor> workers)
      : workers_(std::move(workers)),
        count_(shape.layers),
        roles_(shape, recipe.dense_layers, recipe.attention.rule),
        store_(shape.layers, shape.kv_heads,
               {first_stage<Recipe>::with_scores, Recipe::needs_segments, recipe.retrieve.mean_block()},
               placement_of(recipe), recipe.layout),
        first_(shape),
        reading_(shape),
        prompts_(shape),
        log_(shape.layers),
        ranked_(shape.layers) {}

  void open(index_t id) {
    ranked_.open_empty(id);
    store_.open(id);
    first_.open(id);
    reading_.open(id);
    prompts_.open(id);
    log_.open(id);
  }
  /// Needs no memory.
  void close(index_t id) {
    store_.clear(id);
    first_.forget(id);
    reading_.close(id);
    prompts_.close(id);
  }

  /// Opens an id with what another one holds between two turns, or steps. Where it throws, the id is closed.
  void fork(index_t from, index_t to) {
    open(to);
    try {
      store_.copy(from, to);
      first_.copy(from, to);
      reading_.copy(from, to);
      prompts_.copy(from, to);
    } catch (...) {
      close(to);
      throw;
    }
  }

  /// Whether pages are shared by groups of heads.
  static constexpr bool in_groups = requires(const typename kv_store<layout>::rows_type& rows) { rows.groups(); };

  /// What a prompt of `tokens` tokens takes of the pool of pages; id -1: in a new conversation. Where a first stage
  /// drops all that it drops when a prompt ends, `after` counts what is there before.
  page_plan plan_pages(index_t id, const Recipe& recipe, const planned<Recipe>& policies,
                       index_t tokens) const requires in_groups {
    const head_groups& groups = store_.rows().groups();
    host_vector<index_t> held(std::size_t(count_ * groups.kv_heads), 0);
    for (index_t at = 0; id >= 0 && at < index_t(held.size()); ++at) {
      held[std::size_t(at)] = store_.lengths({at / groups.kv_heads, id})[std::size_t(at % groups.kv_heads)];
    }
    return plan_prompt_pages(groups, store_.rows().page(), held, recipe, policies, roles_, tokens);
  }
  /// A sequence will get `tokens` more in every layer, 0: none for now. Throws where a pool of pages has no room for
  /// them.
  void expect(index_t id, index_t tokens) { store_.expect(id, tokens); }
  /// Between two steps.
  void settle(index_t id) { store_.settle(id); }

  /// Appends a chunk of a prompt at position `first`; its queries are observed.
  template <class E>
  void prefill(sequence_layer owner, const planned<Recipe>& policies, index_t first, const rows_view<const E>& q,
               const rows_view<const E>& k, const rows_view<const E>& v, const segment_marks& marks) {
    choice& slid = begin(1).front();
    try {
      store_.append(owner, k, v, first, marks);
      if (roles_.follows_recipe(owner.layer)) store_.prepare_to_observe(owner, q);
      if (!roles_.follows_recipe(owner.layer)) {
        slide(owner, k.tokens, slid);
      } else if (first_.chooser(owner.layer, policies, roles_) == owner.layer) {
        first_.observe_prompt(owner, store_, policies, roles_.rule(owner.layer), q, first + k.tokens, *workers_);
      }
      if (roles_.follows_recipe(owner.layer)) store_.observe_prompt(owner, q, k.tokens);
    } catch (...) {
      store_.take_back(owner, first);
      throw;
    }
    commit(owner, slid);
    reading_.end_lists(owner);
  }

  /// Before more of a prompt is appended to a layer that chooses among what it has: it keeps its share of that.
  void end_chunk(sequence_layer owner, const planned<Recipe>& policies, const prompt_reach& reach) {
    if (!roles_.follows_recipe(owner.layer)) return;
    choice& made = begin(1).front();
    made.made = first_.choose(owner, store_, policies, roles_.rule(owner.layer), reach.end, 0, &reach, made.kept,
                              tracing_ranks_ ? &made.ranked : nullptr, *workers_);
    if (made.made) store_.prepare_to_keep(owner);
    commit(owner, made);
    first_.forget(owner);
    reading_.take_back(owner, store_);  // its slots have moved; the prompt's end makes it anew
  }

  template <class E>
  void prompt_attention(sequence_layer owner, const Recipe& recipe, index_t first, const rows_view<const E>& q,
                        const attention_output& output) {
    const auto view = store_.view(owner);
    const query_rows<E> queries{q, &first};
    if (!roles_.follows_recipe(owner.layer))
      return prefill_attention(view, queries, roles_.rule(owner.layer), output, *workers_);
    prompts_.attend(owner, recipe, view, queries, roles_.rule(owner.layer), output, *workers_);
  }

  /// Tokens that pass through a layer once more, at position `part.own` and behind it: they attend to everything and to
  /// themselves, are scored with, and leave nothing else behind.
  template <class E>
  void reread(sequence_layer owner, const planned<Recipe>& policies, const reread_part& part,
              const rows_view<const E>& q, const rows_view<const E>& k, const rows_view<const E>& v,
              const attention_output& output) {
    try {
      store_.append(owner, k, v, part.own);
      prefill_attention(store_.view(owner), query_rows<E>{q, &part.own}, roles_.rule(owner.layer), output, *workers_);
      if (roles_.follows_recipe(owner.layer))
        rereading_.score(owner, store_, policies, roles_.rule(owner.layer), q, part, *workers_);
    } catch (...) {
      store_.take_back(owner, part.own);
      throw;
    }
    store_.take_back(owner, part.own);
  }

  /// A prompt has been through a layer: what it needs no other layer for is done.
  void end_layer(sequence_layer owner, const Recipe& recipe) {
    choice& made = begin(1).front();
    if (!roles_.follows_recipe(owner.layer)) {
      slide(owner, 0, made);
    } else if (packs_by_layer(recipe)) {
      prepare_to_pack(owner, made, true);
    }
    commit(owner, made);
  }

  /// A prompt has ended: where `due`, each layer keeps the budget's worth, or lets it through.
  void end_prefill(index_t id, const Recipe& recipe, const planned<Recipe>& policies, bool due,
                   const prompt_reach& reach) {
    host_vector<choice>& choices = begin(count_);
    try {
      if constexpr (Recipe::retain_type::over_model)
        allot_over_model(policies.first, count_, id, store_, roles_, *model_counts_);
      for (index_t layer = 0; layer < count_; ++layer) {
        if constexpr (Recipe::retain_type::over_model)
          first_.give_counts((*model_counts_).data() + offset_t(layer) * store_.kv_heads());
        choice& made = choices[std::size_t(layer)];
        if (!roles_.follows_recipe(layer)) {
          slide({layer, id}, 0, made);
        } else if (const index_t from = first_.chooser(layer, policies, roles_); from != layer) {
          take_over({layer, id}, policies, choices[std::size_t(from)], made);
        } else {
          choose({layer, id}, recipe, policies, due, reach.end, 0, &reach, made);
        }
        if (roles_.follows_recipe(layer)) prepare_to_pack({layer, id}, made, true);
      }
    } catch (...) {
      for (index_t layer = 0; layer < count_; ++layer) {
        store_.take_back({layer, id}, reach.end);
        reading_.take_back({layer, id}, store_);
      }
      throw;
    }
    if constexpr (Recipe::retain_type::over_model) first_.give_counts(nullptr);
    for (index_t layer = 0; layer < count_; ++layer) commit({layer, id}, choices[std::size_t(layer)]);
    store_.expect(id, 0);
    first_.end_turn(id);
  }

  /// One layer of a decode step for every sequence of the batch: append, retrieve, attend, retain.
  template <class E>
  void step(index_t layer, const Recipe& recipe, const batch& step, const conversations<Recipe>& known,
            const rows_view<const E>& q, const rows_view<const E>& k, const rows_view<const E>& v,
            const attention_output& output) {
    host_vector<choice>& choices = begin(step.sequences());
    log_.begin(step.sequences());
    const auto first = [&](index_t b) {
      return known.at(step.ids[std::size_t(b)]).layers[std::size_t(layer)].next_position;
    };
    try {
      for (index_t b = 0; b < step.sequences(); ++b) {
        const sequence_layer owner{layer, step.ids[std::size_t(b)]};
        step_one(owner, recipe, step, b, known.at(owner.id).policies, first(b), known.step_marks(layer, step, b),
                 q.one(b), k.one(b), v.one(b), {output.out.one(b), output.lse.one(b)}, choices[std::size_t(b)]);
      }
    } catch (...) {
      for (index_t b = 0; b < step.sequences(); ++b) {
        const sequence_layer owner{layer, step.ids[std::size_t(b)]};
        if (choices[std::size_t(b)].observed) first_.take_back(b, owner, store_);
        store_.take_back(owner, first(b));
        reading_.take_back(owner, store_);
      }
      throw;
    }
    for (index_t b = 0; b < step.sequences(); ++b) {
      const sequence_layer owner{layer, step.ids[std::size_t(b)]};
      commit(owner, choices[std::size_t(b)]);
      log_.commit(b, owner);
    }
  }

  host_vector<index_t> readable(sequence_layer owner, index_t head) const {
    if (!roles_.follows_recipe(owner.layer)) return store_.positions(owner, head);
    return reading_.positions(owner, head, store_);
  }
  void trace_lines(bool on) { prompts_.trace(on); }
  const prompt_lines& lines(sequence_layer owner) const { return prompts_.lines(owner); }
  void trace_ranks(bool on) { tracing_ranks_ = on; }
  /// Of the last choice that was traced.
  const ranked_tokens& ranked(sequence_layer owner) const { return ranked_[owner]; }
  /// Bytes that are allocated for a sequence.
  offset_t bytes(index_t id) const {
    offset_t total = 0;
    for (index_t layer = 0; layer < count_; ++layer) {
      const sequence_layer owner{layer, id};
      total += store_.bytes(owner) + first_.bytes(owner) + reading_.bytes(owner) + prompts_.bytes(owner);
    }
    return total;
  }

  kv_store<layout>& store() { return store_; }
  const kv_store<layout>& store() const { return store_; }
  step_log& log() { return log_; }
  const step_log& log() const { return log_; }

 private:
  /// What a layer keeps, or lets through, of one sequence, until it is carried out.
  struct choice {
    bool made = false, observed = false;
    host_vector<selection> kept{1};  // one, or one for each place in a group whose query heads choose apart
    ranked_tokens ranked;
    typename reading<Recipe>::lists
        passed;  // a filter's lists to come: the same, or everything; none: those it has stay
  };

  host_vector<choice>& begin(index_t count) {
    host_vector<choice>& all = *choices_;
    if (all.size() < std::size_t(count)) all.resize(std::size_t(count));
    for (choice& one : all) one.made = one.observed = false, one.passed.clear();
    return all;
  }

  /// Of a layer that slides: all but its window, and the `fresh` newest, go.
  void slide(sequence_layer owner, index_t fresh, choice& to) {
    to.kept.resize(1);
    to.made = store_.choose_newest(owner, roles_.window(owner.layer), fresh, to.kept[0]);
    if (to.made) store_.prepare_to_keep(owner);
  }
  /// Of a layer that follows the recipe. `next`: the position of the next token; `tail`: so many of the newest tokens
  /// stay in any case. `reach`: of a prompt.
  void choose(sequence_layer owner, const Recipe& recipe, const planned<Recipe>& policies, bool due, index_t next,
              index_t tail, const prompt_reach* reach, choice& to) {
    to.made = due && first_.choose(owner, store_, policies, roles_.rule(owner.layer), next, tail, reach, to.kept,
                                   tracing_ranks_ ? &to.ranked : nullptr, *workers_);
    if (to.made) prompts_.join(owner, recipe, to.kept);
    prepare(owner, policies, to);
  }
  /// What another layer has chosen among as many tokens.
  void take_over(sequence_layer owner, const planned<Recipe>& policies, const choice& from, choice& to) {
    to.made = from.made;
    if (to.made) to.kept = from.kept;
    if (to.made && tracing_ranks_) to.ranked = from.ranked;
    prepare(owner, policies, to);
  }
  void prepare(sequence_layer owner, const planned<Recipe>& policies, choice& made) {
    if (made.made && Recipe::retain_type::drops) store_.prepare_to_keep(owner);
    reading_.follow(owner, store_, policies, made.made ? &made.kept : nullptr, made.passed);
  }
  /// What is due to be packed when a prompt, or a step, ends, of what stays.
  void prepare_to_pack(sequence_layer owner, const choice& made, bool prompt_ends) {
    const bool drops = made.made && Recipe::retain_type::drops;
    store_.prepare_to_pack(owner, drops ? &made.kept[0] : nullptr, prompt_ends, *workers_);
  }
  /// Carries a choice out. Needs no memory.
  void commit(sequence_layer owner, choice& made) {
    if (made.made && tracing_ranks_ && roles_.follows_recipe(owner.layer)) std::swap(ranked_[owner], made.ranked);
    if (!made.passed.empty()) {
      reading_.pass(owner, made.passed);
    } else if (made.made) {
      store_.keep(owner, made.kept[0], *workers_);
    }
    store_.pack(owner, *workers_);
  }

  template <class E>
  void step_one(sequence_layer owner, const Recipe& recipe, const batch& step, index_t b,
                const planned<Recipe>& policies, index_t first, const segment_marks& marks, const rows_view<const E>& q,
                const rows_view<const E>& k, const rows_view<const E>& v, const attention_output& output,
                choice& made) {
    const index_t next = first + k.tokens;
    const logit_rule rule = roles_.rule(owner.layer);
    const query_rows<E> queries{q, &first};
    store_.append(owner, k, v, first, marks);
    if (!roles_.follows_recipe(owner.layer)) {
      decode_attention(store_.view(owner), queries, rule, nullptr, output, *attending_, *workers_);
      const auto all = store_.view(owner);
      log_.note(b, all, nullptr, store_.token_bytes(), store_.uneven_bytes(all, nullptr));
      return slide(owner, k.tokens, made);
    }
    reading_.append(owner, store_, k.tokens);
    const index_t members = reading_.members(owner);
    const auto read = [&](const auto& view, const query_rows<E>& asked, const logit_rule& own_rule,
                          const attention_output& to, index_t member = 0) {
      offset_t bytes = 0;
      const selection_view* chosen = reading_.choose(owner, view, asked, own_rule, policies, bytes, *workers_);
      decode_attention(view, asked, own_rule, chosen, to, *attending_, *workers_);
      log_.note(b, view, chosen, store_.token_bytes(), bytes + store_.uneven_bytes(view, chosen), member, members);
      reading_.complete(owner, view, q.tokens, to.out);
    };
    if constexpr (Recipe::schedule_type::fires_at(moment::step_begin)) {
      if (step.evicts_first) {  // the step reads what will stay; the rest goes when the whole batch has succeeded
        choose(owner, recipe, policies, true, next, k.tokens, nullptr, made);
        read(reading_.view_of(owner, store_, made.kept[0]), queries, rule, output);
        return prepare_to_pack(owner, made, false);
      }
    }
    for (index_t m = 0; m < members; ++m) {
      const group_member<E> own(q, rule, m, members);
      read(reading_.view(owner, store_, m), {own.q, &first}, own.rule,
           {every_head(output.out, m, members), every_head(output.lse, m, members)}, m);
    }
    log_.add_bytes(b, first_.observe_step(b, owner, store_, policies, rule, q, next, *workers_));
    made.observed = true;
    if (step.evicts_last) {
      choose(owner, recipe, policies, true, next, 0, nullptr, made);
      if constexpr (Recipe::retain_type::follows) log_.note_keys(b, store_.lengths(owner), layout::key_bytes());
    }
    prepare_to_pack(owner, made, false);
  }

  std::shared_ptr<executor> workers_;
  index_t count_;
  layer_roles roles_;
  kv_store<layout> store_;
  first_stage<Recipe> first_;
  rereading<Recipe> rereading_;
  reading<Recipe> reading_;
  prompt_attending<Recipe> prompts_;
  step_log log_;
  bool tracing_ranks_ = false;
  sequence_table<ranked_tokens> ranked_;
  scratch<decode_workspace> attending_;
  scratch<host_vector<choice>> choices_;
  scratch<host_vector<index_t>> model_counts_;  // [layers, kv_heads], of a threshold over the model
};

}  // namespace cpu
TESSERA_NAMESPACE_END
