// A recipe's cache over any backend, as an any_cache.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "../turn/basic_cache.hpp"
#include "any_cache.hpp"

TESSERA_NAMESPACE_BEGIN

/// See any_cache. Backends derive from it: cpu::any_cache_of, cuda::any_cache_of. `In` is the element type of q, k and
/// v. Every call passes on to basic_cache.
template <class Recipe, class Backend, class In>
class any_cache_over : public any_cache {
 protected:
  using cache_type = basic_cache<Recipe, Backend>;
  using queue_type = typename Backend::queue;
  using Out = typename Backend::output_type;
  static constexpr bool has_queue = !std::is_default_constructible_v<queue_type>;
  static constexpr bool packs_rows = requires { requires Recipe::layout_type::rows_type::packs; };

  static queue_type queue_of([[maybe_unused]] void* stream) {
    if constexpr (has_queue) {
      return static_cast<typename Backend::default_queue>(stream);
    } else {
      return {};
    }
  }

 public:
  /// `tables`: what the recipe's budgets point to, kept as long as the cache and its copies.
  any_cache_over(const model_shape& shape, const Recipe& recipe, typename Backend::resources resources,
                 std::shared_ptr<const void> tables = nullptr)
      : tables_(std::move(tables)), cache_(shape, recipe, std::move(resources)) {
    facts_ = {cache_type::k_dim, cache_type::v_dim, element_kind_of<In>, element_kind_of<Out>};
    if constexpr (Recipe::schedule_type::fires_at(moment::chunk_end)) facts_.chunk = cache_.recipe().schedule.chunk;
    facts_.needs_segments = Recipe::needs_segments;
    facts_.needs_step_segments = Recipe::needs_step_segments;
    facts_.rereads = Recipe::retain_type::rereads;
    facts_.drops_by_layer = chooses_by_layer<Recipe> && Recipe::retain_type::drops && !Recipe::retain_type::rereads;
    facts_.shares_pages = Backend::in_groups;
    facts_.packs = packs_rows;
    facts_.cuts_prompts = cache_type::cuts_prompts;
    facts_.saves = cache_.can_save();
    facts_.takes_scores = Recipe::retain_type::takes_scores;
  }

  const model_shape& shape() const override { return cache_.shape(); }
  const any_cache_facts& facts() const override { return facts_; }

  void set_budget(index_t tokens, void* stream) override { cache_.set_budget(tokens, queue_of(stream)); }
  index_t open(const sequence_options& options, void* stream) override {
    return cache_.open(options, queue_of(stream));
  }
  index_t fork(index_t id, void* stream) override { return cache_.fork(id, queue_of(stream)); }
  index_t fork(index_t id, index_t position, void* stream) override {
    return cache_.fork(id, position, queue_of(stream));
  }
  void save(index_t id, const std::function<void(const void*, std::size_t)>& sink, void* stream) override {
    cache_.save(id, sink, queue_of(stream));
  }
  index_t load(const std::function<std::size_t(void*, std::size_t)>& source, void* stream) override {
    return cache_.load(source, queue_of(stream));
  }
  void close(index_t id, void* stream) override { cache_.close(id, queue_of(stream)); }
  void truncate(index_t id, index_t position, void* stream) override {
    cache_.truncate(id, position, queue_of(stream));
  }
  void cancel(index_t id, void* stream) override { cache_.cancel(id, queue_of(stream)); }
  index_t settled(index_t id) const override { return cache_.settled(id); }
  index_t next_position(index_t id) const override { return cache_.next_position(id); }

  void reserve([[maybe_unused]] index_t id, [[maybe_unused]] index_t tokens, [[maybe_unused]] void* stream) override {
    if constexpr (has_queue) cache_.reserve(id, tokens, queue_of(stream));
  }
  void announce(index_t id, index_t tokens) override { cache_.announce(id, tokens); }
  index_t announced(index_t id) const override { return cache_.announced(id); }
  index_t prompt_tokens(index_t id) const override { return cache_.prompt_tokens(id); }
  void prefill(index_t layer, index_t id, const untyped_input& q, const untyped_input& k, const untyped_input& v,
               std::span<const std::uint8_t> boundaries, void* stream) override {
    cache_.prefill(layer, id, rows(q), rows(k), rows(v), queue_of(stream), boundaries);
  }
  void prefill_attention(index_t layer, index_t id, const untyped_input& q, const untyped_output& out,
                         const rows_view<float>& lse, void* stream) override {
    cache_.prefill_attention(layer, id, rows(q), out.template as<Out>(), lse, queue_of(stream));
  }
  void reread([[maybe_unused]] index_t layer, [[maybe_unused]] index_t id, [[maybe_unused]] index_t first,
              [[maybe_unused]] index_t count, [[maybe_unused]] const untyped_input& q,
              [[maybe_unused]] const untyped_input& k, [[maybe_unused]] const untyped_input& v,
              [[maybe_unused]] const untyped_output& out, [[maybe_unused]] void* stream) override {
    if constexpr (Recipe::retain_type::rereads) {
      return cache_.reread(layer, id, first, count, rows(q), rows(k), rows(v), out.template as<Out>(),
                           queue_of(stream));
    }
    fail("tokens to reread", "given", "none: this method rereads no prompts", "ask any_cache_facts::rereads");
  }
  void set_scores([[maybe_unused]] index_t layer, [[maybe_unused]] index_t id, [[maybe_unused]] index_t first,
                  [[maybe_unused]] index_t tokens, [[maybe_unused]] const float* scores,
                  [[maybe_unused]] void* stream) override {
    if constexpr (Recipe::retain_type::takes_scores) {
      return cache_.set_scores(layer, id, first, tokens, scores, queue_of(stream));
    }
    fail("scores", "given", "none: this method computes its own", "ask any_cache_facts::takes_scores");
  }
  void end_layer(index_t layer, index_t id, void* stream) override { cache_.end_layer(layer, id, queue_of(stream)); }
  void end_prefill(index_t id, void* stream) override { cache_.end_prefill(id, queue_of(stream)); }

  batch prepare_step(const host_vector<index_t>& ids, index_t tokens, std::span<const std::uint8_t> boundaries,
                     void* stream) override {
    return cache_.prepare_step(ids, tokens, queue_of(stream), boundaries);
  }
  mixed_batch prepare(const host_vector<batch_item>& items, std::span<const std::uint8_t> boundaries,
                      void* stream) override {
    return cache_.prepare(items, queue_of(stream), boundaries);
  }
  void begin_step([[maybe_unused]] const batch& step, [[maybe_unused]] void* stream) override {
    if constexpr (has_queue) cache_.begin_step(step, queue_of(stream));
  }
  void decode(index_t layer, const batch& step, const untyped_input& q, const untyped_input& k, const untyped_input& v,
              const untyped_output& out, const rows_view<float>& lse, void* stream) override {
    cache_.decode(layer, step, rows(q), rows(k), rows(v), out.template as<Out>(), lse, queue_of(stream));
  }
  void attend(index_t layer, const batch& step, const untyped_input& q, const untyped_output& out,
              const rows_view<float>& lse, void* stream) override {
    cache_.attend(layer, step, rows(q), out.template as<Out>(), lse, queue_of(stream));
  }
  void process(index_t layer, const mixed_batch& work, const untyped_input& q, const untyped_input& k,
               const untyped_input& v, const untyped_output& out, const rows_view<float>& lse, void* stream) override {
    cache_.process(layer, work, rows(q), rows(k), rows(v), out.template as<Out>(), lse, queue_of(stream));
  }
  const index_t* step_positions() const override {
    if constexpr (has_queue) return cache_.step_positions();
    return nullptr;
  }

  host_vector<index_t> positions(index_t layer, index_t id, index_t head) const override {
    return cache_.positions(layer, id, head);
  }
  index_t queries_needed(index_t tokens) const override { return cache_.recipe().queries_needed(tokens); }
  using any_cache::bound;
  capacity bound(const turn_extent& turn, const sequence_options& options) const override {
    return cache_.bound(turn, options);
  }
  capacity available() const override { return cache_.available(); }
  offset_t bytes(index_t id) const override { return cache_.bytes(id); }
  offset_t bytes_read(index_t id) const override { return cache_.bytes_read(id); }
  offset_t full_bytes(index_t tokens) const override { return cache_.full_bytes(tokens); }
  void fit_memory([[maybe_unused]] index_t tokens, [[maybe_unused]] void* stream) override {
    if constexpr (has_queue) cache_.fit_memory(tokens, queue_of(stream));
  }

  host_vector<index_t> pages(index_t id) const override {
    if constexpr (Backend::in_groups) return cache_.pages(id);
    cache_.next_position(id);
    return {};
  }
  page_plan plan_pages(index_t id, [[maybe_unused]] index_t tokens) const override {
    if constexpr (Backend::in_groups) return cache_.plan_pages(id, tokens);
    cache_.next_position(id);
    return {};
  }

  void trace_attended(bool on) override { cache_.trace_attended(on); }
  const host_vector<host_vector<index_t>>& attended(index_t layer, index_t id) const override {
    return cache_.attended(layer, id);
  }
  void trace_lines(bool on) override { cache_.trace_lines(on); }
  const prompt_lines& lines(index_t layer, index_t id) const override { return cache_.lines(layer, id); }
  void trace_ranked([[maybe_unused]] bool on) override {
    if constexpr (!has_queue) return cache_.trace_ranked(on);
    fail_to_rank();
  }
  const ranked_tokens& ranked([[maybe_unused]] index_t layer, [[maybe_unused]] index_t id) const override {
    if constexpr (!has_queue) return cache_.ranked(layer, id);
    fail_to_rank();
  }

 protected:
  cache_type& cache() { return cache_; }
  [[noreturn]] static void fail_to_unpack() {
    fail("unpacked rows", "asked of rows that are not packed", "packed rows", "ask any_cache_facts::packs");
  }

 private:
  static rows_view<const In> rows(const untyped_input& given) { return given.template as<const In>(); }
  [[noreturn]] static void fail_to_rank() {
    fail("ranked tokens", "asked of a cache on a GPU", "a cache on the CPU", "make the cache there");
  }

  std::shared_ptr<const void> tables_;
  cache_type cache_;
  any_cache_facts facts_;
};

TESSERA_NAMESPACE_END
