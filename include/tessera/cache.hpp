// A whole KV cache of one model on the CPU: a recipe over layers and sequences, for engines that have no cache.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "backend/cpu/cache/cache_parts.hpp"
#include "core/host/float_mode.hpp"
#include "core/host/host_vector.hpp"

TESSERA_NAMESPACE_BEGIN

/// Stores, compresses and attends the KV cache of a model by one recipe.
///
/// A turn is: `prefill` a chunk in every layer, and its attention if the engine has none of its own, chunk after chunk;
/// `end_prefill` once; then for each step `prepare_step`, and `decode` in every layer. The next turn begins with the
/// next `prefill`. Keys and queries come after RoPE; positions are counted here and survive every eviction.
/// Errors   bad shapes, unknown sequences and steps out of order throw tessera::error before anything is changed. Where
///          memory runs out, std::bad_alloc, or what else the program's operator new throws: the cache then answers as
///          if it had not been called, and `close` never fails.
/// Threads  one thread calls a cache at a time; the work is spread over the executor. Copies are independent, and so
///          are caches that share an executor: each may be called by a thread of its own, whose stack has 48 KiB or
///          more. A child of fork() may go on with its parent's cache, on the calling thread alone.
/// Floats   calls calculate in the mode that programs begin with (core/host/float_mode.hpp), and leave the caller's as
///          it was.
template <class Recipe>
class cache : public cpu::cache_parts<Recipe> {
  using parts = cpu::cache_parts<Recipe>;

 public:
  using layout = typename Recipe::layout_type;
  static constexpr int k_dim = layout::k_dim, v_dim = layout::v_dim;

  /// Errors   a shape, a recipe or a pair of them that makes no sense; no executor: tessera::error.
  cache(model_shape shape, Recipe recipe, std::shared_ptr<cpu::executor> workers)
      : parts(std::move(shape), std::move(recipe), std::move(workers)) {}

  /// Changes the token budget. The new one takes effect when the schedule retains next, or with the next step that
  /// retrieves by exact scores; where the budget pays for an estimate, at the end of the next turn's prompt.
  /// Errors   a budget that the recipe does not take: tessera::error.
  void set_budget(index_t tokens) {
    const default_float_mode mode;
    Recipe changed = recipe_;
    changed.set_budget(tokens);
    changed.check();
    recipe_ = changed;
    conversations_.follow_budget(recipe_);
  }

  /// Opens an empty sequence and returns its id; ids of closed sequences are used again.
  index_t open() {
    const default_float_mode mode;
    layers_.open(conversations_.next_id());
    return conversations_.open(recipe_);
  }

  /// Opens a sequence that goes on from where another one stands, and returns its id. Both then hold, choose and answer
  /// what the one would have; neither sees what becomes of the other. Rows are copied, finished segments of packed rows
  /// are shared.
  /// Errors   a prompt or a step that is under way; pages that a pool has not: tessera::error.
  index_t fork(index_t id) {
    const default_float_mode mode;
    conversations_.check_fork(id);
    const index_t fresh = conversations_.next_id();
    layers_.fork(id, fresh);
    try {
      return conversations_.fork(id);
    } catch (...) {
      layers_.close(fresh);
      throw;
    }
  }

  void close(index_t id) {
    conversations_.close(id);
    layers_.close(id);
  }

  /// Says how many tokens the turn's prompt will have, before its first chunk: budgets that give shares of it then know
  /// them, and a store with a pool of pages sets aside what the prompt takes at most, or throws. Where the schedule
  /// chooses after chunks, what it sets aside is for chunks no longer than the schedule's. Need not be called.
  void announce(index_t id, index_t tokens) {
    const default_float_mode mode;
    const planned<Recipe> fitted = conversations_.plan_announced(recipe_, id, tokens);
    if constexpr (cpu::layers<Recipe>::in_groups)
      layers_.store().rows().reserve(id, layers_.plan_pages(id, recipe_, fitted, tokens).most);
    conversations_.announce(id, tokens, fitted);
  }

  /// Appends a chunk of the prompt to one layer and lets the scorer observe its queries.
  /// Shapes   k, v [tokens, kv_heads, dim]; q [n_q, q_heads, k_dim], the queries of the chunk's last n_q tokens: all of
  ///          them, or fewer where the scorer needs fewer (its window, or none). boundaries [tokens], for a recipe that
  ///          `needs_segments`: 1 for a token after which a segment of the text ends, else 0; the same in every layer.
  template <class E>
  void prefill(index_t layer, index_t id, const rows_view<const E>& q, const rows_view<const E>& k,
               const rows_view<const E>& v, std::span<const std::uint8_t> boundaries = {}) {
    const default_float_mode mode;
    const sequence_layer owner{layer, id};
    conversations_.check_chunk(recipe_, owner, q, k, v);
    const segment_marks marks = conversations_.check_boundaries(owner, boundaries, k.tokens);
    if (conversations_.chunk_is_due(recipe_, owner, k.tokens)) {
      layers_.end_chunk(owner, conversations_.at(id).policies, conversations_.reach(owner));
      conversations_.judged_chunk(owner);
    }
    if (layer == 0 && conversations_.at(owner).turn_tokens == 0)
      layers_.settle(id);  // before the turn's rows join what is open
    if (layer == 0 && conversations_.at(id).announced == 0) layers_.expect(id, k.tokens);  // for all layers, or none
    layers_.prefill(owner, conversations_.at(id).policies, conversations_.at(owner).next_position, q, k, v,
                    marks);
    conversations_.took_chunk(owner, k.tokens, marks);
  }

  /// Causal attention of the newest q.tokens tokens of a layer over everything that it stores or, where the recipe's
  /// prefill policy chooses lines, over the lines that it chooses by these queries: then pass a whole chunk at once.
  /// Shapes   q [tokens, q_heads, k_dim], out [tokens, q_heads, v_dim], lse [tokens, q_heads] (data null: not wanted).
  template <class E>
  void prefill_attention(index_t layer, index_t id, const rows_view<const E>& q, const rows_view<float>& out,
                         const rows_view<float>& lse = {}) {
    const default_float_mode mode;
    const sequence_layer owner{layer, id};
    conversations_.check_prompt_attention(owner, q, out, lse);
    layers_.prompt_attention(owner, recipe_, conversations_.at(owner).next_position - q.tokens, q, {out, lse});
  }

  /// Passes tokens through one layer once more, for a scorer that wants it (KVzip): they stand behind the prompt,
  /// attend to everything that is stored and to themselves, and are forgotten. What they look at among the `count`
  /// prompt tokens from position `first` on becomes these tokens' scores. After the prompt's last chunk, before
  /// `end_prefill`, as often as wanted.
  /// Shapes   q, k, v, out as those of `prefill` and `prefill_attention`, one query for each key.
  template <class E>
  void reread(index_t layer, index_t id, index_t first, index_t count, const rows_view<const E>& q,
              const rows_view<const E>& k, const rows_view<const E>& v, const rows_view<float>& out) {
    const default_float_mode mode;
    const sequence_layer owner{layer, id};
    conversations_.check_rereading(owner, first, count, q, k, v, out);
    const index_t next = conversations_.at(owner).next_position;
    layers_.reread(owner, conversations_.at(id).policies, {first, first + count, next}, q, k, v, {out, {}});
  }

  /// Says that the turn's prompt has been through a layer, its attention included. What its end needs of this layer
  /// alone is done now: packed rows become segments where their method chooses no tokens, so that a prompt in one chunk
  /// needs one layer's whole rows, not all layers'. Changes no answer; need not be called.
  /// Errors   rows without a basis: tessera::error, and the layer has not ended.
  void end_layer(index_t layer, index_t id) {
    const default_float_mode mode;
    const sequence_layer owner{layer, id};
    conversations_.check_layer_end(owner);
    layers_.end_layer(owner, recipe_);
    conversations_.end_layer(owner);
  }

  /// Ends a turn's prompt: where the schedule says so, every layer chooses anew what it keeps and frees the rest, or
  /// what a filter lets through. The first turn's end also plans what the budget comes to: see `plan`.
  void end_prefill(index_t id) {
    const default_float_mode mode;
    const planned<Recipe> fitted = conversations_.plan_prompt_end(recipe_, id);
    const bool due = recipe_.schedule.due(moment::prompt_end, conversations_.clock_of_prompt_end(id));
    layers_.end_prefill(id, recipe_, fitted, due, conversations_.reach({0, id}));
    conversations_.end_prompt(id, fitted);
  }

  /// What the next step of 1 to 8 tokens does, for every layer's `decode`. boundaries [ids, tokens], for a recipe that
  /// `needs_step_segments`: 1 for a token after which a segment of the text ends, else 0.
  batch prepare_step(const host_vector<index_t>& ids, index_t tokens, std::span<const std::uint8_t> boundaries = {}) {
    const default_float_mode mode;
    const batch step = conversations_.plan_step(recipe_, ids, tokens, most_step_tokens, boundaries);
    for (std::size_t b = 0; b < ids.size(); ++b) {
      try {
        layers_.expect(ids[b], tokens);
      } catch (...) {
        while (b-- > 0) layers_.expect(ids[b], 0);
        throw;
      }
    }
    for (const index_t id : ids) layers_.settle(id);
    return conversations_.begin_step(step);
  }

  /// One layer of a decode step for a batch of sequences: append, retrieve, attend, retain.
  /// Shapes   q [sequences, tokens, q_heads, k_dim], k, v [sequences, tokens, kv_heads, dim], out as q with v_dim, lse
  ///          [sequences, tokens, q_heads] (data null: not wanted). Causal inside the step.
  template <class E>
  void decode(index_t layer, const batch& step, const rows_view<const E>& q, const rows_view<const E>& k,
              const rows_view<const E>& v, const rows_view<float>& out, const rows_view<float>& lse = {}) {
    const default_float_mode mode;
    conversations_.check_step(layer, step, q, k, v, out, lse);
    conversations_.check_order(layer, step);
    layers_.step(layer, recipe_, step, conversations_, q, k, v, {out, lse});
    conversations_.took_step(layer, step);
  }

 private:
  using parts::conversations_, parts::layers_, parts::recipe_;
};

TESSERA_NAMESPACE_END
