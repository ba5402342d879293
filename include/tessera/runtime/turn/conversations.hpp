// The host's state of a cache's conversations: which are open, how far each has come, and when the first stage chooses.
// The caches of both backends use it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "../../core/closed_ids.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/model_shape.hpp"
#include "../../core/sequence_layer.hpp"
#include "../../planned.hpp"
#include "mixed_batch.hpp"
#include "sequence_state.hpp"
#include "truncation.hpp"

TESSERA_NAMESPACE_BEGIN

/// Counts turns, steps and positions, and checks that calls come in order. Nothing changes when a check throws.
template <class Recipe>
class conversations {
 public:
  using layer = layer_progress;
  using conversation = sequence_state<Recipe>;

  conversations(const model_shape& shape, const Recipe& recipe) : shape_(shape), none_(recipe, 0) {
    recipe.retain.check_model(shape.layers, shape.kv_heads);
  }

  /// The id that `open` gives next: the lowest closed one, or a new one.
  index_t next_id() const { return closed_.empty() ? size() : closed_.lowest(); }
  /// Errors   all of `capacity` sequences are open; 0: there is no such bound.
  void require_room(index_t capacity) const {
    require(capacity == 0 || next_id() < capacity, "open sequences", next_id(), "fewer before another is opened",
            "close one, or raise cache_options::sequences");
  }
  /// Opens an empty conversation.   Returns  its id.
  index_t open(const Recipe& recipe, const own_budgets<Recipe>& budgets) {
    return insert(next_id(),
                  conversation(true, budgets, planned<Recipe>(budgets.fitted(recipe, {}), 0), shape_.layers));
  }
  /// Opens a copy of a conversation. Call `check_fork` and `require_room` first.   Returns  its id.
  index_t fork(index_t id) {
    conversation copy = sequence(id);
    copy.step = 0;  // a step of the copy must be prepared before it is decoded
    return insert(next_id(), std::move(copy));
  }
  /// Opens a conversation that was saved. Call `require_room` first.   Returns  its id.
  index_t adopt(conversation&& loaded) { return insert(next_id(), std::move(loaded)); }
  void close(index_t id) {
    find(id) = conversation(false, {}, none_, 0);
    closed_.add(id);
  }

  const conversation& sequence(index_t id) const {
    require_open(id);
    return all_[std::size_t(id)];
  }
  const layer& progress(sequence_layer owner) const {
    if (owner.layer < 0 || owner.layer >= shape_.layers) {
      fail("layer", owner.layer, "0 to " + std::to_string(shape_.layers - 1), "pass a layer of the model");
    }
    return sequence(owner.id).layers[std::size_t(owner.layer)];
  }
  void check_head(sequence_layer owner, index_t head) const {
    progress(owner);
    require(head >= 0 && head < shape_.kv_heads, "kv_head", head, "0 to " + std::to_string(shape_.kv_heads - 1),
            "pass a kv_head of the model");
  }
  /// A layer's progress.   Errors   `end_layer` has ended the layer's prompt: tessera::error.
  const layer& require_not_ended(sequence_layer owner) const {
    const layer& state = progress(owner);
    require(!state.ended, "layer of this turn's prompt", owner.layer, "one that end_layer has not ended",
            "call end_layer behind the layer's last chunk and its attention");
    return state;
  }
  bool is_open(index_t id) const { return all_[std::size_t(id)].open; }
  index_t size() const { return index_t(all_.size()); }

  /// Errors   layers of a prompt have chosen, by the present budget, and others have not: tessera::error.
  void check_budget_change() const {
    for (const conversation& c : all_) {
      const bool ended = chooses_by_layer<Recipe> &&
                         std::any_of(c.layers.begin(), c.layers.end(), [](const layer& state) { return state.ended; });
      require(!ended, "prompts that have ended in some layers", 1, "0", "set a budget behind end_prefill");
    }
  }
  void follow_budget(const Recipe& recipe) {
    none_.follow(recipe);
    for (conversation& c : all_) c.follow_budget(recipe);
  }
  /// A sequence whose budgets are shares gets those of a step that takes `tokens` more; 0: those of the last step.
  void follow_shares(const Recipe& recipe, index_t id, index_t tokens) { find(id).follow_shares(recipe, tokens); }

  // --- prompts -------------------------------------------------------------------------------------------------------

  template <class Q, class E>
  void check_chunk(const Recipe& recipe, sequence_layer owner, const rows_view<const Q>& q, const rows_view<const E>& k,
                   const rows_view<const E>& v) const {
    require_not_ended(owner);
    shape_.check_rows(q, k, v, k_dim, v_dim);
    const index_t given = first_other(1, k.sequences, v.sequences, q.tokens <= 0 ? 1 : q.sequences);
    require(given == 1, "sequences of a prompt chunk", given, "1", "prefill one sequence at a time");
    require(k.tokens >= 1, "tokens of a prompt chunk", k.tokens, "at least 1", "skip empty chunks");
    recipe.require_queries(q.tokens, k.tokens);
    sequence(owner.id).check_chunk_tokens(owner.layer, k.tokens);
  }
  /// The segments of a chunk's new tokens; `boundaries` are read only where the recipe needs them.
  segment_marks check_boundaries(sequence_layer owner, std::span<const std::uint8_t> boundaries, index_t tokens) const {
    if constexpr (!Recipe::needs_segments) return {};
    require_boundaries(boundaries, tokens);
    return {progress(owner).text, boundaries.data()};
  }
  /// The segments of the tokens of a step's b-th sequence. Without boundaries in steps, segments end by their length.
  segment_marks step_marks(index_t layer_index, const batch& step, index_t b) const {
    return {progress({layer_index, step.ids[std::size_t(b)]}).text,
            step.boundaries.empty() ? nullptr : step.boundaries.data() + offset_t(b) * step.tokens};
  }
  void took_chunk(sequence_layer owner, index_t tokens, const segment_marks& marks = {}) {
    layer& state = find(owner.id).layers[std::size_t(owner.layer)];
    state.next_position += tokens;
    state.turn_tokens += tokens;
    if constexpr (Recipe::needs_segments) state.text.advance(marks.boundaries, tokens);
  }
  template <class E, class Out>
  void check_prompt_attention(sequence_layer owner, const rows_view<const E>& q, const rows_view<Out>& out,
                              const rows_view<float>& lse) const {
    const layer& state = require_not_ended(owner);
    shape_.check_output(q, out, lse, k_dim, v_dim);
    require(q.data != nullptr, "memory of q", "null", "memory behind it", "pass the rows themselves");
    require(q.sequences == 1, "sequences of a prompt chunk", q.sequences, "1",
            "pass the queries of one sequence at a time");
    require(q.tokens >= 1 && q.tokens <= state.turn_tokens, "queries of a prompt chunk", q.tokens,
            "1 to the tokens of this turn, which are " + std::to_string(state.turn_tokens),
            "call prefill for the chunk first");
  }

  /// The policies of a new conversation whose prompt will have `tokens` tokens.
  static planned<Recipe> plan_first(const Recipe& recipe, index_t tokens) {
    return check_announced(tokens), planned<Recipe>(recipe, tokens);
  }
  /// The policies of a conversation whose next prompt will have `tokens` tokens.
  planned<Recipe> plan_announced(const Recipe& recipe, index_t id, index_t tokens) const {
    const conversation& c = sequence(id);
    check_announced(tokens);
    for (const layer& state : c.layers) {
      require(state.turn_tokens == 0, "tokens of this turn", state.turn_tokens, "0",
              "announce a prompt before its first chunk");
    }
    c.front().require_positions(tokens);
    return c.plan(recipe, c.front().next_position + tokens);
  }
  void announce(index_t id, index_t tokens, const planned<Recipe>& policies) {
    conversation& c = find(id);
    c.announced = tokens;
    c.announced_at = c.front().next_position;
    c.policies = policies;
  }

  prompt_reach reach(sequence_layer owner) const { return progress(owner).reach(); }
  /// Whether a layer chooses among its prompt tokens before `tokens` more are appended.
  bool chunk_is_due(const Recipe& recipe, sequence_layer owner, index_t tokens) const {
    if constexpr (Recipe::schedule_type::fires_at(moment::chunk_end)) {
      const layer& state = progress(owner);
      turn_clock now{sequence(owner.id).now.turn + 1, 0};
      now.waiting = state.turn_tokens - state.judged;
      now.coming = tokens;
      return sequence(owner.id).policies.first.budget.knows_shares() && recipe.schedule.due(moment::chunk_end, now);
    }
    return false;
  }
  /// When the end of a chunk chooses: how many of the prompt's newest tokens the next choice considers once more.
  index_t reconsidered_tokens(sequence_layer owner) const {
    if constexpr (Recipe::retain_type::settles) {
      const auto& first = sequence(owner.id).policies.first;
      const layer& state = progress(owner);
      return (std::min)(state.turn_tokens - state.judged, first.scorer.protected_tail(first.budget.tokens));
    }
    return 0;
  }
  void ended_chunk(sequence_layer owner, index_t reconsidered) {
    find(owner.id).layers[std::size_t(owner.layer)].end_chunk(reconsidered);
  }

  template <class Q, class E, class Out>
  void check_rereading(sequence_layer owner, index_t first, index_t count, const rows_view<const Q>& q,
                       const rows_view<const E>& k, const rows_view<const E>& v, const rows_view<Out>& out) const {
    const layer& state = require_not_ended(owner);
    shape_.check_rows(q, k, v, k_dim, v_dim);
    shape_.check_output(q, out, rows_view<float>{}, k_dim, v_dim);
    const index_t given = first_other(1, q.sequences, k.sequences, v.sequences);
    require(given == 1, "sequences of a text that is read again", given, "1", "read one sequence again at a time");
    require(k.tokens >= 1 && q.tokens == k.tokens, "queries of a text that is read again", q.tokens,
            "one for each key, which are " + std::to_string(k.tokens) + ", at least 1",
            "pass q, k and v of the same tokens");
    state.require_positions(k.tokens);
    state.require_rereading(first, count);
  }

  void set_scores(sequence_layer owner, index_t first, index_t tokens) {
    layer& state = find(owner.id).layers[std::size_t(owner.layer)];
    state.scored = (std::max)(state.scored, first + tokens);
  }

  /// Errors   a layer without prompt tokens, or with fewer than announced, or already ended: tessera::error.
  void check_layer_end(sequence_layer owner) const {
    sequence(owner.id).require_whole_prompt(require_not_ended(owner));
  }
  void end_layer(sequence_layer owner) { find(owner.id).layers[std::size_t(owner.layer)].ended = true; }
  /// The policies of a conversation whose prompt has ended in this layer.
  planned<Recipe> plan_layer_end(const Recipe& recipe, sequence_layer owner) const {
    return sequence(owner.id).plan(recipe, progress(owner).next_position);
  }

  /// The policies of a conversation whose prompt ends now.
  /// Errors   an empty prompt, or layers with different prompts: tessera::error.
  planned<Recipe> plan_prompt_end(const Recipe& recipe, index_t id) const {
    const conversation& c = sequence(id);
    for (const layer& state : c.layers) {
      require(state.next_position == c.front().next_position, "tokens of a layer", state.next_position,
              "those of layer 0, which are " + std::to_string(c.front().next_position),
              "prefill every layer with every chunk before the prompt ends");
    }
    c.require_whole_prompt(c.front());
    return c.plan(recipe, c.front().next_position);
  }
  turn_clock clock_of_prompt_end(index_t id) const { return {sequence(id).now.turn + 1, 0}; }
  void end_prompt(index_t id, const planned<Recipe>& policies) {
    conversation& c = find(id);
    c.policies = c.ended_policies = policies;
    c.now = {c.now.turn + 1, 0};
    c.step = 0;
    c.step_began = -1;
    c.answer_began = c.front().next_position;
    c.announced = 0;
    c.is_cut = false;
    for (layer& state : c.layers) {
      state.turn_tokens = state.judged = state.reconsidered_tokens = 0, state.ended = false;
      state.answer_text = state.text;
    }
  }

  // --- going back ----------------------------------------------------------------------------------------------------

  /// See truncation.hpp. `settled`: the smallest position that the backend's parts allow.
  truncation plan_truncation(index_t id, index_t position, index_t settled) const {
    return tessera::plan_truncation(sequence(id), position, settled);
  }
  void truncate(index_t id, const truncation& plan) { carry_out(plan, find(id)); }
  void forget_step(index_t id) { find(id).forget_step(); }

  // --- steps ---------------------------------------------------------------------------------------------------------

  /// A step of `tokens` tokens of these conversations, whose schedules must agree. `boundaries` [ids, tokens] are read
  /// only where the recipe needs them in steps.
  batch plan_step(const Recipe& recipe, batch step, index_t max_tokens_of_step,
                  std::span<const std::uint8_t> boundaries = {}) const {
    const host_vector<index_t>& ids = step.ids;
    step.check_tokens(max_tokens_of_step);
    if constexpr (Recipe::needs_step_segments) {
      require_boundaries(boundaries, step.sequences() * step.tokens);
      step.boundaries.assign(boundaries.begin(), boundaries.end());
    }
    batch::require_different(ids);
    for (std::size_t b = 0; b < ids.size(); ++b) {
      const conversation& c = sequence(ids[b]);
      const index_t tokens = step.tokens_of(index_t(b));
      c.check_step(ids[b], tokens);
      const turn_clock then = c.step_clock(tokens);
      const bool first = due(recipe, moment::step_begin, then), last = due(recipe, moment::step_end, then);
      require(b == 0 || (first == step.evicts_first && last == step.evicts_last), "sequence id in a batch", ids[b],
              "one whose schedule is due when that of the others is",
              "step the sequences in batches of those that are due and those that are not");
      step.evicts_first = first;
      step.evicts_last = last;
    }
    return step;
  }
  /// Errors   a sequence whose steps read fewer tokens than the step has: tessera::error.
  void check_reads(const Recipe& recipe, const batch& step) const {
    if constexpr (Recipe::retrieve_type::retrieves && !Recipe::retrieve_type::estimates &&
                  !Recipe::retain_type::plans) {
      for (index_t b = 0; b < step.sequences(); ++b) {
        const index_t read = sequence(step.ids[std::size_t(b)]).policies.plan.read, tokens = step.tokens_of(b);
        require(recipe.retrieve.mean_block() > 0 || read >= tokens, "budget", read,
                "at least the tokens of the step, which are " + std::to_string(tokens),
                "raise the budget: a step of several tokens reads them all");
      }
    }
  }
  /// A number for the next step, or draft, of the cache and its copies.
  std::uint64_t next_number() { return ++*steps_; }
  batch begin_step(batch step) {
    step.number = next_number();
    for (index_t b = 0; b < step.sequences(); ++b) {
      conversation& c = find(step.ids[std::size_t(b)]);
      c.step = step.number;
      c.now = c.step_clock(step.tokens_of(b));
      c.step_began = c.front().next_position;
      c.step_tokens = step.tokens_of(b);
    }
    return step;
  }

  /// Errors   a chunk of a mixed batch that its sequence cannot take: tessera::error.
  void check_chunks(const mixed_batch& work, std::span<const std::uint8_t> boundaries) const {
    if constexpr (Recipe::needs_segments) require_boundaries(boundaries, work.rows());
    for (const batch_item& item : work.items) {
      for (index_t l = 0; item.is_prompt && l < shape_.layers; ++l) {
        require_not_ended({l, item.id});
        sequence(item.id).check_chunk_tokens(l, item.tokens);
      }
      sequence(item.id).check_even_layers();
    }
  }
  /// One layer of a step that `begin_step` began.
  template <class Q, class E, class Out>
  void check_step(index_t layer_index, const batch& step, const rows_view<const Q>& q, const rows_view<const E>& k,
                  const rows_view<const E>& v, const rows_view<Out>& out, const rows_view<float>& lse) const {
    check_step_rows(shape_, step, q, k, v, k_dim, v_dim);
    check_queries(layer_index, step, q, out, lse);
  }
  /// One layer of a draft.
  template <class Q, class E, class Out>
  void check_draft(index_t layer_index, const batch& step, const rows_view<const Q>& q, const rows_view<const E>& k,
                   const rows_view<const E>& v, const rows_view<Out>& out, const rows_view<float>& lse) const {
    check_step_rows(shape_, step, q, k, v, k_dim, v_dim);
    check_query_rows(shape_, step, q, out, lse, k_dim, v_dim);
    progress({layer_index, step.ids.front()});
  }
  /// The queries of one layer of a step that `begin_step` began.
  template <class E, class Out>
  void check_queries(index_t layer_index, const batch& step, const rows_view<const E>& q, const rows_view<Out>& out,
                     const rows_view<float>& lse) const {
    check_query_rows(shape_, step, q, out, lse, k_dim, v_dim);
    for (index_t b = 0; b < step.sequences(); ++b) {
      const index_t id = step.ids[std::size_t(b)];
      require(progress({layer_index, id}).turn_tokens == 0, "tokens since the prompt began",
              progress({layer_index, id}).turn_tokens, "0", "finish a step before the next prompt begins");
      if (step.number == 0 || step.number != sequence(id).step || step.tokens_of(b) != sequence(id).step_tokens) {
        fail("step of sequence " + std::to_string(id), step.number, "the one that prepare_step returned last for it",
             "call prepare_step before the layers of a step");
      }
    }
  }
  void took_step(index_t layer_index, const batch& step) {
    for (index_t b = 0; b < step.sequences(); ++b) {
      layer& state = find(step.ids[std::size_t(b)]).layers[std::size_t(layer_index)];
      if constexpr (Recipe::needs_segments)
        state.text.advance(step_marks(layer_index, step, b).boundaries, step.tokens_of(b));
      state.next_position += step.tokens_of(b);
    }
  }

 private:
  static constexpr int k_dim = Recipe::layout_type::k_dim, v_dim = Recipe::layout_type::v_dim;

  static void check_announced(index_t tokens) {
    require(tokens >= 1 && tokens <= max_tokens, "tokens of the prompt", tokens, value_range{1, max_tokens}.text(),
            "say how long the turn's prompt will be");
  }
  index_t insert(index_t id, conversation&& added) {
    if (id == size()) {
      closed_.reserve(all_.size() + 1);
      all_.push_back(std::move(added));
    } else {
      closed_.pop_lowest();
      all_[std::size_t(id)] = std::move(added);
    }
    return id;
  }
  void require_open(index_t id) const {
    require(id >= 0 && id < index_t(all_.size()) && all_[std::size_t(id)].open, "sequence", id,
            "an id that open() returned and close() has not taken back", "open a sequence first");
  }
  conversation& find(index_t id) {
    require_open(id);
    return all_[std::size_t(id)];
  }
  static bool due(const Recipe& recipe, moment now, const turn_clock& then) {
    return Recipe::schedule_type::fires_at(now) && recipe.schedule.due(now, then);
  }

  model_shape shape_;
  planned<Recipe> none_;
  host_vector<conversation> all_;
  closed_ids closed_;
  /// Copies of a cache share the counter, so that none decodes a step of another.
  std::shared_ptr<std::atomic<std::uint64_t>> steps_ = std::make_shared<std::atomic<std::uint64_t>>(0);
};

TESSERA_NAMESPACE_END
