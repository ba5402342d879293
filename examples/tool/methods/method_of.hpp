// From a method of the library, a class template, to the tool's interface. Each method is instantiated in a source
// file of its own (method.cpp.in), so that compile time spreads over the cores.
#pragma once

#include "kernels.hpp"
#include "method_cache.hpp"
#include "recipe_settings.hpp"
#include "values.hpp"

namespace tool {

/// tessera::cache with one sequence.
template <class Recipe>
class cache_of final : public method_cache {
 public:
  cache_of(const tessera::model_shape& shape, const Recipe& recipe, std::shared_ptr<tessera::cpu::executor> workers)
      : cache_(shape, recipe, std::move(workers)), sequence_(cache_.open()) {}

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    observe(layer, queries(q, tokens), keys(k, tokens), keys(v, tokens));
    cache_.prefill_attention(layer, sequence_, queries(q, tokens), outputs(out, tokens));
  }

  void begin_chunk(std::span<const std::uint8_t> boundaries) override { boundaries_ = boundaries; }
  void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) override {
    cache_.prefill(layer, sequence_, q, k, v, boundaries_);
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
    if (layer == 0) step_ = cache_.prepare_step({sequence_}, q.tokens);
    cache_.decode(layer, step_, q, k, v, outputs(out, q.tokens), lse_rows);
    if (layer + 1 == cache_.shape().layers) {
      reads_.bytes += cache_.bytes_read(sequence_);
      ++reads_.steps;
    }
  }

  std::int64_t next_position() const override { return cache_.next_position(sequence_); }
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
  const std::vector<std::vector<index_t>>& attended(int layer) const override {
    return cache_.attended(layer, sequence_);
  }
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

  input_rows queries(const float* data, int tokens) const {
    return tessera::nhd_rows(data, tokens, cache_.shape().q_heads, cache_type::k_dim);
  }
  input_rows keys(const float* data, int tokens) const {
    return tessera::nhd_rows(data, tokens, cache_.shape().kv_heads, cache_type::k_dim);
  }
  tessera::rows_view<float> outputs(float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, cache_.shape().q_heads, cache_type::v_dim);
  }

  cache_type cache_;
  tessera::batch step_;
  index_t sequence_;
  std::span<const std::uint8_t> boundaries_{};  // of the chunk that passes through the layers
  read_count reads_;
};

template <class Recipe>
std::unique_ptr<method_cache> make_cpu_cache(const cache_request& request) {
  return std::make_unique<cache_of<Recipe>>(request.shape, requested_recipe<Recipe>(request.settings, request.budget),
                                            request.workers);
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
  if constexpr (recipe::retain_type::chooses) {
    info.keeps_blocks_of_segments = tessera::segment_selector<typename recipe::retain_type::selector_type>;
  }
  info.chooses_lines = recipe::prefill_type::chooses_lines;
  info.on_cuda = tessera::runs_on_devices<recipe>;
  info.budgets = recipe::budgets;
  info.budget_counts = budget_counts<recipe>();
  recipe::policies([&](const char* axis, const char* policy) { info.policies.push_back({axis, policy}); });
  info.parameters = parameters_of(recipe{});
  info.configured = [](const std::vector<setting>& settings) {
    return parameters_of(configured_recipe<recipe>(settings));
  };
  info.planned = [](const std::vector<setting>& settings, std::optional<index_t> budget, index_t prompt, int dim) {
    return parameters_of(planned_recipe(requested_recipe<recipe>(settings, budget), prompt, dim));
  };
  info.make = &make_method<Method>;
  return info;
}

}  // namespace tool
