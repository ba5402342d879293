// The CPU backend of tessera::cache.
#pragma once

#include <memory>
#include <utility>

#include "../../core/error.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../runtime/prompt_pages.hpp"
#include "../../runtime/saved/archive.hpp"
#include "../../runtime/turn/truncation.hpp"
#include "cache/detail/prompt_turn.hpp"
#include "cache/detail/step_order.hpp"
#include "cache/detail/step_turn.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// A cache on the CPU has no queue: its calls have done their work when they return.
struct no_queue {};

/// Carries out the calls of `basic_cache` with the parts of one recipe's cache. concepts/backend.hpp lists the calls of
/// every backend. The caller has checked the arguments; where a call throws, nothing has changed.
template <class Recipe>
class backend {
  using parts_type = cache_parts<Recipe>;

 public:
  using recipe_type = Recipe;
  using layout = typename Recipe::layout_type;
  using resources = std::shared_ptr<executor>;
  using queue = no_queue;
  using default_queue = no_queue;
  using output_type = float;

  /// Whether groups of heads share the pages of one pool.
  static constexpr bool in_groups = requires(const typename kv_store<layout>::rows_type& rows) { rows.groups(); };

  /// Whether sequences of one step may have different numbers of tokens.
  static constexpr bool takes_uneven_steps = true;

  /// Whether sequences can be saved and loaded.
  static bool saves(const Recipe&) { return true; }

  /// Whether a step that has layers left can be taken back once it is through.
  static constexpr bool cancels_steps =
      taken_back<Recipe>() != takes_back::nothing && !packing_layout<layout> && reading<Recipe>::settled(1) == 0;

  /// Errors   no executor: tessera::error.
  backend(const model_shape& shape, const Recipe& recipe, resources workers)
      : parts_(shape, recipe, require_workers(std::move(workers))), order_(shape.layers) {}

  // --- sequences -----------------------------------------------------------------------------------------------------

  /// The largest number of open sequences, 0: no bound; the largest number of tokens of a step.
  index_t max_sequences() const { return 0; }
  index_t max_step_tokens() const { return tessera::max_step_tokens; }
  index_t max_draft_tokens() const { return tessera::max_draft_tokens; }

  void check_budgets(const Recipe&, const Recipe&) const {}
  void open(index_t id, const planned<Recipe>&, queue) {
    parts_.ranked.open_empty(id);
    parts_.store.open(id);
    parts_.first.observer().open(id);
    parts_.read_stage.open(id);
    parts_.prompts.open(id);
    parts_.log.open(id);
    parts_.drafts.open(id);
  }
  /// Needs no memory.
  void close(index_t id, queue) {
    parts_.store.clear(id);
    parts_.first.observer().forget(id);
    parts_.read_stage.close(id);
    parts_.prompts.close(id);
    parts_.drafts.forget(id);
  }
  void check_fork(index_t) const {}
  /// Opens a copy of a sequence, between whole calls. Where it throws, the copy is closed.
  void fork(index_t id, index_t copy, const sequence_state<Recipe>& state, queue q) {
    open(copy, state.policies, q);
    try {
      parts_.store.copy(id, copy);
      parts_.first.observer().copy(id, copy);
      parts_.read_stage.copy(id, copy);
      parts_.prompts.copy(id, copy);
      if constexpr (in_groups) {
        if (state.announced > 0) parts_.store.rows().share_reservation(id, copy);
      }
    } catch (...) {
      close(copy, q);
      throw;
    }
  }
  /// An archive that writes to a sink, or reads from a source.
  template <class Sink>
  static saved_writer<Sink> writer(Sink& sink, queue) {
    return saved_writer<Sink>(sink);
  }
  template <class Source>
  static saved_reader<Source> reader(Source& source, queue) {
    return saved_reader<Source>(source);
  }
  /// Saves a sequence between two turns or steps, or loads one into an open, empty one, which the caller closes where
  /// this throws.
  template <class Archive>
  void transfer(index_t id, const sequence_state<Recipe>& state, Archive& archive, queue) {
    const auto next = [&](index_t layer) { return state.layers[std::size_t(layer)].next_position; };
    parts_.store.transfer_lengths_of(id, next, archive);
    parts_.first.observer().transfer(id, state.policies, archive);
    parts_.read_stage.transfer(id, parts_.store, archive);
    parts_.prompts.transfer(id, next, archive);
    parts_.store.transfer_rows_of(id, next, archive);
    if constexpr (Archive::loads) parts_.read_stage.restore(id, parts_.store, state.policies, parts_.roles);
  }
  /// The smallest position that a sequence can go back to, as far as its rows and its index decide it.
  index_t settled(index_t id, const sequence_state<Recipe>& state) const {
    index_t settled = parts_.read_stage.settled(state.front().next_position);
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
      const sequence_layer owner{layer, id};
      const index_t next = state.layers[std::size_t(layer)].next_position;
      settled = (std::max)(settled, parts_.roles.slides(layer) ? settled_of_window(next, parts_.store.longest(owner),
                                                                                   parts_.roles.window(layer))
                                                               : parts_.store.settled(owner, next));
    }
    return settled;
  }
  void check_truncation(index_t) const {}
  /// Takes back a sequence's newest tokens. Needs no memory.
  void truncate(index_t id, const truncation& plan, const sequence_state<Recipe>& state, queue) {
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
      const sequence_layer owner{layer, id};
      parts_.store.truncate(owner, plan.position);
      if (plan.is_of_prompt) {
        const layer_progress& progress = state.layers[std::size_t(layer)];
        parts_.store.forget_prompt(owner, progress.turn_tokens - plan.tokens_of(progress));
        parts_.first.observer().forget(owner);
      }
      parts_.read_stage.truncate(owner, parts_.store, plan.ends_lists);
    }
    if (plan.releases) parts_.store.expect(id, 0);
  }
  void follow_budget(const Recipe&, queue) {}
  void follow_plans(const conversations<Recipe>&, queue) {}

  // --- prompts -------------------------------------------------------------------------------------------------------

  /// The pages that a prompt of `tokens` tokens needs; id -1: in a new sequence. Where a first stage drops tokens only
  /// at the end of a prompt, `final_pages` counts those before the drop.
  page_plan plan_pages(index_t id, const Recipe& recipe, const planned<Recipe>& policies, index_t tokens) const
      requires in_groups {
    const auto& rows = parts_.store.rows();
    host_vector<index_t> held;
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
      for (index_t head = 0; head < parts_.shape.kv_heads; ++head)
        held.push_back(id < 0 ? 0 : parts_.store.lengths({layer, id})[std::size_t(head)]);
    }
    return plan_prompt_pages(rows.groups(), rows.page(), held, recipe, policies, parts_.roles, tokens);
  }
  void reserve_pages(index_t id, index_t pages) requires in_groups { parts_.store.rows().reserve(id, pages); }

  template <class E>
  void check_chunk(sequence_layer, const rows_view<const E>&) const {}
  void begin_prompt(index_t id, queue) { parts_.store.settle(id); }
  void end_chunk(sequence_layer owner, const planned<Recipe>& policies, const prompt_reach& reach, index_t, index_t,
                 queue) {
    prompts().end_chunk(owner, policies, reach);
  }
  /// Reserves pages for `tokens` more in every layer; throws where the pool has too few.
  void expect_chunk(index_t id, index_t tokens) {
    // A layer that slides, or chooses before the chunk, moves what it stores.
    const bool moves_rows = parts_.roles.some_slide() || Recipe::schedule_type::fires_at(moment::chunk_end);
    parts_.store.expect(id, tokens, moves_rows);
  }
  template <class Q, class E>
  void append_chunk(sequence_layer owner, const planned<Recipe>& policies, const prompt_chunk& chunk,
                    const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v, queue) {
    prompts().append(owner, policies, chunk, q, k, v);
  }
  template <class E>
  void attend_chunk(sequence_layer owner, const Recipe& recipe, index_t first, const rows_view<const E>& q,
                    const rows_view<float>& out, const rows_view<float>& lse, queue) {
    prompts().attend(owner, recipe, first, q, {out, lse});
  }
  template <class Q, class E>
  void reread(sequence_layer owner, const planned<Recipe>& policies, const reread_part& part,
              const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v,
              const rows_view<float>& out, queue) {
    prompts().reread(owner, policies, part, q, k, v, {out, {}});
  }
  void set_scores(sequence_layer owner, index_t first, index_t tokens, const float* scores, queue) {
    parts_.store.beside(owner).set_scores(parts_.store.lengths(owner), first, tokens, scores);
  }
  void end_layer(sequence_layer owner, const Recipe& recipe, const planned<Recipe>& policies, bool due,
                 const prompt_reach& reach, queue) {
    prompts().end_layer(owner, recipe, policies, due, reach);
  }
  void end_prompt(index_t id, const Recipe& recipe, const planned<Recipe>& policies, bool due,
                  const sequence_state<Recipe>& state, queue) {
    prompts().end(id, recipe, policies, due, state);
  }

  // --- steps ---------------------------------------------------------------------------------------------------------

  void prepare_step(const Recipe&, const batch& step, const conversations<Recipe>&, queue) { steps().prepare(step); }
  void begin_counting(const batch& step, conversations<Recipe>& known) { order_.prepared(step, known); }
  void require_layer(index_t layer, const batch& step, const conversations<Recipe>& known, queue) const {
    order_.require_layer(layer, step, known);
  }
  template <class Q, class E>
  void decode(index_t layer, const Recipe& recipe, const batch& step, const conversations<Recipe>& known,
              const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v,
              const rows_view<float>& out, const rows_view<float>& lse, queue) {
    steps().decode(layer, recipe, step, known, q, k, v, {out, lse});
  }
  void require_decoded(index_t layer, const batch& step, const conversations<Recipe>& known, queue) const {
    order_.require_decoded(layer, step, known);
  }
  template <class E>
  void attend(index_t layer, const Recipe&, const batch& step, const conversations<Recipe>& known,
              const rows_view<const E>& q, const rows_view<float>& out, const rows_view<float>& lse, queue) {
    steps().attend(layer, step, known, q, {out, lse});
  }
  void count_layer(index_t layer, const batch& step, conversations<Recipe>& known, queue) {
    order_.decoded(layer, step, known);
  }
  /// Whether the sequence's step has been prepared and has layers left.
  bool is_under_way(const sequence_state<Recipe>& state, index_t) const {
    return state.step != 0 && state.layers.back().next_position == state.step_began;
  }
  void forget_step(index_t) {}

  // --- drafts --------------------------------------------------------------------------------------------------------

  void prepare_draft(const draft_step& draft, const conversations<Recipe>&, queue) {
    for (const index_t id : draft.step.ids) parts_.drafts.open(id);
  }
  void begin_counting_draft(const draft_step&) {}
  template <class Q, class E>
  void decode_draft(index_t layer, const Recipe&, const draft_step& draft, const conversations<Recipe>& known,
                    const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v,
                    const rows_view<float>& out, const rows_view<float>& lse, queue) {
    steps().draft(layer, draft, known, q, k, v, {out, lse});
  }
  void require_drafted(index_t id, std::uint64_t number) const { parts_.drafts.require_all(id, number); }
  void plan_accepted(const Recipe& recipe, const batch& step, const host_vector<accepted_tokens>& accepted,
                     const conversations<Recipe>& known, queue) {
    steps().plan_accepted(recipe, step, accepted, known);
  }
  void commit_accepted(const Recipe&, const batch& step, conversations<Recipe>& known, queue) {
    steps().commit_accepted(step);
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) order_.decoded(layer, step, known);
  }
  void end_draft(index_t id) { parts_.drafts.forget(id); }

  // --- answers -------------------------------------------------------------------------------------------------------

  auto view(sequence_layer owner) { return parts_.store.view(owner); }
  index_t length(sequence_layer owner, index_t head) const { return parts_.store.lengths(owner)[std::size_t(head)]; }
  host_vector<index_t> positions(sequence_layer owner, index_t head) const {
    return parts_.store.positions(owner, head);
  }
  host_vector<index_t> readable(sequence_layer owner, index_t head) const {
    if (!parts_.roles.follows_recipe(owner.layer)) return positions(owner, head);
    return parts_.read_stage.positions(owner, head, parts_.store);
  }
  const kv_store<layout>& store() const { return parts_.store; }
  kv_store<layout>& store() { return parts_.store; }

  void trace_attended(bool on) { parts_.log.trace(on); }
  const host_vector<host_vector<index_t>>& attended(sequence_layer owner) const { return parts_.log.attended(owner); }
  void trace_lines(bool on) { parts_.prompts.trace(on); }
  const prompt_lines& lines(sequence_layer owner) const { return parts_.prompts.lines(owner); }
  void trace_ranked(bool on) { parts_.traces_ranks = on; }
  const ranked_tokens& ranked(sequence_layer owner) const { return parts_.ranked[owner]; }

  /// Bytes allocated for a sequence.
  offset_t bytes(index_t id, const sequence_state<Recipe>&) const {
    offset_t total = 0;
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
      const sequence_layer owner{layer, id};
      total += parts_.store.bytes(owner) + parts_.first.observer().bytes(owner) + parts_.read_stage.bytes(owner) +
               parts_.prompts.bytes(owner) + parts_.drafts.bytes(owner);
    }
    return total;
  }
  /// The most that a new sequence with these policies and peaks takes.
  capacity upper_bound(const Recipe& recipe, const planned<Recipe>& policies,
                       const host_vector<layer_peak>& peaks) const {
    capacity bound = parts_.store.upper_bound(peaks);
    for (const layer_peak& peak : peaks) {
      bound.bytes += parts_.first.observer().upper_bound(policies, peak.turn) +
                     parts_.read_stage.upper_bound(policies, peak) + parts_.prompts.upper_bound(recipe, peak.turn);
    }
    return bound;
  }
  capacity available() const { return parts_.store.available(); }
  const layer_roles& roles() const { return parts_.roles; }
  offset_t bytes_read(index_t id, const Recipe&, const sequence_state<Recipe>&) const { return parts_.log.bytes(id); }

 private:
  static resources require_workers(resources workers) {
    require(workers != nullptr, "executor", "null", "a pool of threads",
            "pass std::make_shared<tessera::cpu::executor>()");
    return workers;
  }
  prompt_turn<Recipe> prompts() { return prompt_turn<Recipe>(parts_); }
  step_turn<Recipe> steps() { return step_turn<Recipe>(parts_); }

  parts_type parts_;
  step_order<Recipe> order_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
