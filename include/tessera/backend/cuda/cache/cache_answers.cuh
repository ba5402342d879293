// The objects of a cache on the device, and what they answer when the host asks.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../../../runtime/prompt_pages.hpp"
#include "../../../runtime/turn/conversations.hpp"
#include "../store/pack.cuh"
#include "cache_options.hpp"
#include "first_stage.cuh"
#include "packed_steps.cuh"
#include "prompt_attending.cuh"
#include "prompt_end/rereading.cuh"
#include "reading.cuh"
#include "step_order.cuh"
#include "text_marks.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Store, first stage, reading, attention and conversations of one recipe. `cache_parts` says what they do together.
template <class Recipe, class Out>
class cache_answers {
 public:
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  static constexpr int k_dim = layout::k_dim, v_dim = layout::v_dim;
  static_assert(check_runs_on_devices<Recipe>());
  static_assert(sizeof(T) == 2, "tessera: the CUDA cache computes in fp16 and bf16; the CPU cache in fp32 too");

  const model_shape& shape() const { return shape_; }
  const Recipe& recipe() const { return recipe_; }

  /// On the device, by sequence of the batch: the position of the first token of the step that `begin_step` began.
  const index_t* step_positions() const { return first_position_.data(); }

  /// The logical position of the next token: tokens seen so far.
  index_t next_position(index_t id) const { return conversations_.at(id).front().next_position; }

  /// A view of what a layer stores of one sequence, for engines with attention of their own.
  auto view(index_t layer, index_t id) const {
    conversations_.at({layer, id});
    return store_.view({layer, id});
  }

  /// Of a store with ragged pages: what a prompt of so many tokens takes of the pool, its chunks no longer than the
  /// schedule's and ending at its multiples; pages that each group of heads of a sequence holds; the most that a new
  /// conversation's prompt takes.
  page_plan plan_pages(index_t id, index_t tokens) const requires kv_store<layout>::in_groups {
    return plan_pages(id, conversations_.plan_announced(recipe_, id, tokens), tokens);
  }
  host_vector<index_t> pages(index_t id) const requires kv_store<layout>::in_groups {
    conversations_.at(id);
    host_vector<index_t> held;
    for (index_t group = 0; group < store_.rows().groups().count(); ++group)
      held.push_back(store_.rows().held(id, group));
    return held;
  }
  index_t upper_bound_pages(index_t tokens) const requires kv_store<layout>::in_groups {
    return plan_pages(-1, conversations_.plan_first(recipe_, tokens), tokens).most;
  }

  /// Logical positions that a layer stores for one kv_head, ascending. Synchronises.
  host_vector<index_t> positions(index_t layer, index_t id, index_t head) const {
    conversations_.check_head({layer, id}, head);
    return store_.downloaded_positions({layer, id})[std::size_t(head)];
  }

  /// What the budget comes to in this conversation, since its first prompt ended.
  stage_plan plan(index_t id) const { return policies(id).plan; }

  /// Positions that this turn's steps may read of one kv_head: a filter's and those decoded since, or all.
  /// Synchronises.
  host_vector<index_t> readable(index_t layer, index_t id, index_t head) const {
    conversations_.check_head({layer, id}, head);
    return joined_lists(downloaded_lists({layer, id}), shape_.kv_heads)[std::size_t(head)];
  }

  /// Gives back memory that the stored rows do not need, or takes more: for what is stored and `tokens` more of every
  /// sequence, in place of cache_options::rows. Rows in pages stay. Steps that a graph recorded must be recorded anew.
  /// Allocates the new memory before the old is given back; synchronises. Errors: not enough of it, or a step that has
  /// begun has layers to go; nothing has changed.
  void fit_memory(index_t tokens, cudaStream_t stream) {
    order_.require_none_under_way();
    require(tokens >= 0, "tokens to make room for", tokens, "0 or more", "pass the longest answer");
    store_.resize(tokens, stream);
    order_.disturbed();
  }

  /// Whether decode steps write down which positions they attend; off by default. A traced step synchronises and cannot
  /// be recorded.
  void trace_attended(bool on) { tracing_ = on; }
  /// Positions that the last traced decode step of a layer attended, by kv_head, or by query head where those of a
  /// group read apart.
  const host_vector<host_vector<index_t>>& attended(index_t layer, index_t id) const {
    conversations_.at({layer, id});
    return attended_[sequence_layer{layer, id}];
  }

  /// Whether prompt attention writes down the lines that it chose; off by default. A traced call synchronises.
  void trace_lines(bool on) { prompts_.trace(on); }
  /// The lines of the last chunk of a layer that was attended and traced.
  const prompt_lines& lines(index_t layer, index_t id) const {
    conversations_.at({layer, id});
    return prompts_.lines({layer, id});
  }

  /// Bytes that a sequence holds in all layers: rows, positions, scores, candidates, index and remembered queries.
  offset_t bytes(index_t id) const {
    offset_t total = 0;
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      const token_bound held = reading_.lists().bound({layer, id}, store_.bound({layer, id}));
      total += store_.bytes({layer, id}) + reading_.lists().bytes({layer, id}) + first_.bytes_of_place() +
               prompts_.bytes_of_place() + reading_.reader().bytes(policies(id), held.longest);
    }
    return total;
  }
  /// The most bytes of rows that were ever in use at one time, all sequences together.
  offset_t most_bytes() const { return store_.most_bytes(); }
  /// Of rows whose segments' strategies are searched: what has come of it, and the thread that searches. `search_on`
  /// gives another one, before the first step; copies of a cache share it. Where it was stopped, caches go on with the
  /// strategies that they have.
  strategy_report strategies(index_t id) const requires searching_layout<layout> {
    conversations_.at(id);
    return store_.searches().report(id);
  }
  const std::shared_ptr<background>& searcher() const requires searching_layout<layout> {
    return store_.searches().worker();
  }
  void search_on(std::shared_ptr<background> worker) requires searching_layout<layout> {
    require(worker != nullptr, "the thread that searches strategies", "none", "one", "pass a background");
    store_.searches().use(std::move(worker));
  }

  /// Distinct bytes of stored K, V and scores, of candidates and index, that the last decode step of a sequence
  /// touched, all layers. Synchronises.
  offset_t bytes_read(index_t id) const {
    const auto& conversation = conversations_.at(id);
    if (conversation.step == 0) return 0;  // no step yet
    offset_t total = 0;
    const bool chose = fires_last_ && recipe_.schedule.due(moment::step_end, conversation.now);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      const bool follows = roles_.follows_recipe(layer);
      const auto lists = downloaded_lists({layer, id});
      host_vector<index_t> lengths, entries(std::size_t(shape_.kv_heads));
      for (const auto& list : joined_lists(lists, shape_.kv_heads)) lengths.push_back(index_t(list.size()));
      for (std::size_t i = 0; i < lists.size(); ++i)
        entries[i * entries.size() / lists.size()] += index_t(lists[i].size());
      // What the choice at the end of the step dropped, or reads no more, has been read too.
      if (follows && (filters ? chose : fires_last_)) {
        lengths = downloaded(stepped_of({layer, id}), lengths.size());
        entries = downloaded(stepped_of({shape_.layers + layer, id}), lengths.size());
      }
      for (std::size_t h = 0; h < lengths.size(); ++h) {
        const head_place of{{layer, id}, index_t(h), store_.always_read({layer, id})};
        const offset_t n = lengths[h],
                       attended = follows ? reading_.reader().attended(conversation.policies, n, of) : n;
        total += store_.step_bytes({layer, id}, attended);
        if (!follows) continue;
        total += reading_.reader().bytes_read(conversation.policies, n, of) + (observes_steps ? n * 4 : 0);
        if (filters) total += (lists.size() > lengths.size() ? entries[h] : attended) * offset_t(sizeof(index_t));
        const offset_t stored = filters ? store_.bound({layer, id}).longest : n;
        if (Recipe::retain_type::follows && chose) total += (stored - attended) * layout::key_bytes();
      }
    }
    return total;
  }

  /// Bytes of K and V of an uncompressed sequence of that many tokens.
  offset_t full_bytes(index_t tokens) const {
    return offset_t(shape_.layers) * shape_.kv_heads * tokens * layout::token_bytes();
  }

 protected:
  static constexpr bool filters = Recipe::retain_type::chooses && !Recipe::retain_type::drops;
  static constexpr bool observes_steps =  // add to the scores: they are read then
      first_stage<Recipe>::with_scores && fires_in_steps<typename Recipe::schedule_type>;
  static constexpr bool fires_last_ = Recipe::schedule_type::fires_at(moment::step_end);
  using store_type = kv_store<layout>;
  using view_type = typename store_type::view_type;
  using reading_type = reading<Recipe, Out>;
  using read_view_type = typename reading_type::view_type;

  cache_answers(model_shape shape, Recipe recipe, cache_options options)
      : shape_((shape.check(), std::move(shape))),
        recipe_((recipe.check(), std::move(recipe))),
        options_((options.check(), options)),
        device_(device_info::current()),
        roles_(shape_, recipe_.dense_layers, recipe_.attention.rule),
        conversations_(shape_, recipe_),
        store_(shape_.layers, options_.sequences, shape_.kv_heads, options_.tokens, options_.rows,
               {Recipe::retain_type::drops || !shape_.sliding.empty(), first_stage<Recipe>::with_scores,
                Recipe::needs_segments, recipe_.retrieve.mean_block()},
               placement_of(recipe_), recipe_.layout, &roles_),
        next_(std::size_t(options_.sequences)),
        first_position_(next_.size()),
        after_(next_.size()),
        stepped_(fires_last_ ? 2 * std::size_t(shape_.layers) * std::size_t(options_.sequences * shape_.kv_heads) : 0),
        steps_(options_.sequences),
        marks_(shape_.layers, options_.sequences, options_.tokens, options_.step_tokens),
        first_(recipe_, shape_, options_, device_),
        reading_(recipe_, shape_, options_, device_),
        attention_(shape_, first_.members().q_heads(), options_, device_, recipe_),
        prompts_(recipe_, shape_, options_, device_),
        rereading_(shape_, options_, device_),
        order_(shape_.layers),
        newest_(shape_.kv_heads, shape_.sliding.empty() ? 0 : shape_.window),
        attended_(shape_.layers) {
    attended_.open(options_.sequences - 1);
    store_.adopt(fit_movers(first_));
  }

  /// id -1: a new conversation.
  page_plan plan_pages(index_t id, const planned<Recipe>& fitted,
                       index_t tokens) const requires kv_store<layout>::in_groups {
    host_vector<index_t> held(std::size_t(shape_.layers * shape_.kv_heads), 0);
    for (index_t layer = 0; id >= 0 && layer < shape_.layers; ++layer) {
      const host_vector<index_t> own = store_.held_by_head({layer, id});
      std::copy(own.begin(), own.end(), held.begin() + offset_t(layer) * shape_.kv_heads);
    }
    return plan_prompt_pages(store_.rows().groups(), store_.rows().page(), held, recipe_, fitted, roles_, tokens);
  }
  auto fit_movers(const first_stage<Recipe>& first) const {
    return store_.fit(first.most_sequences(), (std::max)(first.most_tokens_kept(), shape_.window), device_);
  }
  index_t* stepped_of(sequence_layer owner) const {
    return stepped_.data() + (offset_t(owner.layer) * options_.sequences + owner.id) * shape_.kv_heads;
  }
  const planned<Recipe>& policies(index_t id) const { return conversations_.at(id).policies; }

  /// Positions that steps may read of a layer, by kv_head, or by query head where those of a group read apart.
  host_vector<host_vector<index_t>> downloaded_lists(sequence_layer owner) const {
    if (!roles_.follows_recipe(owner.layer)) return store_.downloaded_positions(owner);
    return reading_.lists().downloaded_lists(owner, store_);
  }

  model_shape shape_;
  Recipe recipe_;
  cache_options options_;
  device_info device_;
  layer_roles roles_;
  conversations<Recipe> conversations_;
  store_type store_;
  device_buffer<index_t> next_;                    // by id: position of the next token
  device_buffer<index_t> first_position_, after_;  // by sequence of the batch: of the step's first token, and behind it
  device_buffer<index_t> chunk_position_{1};
  device_buffer<index_t> stepped_;  // by place and head: what the last step could read, then entries of its lists
  step_table steps_;
  text_marks<Recipe::needs_segments> marks_;
  first_stage<Recipe> first_;
  reading_type reading_;
  attention<view_type, read_view_type, Out> attention_;
  prompt_attending<Recipe, view_type, Out> prompts_;
  rereading<Recipe> rereading_;
  step_order order_;
  newest_slots newest_;
  bool tracing_ = false;
  sequence_table<host_vector<host_vector<index_t>>> attended_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
