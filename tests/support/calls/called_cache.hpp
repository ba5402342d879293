// A cache of any recipe and backend behind one interface, and the CPU's behind it.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/cache.hpp>

#include "cache/callers/given_scores.hpp"
#include "layout/short_segments.hpp"
#include "support/calls/saved_bytes.hpp"

namespace support {

using tessera::index_t;
using tessera::offset_t;

/// What an engine calls. Rows are of host memory; a backend that computes elsewhere brings them there and back.
class called_cache {
 public:
  using rows = tessera::rows_view<const float>;
  using results = tessera::rows_view<float>;

  /// What is wrong with the boundaries of segments that the next calls pass, where the recipe looks at them.
  enum class boundary_fault { none, one_less, one_more, no_flag };
  boundary_fault fault = boundary_fault::none;

  virtual ~called_cache() = default;
  virtual std::unique_ptr<called_cache> copy() const = 0;
  virtual index_t open(const tessera::sequence_options& options = {}) = 0;
  virtual index_t fork(index_t id) = 0;
  /// What `save` writes, of a backend that saves; empty: it does not. `load_bytes`: the id that `load` gives to it.
  virtual std::vector<unsigned char> saved_bytes(index_t) { return {}; }
  virtual index_t load_bytes(const std::vector<unsigned char>&) { return -1; }
  /// A fork by these bytes, where the backend saves.
  index_t fork_by_bytes(index_t id) {
    const auto bytes = saved_bytes(id);
    return bytes.empty() ? fork(id) : load_bytes(bytes);
  }
  virtual void truncate(index_t id, index_t position) = 0;
  virtual index_t settled(index_t id) const = 0;
  virtual void close(index_t id) = 0;
  virtual void reserve(index_t id, index_t tokens) = 0;
  virtual void prefill(index_t layer, index_t id, const rows& q, const rows& k, const rows& v) = 0;
  virtual void prefill_attention(index_t layer, index_t id, const rows& q, const results& out, const results& lse) = 0;
  virtual void end_layer(index_t layer, index_t id) = 0;
  virtual void end_prefill(index_t id) = 0;
  virtual void announce(index_t, index_t) {}
  virtual void reread(index_t, index_t, index_t, index_t, const rows&, const rows&, const rows&, const results&) {}
  virtual tessera::batch prepare_step(const std::vector<index_t>& ids, index_t tokens) = 0;
  virtual tessera::batch prepare_uneven(const std::vector<index_t>& ids, const std::vector<index_t>& lengths) = 0;
  virtual void begin_step(const tessera::batch& step) = 0;
  virtual void decode(index_t layer, const tessera::batch& step, const rows& q, const rows& k, const rows& v,
                      const results& out, const results& lse) = 0;
  virtual void attend(index_t layer, const tessera::batch& step, const rows& q, const results& out,
                      const results& lse) = 0;
  /// A draft of each of these sequences, by one tree.
  virtual tessera::draft_step prepare_draft(const std::vector<index_t>& ids, const tessera::draft_tree& tree) = 0;
  virtual void begin_draft(const tessera::draft_step&) {}
  virtual void decode_draft(index_t layer, const tessera::draft_step& draft, const rows& q, const rows& k,
                            const rows& v, const results& out, const results& lse) = 0;
  virtual void accept(const std::vector<tessera::accepted_tokens>& accepted) = 0;
  virtual void cancel(index_t id) = 0;
  virtual void set_budget(index_t tokens) = 0;
  virtual index_t next_position(index_t id) const = 0;
  virtual std::vector<index_t> positions(index_t layer, index_t id, index_t head) const = 0;
  virtual std::vector<index_t> readable(index_t layer, index_t id, index_t head) const = 0;
  virtual tessera::stage_plan plan(index_t id) const = 0;
  virtual void trace_attended(bool on) = 0;
  virtual std::vector<std::vector<index_t>> attended(index_t layer, index_t id) const = 0;
  virtual offset_t bytes(index_t id) const = 0;
  virtual offset_t bytes_read(index_t id) const = 0;
  virtual tessera::capacity bound(const tessera::turn_extent& turn,
                                  const tessera::sequence_options& options = {}) const = 0;
  tessera::capacity bound(index_t prompt, index_t answer, index_t chunk,
                          const tessera::sequence_options& options = {}) const {
    return bound(tessera::turn_extent{prompt, answer, chunk}, options);
  }
  virtual tessera::capacity available() const = 0;
  /// How many tokens may be others where scores of two choices differ by rounding only: pages and pooled scores have
  /// several of one score, and where two channels of a query are equal to rounding, all estimates are others.
  virtual index_t chosen_together(index_t) const { return 1; }
};

/// Where segments end, for a recipe that wants to know: read off the signs of keys, alike in any chunks and any encoding.
/// Behind a chunk that is refused for its size there are no keys to read.
template <class Recipe, class Rows>
std::vector<std::uint8_t> called_boundaries(const Rows& k) {
  constexpr offset_t elements = 40000;  // that lie behind every `data` of call_arguments
  std::vector<std::uint8_t> boundaries(Recipe::needs_segments && k.data ? std::size_t(std::max(k.tokens, 0)) : 0);
  for (std::size_t t = 0; t < boundaries.size(); ++t) {
    const offset_t at = offset_t(t) * k.token_stride;
    if (at < 0 || at >= elements) break;  // of a chunk that will be refused
    const float* key = k.data + at;
    boundaries[t] = key[0] > 0 && key[1] > 0;
  }
  return boundaries;
}

/// And among a step's tokens, by their positions.
template <class Recipe, class Cache>
std::vector<std::uint8_t> called_step_boundaries(const Cache& held, const std::vector<index_t>& ids, index_t tokens) {
  std::vector<std::uint8_t> boundaries;
  for (std::size_t b = 0; Recipe::needs_step_segments && b < ids.size(); ++b) {
    const index_t next = held.next_position(ids[b]);
    for (index_t t = 0; t < tokens; ++t) boundaries.push_back((next + t) % 5 == 2);
  }
  return boundaries;
}

/// Those of a step whose sequences have different numbers of tokens.
template <class Recipe, class Cache>
std::vector<std::uint8_t> uneven_boundaries(const Cache& held, const std::vector<index_t>& ids,
                                            const std::vector<index_t>& lengths) {
  const index_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  return called_step_boundaries<Recipe>(held, ids, longest);
}
/// And of a draft, by the positions that its tokens would have.
template <class Recipe, class Cache>
std::vector<std::uint8_t> called_draft_boundaries(const Cache& held, const std::vector<index_t>& ids,
                                                  const tessera::draft_tree& tree) {
  std::vector<std::uint8_t> boundaries;
  for (std::size_t b = 0; Recipe::needs_step_segments && b < ids.size(); ++b) {
    for (index_t t = 0; t < tree.tokens(); ++t)
      boundaries.push_back((held.next_position(ids[b]) + tree.depth(t)) % 5 == 2);
  }
  return boundaries;
}
/// Zeros behind the tokens of a step's sequences, where outputs are not defined.
inline void clear_behind(const tessera::batch& step, const called_cache::results& out) {
  for (index_t b = 0; out.data && b < out.sequences; ++b) {
    for (index_t t = step.tokens_of(b); t < out.tokens; ++t) {
      for (index_t head = 0; head < out.heads; ++head) std::fill_n(out.row(b, t, head), out.dim, 0.0f);
    }
  }
}

/// Those, with what is wrong with them.
inline std::vector<std::uint8_t> with_fault(std::vector<std::uint8_t> boundaries, called_cache::boundary_fault fault) {
  using kind = called_cache::boundary_fault;
  if (fault == kind::one_more) boundaries.push_back(0);
  if (!boundaries.empty() && fault == kind::one_less) boundaries.pop_back();
  if (!boundaries.empty() && fault == kind::no_flag) boundaries.back() = 2;
  return boundaries;
}

/// A model of that shape, whose RoPE is known where the recipe wants to know.
template <class Recipe>
tessera::model_shape called_shape(tessera::model_shape shape) {
  constexpr int pairs = Recipe::layout_type::k_dim / 2;
  for (int d = 0; Recipe::needs_rope && d < pairs; ++d) {
    shape.rope_frequencies.push_back(float(std::pow(10'000.0, -double(d) / pairs)));
  }
  return shape;
}

/// Backends find bases of their own, and of fewer rows than channels any: what is compared keeps every element of packed rows, which is
/// then the same in all bases but for rounding.
template <class Recipe>
void keep_all_elements(Recipe& recipe) {
  if constexpr (tessera::packing_layout<typename Recipe::layout_type>) {
    Recipe::parameters(recipe, [](const std::string& name, auto& value, const auto&, const char*) {
      if constexpr (std::is_same_v<std::remove_reference_t<decltype(value)>, float>) {
        if (name == "channels") value = 1;
        if (name == "truncate") value = 0;
      }
    });
  }
}

/// The CPU's cache; `Interface` is called_cache, or what adds to it.
template <class Recipe, class Interface = called_cache>
class cpu_calls : public Interface {
 public:
  using Interface::bound;
  using typename Interface::results;
  using typename Interface::rows;

  explicit cpu_calls(tessera::cache<Recipe> held) : held_(std::move(held)) {}
  index_t open(const tessera::sequence_options& options) override { return held_.open(options); }
  index_t fork(index_t id) override { return held_.fork(id); }
  std::vector<unsigned char> saved_bytes(index_t id) override { return saved(held_, id); }
  index_t load_bytes(const std::vector<unsigned char>& bytes) override { return loaded(held_, bytes); }
  void truncate(index_t id, index_t position) override { held_.truncate(id, position); }
  index_t settled(index_t id) const override { return held_.settled(id); }
  void close(index_t id) override { held_.close(id); }
  void reserve(index_t, index_t) override {}
  void prefill(index_t layer, index_t id, const rows& q, const rows& k, const rows& v) override {
    give_scores<Recipe>(held_, layer, id);
    held_.prefill(layer, id, q, k, v, with_fault(called_boundaries<Recipe>(k), this->fault));
  }
  void prefill_attention(index_t layer, index_t id, const rows& q, const results& out, const results& lse) override {
    held_.prefill_attention(layer, id, q, out, lse);
  }
  void end_layer(index_t layer, index_t id) override {
    give_scores<Recipe>(held_, layer, id);
    held_.end_layer(layer, id);
  }
  void end_prefill(index_t id) override {
    give_scores<Recipe>(held_, id);
    held_.end_prefill(id);
  }
  void announce(index_t id, index_t tokens) override { held_.announce(id, tokens); }
  void reread(index_t layer, index_t id, index_t first, index_t count, const rows& q, const rows& k, const rows& v,
              const results& out) override {
    held_.reread(layer, id, first, count, q, k, v, out);
  }
  tessera::batch prepare_step(const std::vector<index_t>& ids, index_t tokens) override {
    return held_.prepare_step(ids, tokens, with_fault(called_step_boundaries<Recipe>(held_, ids, tokens), this->fault));
  }
  tessera::batch prepare_uneven(const std::vector<index_t>& ids, const std::vector<index_t>& lengths) override {
    return held_.prepare_step(ids, tessera::host_vector<index_t>(lengths.begin(), lengths.end()),
                              with_fault(uneven_boundaries<Recipe>(held_, ids, lengths), this->fault));
  }
  void begin_step(const tessera::batch&) override {}
  void decode(index_t layer, const tessera::batch& step, const rows& q, const rows& k, const rows& v,
              const results& out, const results& lse) override {
    held_.decode(layer, step, q, k, v, out, lse);
    clear_behind(step, out), clear_behind(step, lse);
  }
  void attend(index_t layer, const tessera::batch& step, const rows& q, const results& out,
              const results& lse) override {
    held_.attend(layer, step, q, out, lse);
    clear_behind(step, out), clear_behind(step, lse);
  }
  tessera::draft_step prepare_draft(const std::vector<index_t>& ids, const tessera::draft_tree& tree) override {
    return held_.prepare_draft(ids, {tree}, {}, called_draft_boundaries<Recipe>(held_, ids, tree));
  }
  void decode_draft(index_t layer, const tessera::draft_step& draft, const rows& q, const rows& k, const rows& v,
                    const results& out, const results& lse) override {
    held_.decode(layer, draft, q, k, v, out, lse);
  }
  void accept(const std::vector<tessera::accepted_tokens>& accepted) override {
    held_.accept(tessera::host_vector<tessera::accepted_tokens>(accepted.begin(), accepted.end()));
  }
  void cancel(index_t id) override { held_.cancel(id); }
  void set_budget(index_t tokens) override { held_.set_budget(tokens); }
  index_t next_position(index_t id) const override { return held_.next_position(id); }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const override {
    return held_.positions(layer, id, head);
  }
  std::vector<index_t> readable(index_t layer, index_t id, index_t head) const override {
    return held_.readable(layer, id, head);
  }
  tessera::stage_plan plan(index_t id) const override { return held_.plan(id); }
  void trace_attended(bool on) override { held_.trace_attended(on); }
  std::vector<std::vector<index_t>> attended(index_t layer, index_t id) const override {
    return held_.attended(layer, id);
  }
  offset_t bytes(index_t id) const override { return held_.bytes(id); }
  offset_t bytes_read(index_t id) const override { return held_.bytes_read(id); }
  tessera::capacity bound(const tessera::turn_extent& turn, const tessera::sequence_options& options) const override {
    return held_.bound(turn, options);
  }
  tessera::capacity available() const override { return held_.available(); }
  index_t chosen_together(index_t id) const override {
    index_t most = 1;
    const Recipe& recipe = held_.recipe();
    if constexpr (Recipe::retrieve_type::estimates)
      most = std::max(most, recipe.retrieve.planned(held_.plan(id), Recipe::layout_type::k_dim).scorer.page);
    if constexpr (requires { recipe.retrieve.scorer.channels; }) most = std::max(most, held_.next_position(id));
    if constexpr (requires { recipe.retain.selector.unit_slots(); })
      most = std::max<index_t>(most, recipe.retain.selector.unit_slots());
    if constexpr (Recipe::needs_segments) most = std::max(most, 2 * tessera::max_segment_tokens);
    most = std::max(most, recipe.retrieve.mean_block());
    if constexpr (requires { recipe.retain.scorer.pool; }) most = std::max<index_t>(most, recipe.retain.scorer.pool);
    return most;
  }

 protected:
  tessera::cache<Recipe> held_;
};

/// The CPU's cache and nothing else.
template <class Recipe>
class plain_cpu_calls final : public cpu_calls<Recipe> {
 public:
  using cpu_calls<Recipe>::cpu_calls;
  std::unique_ptr<called_cache> copy() const override { return std::make_unique<plain_cpu_calls>(*this); }
};

}  // namespace support
