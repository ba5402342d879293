// The whole cache of one model on the GPU: a recipe over layers and sequences, the device's tessera::cache.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "attend/prefill/prefill_attention.cuh"
#include "cache/batch.hpp"
#include "cache/cache_operations.cuh"
#include "cache/cache_options.hpp"
#include "cache/cache_state.hpp"
#include "cache/prompt_stage.cuh"
#include "cache/read_store.cuh"
#include "store/row_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Stores, compresses and attends the KV cache of a model by one recipe, on one device and one stream at a time.
///
/// A turn is: `reserve` the prompt's length, `prefill` a chunk in every layer, and its attention if the engine has none
/// of its own, chunk after chunk; `end_prefill` once. Then for each step `prepare_step` on the host; and, recorded in a
/// graph or not, `begin_step` and `decode` in every layer. What a graph recorded can be replayed for every later step of
/// the same sequences and number of tokens: lengths, positions and places are read on the device.
/// Keys and queries come after RoPE; positions are counted here and survive every eviction. T is the layout's element
/// type, fp16 or bf16; `Out` is what attention is written as: fp32, fp16 or bf16. All pointers are device pointers.
/// Errors   bad shapes, unknown sequences and steps out of order throw tessera::error before anything is launched; where
///          the pool has no room left, the call that needs it throws.
/// Memory   rows * (bytes of a row), scratch of sequences * kv_heads * tokens scores, and what the operations need.
/// Limits   lengths and positions that the host asks for (`positions`, `bytes_read`, tracing) synchronise the stream.
template <class Recipe, class Out = float>
class cache {
 public:
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  static constexpr int k_dim = layout::k_dim, v_dim = layout::v_dim;
  static_assert(sizeof(T) == 2, "tessera: the CUDA cache stores fp16 and bf16; the CPU cache stores fp32 too");

  cache(model_shape shape, Recipe recipe, cache_options options)
      : shape_(checked(shape)),
        recipe_(checked(recipe)),
        options_(checked(options)),
        device_(device_info::current()),
        store_(shape.layers, options.sequences, shape.kv_heads, options.rows_for(shape), Recipe::retains,
               observes_every_query, Recipe::filters),
        next_(std::size_t(options.sequences)),
        first_(std::size_t(options.sequences)),
        sequences_(options.sequences, shape.layers),
        reading_(shape.layers, options.sequences, shape.kv_heads, options.index_pages_for(shape, recipe)),
        first_stage_(recipe_, shape_, options_, device_) {}

  const model_shape& shape() const { return shape_; }
  const Recipe& recipe() const { return recipe_; }

  /// Changes the token budget; it counts from the next time the schedule retains, or the next step that retrieves.
  /// Steps that a graph recorded keep the budget that they were recorded with.
  void set_budget(index_t tokens) {
    Recipe changed = recipe_;
    changed.set_budget(tokens);
    changed.check();
    recipe_ = changed;
    steps_.clear();
    if constexpr (Recipe::chooses) first_stage_.reset();
    if constexpr (Recipe::retrieves && !Recipe::estimates && !Recipe::plans) {
      for (index_t id = 0; id < options_.sequences; ++id) {
        if (sequences_.is_open(id)) set_plan(id, nullptr);
      }
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // steps on other streams read the new plans
    }
  }

  /// Opens an empty sequence and returns its id; ids of closed sequences are used again.
  index_t open(cudaStream_t stream = nullptr) {
    const index_t id = sequences_.open(recipe_.plan(0));
    check(cudaMemsetAsync(next_.data() + id, 0, sizeof(index_t), stream), "cudaMemsetAsync");
    first_stage_.forget(id);
    return id;
  }

  void close(index_t id, cudaStream_t stream = nullptr) {
    sequences_.at(id).open = false;
    store_.clear(id, stream);
    reading_.clear(shape_.layers, id);
  }

  /// Makes room for so many more tokens in every layer, so that a prompt's rows do not move while it comes.
  void reserve(index_t id, index_t tokens, cudaStream_t stream) {
    sequences_.at(id);
    require(tokens >= 0, "tokens to reserve", tokens, "0 or more", "pass the prompt's length");
    for (index_t layer = 0; layer < shape_.layers; ++layer) require_fits(layer, id, tokens);
    for (index_t layer = 0; layer < shape_.layers; ++layer) store_.make_room(layer, id, tokens, 0, stream);
  }

  /// Appends a chunk of the prompt to one layer and lets the scorer observe its queries.
  /// Shapes   k, v [1, tokens, kv_heads, dim]; q [1, n_q, q_heads, k_dim], the queries of the chunk's last n_q tokens:
  ///          all of them, or fewer where the scorer needs fewer (its window, or none).
  void prefill(index_t layer, index_t id, const rows_view<const T>& q, const rows_view<const T>& k,
               const rows_view<const T>& v, cudaStream_t stream) {
    detail::layer_state& state = sequences_.at(id, layer);
    shape_.check_rows(q, k, v, k_dim, v_dim);
    require_batch(k.sequences, 1);
    require(k.tokens >= 1, "tokens of a prompt chunk", k.tokens, "at least 1", "skip empty chunks");
    recipe_.require_queries(q.tokens, k.tokens);
    require_fits(layer, id, k.tokens);
    // Unreserved prompts grow by half, so that n tokens move fewer than 3 n.
    store_.make_room(layer, id, k.tokens, std::max(options_.room, store_.at(layer, id).longest / 2), stream);
    append_rows(layer, id, 1, k, v, at_position(state.next_position, stream), stream);
    store_.took(layer, id, k.tokens);
    state.next_position += k.tokens;
    state.turn_tokens += k.tokens;
    first_stage_.observe(recipe_, sequences_.at(id).plan, store_, layer, id, q, state.next_position, stream);
  }

  /// Causal attention of the newest q.tokens tokens of a layer over everything that it stores.
  /// Shapes   q [1, tokens, q_heads, k_dim], out [1, tokens, q_heads, v_dim], lse [1, tokens, q_heads] (data null: not
  ///          wanted).
  void prefill_attention(index_t layer, index_t id, const rows_view<const T>& q, const rows_view<Out>& out,
                         const rows_view<float>& lse, cudaStream_t stream) {
    const detail::layer_state& state = sequences_.at(id, layer);
    shape_.check_output(q, out, k_dim, v_dim);
    require(q.tokens >= 1 && q.tokens <= state.turn_tokens, "queries of a prompt chunk", q.tokens,
            "1 to the tokens of this turn, which are " + std::to_string(state.turn_tokens),
            "call prefill for the chunk first");
    if (!prompt_attention_) prompt_attention_.make(shape_, device_);
    const auto& attention = *prompt_attention_;
    attention.run.run({store_.view(layer, id, 1), q, at_position(state.next_position - q.tokens, stream),
                       recipe_.attention.rule, out, lse},
                      attention.scratch.data(), stream);
  }

  /// Ends a turn's prompt: where the schedule says so, every layer chooses anew what it keeps and frees the rest, or what
  /// a filter lets through. The first turn's end also plans what the budget comes to: see `plan`.
  void end_prefill(index_t id, cudaStream_t stream) {
    detail::sequence_state& sequence = sequences_.at(id);
    sequence.check_prompt_ended();
    const index_t first_prompt = sequence.first_prompt ? sequence.first_prompt : sequence.front().turn_tokens;
    sequence.plan = recipe_.plan(first_prompt);  // may throw: nothing has changed yet
    sequence.first_prompt = first_prompt;
    set_number(next_.data() + id, sequence.front().next_position, stream);
    set_plan(id, stream);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      if constexpr (Recipe::chooses) {
        if (recipe_.schedule.due(moment::prefill_end)) choose_anew(layer, id, sequence.plan, stream);
      }
      if constexpr (Recipe::estimates) {
        const auto& held = store_.at(layer, id);
        reading_.refresh(layer, id, read_view(layer, id, 1), held.longest, held.total,
                         recipe_.step_scorer(sequence.plan).page, options_.room, stream);
      }
      sequence.layers[std::size_t(layer)].turn_tokens = 0;
    }
    first_stage_.forget(id);
  }

  /// The host's part of a decode step of 1 to `step_tokens` tokens: room for it in every layer. Before every step, also
  /// before a replayed one; never recorded itself.
  void prepare_step(const std::vector<index_t>& ids, index_t tokens, cudaStream_t stream) {
    require(tokens >= 1 && tokens <= options_.step_tokens, "tokens of a decode step", tokens,
            "1 to cache_options::step_tokens, which is " + std::to_string(options_.step_tokens),
            "prefill longer runs, or raise step_tokens");
    require(!ids.empty(), "sequences of the batch", 0, "at least 1", "pass the ids of a batch");
    if constexpr (Recipe::retrieves && !Recipe::estimates && !Recipe::plans) {
      require(recipe_.retrieve.tokens >= tokens, "budget", recipe_.retrieve.tokens,
              "at least the tokens of the step, which are " + std::to_string(tokens),
              "raise the budget: a step of several tokens reads them all");
    }
    for (const index_t id : ids) {
      const detail::layer_state& state = sequences_.at(id).front();
      require(state.turn_tokens == 0 && state.next_position > 0, "tokens since the prompt began", state.turn_tokens,
              "a prompt that has ended", "prefill a prompt and call end_prefill before the first decode step");
      require(std::count(ids.begin(), ids.end(), id) == 1, "sequence id in a batch", id, "given once",
              "pass each sequence once a step");
      for (index_t layer = 0; layer < shape_.layers; ++layer) require_fits(layer, id, tokens);
    }
    for (const auto& [first, count] : runs(ids)) {
      operations(first, count);
      for (index_t id = first; id < first + count; ++id) sequences_.at(id).batched = count;
    }
    for (const index_t id : ids) {
      detail::sequence_state& sequence = sequences_.at(id);
      sequence.prepared = tokens;
      for (index_t layer = 0; layer < shape_.layers; ++layer) {
        const auto& held = store_.at(layer, id);
        store_.make_room(layer, id, tokens, options_.room, stream);
        reading_.make_room(layer, id, read_view(layer, id, 1), held.longest, held.total, tokens, options_.room, stream);
        store_.took(layer, id, tokens);
        sequence.layers[std::size_t(layer)].next_position += tokens;
        if constexpr (retains_steps) first_stage_.note_eviction(recipe_, sequence.plan, store_, layer, id);
      }
    }
  }

  /// The device's part of a step, first of all: positions move on.
  void begin_step(const std::vector<index_t>& ids, index_t tokens, cudaStream_t stream) {
    for (const auto& [first, count] : runs(ids)) {
      detail::advance_positions_entry<128><<<unsigned(ceil_div(count, 128)), 128, 0, stream>>>(
          next_.data() + first, first_.data() + first, count, tokens);
      check(cudaGetLastError(), "launch of advance_positions");
    }
  }

  /// One layer of a decode step for a batch of sequences: append, retrieve, attend, retain.
  ///
  /// Ids that follow one another (3, 4, 5) run in one launch each; others in several.
  /// Shapes   ids [sequences]; q [sequences, tokens, q_heads, k_dim], k, v [sequences, tokens, kv_heads, dim], out as q
  ///          with v_dim, lse [sequences, tokens, q_heads] (data null: not wanted). Causal inside the step.
  void decode(index_t layer, const std::vector<index_t>& ids, const rows_view<const T>& q, const rows_view<const T>& k,
              const rows_view<const T>& v, const rows_view<Out>& out, const rows_view<float>& lse,
              cudaStream_t stream) {
    shape_.check_rows(q, k, v, k_dim, v_dim);
    shape_.check_output(q, out, k_dim, v_dim);
    require_batch(q.sequences == k.sequences ? k.sequences : 0, ids.size());
    require(q.tokens == k.tokens, "queries of a decode step", q.tokens,
            "as many as new keys, which are " + std::to_string(k.tokens), "pass q, k and v of the same tokens");
    for (const index_t id : ids) {
      sequences_.at(id, layer);
      require(sequences_.at(id).prepared == q.tokens, "tokens of a decode step", q.tokens,
              "those of prepare_step, which are " + std::to_string(sequences_.at(id).prepared),
              "call prepare_step and begin_step before the layers of a step");
    }
    index_t done = 0;
    for (const auto& [first, count] : runs(ids)) {
      step(layer, first, detail::part(q, done, count), detail::part(k, done, count), detail::part(v, done, count),
           detail::part(out, done, count), detail::part(lse, done, count), stream);
      done += count;
    }
  }

  /// On the device, by id: the position of the first token of the step that `begin_step` began.
  const index_t* step_positions() const { return first_.data(); }

  /// The logical position of the next token: tokens seen so far.
  index_t next_position(index_t id) const { return sequences_.at(id).front().next_position; }

  /// A view of what a layer stores of one sequence, for engines with attention of their own.
  auto view(index_t layer, index_t id) const {
    sequences_.at(id, layer);
    return store_.view(layer, id, 1);
  }

  /// Logical positions that a layer stores for one kv_head, ascending. Synchronises.
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const {
    sequences_.at(id, layer);
    return store_.downloaded_positions(layer, id)[std::size_t(head)];
  }

  /// What the budget comes to in this conversation, since its first prompt ended.
  stage_plan plan(index_t id) const { return step_plan(sequences_.at(id).plan); }

  /// Logical positions that this turn's steps may read of one kv_head: what a filter let through and what was decoded
  /// since; everything stored where there is no filter. Synchronises.
  std::vector<index_t> readable(index_t layer, index_t id, index_t head) const {
    sequences_.at(id, layer);
    return downloaded_readable(layer, id)[std::size_t(head)];
  }

  /// Whether decode steps write down which positions they attend; off by default. A traced step synchronises and cannot
  /// be recorded.
  void trace_attended(bool on) { tracing_ = on; }
  /// Positions that the last traced decode step of a layer attended, by kv_head.
  const std::vector<std::vector<index_t>>& attended(index_t layer, index_t id) const {
    return sequences_.at(id, layer).attended;
  }

  /// Bytes that a sequence holds in all layers: rows with their positions and scores, remembered queries.
  offset_t bytes(index_t id) const {
    sequences_.at(id);
    offset_t total = 0;
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      total += store_.at(layer, id).rows * store_.row_bytes() + reading_.bytes(layer, id);
      total += first_stage_.bytes_per_place();
    }
    return total;
  }
  /// The most bytes of rows and index that were ever in use at one time, all sequences together.
  offset_t most_bytes() const { return store_.spans().most_used() * store_.row_bytes() + reading_.most_bytes(); }

  /// Distinct bytes of stored K, V and scores, of candidates and index, that the last decode step of a sequence touched,
  /// all layers. Synchronises.
  offset_t bytes_read(index_t id) {
    const detail::sequence_state& sequence = sequences_.at(id);
    if (sequence.batched == 0) return 0;  // no step yet
    offset_t total = 0;
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      const view_type all = store_.view(layer, id, 1);
      for (const index_t stored :
           downloaded(reading_.view(all, layer, id, nullptr).lengths, std::size_t(shape_.kv_heads))) {
        offset_t n = stored;
        // What the eviction at the end of the step dropped has been read too.
        if constexpr (retains_steps) n = std::min<offset_t>(n + sequence.prepared, next_position(id));
        offset_t attended = n;
        if constexpr (Recipe::retrieves) {
          const auto& retrieve = operations(id, sequence.batched).retrieve();
          const read_plan plan = retrieve.plan_for(recipe_, step_plan(sequence.plan));
          attended = std::min<offset_t>(n, retrieve.most_read(plan));
          total += retrieve.bytes_read(plan, n);
          if constexpr (reading_type::averages) total += offset_t(v_dim) * offset_t(sizeof(double));
          if constexpr (Recipe::filters) total += attended * offset_t(sizeof(index_t));
        }
        total += attended * layout::token_bytes() + (observes_every_query ? n * 4 : 0);
      }
    }
    return total;
  }

  /// Bytes of K and V of an uncompressed sequence of that many tokens.
  offset_t full_bytes(index_t tokens) const {
    return offset_t(shape_.layers) * shape_.kv_heads * tokens * layout::token_bytes();
  }

 private:
  static constexpr bool retains_steps = Recipe::retains && Recipe::schedule_type::after_steps;
  static constexpr bool observes_every_query = Recipe::observed == observes::every_query;

  using store_type = row_store<layout>;
  using view_type = typename store_type::view_type;
  using reading_type = read_store<Recipe>;
  using read_view_type = typename reading_type::view_type;
  using operations_type = step_operations<Recipe, view_type, read_view_type, Out>;
  template <class X>
  static X checked(X given) {
    given.check();
    return given;
  }

  void require_fits(index_t layer, index_t id, index_t tokens) const {
    const index_t held = store_.at(layer, id).longest;
    require(offset_t(held) + tokens <= options_.tokens, "tokens of a kv_head", offset_t(held) + tokens,
            "at most cache_options::tokens, which is " + std::to_string(options_.tokens),
            "raise tokens, or lower the budget");
  }
  void require_batch(index_t sequences, std::size_t ids) const {
    require(sequences == index_t(ids), "sequences of q, k and v", sequences,
            "as many as ids, which are " + std::to_string(ids), "pass one row of tokens per sequence");
  }

  const index_t* at_position(index_t position, cudaStream_t stream) const {
    return set_number(chunk_position_.data(), position, stream);
  }

  /// What a budget comes to in a step. A budget of one step's exact reads may change at any time.
  stage_plan step_plan(const stage_plan& planned) const {
    stage_plan plan = planned;
    if constexpr (Recipe::retrieves && !Recipe::estimates && !Recipe::plans) plan.read = recipe_.retrieve.tokens;
    return plan;
  }

  void set_plan(index_t id, cudaStream_t stream) {
    if constexpr (Recipe::retrieves) {
      using retrieve_type = std::remove_cvref_t<decltype(std::declval<operations_type>().retrieve())>;
      reading_.set_plan(id, retrieve_type::plan_for(recipe_, step_plan(sequences_.at(id).plan)), stream);
    }
  }

  read_view_type read_view(index_t layer, index_t first, index_t count) const {
    return reading_.view(store_.view(layer, first, count), layer, first, store_.positions(nullptr).data);
  }

  void append_rows(index_t layer, index_t first, index_t count, const rows_view<const T>& k,
                   const rows_view<const T>& v, const index_t* positions, cudaStream_t stream) const {
    append_problem<view_type, T> problem;
    problem.view = store_.view(layer, first, count);
    problem.k = k;
    problem.v = v;
    problem.lengths = store_.lengths(layer, first);
    problem.first_position = positions;
    if constexpr (Recipe::retains) problem.positions = store_.positions(store_.begins(layer, first));
    if constexpr (observes_every_query) problem.scores = store_.scores(store_.begins(layer, first));
    append<view_type, T>(count, shape_.kv_heads).run(problem, nullptr, stream);
  }

  /// Keeps, or lets through, the budget's worth of what a layer stores.
  void choose_anew(index_t layer, index_t id, const stage_plan& plan, cudaStream_t stream) requires(Recipe::chooses) {
    if (Recipe::retains && store_.at(layer, id).longest <= recipe_.first_stage(plan).budget.tokens) return;
    const auto [chosen, bound] =
        first_stage_.choose(recipe_, plan, store_, layer, id, next_position(id), next_.data() + id, stream);
    if constexpr (Recipe::filters) {
      reading_.pass(layer, id, chosen, store_.begins(layer, id), store_.positions(nullptr).data, bound.longest,
                    bound.total, stream);
    } else {
      store_.keep(layer, id, chosen, bound.longest, bound.total, options_.room, first_stage_.mover(recipe_), stream);
    }
  }

  // --- steps -------------------------------------------------------------------------------------------------------

  /// Sequences share launches when their plans are equal and their ids follow one another.
  using operations_key = std::tuple<index_t, index_t, double>;
  static operations_key key_of(const stage_plan& plan, index_t sequences) {
    return {sequences, Recipe::retrieves ? plan.read : 0, Recipe::estimates ? plan.ratio : 1.0};
  }
  std::vector<std::pair<index_t, index_t>> runs(const std::vector<index_t>& ids) const {
    return detail::runs(ids, [&](index_t a, index_t b) {
      return key_of(sequences_.at(a).plan, 1) == key_of(sequences_.at(b).plan, 1);
    });
  }

  operations_type& operations(index_t first, index_t sequences) {
    const stage_plan plan = step_plan(sequences_.at(first).plan);
    auto& found = steps_[key_of(plan, sequences)];
    if (!found) {
      index_t kept = 0;
      if constexpr (retains_steps) kept = first_stage_.most(recipe_, plan);
      found.make(recipe_, plan, shape_, sequences, options_.step_tokens, options_.tokens, kept, device_);
    }
    return *found;
  }

  void step(index_t layer, index_t first, const rows_view<const T>& q, const rows_view<const T>& k,
            const rows_view<const T>& v, const rows_view<Out>& out, const rows_view<float>& lse, cudaStream_t stream) {
    operations_type& does = operations(first, q.sequences);
    const index_t* position = first_.data() + first;
    append_rows(layer, first, q.sequences, k, v, position, stream);
    const view_type all = store_.view(layer, first, q.sequences);
    reading_.append(layer, first, all, q.tokens, store_.positions(nullptr).data, stream);
    const read_view_type view = read_view(layer, first, q.sequences);
    selection_view read{};
    bool attended = false;
    if constexpr (Recipe::estimates) {
      attended = does.retrieve().attends();
      if (attended) {
        read = does.retrieve().choose_and_attend(view, reading_.plans(first), reading_.index(layer, first), q, position,
                                                 out, lse, stream);
      }
    }
    if constexpr (Recipe::retrieves) {
      if (!attended)
        read = does.retrieve().choose(view, reading_.plans(first), reading_.index(layer, first), q, position, stream);
    }
    if (!attended) does.attend({view, q, position, recipe_.attention.rule, out, lse, read}, stream);
    if constexpr (reading_type::averages) {
      reading_.add_mean_value(layer, first, view, does.retrieve().mass(), out, stream);
    }
    if (tracing_) trace(layer, first, q.sequences, read);
    if constexpr (retains_steps) {
      if (!recipe_.schedule.due(moment::step_end)) return;
      const auto policy = recipe_.first_stage(sequences_.at(first).plan);
      const auto& retain = does.retain();
      const slot_column<float> scores = store_.scores(all.table.begin);
      if constexpr (observes_every_query) {
        retain.observe(policy, recipe_.attention.rule, all, q, position, scores.data, all.table.begin, stream);
      }
      const selection_view kept =
          retain.choose(policy, recipe_.attention.rule, all, q, next_.data() + first, scores.data,
                        policy.scorer.protected_tail(policy.budget.tokens), layer, stream);
      retain.keep_in_place(all, kept, store_.positions(all.table.begin), scores, store_.lengths(layer, first), stream);
      if constexpr (Recipe::estimates)
        reading_.rebuild(layer, first, read_view(layer, first, q.sequences), options_.tokens, stream);
    }
  }

  // --- what the host asks for --------------------------------------------------------------------------------------

  /// Positions that steps may read of a layer, by kv_head.
  std::vector<std::vector<index_t>> downloaded_readable(index_t layer, index_t id) const {
    if constexpr (Recipe::filters) {
      std::vector<std::vector<index_t>> all;
      const auto counts = reading_.downloaded_counts(layer, id);
      const auto begins = downloaded(store_.begins(layer, id), counts.size());
      for (std::size_t h = 0; h < counts.size(); ++h) {
        all.push_back(downloaded(store_.positions(nullptr).data + begins[h], std::size_t(counts[h])));
      }
      return all;
    } else {
      return store_.downloaded_positions(layer, id);
    }
  }
  void trace(index_t layer, index_t first, index_t count, const selection_view& read) {
    for (index_t b = 0; b < count; ++b) {
      auto& attended = sequences_.at(first + b, layer).attended;
      attended = downloaded_readable(layer, first + b);
      for (index_t h = 0; read.indices && h < shape_.kv_heads; ++h) {
        const offset_t row = offset_t(b) * shape_.kv_heads + h;
        std::vector<index_t> chosen = downloaded(read.row(row), std::size_t(downloaded(read.counts + row, 1)[0]));
        for (index_t& slot : chosen) slot = attended[std::size_t(h)][std::size_t(slot)];
        attended[std::size_t(h)] = std::move(chosen);
      }
    }
  }

  model_shape shape_;
  Recipe recipe_;
  cache_options options_;
  device_info device_;
  store_type store_;
  device_buffer<index_t> next_, first_;  // by id: position of the next token, and of the step's first
  device_buffer<index_t> chunk_position_{1};
  detail::sequence_table sequences_;
  reading_type reading_;
  prompt_stage<Recipe> first_stage_;
  bool tracing_ = false;
  struct prompt_attention {
    cuda::prefill_attention<view_type, Out> run;
    device_buffer<unsigned char> scratch;
    prompt_attention(const model_shape& shape, const device_info& device)
        : run(1, shape.kv_heads, shape.q_heads, device), scratch(run.workspace_bytes()) {}
  };
  made_on_demand<prompt_attention> prompt_attention_;
  std::map<operations_key, made_on_demand<operations_type>> steps_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
