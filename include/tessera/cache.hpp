// The whole cache of one model on the CPU: a recipe over layers and sequences, for those who have no cache of their
// own.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/attend/attend.hpp"
#include "backend/cpu/choose/retain.hpp"
#include "backend/cpu/read/read_stage.hpp"
#include "backend/cpu/score/score.hpp"
#include "backend/cpu/store/ragged_store.hpp"
#include "core/model_shape.hpp"
#include "recipe.hpp"

TESSERA_NAMESPACE_BEGIN
inline namespace TESSERA_HOST_ISA {

/// Stores, compresses and attends the KV cache of a model by one recipe.
///
/// A turn is: `prefill` a chunk in every layer, and its attention if the engine has none of its own, chunk after chunk;
/// `end_prefill` once; then `decode` in every layer for each step. The next turn begins with the next `prefill`.
/// Keys and queries come after RoPE; positions are counted here and survive every eviction.
/// Errors   bad shapes, unknown sequences and steps out of order throw tessera::error before anything is changed.
/// Threads  one thread calls a cache at a time; the work is spread over the executor. Copies are independent.
template <class Recipe>
class cache {
 public:
  using layout = typename Recipe::layout_type;
  static constexpr int k_dim = layout::k_dim;
  static constexpr int v_dim = layout::v_dim;
  static constexpr index_t most_step_tokens = 8;

  cache(model_shape shape, Recipe recipe, std::shared_ptr<cpu::executor> workers)
      : shape_(shape), recipe_(std::move(recipe)), workers_(std::move(workers)) {
    shape_.check();
    recipe_.check();
  }

  cache(const cache& other)
      : shape_(other.shape_),
        recipe_(other.recipe_),
        workers_(other.workers_),
        sequences_(other.sequences_),
        tracing_(other.tracing_) {}
  cache& operator=(const cache& other) {
    if (this != &other) *this = cache(other);
    return *this;
  }
  cache(cache&&) noexcept = default;
  cache& operator=(cache&&) noexcept = default;

  const model_shape& shape() const { return shape_; }
  const Recipe& recipe() const { return recipe_; }

  /// Changes the token budget; it counts from the next time the schedule retains, or the next step that retrieves by
  /// exact scores. Where the budget pays for an estimate, it counts from the end of the next turn's prompt.
  void set_budget(index_t tokens) {
    Recipe changed = recipe_;
    changed.set_budget(tokens);
    changed.check();
    recipe_ = changed;
  }

  /// Opens an empty sequence and returns its id; ids of closed sequences are used again.
  index_t open() {
    const index_t id = index_t(std::find(sequences_.begin(), sequences_.end(), nullptr) - sequences_.begin());
    if (id == index_t(sequences_.size())) sequences_.emplace_back();
    sequences_[std::size_t(id)] = sequence_state(shape_, recipe_);
    return id;
  }

  void close(index_t id) {
    at(id);
    sequences_[std::size_t(id)] = {};
  }

  /// Appends a chunk of the prompt to one layer and lets the scorer observe its queries.
  /// Shapes   k, v [tokens, kv_heads, dim]; q [n_q, q_heads, k_dim], the queries of the chunk's last n_q tokens: all of
  ///          them, or fewer where the scorer needs fewer (its window, or none).
  template <class E>
  void prefill(index_t layer, index_t id, const rows_view<const E>& q, const rows_view<const E>& k,
               const rows_view<const E>& v) {
    layer_state& state = at(id, layer);
    shape_.check_rows(q, k, v, k_dim, v_dim);
    require(k.tokens >= 1, "tokens of a prompt chunk", k.tokens, "at least 1", "skip empty chunks");
    recipe_.require_queries(q.tokens, k.tokens);
    state.store.append(k, v, state.next_position);
    state.next_position += k.tokens;
    state.turn_tokens += k.tokens;
    if constexpr (Recipe::observed == observes::window) state.remember(q, recipe_.retain.scorer.window);
    if constexpr (Recipe::observed == observes::every_query) accumulate(state, q);
  }

  /// Causal attention of the newest q.tokens tokens of a layer over everything that it stores.
  /// Shapes   q [tokens, q_heads, k_dim], out [tokens, q_heads, v_dim], lse [tokens, q_heads] (data null: not wanted).
  template <class E>
  void prefill_attention(index_t layer, index_t id, const rows_view<const E>& q, const rows_view<float>& out,
                         const rows_view<float>& lse = {}) {
    layer_state& state = at(id, layer);
    shape_.check_output(q, out, k_dim, v_dim);
    require(q.tokens >= 1 && q.tokens <= state.turn_tokens, "queries of a prompt chunk", q.tokens,
            "1 to the tokens of this turn, which are " + std::to_string(state.turn_tokens),
            "call prefill for the chunk first");
    const index_t first = state.next_position - q.tokens;
    cpu::prefill_attention(state.store.view(), cpu::query_rows<E>{q, &first}, recipe_.attention.rule,
                           cpu::attention_output{out, lse}, *workers_);
  }

  /// Ends a turn's prompt: where the schedule says so, every layer chooses anew what it keeps and frees the rest, or what
  /// a filter lets through. The first turn's end also plans what the budget comes to: see `plan`.
  void end_prefill(index_t id) {
    sequence_state& sequence = at(id);
    for (const layer_state& state : sequence.layers) {
      require(state.next_position == sequence.layers[0].next_position, "tokens of a layer", state.next_position,
              "those of layer 0, which are " + std::to_string(sequence.layers[0].next_position),
              "prefill every layer with every chunk before the prompt ends");
    }
    require(sequence.layers[0].turn_tokens >= 1, "tokens of this turn", sequence.layers[0].turn_tokens, "at least 1",
            "prefill a prompt before ending it");
    const index_t first_prompt = sequence.first_prompt ? sequence.first_prompt : sequence.layers[0].turn_tokens;
    sequence.plan = recipe_.plan(first_prompt);  // may throw: nothing has changed yet
    sequence.first_prompt = first_prompt;
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      layer_state& state = sequence.layers[std::size_t(layer)];
      bool moved = false;
      if constexpr (Recipe::chooses) {
        if (recipe_.schedule.due(moment::prefill_end)) moved = choose_anew(layer, state, sequence.plan);
      }
      state.reading.refresh(state.store, page_of(sequence.plan), moved);
      state.turn_tokens = 0;
      state.window = std::vector<float>();  // `= {}` would keep the memory
    }
  }

  /// One decode step of 1 to 8 tokens for a batch of sequences in one layer: append, retrieve, attend, retain.
  /// Shapes   ids [sequences]; q [sequences, tokens, q_heads, k_dim], k, v [sequences, tokens, kv_heads, dim], out as q
  ///          with v_dim, lse [sequences, tokens, q_heads] (data null: not wanted). Causal inside the step.
  template <class E>
  void decode(index_t layer, const std::vector<index_t>& ids, const rows_view<const E>& q, const rows_view<const E>& k,
              const rows_view<const E>& v, const rows_view<float>& out, const rows_view<float>& lse = {}) {
    shape_.check_rows(q, k, v, k_dim, v_dim);
    shape_.check_output(q, out, k_dim, v_dim);
    require(q.tokens >= 1 && q.tokens <= most_step_tokens, "tokens of a decode step", q.tokens, "1 to 8",
            "prefill longer runs");
    require(q.tokens == k.tokens, "queries of a decode step", q.tokens,
            "as many as new keys, which are " + std::to_string(k.tokens), "pass q, k and v of the same tokens");
    require(index_t(ids.size()) == q.sequences && q.sequences == k.sequences, "sequences of the batch", q.sequences,
            "as many as ids, which are " + std::to_string(ids.size()), "pass one id per sequence");
    if constexpr (Recipe::retrieves && !Recipe::estimates && !Recipe::plans) {
      require(recipe_.retrieve.tokens >= q.tokens, "budget", recipe_.retrieve.tokens,
              "at least the tokens of the step, which are " + std::to_string(q.tokens),
              "raise the budget: a step of several tokens reads them all");
    }
    for (std::size_t b = 0; b < ids.size(); ++b) {
      // Layers step in order: a layer that is behind or ahead of the others would answer for other positions.
      const index_t expected =
          layer > 0 ? at(ids[b], 0).next_position - q.tokens : at(ids[b], shape_.layers - 1).next_position;
      require(at(ids[b], layer).next_position == expected, "tokens of a layer before the step",
              at(ids[b], layer).next_position, std::to_string(expected), "decode every layer, in order, in every step");
      require(at(ids[b], layer).turn_tokens == 0, "tokens since the prompt began", at(ids[b], layer).turn_tokens, "0",
              "call end_prefill before the first decode step");
      require(std::count(ids.begin(), ids.end(), ids[b]) == 1, "sequence id in a batch", ids[b], "given once",
              "pass each sequence once a step");
    }
    for (index_t b = 0; b < q.sequences; ++b) {
      step(layer, at(ids[std::size_t(b)]), one(q, b), one(k, b), one(v, b), one(out, b), one(lse, b));
    }
  }

  /// The logical position of the next token: tokens seen so far in layer 0.
  index_t next_position(index_t id) const { return at(id).layers[0].next_position; }

  /// Tokens that a layer stores for one kv_head, and their logical positions, ascending.
  index_t length(index_t layer, index_t id, index_t head) const { return at(id, layer).store.length(head); }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const {
    const auto& store = at(id, layer).store;
    std::vector<index_t> result;
    for (index_t i = 0; i < store.length(head); ++i) result.push_back(store.position(head, i));
    return result;
  }

  /// What the budget comes to in this conversation, since its first prompt ended.
  stage_plan plan(index_t id) const {
    stage_plan plan = at(id).plan;
    if constexpr (Recipe::retrieves && !Recipe::estimates && !Recipe::plans) plan.read = recipe_.retrieve.tokens;
    return plan;
  }

  /// Logical positions that this turn's steps may read of one kv_head: what a filter let through and what was decoded
  /// since; everything stored where there is no filter.
  std::vector<index_t> readable(index_t layer, index_t id, index_t head) const {
    if constexpr (Recipe::filters) {
      const auto& passed = at(id, layer).reading.passed();
      return {passed.row(head), passed.row(head) + passed.count(head)};
    } else {
      return positions(layer, id, head);
    }
  }

  /// Whether decode steps write down which positions they attend (see `attended`); off by default.
  void trace_attended(bool on) { tracing_ = on; }
  /// Positions that the last traced decode step of a layer attended, by kv_head.
  const std::vector<std::vector<index_t>>& attended(index_t layer, index_t id) const { return at(id, layer).attended; }

  /// A view of what a layer stores, for engines with attention of their own. Valid until the sequence changes.
  auto view(index_t layer, index_t id) { return at(id, layer).store.view(); }

  /// Bytes that a sequence holds in all layers: rows, positions, scores, remembered queries; candidates, index and sums of
  /// the second stage.
  offset_t bytes(index_t id) const {
    offset_t total = 0;
    for (const layer_state& state : at(id).layers) {
      total += state.store.bytes() + state.reading.bytes() + offset_t(state.window.capacity() * sizeof(float));
    }
    return total;
  }

  /// Distinct bytes of stored K, V and scores, of candidates, index and sums, that the last decode step of a sequence
  /// touched, summed over layers. What a step writes is not counted.
  offset_t bytes_read(index_t id) const {
    offset_t total = 0;
    for (const layer_state& state : at(id).layers) total += state.bytes_read;
    return total;
  }

  /// Bytes of K and V of an uncompressed sequence of that many tokens.
  offset_t full_bytes(index_t tokens) const {
    return offset_t(shape_.layers) * shape_.kv_heads * tokens * layout::token_bytes();
  }

 private:
  struct layer_state {
    layer_state(index_t kv_heads, index_t page)
        : store(kv_heads, Recipe::observed == observes::every_query), reading(kv_heads, page) {}

    cpu::ragged_store<layout> store;
    cpu::read_stage<Recipe> reading;
    std::vector<float> window;  // [rows, q_heads, k_dim], the newest prompt queries of this turn
    index_t next_position = 0;
    index_t turn_tokens = 0;  // prompt tokens since the turn began; 0 while decoding
    offset_t bytes_read = 0;
    std::vector<std::vector<index_t>> attended;

    template <class E>
    void remember(const rows_view<const E>& q, index_t most) {
      const index_t row = q.heads * k_dim, fresh = std::min(q.tokens, most);
      const index_t old = std::min(most - fresh, index_t(window.size()) / row);
      window.erase(window.begin(), window.end() - offset_t(old) * row);
      for (index_t t = q.tokens - fresh; t < q.tokens; ++t) {
        for (index_t h = 0; h < q.heads; ++h) {
          const E* from = q.row(0, t, h);
          for (int d = 0; d < k_dim; ++d) window.push_back(float(from[d]));
        }
      }
    }
  };

  struct sequence_state {
    sequence_state(const model_shape& shape, const Recipe& recipe) : plan(recipe.plan(0)) {
      layers.assign(std::size_t(shape.layers), layer_state(shape.kv_heads, page_of(recipe, plan)));
    }
    stage_plan plan;           // of a conversation without a prompt, until the first has ended
    index_t first_prompt = 0;  // tokens; 0 until it has ended
    std::vector<layer_state> layers;
  };

  /// A sequence or nothing, copied by value.
  struct slot {
    std::unique_ptr<sequence_state> state;
    slot() = default;
    slot(sequence_state s) : state(std::make_unique<sequence_state>(std::move(s))) {}
    slot(const slot& other) : state(other.state ? std::make_unique<sequence_state>(*other.state) : nullptr) {}
    slot& operator=(slot other) noexcept {
      state = std::move(other.state);
      return *this;
    }
    slot(slot&&) noexcept = default;
    bool operator==(std::nullptr_t) const { return !state; }
  };

  const sequence_state& at(index_t id) const {
    require(id >= 0 && id < index_t(sequences_.size()) && sequences_[std::size_t(id)].state, "sequence", id,
            "an id that open() returned and close() has not taken back", "open a sequence first");
    return *sequences_[std::size_t(id)].state;
  }
  sequence_state& at(index_t id) { return const_cast<sequence_state&>(std::as_const(*this).at(id)); }
  const layer_state& at(index_t id, index_t layer) const {
    require(layer >= 0 && layer < shape_.layers, "layer", layer, "0 to " + std::to_string(shape_.layers - 1),
            "pass a layer of the model");
    return at(id).layers[std::size_t(layer)];
  }
  layer_state& at(index_t id, index_t layer) { return const_cast<layer_state&>(std::as_const(*this).at(id, layer)); }

  template <class T>
  static rows_view<T> one(rows_view<T> rows, index_t sequence) {
    rows.data += rows.data ? sequence * rows.sequence_stride : 0;
    rows.sequences = 1;
    return rows;
  }

  template <class E>
  void accumulate(layer_state& state, const rows_view<const E>& q) {
    if (q.tokens == 0) return;
    const index_t first = state.next_position - q.tokens;
    cpu::score_rows(state.store.view(), cpu::query_rows<E>{q, &first}, recipe_.attention.rule, recipe_.retain.scorer,
                    state.store.scores(), state.store.begins().data(), scoring_, *workers_);
  }

  static index_t page_of(const Recipe& recipe, const stage_plan& plan) {
    if constexpr (Recipe::estimates) return recipe.step_scorer(plan).page;
    return 1;
  }
  index_t page_of(const stage_plan& plan) const { return page_of(recipe_, plan); }

  /// Scores what a layer stores and keeps, or lets through, the budget's worth of it. Returns whether slots, or
  /// candidates, are no longer what they were.
  bool choose_anew(index_t layer, layer_state& state, const stage_plan& plan) {
    const auto policy = recipe_.first_stage(plan);
    const auto& lengths = state.store.lengths();
    const bool fits = *std::max_element(lengths.begin(), lengths.end()) <= policy.budget.tokens;
    if (fits && Recipe::retains) return false;
    layer_scores scores;
    scores.layer = layer;
    scores.layers = shape_.layers;
    scores.kv_heads = shape_.kv_heads;
    scores.tokens = lengths.data();
    scores.offsets = state.store.begins().data();
    scores.protected_tail = policy.scorer.protected_tail(policy.budget.tokens);
    if (Recipe::observed == observes::every_query) {
      scores.scores = state.store.scores();
    } else {
      raw_.assign(std::size_t(scores.offsets[shape_.kv_heads - 1] + lengths.back()), 0.0f);
      scores.scores = raw_.data();
      if constexpr (Recipe::observed == observes::window) {
        const index_t rows = index_t(state.window.size()) / (shape_.q_heads * k_dim);
        const index_t first = state.next_position - rows;
        scores.protected_tail = rows;
        const auto window = nhd_rows<const float>(state.window.data(), rows, shape_.q_heads, k_dim);
        if (!fits) {
          cpu::score_rows(state.store.view(), cpu::query_rows<float>{window, &first}, recipe_.attention.rule,
                          policy.scorer, raw_.data(), scores.offsets, scoring_, *workers_);
        }
      }
      if constexpr (Recipe::observed == observes::nothing) {
        for (index_t h = 0; h < shape_.kv_heads; ++h) {
          for (index_t i = 0; i < state.store.length(h); ++i) {
            raw_[std::size_t(scores.offsets[h] + i)] =
                policy.scorer.score(state.store.position(h, i), state.next_position);
          }
        }
      }
    }
    cpu::choose_kept(policy, scores, kept_, retaining_);
    if constexpr (Recipe::filters) {
      state.reading.pass(kept_);
    } else {
      state.store.keep(kept_, *workers_);
    }
    return true;
  }

  template <class E>
  void step(index_t layer, sequence_state& sequence, const rows_view<const E>& q, const rows_view<const E>& k,
            const rows_view<const E>& v, const rows_view<float>& out, const rows_view<float>& lse) {
    layer_state& state = sequence.layers[std::size_t(layer)];
    stage_plan plan = sequence.plan;
    if constexpr (Recipe::retrieves && !Recipe::estimates && !Recipe::plans) plan.read = recipe_.retrieve.tokens;
    const index_t first = state.next_position;
    state.store.append(k, v, first);
    state.reading.append(state.store, k.tokens);
    state.next_position += k.tokens;
    const cpu::query_rows<E> queries{q, &first};
    const auto view = state.reading.view(state.store);

    const selection_view* read = nullptr;
    selection_view read_view;
    state.bytes_read = 0;
    if constexpr (Recipe::retrieves) {
      state.bytes_read = state.reading.choose(view, queries, recipe_, plan, reading_, scoring_, *workers_);
      read_view = reading_.chosen.view();
      read = &read_view;
    }
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      const index_t count = read ? read->count(h) : view.length(0, h);
      state.bytes_read += count * layout::token_bytes() + state.reading.side_bytes(view.length(0, h), count);
    }
    cpu::decode_attention(view, queries, recipe_.attention.rule, read, cpu::attention_output{out, lse}, attending_,
                          *workers_);
    if constexpr (cpu::read_stage<Recipe>::averages) {
      state.reading.add_mean_value(state.store, q.tokens, shape_.q_heads / shape_.kv_heads, reading_.mass.data(), out);
    }
    if (tracing_) trace(state, view, read);

    if constexpr (Recipe::retains && Recipe::schedule_type::after_steps) {
      if constexpr (Recipe::observed == observes::every_query) {
        accumulate(state, q);
        for (index_t h = 0; h < shape_.kv_heads; ++h)
          state.bytes_read += state.store.length(h) * offset_t(sizeof(float));
      }
      if (recipe_.schedule.due(moment::step_end)) {
        const bool moved = choose_anew(layer, state, plan);
        state.reading.refresh(state.store, page_of(plan), moved);
      }
    }
  }

  template <class View>
  void trace(layer_state& state, const View& view, const selection_view* read) const {
    state.attended.assign(std::size_t(shape_.kv_heads), {});
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      const index_t count = read ? read->count(h) : view.length(0, h);
      for (index_t i = 0; i < count; ++i) {
        state.attended[std::size_t(h)].push_back(view.position(0, h, read ? read->row(h)[i] : i));
      }
    }
  }

  model_shape shape_;
  Recipe recipe_;
  std::shared_ptr<cpu::executor> workers_;
  std::vector<slot> sequences_;
  bool tracing_ = false;

  // Scratch of the operations; copies of a cache start with their own.
  cpu::score_workspace<k_dim> scoring_;
  cpu::retain_workspace retaining_;
  cpu::read_workspace<Recipe> reading_;
  cpu::decode_workspace attending_;
  selection kept_;
  std::vector<float> raw_;
};

}  // namespace TESSERA_HOST_ISA
TESSERA_NAMESPACE_END
