// The whole cache of one model on the CPU: a recipe over layers and sequences, for those who have no cache of their
// own.
#pragma once

#include <memory>
#include <vector>

#include "backend/cpu/attend/attend.hpp"
#include "backend/cpu/attend/step_log.hpp"
#include "backend/cpu/choose/first_stage.hpp"
#include "backend/cpu/read/reading.hpp"
#include "backend/cpu/store/kv_store.hpp"
#include "runtime/conversations.hpp"
#include "runtime/layer_roles.hpp"

TESSERA_NAMESPACE_BEGIN
inline namespace TESSERA_HOST_ISA {

/// Stores, compresses and attends the KV cache of a model by one recipe.
///
/// A turn is: `prefill` a chunk in every layer, and its attention if the engine has none of its own, chunk after chunk;
/// `end_prefill` once; then for each step `prepare_step`, and `decode` in every layer. The next turn begins with the next
/// `prefill`. Keys and queries come after RoPE; positions are counted here and survive every eviction.
/// Errors   bad shapes, unknown sequences and steps out of order throw tessera::error before anything is changed.
/// Threads  one thread calls a cache at a time; the work is spread over the executor. Copies are independent.
template <class Recipe>
class cache {
 public:
  using layout = typename Recipe::layout_type;
  static constexpr int k_dim = layout::k_dim;
  static constexpr int v_dim = layout::v_dim;

  cache(model_shape shape, Recipe recipe, std::shared_ptr<cpu::executor> workers)
      : shape_((shape.check(), std::move(shape))),
        recipe_((recipe.check(), std::move(recipe))),
        workers_(std::move(workers)),
        roles_(shape_, recipe_.dense_layers, recipe_.attention.rule),
        conversations_(shape_, recipe_),
        store_(shape_.layers, shape_.kv_heads, cpu::first_stage<Recipe>::with_scores),
        first_(shape_),
        reading_(shape_),
        log_(shape_.layers) {}

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
    const index_t id = conversations_.open(recipe_);
    store_.open(id);
    first_.forget(id);
    reading_.open(id);
    log_.open(id);
    return id;
  }

  void close(index_t id) {
    conversations_.close(id);
    store_.clear(id);
    first_.forget(id);
    reading_.open(id);
  }

  /// Appends a chunk of the prompt to one layer and lets the scorer observe its queries.
  /// Shapes   k, v [tokens, kv_heads, dim]; q [n_q, q_heads, k_dim], the queries of the chunk's last n_q tokens: all of
  ///          them, or fewer where the scorer needs fewer (its window, or none).
  template <class E>
  void prefill(index_t layer, index_t id, const rows_view<const E>& q, const rows_view<const E>& k,
               const rows_view<const E>& v) {
    conversations_.check_chunk(recipe_, layer, id, q, k, v);
    slide(layer, id);
    const index_t first = conversations_.at(id, layer).next_position;
    store_.append(layer, id, k, v, first);
    conversations_.took_chunk(layer, id, k.tokens);
    if (!roles_.follows_recipe(layer)) return;
    first_.observe_prompt(layer, id, store_, policies(id), roles_.rule(layer), q, first + k.tokens, *workers_);
  }

  /// Causal attention of the newest q.tokens tokens of a layer over everything that it stores.
  /// Shapes   q [tokens, q_heads, k_dim], out [tokens, q_heads, v_dim], lse [tokens, q_heads] (data null: not wanted).
  template <class E>
  void prefill_attention(index_t layer, index_t id, const rows_view<const E>& q, const rows_view<float>& out,
                         const rows_view<float>& lse = {}) {
    conversations_.check_prompt_attention(layer, id, q, out);
    const index_t first = conversations_.at(id, layer).next_position - q.tokens;
    cpu::prefill_attention(store_.view(layer, id), cpu::query_rows<E>{q, &first}, roles_.rule(layer),
                           cpu::attention_output{out, lse}, *workers_);
  }

  /// Ends a turn's prompt: where the schedule says so, every layer chooses anew what it keeps and frees the rest, or what
  /// a filter lets through. The first turn's end also plans what the budget comes to: see `plan`.
  void end_prefill(index_t id) {
    const planned<Recipe> fitted = conversations_.plan_prompt_end(recipe_, id);  // may throw: nothing has changed yet
    const bool due = recipe_.schedule.due(moment::prompt_end, conversations_.clock_of_prompt_end(id));
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      slide(layer, id);
      const bool moved = due && roles_.follows_recipe(layer) &&
                         choose_anew(layer, id, fitted, conversations_.at(id, layer).next_position, 0);
      if (roles_.follows_recipe(layer)) reading_.refresh(layer, id, store_, fitted, moved);
    }
    conversations_.end_prompt(id, fitted);
    first_.forget(id);
  }

  /// What the next step of 1 to 8 tokens does, for every layer's `decode`.
  batch prepare_step(const std::vector<index_t>& ids, index_t tokens) {
    const batch step = conversations_.plan_step(recipe_, ids, tokens, most_step_tokens);
    conversations_.begin_step(step);
    return step;
  }

  /// One layer of a decode step for a batch of sequences: append, retrieve, attend, retain.
  /// Shapes   q [sequences, tokens, q_heads, k_dim], k, v [sequences, tokens, kv_heads, dim], out as q with v_dim, lse
  ///          [sequences, tokens, q_heads] (data null: not wanted). Causal inside the step.
  template <class E>
  void decode(index_t layer, const batch& step, const rows_view<const E>& q, const rows_view<const E>& k,
              const rows_view<const E>& v, const rows_view<float>& out, const rows_view<float>& lse = {}) {
    conversations_.check_step(layer, step, q, k, v, out);
    conversations_.check_order(layer, step);
    for (index_t b = 0; b < step.sequences(); ++b) {
      step_one(layer, step, step.ids[std::size_t(b)], one(q, b), one(k, b), one(v, b), one(out, b), one(lse, b));
    }
    conversations_.took_step(layer, step);
  }

  /// The logical position of the next token: tokens seen so far in layer 0.
  index_t next_position(index_t id) const { return conversations_.at(id).front().next_position; }

  /// Tokens that a layer stores for one kv_head, and their logical positions, ascending.
  index_t length(index_t layer, index_t id, index_t head) const {
    conversations_.at(id, layer);
    return store_.lengths(layer, id)[std::size_t(head)];
  }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const {
    std::vector<index_t> result;
    for (index_t i = 0; i < length(layer, id, head); ++i) result.push_back(store_.position(layer, id, head, i));
    return result;
  }

  /// What the budget comes to in this conversation, since its first prompt ended.
  stage_plan plan(index_t id) const { return policies(id).plan; }

  /// Logical positions that this turn's steps may read of one kv_head: what a filter let through and what was decoded
  /// since; everything stored where there is no filter.
  std::vector<index_t> readable(index_t layer, index_t id, index_t head) const {
    if (!roles_.follows_recipe(layer)) return positions(layer, id, head);
    conversations_.at(id, layer);
    return reading_.positions(layer, id, head, store_);
  }

  /// Whether decode steps write down which positions they attend (see `attended`); off by default.
  void trace_attended(bool on) { log_.trace(on); }
  /// Positions that the last traced decode step of a layer attended, by kv_head.
  const std::vector<std::vector<index_t>>& attended(index_t layer, index_t id) const {
    conversations_.at(id, layer);
    return log_.attended(layer, id);
  }

  /// A view of what a layer stores, for engines with attention of their own. Valid until the cache changes.
  auto view(index_t layer, index_t id) {
    conversations_.at(id, layer);
    return store_.view(layer, id);
  }

  /// Bytes that a sequence holds in all layers: rows, positions, scores, remembered queries; candidates, index and sums of
  /// the second stage.
  offset_t bytes(index_t id) const {
    conversations_.at(id);
    offset_t total = 0;
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      total += store_.bytes(layer, id) + first_.bytes(layer, id) + reading_.bytes(layer, id);
    }
    return total;
  }

  /// Distinct bytes of stored K, V and scores, of candidates, index and sums, that the last decode step of a sequence
  /// touched, summed over layers. What a step writes is not counted.
  offset_t bytes_read(index_t id) const {
    conversations_.at(id);
    return log_.bytes(id);
  }

  /// Bytes of K and V of an uncompressed sequence of that many tokens.
  offset_t full_bytes(index_t tokens) const {
    return offset_t(shape_.layers) * shape_.kv_heads * tokens * layout::token_bytes();
  }

 private:
  const planned<Recipe>& policies(index_t id) const { return conversations_.at(id).policies; }

  template <class T>
  static rows_view<T> one(rows_view<T> rows, index_t sequence) {
    rows.data += rows.data ? sequence * rows.sequence_stride : 0;
    rows.sequences = 1;
    return rows;
  }

  /// Drops what a sliding layer has left behind, now and then.
  void slide(index_t layer, index_t id) {
    const index_t window = roles_.window(layer);
    if (window == 0 || store_.longest(layer, id) <= window + spare_room(window)) return;
    store_.keep(layer, id, cpu::newest(store_.lengths(layer, id), window), *workers_);
  }

  /// Keeps, or lets through, the budget's worth of what a layer stores. Returns whether what steps may read has moved.
  /// `next`: the position of the next token; `tail`: so many of the newest tokens are kept in any case.
  bool choose_anew(index_t layer, index_t id, const planned<Recipe>& fitted, index_t next, index_t tail) {
    const selection* chosen = first_.choose(layer, id, store_, fitted, roles_.rule(layer), next, tail, *workers_);
    if (!chosen) return false;
    if constexpr (Recipe::retain_type::drops) return store_.keep(layer, id, *chosen, *workers_);
    reading_.pass(layer, id, *chosen);
    return true;
  }
  void evict(index_t layer, index_t id, index_t next, index_t tail) {
    const bool moved = choose_anew(layer, id, policies(id), next, tail);
    reading_.refresh(layer, id, store_, policies(id), moved);
  }

  template <class E>
  void step_one(index_t layer, const batch& step, index_t id, const rows_view<const E>& q, const rows_view<const E>& k,
                const rows_view<const E>& v, const rows_view<float>& out, const rows_view<float>& lse) {
    const index_t first = conversations_.at(id, layer).next_position;
    const logit_rule rule = roles_.rule(layer);
    const cpu::query_rows<E> queries{q, &first};
    store_.append(layer, id, k, v, first);
    if (!roles_.follows_recipe(layer)) {
      slide(layer, id);
      return attend(layer, id, store_.view(layer, id), queries, rule, nullptr, 0, {out, lse});
    }
    reading_.append(layer, id, store_, k.tokens);
    if (step.evicts_first) evict(layer, id, first + k.tokens, k.tokens);
    const auto view = reading_.view(layer, id, store_);
    offset_t bytes = 0;
    const selection_view* read = reading_.choose(layer, id, view, queries, rule, policies(id), bytes, *workers_);
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      bytes += reading_.side_bytes(layer, id, view.length(0, h), read ? read->count(h) : view.length(0, h));
    }
    attend(layer, id, view, queries, rule, read, bytes, {out, lse});
    reading_.complete(layer, id, view, q.tokens, out);
    log_.add_bytes(layer, id,
                   first_.observe_step(layer, id, store_, policies(id), rule, q, first + k.tokens, *workers_));
    if (step.evicts_last) evict(layer, id, first + k.tokens, 0);
  }

  template <class View, class E>
  void attend(index_t layer, index_t id, const View& view, const cpu::query_rows<E>& queries, const logit_rule& rule,
              const selection_view* read, offset_t bytes, const cpu::attention_output& output) {
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      bytes += (read ? read->count(h) : view.length(0, h)) * layout::token_bytes();
    }
    cpu::decode_attention(view, queries, rule, read, output, *attending_, *workers_);
    log_.note(layer, id, view, read, bytes);
  }

  model_shape shape_;
  Recipe recipe_;
  std::shared_ptr<cpu::executor> workers_;
  layer_roles roles_;
  conversations<Recipe> conversations_;
  cpu::kv_store<layout> store_;
  cpu::first_stage<Recipe> first_;
  cpu::reading<Recipe> reading_;
  cpu::step_log log_;
  cpu::scratch<cpu::decode_workspace> attending_;
};

}  // namespace TESSERA_HOST_ISA
TESSERA_NAMESPACE_END
