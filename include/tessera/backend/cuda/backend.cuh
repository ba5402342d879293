// The backend of tessera::cuda::cache: the parts and operations of a cache on a GPU.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../../core/host/host_vector.hpp"
#include "../../runtime/prompt_pages.hpp"
#include "../../runtime/turn/truncation.hpp"
#include "cache/detail/prompt_turn.cuh"
#include "cache/detail/saving.cuh"
#include "cache/detail/step_bytes.cuh"
#include "cache/detail/step_turn.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The stream that a call works in. Every call that begins work must be given one.
struct stream_queue {
  stream_queue(cudaStream_t given) : stream(given) {}
  operator cudaStream_t() const { return stream; }
  cudaStream_t stream;
};

/// The parts of one recipe's cache on a device, and what each call of `basic_cache` does with them.
/// concepts/backend.hpp says which calls every backend has. Arguments have been checked. A call that throws does so
/// before anything is launched.
template <class Recipe, class Out>
class backend {
  using parts_type = cache_parts<Recipe, Out>;
  using T = typename parts_type::T;
  static_assert(check_runs_on_devices<Recipe>());
  static_assert(sizeof(T) == 2, "tessera: the CUDA cache computes in fp16 and bf16; the CPU cache in fp32 too");

 public:
  using recipe_type = Recipe;
  using layout = typename Recipe::layout_type;
  using resources = cache_options;
  using queue = stream_queue;
  using default_queue = cudaStream_t;
  using output_type = Out;

  /// Whether groups of heads share the pages of one pool.
  static constexpr bool in_groups = kv_store<layout>::in_groups;
  /// Whether sequences of one step may have different numbers of tokens.
  static constexpr bool takes_uneven_steps = parts_type::takes_uneven_steps;
  /// Whether sequences can be saved and loaded: not those whose packing strategies are searched.
  static bool saves(const Recipe& recipe) {
    if constexpr (packing_layout<layout>) return !searches_strategies(recipe.layout);
    return true;
  }

  /// Whether a step that has layers left can be taken back once it is through.
  static constexpr bool cancels_steps = taken_back<Recipe>() != takes_back::nothing && !packing_layout<layout> &&
                                        parts_type::reading_type::settled(1) == 0;

  backend(const model_shape& shape, const Recipe& recipe, const cache_options& options)
      : parts_(shape, recipe, options) {}

  // --- sequences -----------------------------------------------------------------------------------------------------

  /// Upper bounds: of sequences that are open at a time, and of the tokens of a step.
  index_t max_sequences() const { return parts_.options.sequences; }
  index_t max_step_tokens() const { return parts_.options.step_tokens; }
  index_t max_draft_tokens() const { return parts_.options.draft_tokens; }

  void check_budgets(const Recipe& recipe, const Recipe& own) const { parts_type::check_budgets(recipe, own); }
  void open(index_t id, const planned<Recipe>& policies, cudaStream_t stream) {
    set_number(parts_.next.data() + id, index_t(0), stream);
    parts_.begin_sequence(id, stream);
    parts_.set_plan(id, policies, stream);
  }
  /// Releases everything that a sequence holds.
  void close(index_t id, cudaStream_t stream) {
    parts_.order.closed(id);
    clear(id, stream);
  }
  /// Errors   the sequence's step has layers left, or a step of any sequence has begun and has layers left.
  void check_fork(index_t id) const {
    parts_.order.require_finished(id);
    parts_.order.require_none_under_way();
  }
  /// Copies a sequence to another id, between whole calls. Where it throws, that id is closed.
  void fork(index_t id, index_t to, const sequence_state<Recipe>& state, cudaStream_t stream) {
    parts_.hold_for_saves(stream);
    parts_.store.plan_copy(id, to, stream);
    try {
      parts_.read_stage.candidates().plan_copy(id, to);
    } catch (...) {
      parts_.store.abandon();
      throw;
    }
    try {
      copy_sequence(parts_, id, to, state, stream);
    } catch (...) {
      clear(to, stream);
      throw;
    }
  }

  /// An archive that writes to a sink or a saved_sequence, or reads from a source or a saved_sequence.
  template <class Sink>
  sequence_writer<Sink> writer(Sink& sink, cudaStream_t stream) {
    return {sink, parts_.save_buffer(), stream};
  }
  template <class Source>
  sequence_reader<Source> reader(Source& source, cudaStream_t stream) {
    parts_.order.require_none_under_way();
    parts_.hold_for_saves(stream);
    return {source, parts_.save_buffer(), stream};
  }
  /// Saves a sequence between two turns or steps, or loads one into an open, empty one, which the caller closes where
  /// this throws.
  template <class Archive>
  void transfer(index_t id, const sequence_state<Recipe>& state, Archive& archive, cudaStream_t stream) {
    transfer_sequence(parts_, id, state, archive, stream);
  }

  /// The smallest position that a sequence can go back to, as far as its rows and its index decide it.
  index_t settled(index_t id, const sequence_state<Recipe>& state) const {
    index_t settled = parts_.read_stage.settled(state.front().next_position);
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
      const sequence_layer owner{layer, id};
      const index_t next = state.layers[std::size_t(layer)].next_position;
      settled = (std::max)(settled,
                           parts_.roles.slides(layer)
                               ? settled_of_window(next, parts_.store.bound(owner).longest, parts_.roles.window(layer))
                               : parts_.store.settled(owner, next));
    }
    return settled;
  }
  /// Errors   the sequence's step has layers left.
  void check_truncation(index_t id) const { parts_.order.require_finished(id); }
  /// Takes back a sequence's newest tokens.
  void truncate(index_t id, const truncation& plan, const sequence_state<Recipe>& state, cudaStream_t stream) {
    const bool is_counted = parts_.order.is_counted(id);
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
      const sequence_layer owner{layer, id};
      const index_t tokens = plan.tokens_of(state.layers[std::size_t(layer)]);
      index_t* lengths = parts_.store.lengths(owner);
      if (is_counted) add_number(lengths, lengths, -tokens, parts_.shape.kv_heads, stream);
      parts_.store.drop_newest(owner, tokens);
      if (plan.is_of_prompt) {
        parts_.store.forget_prompt(owner);
        parts_.first.observer().forget(owner);
        if (plan.ends_lists) parts_.read_stage.candidates().end_lists(owner, stream);
      } else if (parts_.roles.follows_recipe(layer)) {
        parts_.read_stage.truncate(owner, parts_.store, tokens, plan.ends_lists, stream);
      }
      // A fork in the middle of the prompt has no index yet.
      if (plan.withdraws && !plan.ends_lists) parts_.refresh({layer, id}, stream);
      parts_.attended[owner].clear();
    }
    set_number(parts_.next.data() + id, plan.position, stream);
    if (plan.releases) parts_.store.expect(id, 0);
  }

  /// Adopts another budget, after everything that may fail has been made. Allocates; synchronises. Errors: a prepared
  /// step has layers left.
  void follow_budget(const Recipe& changed, cudaStream_t) {
    parts_.order.require_all_finished();
    auto first = parts_.first.fit(changed, parts_.device);
    auto reader = parts_.read_stage.reader().fit(changed, parts_.shape, parts_.options, parts_.device);
    auto movers = parts_.fit_movers(parts_.first.max_kept_tokens(first));
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    parts_.first.adopt(std::move(first));
    parts_.read_stage.reader().adopt(std::move(reader));
    parts_.store.adopt(std::move(movers));
    parts_.order.disturbed();
  }
  void follow_plans(const conversations<Recipe>& known, cudaStream_t stream) {
    for (index_t id = 0; id < known.size(); ++id) {
      if (known.is_open(id)) parts_.set_plan(id, known.sequence(id).policies, stream);
    }
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  void fit_memory(index_t tokens, cudaStream_t stream) {
    parts_.order.require_none_under_way();
    require(tokens >= 0, "tokens to make room for", tokens, "0 or more", "pass the longest answer");
    parts_.hold_for_saves(stream);
    parts_.store.resize(tokens, stream);
    parts_.order.disturbed();
  }

  // --- prompts -------------------------------------------------------------------------------------------------------

  void reserve(index_t id, index_t tokens, cudaStream_t stream) {
    parts_.order.require_finished(id);
    parts_.make_room(parts_.all_layers({id}), tokens, stream);
  }
  /// id -1: for a new sequence.
  page_plan plan_pages(index_t id, const Recipe& recipe, const planned<Recipe>& policies, index_t tokens) const
      requires in_groups {
    host_vector<index_t> held(std::size_t(parts_.shape.layers * parts_.shape.kv_heads), 0);
    for (index_t layer = 0; id >= 0 && layer < parts_.shape.layers; ++layer) {
      const host_vector<index_t> by_head = parts_.store.held_by_head({layer, id});
      std::copy(by_head.begin(), by_head.end(), held.begin() + offset_t(layer) * parts_.shape.kv_heads);
    }
    const auto& rows = parts_.store.rows();
    return plan_prompt_pages(rows.groups(), rows.page(), held, recipe, policies, parts_.roles, tokens);
  }
  void reserve_pages(index_t id, index_t pages) requires in_groups { parts_.store.rows().reserve(id, pages); }

  template <class E>
  void check_chunk(sequence_layer owner, const rows_view<const E>& q) const {
    check_element<E>();
    parts_.order.require_finished(owner.id);
    if (Recipe::retain_type::observed == observes::every_query && parts_.roles.follows_recipe(owner.layer) &&
        q.tokens > 0)
      require_rows_on_16_bytes("q", q);
  }
  void begin_prompt(index_t id, cudaStream_t stream) { parts_.store.settle({id}, true, stream); }
  /// Sets aside the pages that layers share, for all layers or for none.
  void expect_chunk(index_t id, index_t tokens) {
    parts_.store.require_fits({0, id}, tokens);
    // A layer that slides, or chooses before the chunk, moves what it stores.
    const bool moves_rows = parts_.roles.some_slide() || Recipe::schedule_type::fires_at(moment::chunk_end);
    parts_.store.expect(id, tokens, moves_rows);
  }
  void end_chunk(sequence_layer owner, const planned<Recipe>& policies, const prompt_reach& reach, index_t reconsidered,
                 index_t coming, cudaStream_t stream) {
    if constexpr (Recipe::schedule_type::fires_at(moment::chunk_end))
      prompts().end_chunk(owner, policies, reach, reconsidered, coming, stream);
  }
  template <class Q, class E>
  void append_chunk(sequence_layer owner, const planned<Recipe>& policies, const prompt_chunk& chunk,
                    const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v,
                    cudaStream_t stream) {
    check_element<Q, E>();
    prompts().append(owner, policies, chunk, q, k, v, stream);
  }
  template <class E>
  void attend_chunk(sequence_layer owner, const Recipe& recipe, index_t first, const rows_view<const E>& q,
                    const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    check_element<E>();
    prompts().attend(owner, recipe, first, q, out, lse, stream);
  }
  template <class Q, class E>
  void reread(sequence_layer owner, const planned<Recipe>& policies, const reread_part& part,
              const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v,
              const rows_view<Out>& out, cudaStream_t stream) {
    check_element<Q, E>();
    prompts().reread(owner, policies, part, q, k, v, out, stream);
  }
  void set_scores(sequence_layer owner, index_t first, index_t tokens, const float* scores, cudaStream_t stream) {
    prompts().set_scores(owner, first, tokens, scores, stream);
  }
  void end_layer(sequence_layer owner, const Recipe& recipe, const planned<Recipe>& policies, bool due,
                 const prompt_reach& reach, cudaStream_t stream) {
    prompts().end_layer(owner, recipe, policies, due, reach, stream);
  }
  void end_prompt(index_t id, const Recipe&, const planned<Recipe>& policies, bool due,
                  const sequence_state<Recipe>& state, cudaStream_t stream) {
    prompts().end(id, policies, due, state, stream);
  }

  // --- steps ---------------------------------------------------------------------------------------------------------

  void prepare_step(const Recipe&, const batch& step, const conversations<Recipe>& known, cudaStream_t stream) {
    steps().prepare(step, known, stream);
  }
  void begin_counting(const batch& step, conversations<Recipe>& known) { parts_.order.prepared(step, known); }
  void begin_step(const batch& step, cudaStream_t stream) { steps().begin(step, stream); }
  void require_layer(index_t layer, const batch& step, const conversations<Recipe>&, cudaStream_t stream) const {
    parts_.order.require_layer(layer, step, stream);
  }
  template <class Q, class E>
  void decode(index_t layer, const Recipe& recipe, const batch& step, const conversations<Recipe>& known,
              const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v,
              const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    check_element<Q, E>();
    require_rows_on_16_bytes("q", q);  // before the rows are appended: attention would refuse it behind them
    steps().decode_rows(layer, recipe, step, known.sequence(step.ids.front()).policies, q, k, v, out, lse, stream);
  }
  void require_decoded(index_t layer, const batch& step, const conversations<Recipe>&, cudaStream_t stream) const {
    parts_.order.require_decoded(layer, step, stream);
  }
  template <class E>
  void attend(index_t layer, const Recipe& recipe, const batch& step, const conversations<Recipe>&,
              const rows_view<const E>& q, const rows_view<Out>& out, const rows_view<float>& lse,
              cudaStream_t stream) {
    check_element<E>();
    require_rows_on_16_bytes("q", q);
    steps().attend_rows(layer, recipe, step, q, out, lse, stream);
  }
  void count_layer(index_t layer, const batch&, const conversations<Recipe>&, cudaStream_t stream) {
    parts_.order.decoded(layer, stream);
  }
  /// Whether the sequence's step has been prepared and has layers left, as far as the host knows.
  bool is_under_way(const sequence_state<Recipe>&, index_t id) const { return parts_.order.is_under_way(id); }
  void forget_step(index_t id) { parts_.order.closed(id); }

  // --- drafts --------------------------------------------------------------------------------------------------------

  void prepare_draft(const draft_step& draft, const conversations<Recipe>&, cudaStream_t stream) {
    steps().prepare_draft(draft, stream);
  }
  void begin_counting_draft(const draft_step& draft) { parts_.order.prepared_draft(draft.step); }
  void begin_draft(const draft_step& draft, cudaStream_t stream) { steps().begin_draft(draft, stream); }
  template <class Q, class E>
  void decode_draft(index_t layer, const Recipe& recipe, const draft_step& draft, const conversations<Recipe>&,
                    const rows_view<const Q>& q, const rows_view<const E>& k, const rows_view<const E>& v,
                    const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    check_element<Q, E>();
    parts_.order.require_draft(draft.step, stream);
    require_rows_on_16_bytes("q", q);
    steps().draft(layer, recipe, draft, q, k, v, out, lse, stream);
    parts_.order.drafted(layer, stream);
  }
  void require_drafted(index_t id, std::uint64_t number) const { parts_.order.require_drafted(id, number); }
  void plan_accepted(const Recipe&, const batch& step, const host_vector<accepted_tokens>& accepted,
                     const conversations<Recipe>& known, cudaStream_t stream) {
    steps().plan_accepted(step, accepted, known, stream);
  }
  void commit_accepted(const Recipe& recipe, const batch& step, const conversations<Recipe>& known,
                       cudaStream_t stream) {
    steps().commit_accepted(recipe, step, known.sequence(step.ids.front()).policies, stream);
  }
  void end_draft(index_t) {}

  // --- answers -------------------------------------------------------------------------------------------------------

  auto view(sequence_layer owner) const { return parts_.store.view(owner); }
  host_vector<index_t> positions(sequence_layer owner, index_t head) const {
    return parts_.store.downloaded_positions(owner)[std::size_t(head)];
  }
  host_vector<index_t> readable(sequence_layer owner, index_t head) const {
    return joined_lists(parts_.downloaded_lists(owner), parts_.shape.kv_heads)[std::size_t(head)];
  }
  const kv_store<layout>& store() const { return parts_.store; }
  kv_store<layout>& store() { return parts_.store; }
  const index_t* step_positions() const { return parts_.first_position.data(); }

  void trace_attended(bool on) { parts_.traces_attended = on; }
  const host_vector<host_vector<index_t>>& attended(sequence_layer owner) const { return parts_.attended[owner]; }
  void trace_lines(bool on) { parts_.prompts.trace(on); }
  const prompt_lines& lines(sequence_layer owner) const { return parts_.prompts.lines(owner); }

  /// Bytes of rows, positions, scores, candidates, stored queries and, once a prompt has ended, the index.
  offset_t bytes(index_t id, const sequence_state<Recipe>& state) const {
    offset_t total = 0;
    for (index_t layer = 0; layer < parts_.shape.layers; ++layer) {
      const sequence_layer owner{layer, id};
      const token_bound held = parts_.read_stage.candidates().bound(owner, parts_.store.bound(owner));
      total += parts_.store.bytes(owner) + parts_.read_stage.candidates().bytes(owner) + bytes_of_every_layer() +
               (state.now.turn > 0 ? parts_.read_stage.reader().bytes(state.policies, held.longest) : 0);
    }
    return total;
  }
  /// An upper bound of what a new sequence with these policies and peaks takes.
  /// Errors   more than the sizes of the cache allow for one sequence: tessera::error.
  capacity upper_bound(const Recipe&, const planned<Recipe>& policies, const host_vector<layer_peak>& peaks) const {
    parts_.require_covered(policies);
    capacity bound = parts_.store.upper_bound(peaks);
    for (const layer_peak& peak : peaks) {
      require_tokens_of_head(peak.stored.longest, parts_.options.tokens);
      if (peak.follows_recipe) parts_.read_stage.reader().require_fits(peak.readable.longest);
      bound.bytes += bytes_of_every_layer() + parts_.read_stage.candidates().upper_bound(peak.readable) +
                     parts_.read_stage.reader().bytes(policies, peak.readable.longest);
    }
    return bound;
  }
  /// What is free in the pool of rows. Everything else was allocated when the cache was made. Of that, only the bytes
  /// that every sequence takes are counted. So a sequence whose upper bound fits has enough rows.
  capacity available() const {
    capacity left = parts_.store.available();
    if (left.bytes != capacity::unlimited) left.bytes += parts_.shape.layers * bytes_of_every_layer();
    return left;
  }
  const layer_roles& roles() const { return parts_.roles; }
  offset_t bytes_read(index_t id, const Recipe& recipe, const sequence_state<Recipe>& state) const {
    return step_bytes(parts_, id, recipe, state);
  }

 private:
  /// Bytes that every layer of a sequence takes, whatever it stores.
  offset_t bytes_of_every_layer() const {
    return parts_.first.observer().bytes_of_layer() + parts_.prompts.bytes_of_layer();
  }
  template <class... E>
  static constexpr void check_element() {
    static_assert((std::is_same_v<E, T> && ...),
                  "tessera: the CUDA cache takes q, k and v of its layout's element type, fp16 or bf16");
  }
  prompt_turn<Recipe, Out> prompts() { return prompt_turn<Recipe, Out>(parts_); }
  step_turn<Recipe, Out> steps() { return step_turn<Recipe, Out>(parts_); }

  void clear(index_t id, cudaStream_t stream) {
    if constexpr (packing_layout<layout>) parts_.hold_for_saves(stream);  // forks may read its segments
    parts_.store.clear(id, stream);
    parts_.read_stage.candidates().clear(id, stream);
    parts_.read_stage.reader().clear(id, stream);
    parts_.first.observer().forget(id);
  }
  parts_type parts_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
