// The whole cache of one model on the GPU: a recipe over layers and sequences, the device's tessera::cache.
#pragma once

#include <span>
#include <utility>

#include "../../core/host/host_vector.hpp"
#include "cache/cache_parts.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Stores, compresses and attends the KV cache of a model by one recipe, on one device and one stream at a time.
///
/// A turn is: `reserve` the prompt's length, `prefill` a chunk in every layer, and its attention if the engine has none
/// of its own, chunk after chunk; `end_prefill` once. Then for each step `prepare_step` on the host; and, recorded in a
/// graph or not, `begin_step` and `decode` in every layer. What a graph recorded can be replayed for every later batch
/// of as many sequences, tokens and the same actions: ids, lengths, positions, plans and places are read on the device.
/// Keys and queries come after RoPE; positions are counted here and survive every eviction. T is the layout's element
/// type, fp16 or bf16; `Out` is what attention is written as: fp32, fp16 or bf16. All pointers are device pointers.
/// Errors   bad shapes, unknown sequences, steps out of order and pools without room throw tessera::error before
///          anything is launched: the cache is as it was.
/// Memory   rows, and scratch of sequences * kv_heads * tokens scores: allocated when made, anew by `set_budget`, by
///          `allocate_from`. Limits: what the host asks for (`positions`, `bytes_read`, tracing) synchronises the
///          stream.
template <class Recipe, class Out = float>
class cache : public cache_parts<Recipe, Out> {
  using parts = cache_parts<Recipe, Out>;

 public:
  using typename parts::T;
  cache(model_shape shape, Recipe recipe, cache_options options)
      : parts(std::move(shape), std::move(recipe), options) {}

  /// Changes the token budget; it counts from the next time the schedule retains, or the next step that retrieves.
  /// Steps that a graph recorded must be recorded anew. Allocates; synchronises. Errors: a prepared step has layers to
  /// go.
  void set_budget(index_t tokens, cudaStream_t stream = nullptr) {
    Recipe changed = recipe_;
    changed.set_budget(tokens);
    changed.check();
    parts::follow_budget(changed, stream);
  }

  /// Opens an empty sequence and returns its id; ids of closed sequences are used again.
  index_t open(cudaStream_t stream = nullptr) {
    const index_t id = conversations_.open(recipe_, options_.sequences);
    set_number(next_.data() + id, index_t(0), stream);
    parts::begin_place(id, stream);
    reading_.set_plan(id, conversations_.at(id).policies, stream);
    return id;
  }

  /// Opens a sequence that goes on from where another one stands, and returns its id: see the CPU's cache. Finished
  /// segments of packed rows stay where they are, until the sequence that packed them is closed.
  /// Errors   as there; any sequence's step that has begun and has layers to decode. What a graph replays is not seen:
  ///          fork behind it.
  index_t fork(index_t id, cudaStream_t stream = nullptr) {
    conversations_.check_fork(id, options_.sequences);
    order_.require_finished(id);
    order_.require_none_under_way();
    return parts::copy_of(id, stream);
  }

  void close(index_t id, cudaStream_t stream = nullptr) {
    conversations_.close(id);
    order_.closed(id);
    parts::empty_place(id, stream);
  }

  /// Makes room for so many more tokens in every layer, so that a prompt's rows do not move while it comes.
  void reserve(index_t id, index_t tokens, cudaStream_t stream) {
    conversations_.at(id);
    order_.require_finished(id);
    require(tokens >= 0, "tokens to reserve", tokens, "0 or more", "pass the prompt's length");
    make_store_room(all_layers({id}), tokens, stream);
  }

  /// Says how many tokens the turn's prompt will have, before its first chunk: budgets that give shares of it then know
  /// them, and a store with a pool of pages sets aside what the prompt takes at most, or throws: see the CPU's cache.
  void announce(index_t id, index_t tokens) {
    const planned<Recipe> fitted = conversations_.plan_announced(recipe_, id, tokens);
    if constexpr (kv_store<typename parts::layout>::in_groups)
      store_.rows().reserve(id, parts::plan_pages(id, fitted, tokens).most);
    conversations_.announce(id, tokens, fitted);
  }

  /// Appends a chunk of the prompt to one layer and lets the scorer observe its queries.
  /// Shapes   k, v [1, tokens, kv_heads, dim]; q [1, n_q, q_heads, k_dim], the queries of the chunk's last n_q tokens:
  ///          all of them, or fewer where the scorer needs fewer (its window, or none). boundaries [tokens], on the
  ///          host, for a recipe that `needs_segments`: 1 for a token after which a segment of the text ends, else 0.
  void prefill(index_t layer, index_t id, const rows_view<const T>& q, const rows_view<const T>& k,
               const rows_view<const T>& v, cudaStream_t stream, std::span<const std::uint8_t> boundaries = {}) {
    const sequence_layer owner{layer, id};
    conversations_.check_chunk(recipe_, owner, q, k, v);
    const segment_marks marks = conversations_.check_boundaries(owner, boundaries, k.tokens);
    order_.require_finished(id);
    const bool follows = roles_.follows_recipe(layer);
    if (Recipe::retain_type::observed == observes::every_query && follows && q.tokens > 0)
      require_rows_on_16_bytes("q", q);
    const bool begins = conversations_.at(owner).turn_tokens == 0;
    if (begins && layer == 0) store_.settle({id}, true, stream);
    store_.plan_packing(begins ? sequence_layers{owner} : sequence_layers{}, 0, stream);  // what steps have filled
    begin_chunk(owner, k.tokens, stream);
    make_store_room({owner}, k.tokens, stream);
    store_.commit_packing(stream);
    const index_t first = conversations_.at(owner).next_position;
    store_.append_rows(store_.view(owner), k, v, set_number(chunk_position_.data(), first, stream),
                       marks_.of_chunk(marks, k.tokens, stream), stream);
    store_.took(owner, k.tokens);
    if (begins) reading_.lists().end_lists(owner, stream);
    conversations_.took_chunk(owner, k.tokens, marks);
    if (!follows) return;
    store_.observe_prompt(owner, q, stream);
    if (first_.chooser(layer, policies(id), roles_) != layer) return;
    first_.observe_prompt(owner, store_, policies(id), roles_.rule(layer), q, first + k.tokens, stream);
  }

  /// Causal attention of the newest q.tokens tokens of a layer over everything that it stores, or over the lines that
  /// the recipe's prefill policy chooses by these queries: then of a whole chunk.
  /// Shapes   q [1, tokens, q_heads, k_dim], out [1, tokens, q_heads, v_dim], lse [1, tokens, q_heads], or no data.
  void prefill_attention(index_t layer, index_t id, const rows_view<const T>& q, const rows_view<Out>& out,
                         const rows_view<float>& lse, cudaStream_t stream) {
    const sequence_layer owner{layer, id};
    conversations_.check_prompt_attention(owner, q, out, lse);
    const index_t first = conversations_.at(owner).next_position - q.tokens;
    prefill_problem<view_type, Out> problem{
        store_.view(owner), q, set_number(chunk_position_.data(), first, stream), roles_.rule(layer), out, lse};
    if (!roles_.follows_recipe(layer)) return attention_.prompt(problem, stream);
    if (!lse.data) problem.lse = first_.lse_room(q.tokens);
    prompts_.attend(owner, recipe_, problem, first, attention_, stream);
    first_.observe_attention(owner, q, problem.lse, stream);
  }

  /// Passes tokens through one layer once more, for a scorer that wants it (KVzip): see the CPU's cache. Shapes as
  /// `prefill`'s.
  void reread(index_t layer, index_t id, index_t first, index_t count, const rows_view<const T>& q,
              const rows_view<const T>& k, const rows_view<const T>& v, const rows_view<Out>& out,
              cudaStream_t stream) requires(Recipe::retain_type::rereads) {
    const sequence_layer owner{layer, id};
    conversations_.check_rereading(owner, first, count, q, k, v, out);
    order_.require_finished(id);
    make_store_room({owner}, k.tokens, stream);
    const reread_part part{first, first + count, conversations_.at(owner).next_position};
    rereading_.pass(owner, store_, policies(id), roles_, attention_, q, k, v, out, part, stream);
  }

  /// Says that the turn's prompt has been through a layer, its attention included: see the CPU's cache. Segments are
  /// made on a stream of the cache's own, and take the place of whole rows when the next layer ends that packs, or a
  /// step is prepared, or sooner where the pool has no room: a prompt in one chunk needs two layers' whole rows, or
  /// one. What joins a segment, or has no basis, waits for `end_prefill`. Not within a step.
  void end_layer(index_t layer, index_t id, cudaStream_t stream) {
    const sequence_layer owner{layer, id};
    conversations_.check_layer_end(owner);
    order_.require_none_under_way();
    slide({owner}, stream);
    if (roles_.follows_recipe(layer) && packs_by_layer(recipe_))
      store_.pack_layer(owner, conversations_.at(owner).turn_tokens, stream);
    conversations_.end_layer(owner);
  }

  /// Ends a turn's prompt: where the schedule says so, every layer chooses anew what it keeps and frees the rest, or
  /// what a filter lets through. The first turn's end also plans what the budget comes to: see `plan`.
  void end_prefill(index_t id, cudaStream_t stream) {
    const planned<Recipe> fitted = conversations_.plan_prompt_end(recipe_, id);
    reading_.require_covered(fitted);
    const bool due = recipe_.schedule.due(moment::prompt_end, conversations_.clock_of_prompt_end(id));
    const host_vector<index_t> choosing = plan_choice(id, due, fitted, stream);
    parts::plan_packing(id, stream);  // last that can throw
    set_number(next_.data() + id, conversations_.at(id).front().next_position, stream);
    kept_slots kept;  // of the layer before: one that takes over its choice comes right behind it
    for (const index_t layer : choosing) choose({layer, id}, due, fitted, kept, stream);
    store_.commit_packing(stream);
    reading_.set_plan(id, fitted, stream);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      if (roles_.follows_recipe(layer)) reading_.refresh({layer, id}, store_, stream);
    }
    slide(all_layers({id}), stream);
    store_.expect(id, 0);
    conversations_.end_prompt(id, fitted);
    first_.forget(id);
  }

  /// The host's part of a decode step of 1 to `step_tokens` tokens: room for it in every layer. Before every step, also
  /// before a replayed one; never recorded itself. What it returns is every layer's `decode`'s. boundaries [ids,
  /// tokens], on the host, for a recipe that `needs_step_segments`: 1 for a token after which a segment of the text
  /// ends, else 0.
  batch prepare_step(const host_vector<index_t>& ids, index_t tokens, cudaStream_t stream,
                     std::span<const std::uint8_t> boundaries = {}) {
    batch step = conversations_.plan_step(recipe_, ids, tokens, options_.step_tokens, boundaries);
    for (const index_t id : ids) order_.require_finished(id);
    const sequence_layers owners = all_layers(ids);
    make_step_room(owners, step, stream);
    steps_.set(ids, stream);
    note_step(owners, step);
    if constexpr (Recipe::needs_segments) {
      host_vector<segment_cursor> texts;
      for (const index_t id : ids) texts.push_back(conversations_.at({0, id}).text);
      marks_.set(texts, step.boundaries, stream);
    }
    step = conversations_.begin_step(std::move(step));
    for (index_t layer = 0; layer < shape_.layers; ++layer) conversations_.took_step(layer, step);
    order_.prepared(step);
    return step;
  }

  /// The device's part of a step, first of all: what the batch needs is gathered, positions and lengths move on.
  void begin_step(const batch& step, cudaStream_t stream) {
    order_.begin(step, stream);
    auto columns = store_.gathered();
    for (const auto& column : reading_.gathered()) columns.push_back(column);
    steps_.gather(step.sequences(), columns, stream);
    detail::advance_positions_entry<128><<<unsigned(ceil_div(step.sequences(), 128)), 128, 0, stream>>>(
        next_.data(), steps_.ids(), first_position_.data(), after_.data(), step.sequences(), step.tokens);
    check(cudaGetLastError(), "launch of advance_positions");
    steps_.advance(store_.length_column(), shape_.layers, step.sequences(), step.tokens, stream, stepped_.data());
    reading_.lists().join(steps_, store_.length_column(), step.sequences(), step.tokens, stream);
  }

  /// One layer of a decode step for a batch of sequences, of any ids: append, retrieve, attend, retain.
  /// Shapes   q [sequences, tokens, q_heads, k_dim], k, v [sequences, tokens, kv_heads, dim], out as q with v_dim, lse
  ///          [sequences, tokens, q_heads] (data null: not wanted). Causal inside the step.
  void decode(index_t layer, const batch& step, const rows_view<const T>& q, const rows_view<const T>& k,
              const rows_view<const T>& v, const rows_view<Out>& out, const rows_view<float>& lse,
              cudaStream_t stream) {
    conversations_.check_step(layer, step, q, k, v, out, lse);
    order_.require_layer(layer, step, stream);
    require_rows_on_16_bytes("q", q);  // before the rows are appended: attention would refuse it behind them
    order_.took(layer, stream);
    const index_t* first = first_position_.data();
    const logit_rule rule = roles_.rule(layer);
    const view_type all = store_.batch_view(layer, step.sequences());
    store_.append_rows(all, k, v, first, marks_.of_step(layer), stream);
    if (!roles_.follows_recipe(layer)) {
      attention_.step(decode_problem<view_type, Out>{all, q, first, rule, out, lse, {}}, stream);
      if (tracing_) trace(layer, step, {});
      return;
    }
    if (step.evicts_first) choose_in_step(layer, step, all, step.tokens, stream);
    selection_view chosen{};
    parts::read(layer, all, q, out, lse, chosen, stream);
    if (tracing_) trace(layer, step, chosen);
    first_.observe_step(layer, steps_.ids(), store_, all, policies(step.ids.front()), rule, q, first, stream);
    if (step.evicts_last) choose_in_step(layer, step, all, 0, stream);
  }

 private:
  using parts::after_, parts::all_layers, parts::attention_, parts::begin_chunk, parts::chunk_position_, parts::choose,
      parts::choose_in_step, parts::conversations_, parts::device_, parts::first_, parts::first_position_,
      parts::make_step_room, parts::make_store_room, parts::marks_, parts::note_step, parts::next_, parts::options_,
      parts::order_, parts::plan_choice, parts::policies, parts::prompts_, parts::reading_, parts::recipe_,
      parts::rereading_, parts::roles_, parts::shape_, parts::slide, parts::stepped_, parts::steps_, parts::store_,
      parts::trace, parts::tracing_;
  using typename parts::read_view_type, typename parts::view_type;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
