// What a cache's layers hold on the CPU, and what a turn does to them: store, first stage, reading and attention in order.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "../../../core/host/host_vector.hpp"
#include "../../../runtime/conversations.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../../../runtime/prompt_pages.hpp"
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
        log_(shape.layers) {}

  void open(index_t id) {
    if (ranked_.size() <= place(count_, id)) ranked_.resize(place(count_, id) + 1);
    for (index_t layer = 0; layer < count_; ++layer) ranked_[place(layer, id)] = {};
    store_.open(id);
    first_.forget(id);
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

  /// What a prompt of `tokens` tokens takes of the pool of pages; id -1: in a new conversation. Where a first stage drops all
  /// that it drops when a prompt ends, `after` counts what is there before.
  page_plan plan_pages(index_t id, const Recipe& recipe, const planned<Recipe>& policies,
                       index_t tokens) const requires in_groups {
    const head_groups& groups = store_.rows().groups();
    host_vector<index_t> held(std::size_t(count_ * groups.kv_heads), 0);
    for (index_t at = 0; id >= 0 && at < index_t(held.size()); ++at) {
      held[std::size_t(at)] = store_.lengths(at / groups.kv_heads, id)[std::size_t(at % groups.kv_heads)];
    }
    return plan_prompt_pages(groups, store_.rows().page(), held, recipe, policies, roles_, tokens);
  }
  /// A sequence will get `tokens` more in every layer, 0: none for now. Throws where a pool of pages has no room for them.
  void expect(index_t id, index_t tokens) { store_.expect(id, tokens); }
  /// Between two steps.
  void settle(index_t id) { store_.settle(id); }

  /// Appends a chunk of a prompt at position `first`; its queries are observed.
  template <class E>
  void prefill(index_t layer, index_t id, const planned<Recipe>& policies, index_t first, const rows_view<const E>& q,
               const rows_view<const E>& k, const rows_view<const E>& v, const segment_marks& marks) {
    choice& slid = begin(1).front();
    try {
      store_.append(layer, id, k, v, first, marks);
      if (roles_.follows_recipe(layer)) store_.prepare_to_observe(layer, id, q);
      if (!roles_.follows_recipe(layer)) {
        slide(layer, id, k.tokens, slid);
      } else if (first_.chooser(layer, policies, roles_) == layer) {
        first_.observe_prompt(layer, id, store_, policies, roles_.rule(layer), q, first + k.tokens, *workers_);
      }
      if (roles_.follows_recipe(layer)) store_.observe_prompt(layer, id, q, k.tokens);
    } catch (...) {
      store_.take_back(layer, id, first);
      throw;
    }
    commit(layer, id, slid);
    reading_.end_lists(layer, id);
  }

  /// Before more of a prompt is appended to a layer that chooses among what it has: it keeps its share of that.
  void end_chunk(index_t layer, index_t id, const planned<Recipe>& policies, const prompt_reach& reach) {
    if (!roles_.follows_recipe(layer)) return;
    choice& made = begin(1).front();
    made.made = first_.choose(layer, id, store_, policies, roles_.rule(layer), reach.end, 0, &reach, made.kept,
                              tracing_ranks_ ? &made.ranked : nullptr, *workers_);
    if (made.made) store_.prepare_to_keep(layer, id);
    commit(layer, id, made);
    first_.forget(layer, id);
    reading_.take_back(layer, id, store_);  // its slots have moved; the prompt's end makes it anew
  }

  template <class E>
  void prompt_attention(index_t layer, index_t id, const Recipe& recipe, index_t first, const rows_view<const E>& q,
                        const attention_output& output) {
    const auto view = store_.view(layer, id);
    const query_rows<E> queries{q, &first};
    if (!roles_.follows_recipe(layer)) return prefill_attention(view, queries, roles_.rule(layer), output, *workers_);
    prompts_.attend(layer, id, recipe, view, queries, roles_.rule(layer), output, *workers_);
  }

  /// Tokens that pass through a layer once more, at position `part.own` and behind it: they attend to everything and to
  /// themselves, are scored with, and leave nothing else behind.
  template <class E>
  void reread(index_t layer, index_t id, const planned<Recipe>& policies, const reread_part& part,
              const rows_view<const E>& q, const rows_view<const E>& k, const rows_view<const E>& v,
              const attention_output& output) {
    try {
      store_.append(layer, id, k, v, part.own);
      prefill_attention(store_.view(layer, id), query_rows<E>{q, &part.own}, roles_.rule(layer), output, *workers_);
      if (roles_.follows_recipe(layer))
        rereading_.score(layer, id, store_, policies, roles_.rule(layer), q, part, *workers_);
    } catch (...) {
      store_.take_back(layer, id, part.own);
      throw;
    }
    store_.take_back(layer, id, part.own);
  }

  /// A prompt has been through a layer: what it needs no other layer for is done.
  void end_layer(index_t layer, index_t id, const Recipe& recipe) {
    choice& made = begin(1).front();
    if (!roles_.follows_recipe(layer)) {
      slide(layer, id, 0, made);
    } else if (packs_by_layer(recipe)) {
      prepare_to_pack(layer, id, made, true);
    }
    commit(layer, id, made);
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
          slide(layer, id, 0, made);
        } else if (const index_t from = first_.chooser(layer, policies, roles_); from != layer) {
          take_over(layer, id, policies, choices[std::size_t(from)], made);
        } else {
          choose(layer, id, recipe, policies, due, reach.end, 0, &reach, made);
        }
        if (roles_.follows_recipe(layer)) prepare_to_pack(layer, id, made, true);
      }
    } catch (...) {
      for (index_t layer = 0; layer < count_; ++layer) {
        store_.take_back(layer, id, reach.end);
        reading_.take_back(layer, id, store_);
      }
      throw;
    }
    if constexpr (Recipe::retain_type::over_model) first_.give_counts(nullptr);
    for (index_t layer = 0; layer < count_; ++layer) commit(layer, id, choices[std::size_t(layer)]);
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
        const index_t id = step.ids[std::size_t(b)];
        step_one(layer, recipe, step, b, known.at(id).policies, first(b), known.step_marks(layer, step, b), q.one(b),
                 k.one(b), v.one(b), {output.out.one(b), output.lse.one(b)}, choices[std::size_t(b)]);
      }
    } catch (...) {
      for (index_t b = 0; b < step.sequences(); ++b) {
        const index_t id = step.ids[std::size_t(b)];
        if (choices[std::size_t(b)].observed) first_.take_back(b, layer, id, store_);
        store_.take_back(layer, id, first(b));
        reading_.take_back(layer, id, store_);
      }
      throw;
    }
    for (index_t b = 0; b < step.sequences(); ++b) {
      commit(layer, step.ids[std::size_t(b)], choices[std::size_t(b)]);
      log_.commit(b, layer, step.ids[std::size_t(b)]);
    }
  }

  host_vector<index_t> readable(index_t layer, index_t id, index_t head) const {
    if (!roles_.follows_recipe(layer)) return store_.positions(layer, id, head);
    return reading_.positions(layer, id, head, store_);
  }
  void trace_lines(bool on) { prompts_.trace(on); }
  const prompt_lines& lines(index_t layer, index_t id) const { return prompts_.lines(layer, id); }
  void trace_ranks(bool on) { tracing_ranks_ = on; }
  /// Of the last choice that was traced.
  const ranked_tokens& ranked(index_t layer, index_t id) const { return ranked_[place(layer, id)]; }
  /// Bytes that are allocated for a sequence.
  offset_t bytes(index_t id) const {
    offset_t total = 0;
    for (index_t layer = 0; layer < count_; ++layer) {
      total +=
          store_.bytes(layer, id) + first_.bytes(layer, id) + reading_.bytes(layer, id) + prompts_.bytes(layer, id);
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
  void slide(index_t layer, index_t id, index_t fresh, choice& to) {
    to.kept.resize(1);
    to.made = store_.choose_newest(layer, id, roles_.window(layer), fresh, to.kept[0]);
    if (to.made) store_.prepare_to_keep(layer, id);
  }
  /// Of a layer that follows the recipe. `next`: the position of the next token; `tail`: so many of the newest tokens stay
  /// in any case. `reach`: of a prompt.
  void choose(index_t layer, index_t id, const Recipe& recipe, const planned<Recipe>& policies, bool due, index_t next,
              index_t tail, const prompt_reach* reach, choice& to) {
    to.made = due && first_.choose(layer, id, store_, policies, roles_.rule(layer), next, tail, reach, to.kept,
                                   tracing_ranks_ ? &to.ranked : nullptr, *workers_);
    if (to.made) prompts_.join(layer, id, recipe, to.kept);
    prepare(layer, id, policies, to);
  }
  /// What another layer has chosen among as many tokens.
  void take_over(index_t layer, index_t id, const planned<Recipe>& policies, const choice& from, choice& to) {
    to.made = from.made;
    if (to.made) to.kept = from.kept;
    if (to.made && tracing_ranks_) to.ranked = from.ranked;
    prepare(layer, id, policies, to);
  }
  void prepare(index_t layer, index_t id, const planned<Recipe>& policies, choice& made) {
    if (made.made && Recipe::retain_type::drops) store_.prepare_to_keep(layer, id);
    reading_.follow(layer, id, store_, policies, made.made ? &made.kept : nullptr, made.passed);
  }
  /// What is due to be packed when a prompt, or a step, ends, of what stays.
  void prepare_to_pack(index_t layer, index_t id, const choice& made, bool prompt_ends) {
    const bool drops = made.made && Recipe::retain_type::drops;
    store_.prepare_to_pack(layer, id, drops ? &made.kept[0] : nullptr, prompt_ends, *workers_);
  }
  /// Carries a choice out. Needs no memory.
  void commit(index_t layer, index_t id, choice& made) {
    if (made.made && tracing_ranks_ && roles_.follows_recipe(layer)) std::swap(ranked_[place(layer, id)], made.ranked);
    if (!made.passed.empty()) {
      reading_.pass(layer, id, made.passed);
    } else if (made.made) {
      store_.keep(layer, id, made.kept[0], *workers_);
    }
    store_.pack(layer, id, *workers_);
  }

  template <class E>
  void step_one(index_t layer, const Recipe& recipe, const batch& step, index_t b, const planned<Recipe>& policies,
                index_t first, const segment_marks& marks, const rows_view<const E>& q, const rows_view<const E>& k,
                const rows_view<const E>& v, const attention_output& output, choice& made) {
    const index_t id = step.ids[std::size_t(b)], next = first + k.tokens;
    const logit_rule rule = roles_.rule(layer);
    const query_rows<E> queries{q, &first};
    store_.append(layer, id, k, v, first, marks);
    if (!roles_.follows_recipe(layer)) {
      decode_attention(store_.view(layer, id), queries, rule, nullptr, output, *attending_, *workers_);
      const auto all = store_.view(layer, id);
      log_.note(b, all, nullptr, store_.token_bytes(), store_.uneven_bytes(all, nullptr));
      return slide(layer, id, k.tokens, made);
    }
    reading_.append(layer, id, store_, k.tokens);
    const index_t members = reading_.members(layer, id);
    const auto read = [&](const auto& view, const query_rows<E>& asked, const logit_rule& own_rule,
                          const attention_output& to, index_t member = 0) {
      offset_t bytes = 0;
      const selection_view* chosen = reading_.choose(layer, id, view, asked, own_rule, policies, bytes, *workers_);
      decode_attention(view, asked, own_rule, chosen, to, *attending_, *workers_);
      log_.note(b, view, chosen, store_.token_bytes(), bytes + store_.uneven_bytes(view, chosen), member, members);
      reading_.complete(layer, id, view, q.tokens, to.out);
    };
    if constexpr (Recipe::schedule_type::fires_at(moment::step_begin)) {
      if (step.evicts_first) {  // the step reads what will stay; the rest goes when the whole batch has succeeded
        choose(layer, id, recipe, policies, true, next, k.tokens, nullptr, made);
        read(reading_.view_of(layer, id, store_, made.kept[0]), queries, rule, output);
        return prepare_to_pack(layer, id, made, false);
      }
    }
    for (index_t m = 0; m < members; ++m) {
      const group_member<E> own(q, rule, m, members);
      read(reading_.view(layer, id, store_, m), {own.q, &first}, own.rule,
           {every_head(output.out, m, members), every_head(output.lse, m, members)}, m);
    }
    log_.add_bytes(b, first_.observe_step(b, layer, id, store_, policies, rule, q, next, *workers_));
    made.observed = true;
    if (step.evicts_last) {
      choose(layer, id, recipe, policies, true, next, 0, nullptr, made);
      if constexpr (Recipe::retain_type::follows) log_.note_keys(b, store_.lengths(layer, id), layout::key_bytes());
    }
    prepare_to_pack(layer, id, made, false);
  }

  std::size_t place(index_t layer, index_t id) const {
    return std::size_t(id) * std::size_t(count_) + std::size_t(layer);
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
  host_vector<ranked_tokens> ranked_;
  scratch<decode_workspace> attending_;
  scratch<host_vector<choice>> choices_;
  scratch<host_vector<index_t>> model_counts_;  // [layers, kv_heads], of a threshold over the model
};

}  // namespace cpu
TESSERA_NAMESPACE_END
