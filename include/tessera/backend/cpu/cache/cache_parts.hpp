// What a cache on the CPU is made of, and what it answers.
#pragma once

#include <memory>

#include "../../../core/error.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../runtime/turn/conversations.hpp"
#include "layers.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Conversations and layers of one recipe: `cache` puts their calls in order.
template <class Recipe>
class cache_parts {
 public:
  using layout = typename Recipe::layout_type;

  const model_shape& shape() const { return shape_; }
  const Recipe& recipe() const { return recipe_; }

  /// The logical position of the next token: tokens seen so far in layer 0.
  index_t next_position(index_t id) const { return conversations_.at(id).front().next_position; }

  /// Tokens that a layer stores for one kv_head, and their logical positions, ascending.
  index_t length(index_t layer, index_t id, index_t head) const {
    conversations_.check_head({layer, id}, head);
    return layers_.store().lengths({layer, id})[std::size_t(head)];
  }
  host_vector<index_t> positions(index_t layer, index_t id, index_t head) const {
    conversations_.check_head({layer, id}, head);
    return layers_.store().positions({layer, id}, head);
  }

  /// What the budget comes to in this conversation, since its first prompt ended.
  stage_plan plan(index_t id) const { return conversations_.at(id).policies.plan; }

  /// Logical positions that this turn's steps may read of one kv_head: what a filter let through and what was decoded
  /// since; everything stored where there is no filter.
  host_vector<index_t> readable(index_t layer, index_t id, index_t head) const {
    conversations_.check_head({layer, id}, head);
    return layers_.readable({layer, id}, head);
  }

  /// Whether decode steps write down which positions they attend; off by default.
  void trace_attended(bool on) { layers_.log().trace(on); }
  /// Positions that the last traced decode step of a layer attended, by kv_head.
  const host_vector<host_vector<index_t>>& attended(index_t layer, index_t id) const {
    conversations_.at({layer, id});
    return layers_.log().attended({layer, id});
  }

  /// Whether prompts write down which lines they attend; off by default.
  void trace_lines(bool on) { layers_.trace_lines(on); }
  /// Lines of the last traced prompt chunk of a layer; no heads where all of its rows attend everything.
  const prompt_lines& lines(index_t layer, index_t id) const {
    conversations_.at({layer, id});
    return layers_.lines({layer, id});
  }

  /// Whether the first stage writes down what it ranked; off by default.
  void trace_ranked(bool on) { layers_.trace_ranks(on); }
  /// Tokens that competed in the last traced choice of a layer, and their scores, by kv_head; nothing where none was
  /// due.
  const ranked_tokens& ranked(index_t layer, index_t id) const {
    conversations_.at({layer, id});
    return layers_.ranked({layer, id});
  }

  /// A view of what a layer stores, for engines with attention of their own. Valid until the cache changes.
  auto view(index_t layer, index_t id) {
    conversations_.at({layer, id});
    return layers_.store().view({layer, id});
  }

  /// Bytes that a sequence holds in all layers: rows and columns, remembered queries, what the second stage keeps.
  offset_t bytes(index_t id) const {
    conversations_.at(id);
    return layers_.bytes(id);
  }

  /// Of a store with ragged pages: what a prompt of so many tokens takes of the pool, its chunks no longer than the
  /// schedule's and ending at its multiples; pages that each group of heads of a sequence holds; the most that a new
  /// conversation's prompt takes.
  page_plan plan_pages(index_t id, index_t tokens) const requires layers<Recipe>::in_groups {
    const planned<Recipe> fitted = conversations_.plan_announced(recipe_, id, tokens);
    return layers_.plan_pages(id, recipe_, fitted, tokens);
  }
  host_vector<index_t> pages(index_t id) const requires layers<Recipe>::in_groups {
    conversations_.at(id);
    host_vector<index_t> held;
    for (index_t group = 0; group < layers_.store().rows().groups().count(); ++group)
      held.push_back(layers_.store().rows().held(id, group));
    return held;
  }
  index_t upper_bound_pages(index_t tokens) const requires layers<Recipe>::in_groups {
    return layers_.plan_pages(-1, recipe_, conversations_.plan_first(recipe_, tokens), tokens).most;
  }

  /// Of rows whose segments' strategies are searched: what has come of it, and the thread that searches. `search_on`
  /// gives another one, before the first step; copies of a cache share it. Where it was stopped, caches go on with the
  /// strategies that they have.
  strategy_report strategies(index_t id) const requires searching_layout<layout> {
    conversations_.at(id);
    return layers_.store().searches().report(id);
  }
  const std::shared_ptr<background>& searcher() const requires searching_layout<layout> {
    return layers_.store().searches().worker();
  }
  void search_on(std::shared_ptr<background> worker) requires searching_layout<layout> {
    require(worker != nullptr, "the thread that searches strategies", "none", "one", "pass a background");
    layers_.store().searches().use(std::move(worker));
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
  static std::shared_ptr<executor> some(std::shared_ptr<executor> workers) {
    require(workers != nullptr, "executor", "null", "a pool of threads",
            "pass std::make_shared<tessera::cpu::executor>()");
    return workers;
  }

 protected:
  cache_parts(model_shape shape, Recipe recipe, std::shared_ptr<executor> workers)
      : shape_((shape.check(), std::move(shape))),
        recipe_((recipe.check(), std::move(recipe))),
        conversations_(shape_, recipe_),
        layers_(shape_, recipe_, some(std::move(workers))) {}

  model_shape shape_;
  Recipe recipe_;
  conversations<Recipe> conversations_;
  layers<Recipe> layers_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
