// From a method of the library, a class template, to the tool's interface. Each method is instantiated in a source
// file of its own (method.cpp.in), so that compile time spreads over the cores.
#pragma once

#include <utility>

#include "kernels.hpp"
#include "method_cache.hpp"
#include "recipe_settings.hpp"
#include "values.hpp"

namespace tool {

/// tessera::cache with one sequence.
template <class Recipe>
class cache_of final : public method_cache {
 public:
  /// `profile`: what the recipe's shares lie in.
  cache_of(const tessera::model_shape& shape, const Recipe& recipe, std::shared_ptr<tessera::cpu::executor> workers,
           std::shared_ptr<const tessera::profile> profile)
      : profile_(std::move(profile)), cache_(shape, recipe, std::move(workers)), sequence_(cache_.open()) {}

  index_t judged_together() const override {
    if constexpr (fuses_chunks<Recipe>) return cache_.recipe().schedule.chunk;
    return 0;
  }
  void announce(index_t tokens) override {
    if constexpr (fuses_chunks<Recipe>) {
      if constexpr (in_groups) reserved_ = cache_.plan_pages(sequence_, tokens).final_pages;
      cache_.announce(sequence_, tokens);
    }
  }
  std::optional<page_counts> pages() const override {
    if constexpr (in_groups) {
      const auto used = cache_.pages(sequence_);
      return page_counts{{used.begin(), used.end()}, {reserved_.begin(), reserved_.end()}};
    }
    return std::nullopt;
  }

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    observe(layer, queries(q, tokens), keys(k, tokens), keys(v, tokens));
    cache_.prefill_attention(layer, sequence_, queries(q, tokens), outputs(out, tokens));
  }

  void begin_chunk(std::span<const std::uint8_t> boundaries) override { boundaries_ = boundaries; }
  void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) override {
    cache_.prefill(layer, sequence_, q, k, v, boundaries_);
  }

  bool rereads() const override { return Recipe::retain_type::rereads; }
  void reread(int layer, std::int64_t first, std::int64_t count, const float* q, const float* k, const float* v,
              int tokens, float* out) override {
    if constexpr (Recipe::retain_type::rereads) {
      cache_.reread(layer, sequence_, index_t(first), index_t(count), queries(q, tokens), keys(k, tokens),
                    keys(v, tokens), outputs(out, tokens));
    }
  }

  void end_prefill() override {
    cache_.end_prefill(sequence_);
    boundaries_ = {};
    reads_ = {};
  }

  void attend_prompt(int layer, const input_rows& q, float* out, float* lse) override {
    cache_.prefill_attention(layer, sequence_, q, outputs(out, q.tokens),
                             tessera::nhd_rows(lse, q.tokens, cache_.shape().q_heads, 1));
  }

  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    step(layer, queries(q, tokens), keys(k, tokens), keys(v, tokens), out, nullptr);
  }

  void step(int layer, const input_rows& q, const input_rows& k, const input_rows& v, float* out, float* lse) override {
    const index_t heads = cache_.shape().q_heads;
    const tessera::rows_view<float> lse_rows =
        lse ? tessera::nhd_rows(lse, q.tokens, heads, 1) : tessera::rows_view<float>{};
    if (layer == 0) step_ = cache_.prepare_step({sequence_}, q.tokens, std::exchange(boundaries_, {}));
    cache_.decode(layer, step_, q, k, v, outputs(out, q.tokens), lse_rows);
    if (layer + 1 == cache_.shape().layers) {
      reads_.bytes += cache_.bytes_read(sequence_);
      ++reads_.steps;
    }
  }

  std::int64_t next_position() const override { return cache_.next_position(sequence_); }
  void save(const std::function<void(const void*, std::size_t)>& sink) override { cache_.save(sequence_, sink); }
  void load(const std::function<std::size_t(void*, std::size_t)>& source) override {
    const index_t loaded = cache_.load(source);
    cache_.close(std::exchange(sequence_, loaded));
  }
  std::unique_ptr<method_cache> clone() const override { return std::make_unique<cache_of>(*this); }
  void set_budget(index_t tokens) override { cache_.set_budget(tokens); }

  index_t queries_needed(index_t tokens) const override { return cache_.recipe().queries_needed(tokens); }
  offset_t bytes() const override { return cache_.bytes(sequence_); }
  offset_t full_bytes(index_t tokens) const override { return cache_.full_bytes(tokens); }
  read_count reads() const override { return reads_; }
  std::vector<index_t> positions(int layer, index_t head) const override {
    return cache_.positions(layer, sequence_, head);
  }
  void trace_attended() override { cache_.trace_attended(true); }
  std::vector<std::vector<index_t>> attended(int layer) const override { return cache_.attended(layer, sequence_); }
  bool trace_ranked() override {
    cache_.trace_ranked(true);
    return true;
  }
  bool trace_lines() override {
    cache_.trace_lines(true);
    return true;
  }
  tessera::prompt_lines lines(int layer) const override { return cache_.lines(layer, sequence_); }
  ranked_tokens ranked(int layer) const override {
    const auto& seen = cache_.ranked(layer, sequence_);
    return {seen.positions, seen.scores, seen.blocks};
  }
  std::optional<stored_rows> unpacked(int layer) override {
    stored_rows rows;
    if constexpr (tessera::packing_layout<typename Recipe::layout_type>) {
      const auto view = cache_.view(layer, sequence_);
      for (index_t head = 0; head < view.kv_heads; ++head) {
        for (index_t slot = 0; slot < view.length(0, head); ++slot) {
          float key[cache_type::k_dim], value[cache_type::v_dim];
          load_key(view, 0, head, slot, key);
          load_value(view, 0, head, slot, value);
          rows.k.insert(rows.k.end(), key, key + cache_type::k_dim);
          rows.v.insert(rows.v.end(), value, value + cache_type::v_dim);
        }
      }
      return rows;
    }
    return std::nullopt;
  }

 private:
  using cache_type = tessera::cache<Recipe>;
  static constexpr bool in_groups = tessera::cpu::backend<Recipe>::in_groups;

  input_rows queries(const float* data, int tokens) const {
    return tessera::nhd_rows(data, tokens, cache_.shape().q_heads, cache_type::k_dim);
  }
  input_rows keys(const float* data, int tokens) const {
    return tessera::nhd_rows(data, tokens, cache_.shape().kv_heads, cache_type::k_dim);
  }
  tessera::rows_view<float> outputs(float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, cache_.shape().q_heads, cache_type::v_dim);
  }

  std::shared_ptr<const tessera::profile> profile_;
  cache_type cache_;
  std::vector<index_t> reserved_;  // pages by group, for when the prompt has ended
  tessera::batch step_;
  index_t sequence_;
  std::span<const std::uint8_t> boundaries_{};  // of the chunk, or the step, that passes through the layers
  read_count reads_;
};

template <class Recipe>
std::unique_ptr<method_cache> make_cpu_cache(const cache_request& request) {
  const recipe_with_profile<Recipe> wanted(request);
  return std::make_unique<cache_of<Recipe>>(request.shape, wanted.recipe, request.workers, wanted.profile);
}

/// `Method::of<T, D>` is the recipe. No template parameter that is a template of constrained ones: clang 16 dies of it.
template <class Method>
std::unique_ptr<method_cache> make_method(const cache_request& request) {
  return with_layout(request.element, request.head_dim,
                     [&]<class T, int D>() { return make_cpu_cache<typename Method::template of<T, D>>(request); });
}

/// Everything about a method that does not depend on element type and head dim.
template <class Method>
method_info describe() {
  using recipe = typename Method::template of<tessera::bf16, 64>;
  method_info info;
  info.name = recipe::name;
  info.paper = recipe::paper;
  info.has_budget = recipe::retain_type::chooses || recipe::retrieve_type::retrieves;
  info.ranks = recipe::retain_type::chooses;
  info.needs_segments = recipe::needs_segments;
  info.needs_step_segments = recipe::needs_step_segments;
  info.needs_profile = takes_gates<recipe>;
  info.rereads = recipe::retain_type::rereads;
  info.needs_rope = recipe::needs_rope;
  if constexpr (recipe::retain_type::chooses) {
    info.takes_projection = tessera::weighted_scorer<typename recipe::retain_type::scorer_type>;
    info.keeps_blocks_of_segments = tessera::segment_selector<typename recipe::retain_type::selector_type>;
  }
  info.chooses_lines = recipe::prefill_type::chooses_lines;
  info.on_cuda = tessera::runs_on_devices<recipe>;
  info.budgets = recipe::budgets;
  info.budget_counts = budget_counts<recipe>();
  recipe::policies([&](const char* axis, const char* policy) { info.policies.push_back({axis, policy}); });
  info.takes_profile = takes_profile<recipe>;
  info.fuses_chunks = fuses_chunks<recipe>;
  info.parameters = shown_parameters(recipe{}, {});
  info.configured = [](const std::vector<setting>& settings) {
    return shown_parameters(configured_recipe<recipe>(settings), settings);
  };
  info.planned = [](const std::vector<setting>& settings, std::optional<index_t> budget, index_t prompt, int dim) {
    return shown_parameters(planned_recipe(requested_recipe<recipe>(settings, budget), prompt, dim), settings, true);
  };
  info.make = &make_method<Method>;
  return info;
}

}  // namespace tool
