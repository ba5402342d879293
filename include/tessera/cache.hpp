// The whole cache of one model on the CPU: a recipe over layers and sequences, for those who have no cache of their
// own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/cpu/cache/layers.hpp"
#include "runtime/conversations.hpp"

TESSERA_NAMESPACE_BEGIN
inline namespace TESSERA_HOST_ISA {

/// Stores, compresses and attends the KV cache of a model by one recipe.
///
/// A turn is: `prefill` a chunk in every layer, and its attention if the engine has none of its own, chunk after chunk;
/// `end_prefill` once; then for each step `prepare_step`, and `decode` in every layer. The next turn begins with the next
/// `prefill`. Keys and queries come after RoPE; positions are counted here and survive every eviction.
/// Errors   bad shapes, unknown sequences and steps out of order throw tessera::error before anything is changed. Where
///          memory runs out, std::bad_alloc: the cache then answers as if it had not been called, and `close` never fails.
/// Threads  one thread calls a cache at a time; the work is spread over the executor. Copies are independent.
template <class Recipe>
class cache {
 public:
  using layout = typename Recipe::layout_type;
  static constexpr int k_dim = layout::k_dim, v_dim = layout::v_dim;

  cache(model_shape shape, Recipe recipe, std::shared_ptr<cpu::executor> workers)
      : shape_((shape.check(), std::move(shape))),
        recipe_((recipe.check(), std::move(recipe))),
        conversations_(shape_, recipe_),
        layers_(shape_, recipe_, std::move(workers)) {}

  const model_shape& shape() const { return shape_; }
  const Recipe& recipe() const { return recipe_; }

  /// Changes the token budget; it counts from the next time the schedule retains, or the next step that retrieves by
  /// exact scores. Where the budget pays for an estimate, it counts from the end of the next turn's prompt.
  void set_budget(index_t tokens) {
    Recipe changed = recipe_;
    changed.set_budget(tokens);
    changed.check();
    recipe_ = changed;
    conversations_.follow_budget(recipe_);
  }

  /// Opens an empty sequence and returns its id; ids of closed sequences are used again.
  index_t open() {
    layers_.open(conversations_.next_id());
    return conversations_.open(recipe_);
  }

  void close(index_t id) {
    conversations_.close(id);
    layers_.close(id);
  }

  /// Appends a chunk of the prompt to one layer and lets the scorer observe its queries.
  /// Shapes   k, v [tokens, kv_heads, dim]; q [n_q, q_heads, k_dim], the queries of the chunk's last n_q tokens: all of
  ///          them, or fewer where the scorer needs fewer (its window, or none). boundaries [tokens], for a recipe that
  ///          `needs_segments`: 1 for a token after which a segment of the text ends, else 0; the same in every layer.
  template <class E>
  void prefill(index_t layer, index_t id, const rows_view<const E>& q, const rows_view<const E>& k,
               const rows_view<const E>& v, std::span<const std::uint8_t> boundaries = {}) {
    conversations_.check_chunk(recipe_, layer, id, q, k, v);
    const segment_marks marks = conversations_.check_boundaries(layer, id, boundaries, k.tokens);
    layers_.prefill(layer, id, conversations_.at(id).policies, conversations_.at(id, layer).next_position, q, k, v,
                    marks);
    conversations_.took_chunk(layer, id, k.tokens, marks);
  }

  /// Causal attention of the newest q.tokens tokens of a layer over everything that it stores or, where the recipe's prefill
  /// policy chooses lines, over the lines that it chooses by these queries: then pass a whole chunk at once.
  /// Shapes   q [tokens, q_heads, k_dim], out [tokens, q_heads, v_dim], lse [tokens, q_heads] (data null: not wanted).
  template <class E>
  void prefill_attention(index_t layer, index_t id, const rows_view<const E>& q, const rows_view<float>& out,
                         const rows_view<float>& lse = {}) {
    conversations_.check_prompt_attention(layer, id, q, out, lse);
    layers_.prompt_attention(layer, id, recipe_, conversations_.at(id, layer).next_position - q.tokens, q, {out, lse});
  }

  /// Ends a turn's prompt: where the schedule says so, every layer chooses anew what it keeps and frees the rest, or what
  /// a filter lets through. The first turn's end also plans what the budget comes to: see `plan`.
  void end_prefill(index_t id) {
    const planned<Recipe> fitted = conversations_.plan_prompt_end(recipe_, id);
    const bool due = recipe_.schedule.due(moment::prompt_end, conversations_.clock_of_prompt_end(id));
    layers_.end_prefill(id, recipe_, fitted, due, conversations_.at(id).front().next_position);
    conversations_.end_prompt(id, fitted);
  }

  /// What the next step of 1 to 8 tokens does, for every layer's `decode`.
  batch prepare_step(const std::vector<index_t>& ids, index_t tokens) {
    return conversations_.begin_step(conversations_.plan_step(recipe_, ids, tokens, most_step_tokens));
  }

  /// One layer of a decode step for a batch of sequences: append, retrieve, attend, retain.
  /// Shapes   q [sequences, tokens, q_heads, k_dim], k, v [sequences, tokens, kv_heads, dim], out as q with v_dim, lse
  ///          [sequences, tokens, q_heads] (data null: not wanted). Causal inside the step.
  template <class E>
  void decode(index_t layer, const batch& step, const rows_view<const E>& q, const rows_view<const E>& k,
              const rows_view<const E>& v, const rows_view<float>& out, const rows_view<float>& lse = {}) {
    conversations_.check_step(layer, step, q, k, v, out, lse);
    conversations_.check_order(layer, step);
    layers_.step(layer, recipe_, step, conversations_, q, k, v, {out, lse});
    conversations_.took_step(layer, step);
  }

  /// The logical position of the next token: tokens seen so far in layer 0.
  index_t next_position(index_t id) const { return conversations_.at(id).front().next_position; }

  /// Tokens that a layer stores for one kv_head, and their logical positions, ascending.
  index_t length(index_t layer, index_t id, index_t head) const {
    conversations_.check_head(layer, id, head);
    return layers_.store().lengths(layer, id)[std::size_t(head)];
  }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const {
    conversations_.check_head(layer, id, head);
    return layers_.store().positions(layer, id, head);
  }

  /// What the budget comes to in this conversation, since its first prompt ended.
  stage_plan plan(index_t id) const { return conversations_.at(id).policies.plan; }

  /// Logical positions that this turn's steps may read of one kv_head: what a filter let through and what was decoded
  /// since; everything stored where there is no filter.
  std::vector<index_t> readable(index_t layer, index_t id, index_t head) const {
    conversations_.check_head(layer, id, head);
    return layers_.readable(layer, id, head);
  }

  /// Whether decode steps write down which positions they attend; off by default.
  void trace_attended(bool on) { layers_.log().trace(on); }
  /// Positions that the last traced decode step of a layer attended, by kv_head.
  const std::vector<std::vector<index_t>>& attended(index_t layer, index_t id) const {
    conversations_.at(id, layer);
    return layers_.log().attended(layer, id);
  }

  /// Whether prompts write down which lines they attend; off by default.
  void trace_lines(bool on) { layers_.trace_lines(on); }
  /// Lines of the last traced prompt chunk of a layer; no heads where all of its rows attend everything.
  const prompt_lines& lines(index_t layer, index_t id) const {
    conversations_.at(id, layer);
    return layers_.lines(layer, id);
  }

  /// Whether the first stage writes down what it ranked; off by default.
  void trace_ranked(bool on) { layers_.trace_ranks(on); }
  /// Tokens that competed in the last traced choice of a layer, and their scores, by kv_head; nothing where none was due.
  const cpu::ranked_tokens& ranked(index_t layer, index_t id) const {
    conversations_.at(id, layer);
    return layers_.ranked(layer, id);
  }

  /// A view of what a layer stores, for engines with attention of their own. Valid until the cache changes.
  auto view(index_t layer, index_t id) {
    conversations_.at(id, layer);
    return layers_.store().view(layer, id);
  }

  /// Bytes that a sequence holds in all layers: rows and columns, remembered queries, what the second stage keeps.
  offset_t bytes(index_t id) const {
    conversations_.at(id);
    return layers_.bytes(id);
  }

  /// Distinct bytes of stored K, V and scores, of candidates, index and sums, that the last decode step of a sequence
  /// touched, summed over layers. What a step writes is not counted.
  offset_t bytes_read(index_t id) const {
    conversations_.at(id);
    return layers_.log().bytes(id);
  }

  /// Bytes of K and V of an uncompressed sequence of that many tokens.
  offset_t full_bytes(index_t tokens) const {
    return offset_t(shape_.layers) * shape_.kv_heads * tokens * layout::token_bytes();
  }

 private:
  model_shape shape_;
  Recipe recipe_;
  conversations<Recipe> conversations_;
  cpu::layers<Recipe> layers_;
};

}  // namespace TESSERA_HOST_ISA
TESSERA_NAMESPACE_END
