// A recipe's cache behind the tests' interface.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "any_cache.hpp"

namespace methods_test {

template <class Recipe>
Recipe configured(const settings& chosen) {
  Recipe recipe;
  recipe.set_budget(chosen.budget);
  recipe.attention.rule = chosen.rule;
  Recipe::parameters(recipe, [&](const char* name, auto& value, const auto&, const char*) {
    using value_type = std::remove_reference_t<decltype(value)>;
    const auto found = chosen.values.find(name);
    if (found == chosen.values.end()) return;
    if constexpr (std::is_same_v<value_type, tessera::split_factor>) {
      value = tessera::split_factor(found->second);
    } else {
      value = static_cast<value_type>(index_t(found->second));
    }
    if constexpr (std::is_same_v<value_type, float>) value = float(chosen.value(name, double(value)));
  });
  if constexpr (Recipe::retain_type::chooses && Recipe::retrieve_type::retrieves && !Recipe::retain_type::plans) recipe.retrieve.tokens = chosen.count("read_tokens", chosen.budget);
  return recipe;
}

template <class Recipe>
class cache_of final : public any_cache {
 public:
  explicit cache_of(tessera::cache<Recipe> held) : held_(std::move(held)) {}
  std::unique_ptr<any_cache> clone() const override { return std::make_unique<cache_of>(held_); }
  index_t open() override { return held_.open(); }
  void close(index_t id) override { held_.close(id); }
  void prefill(index_t layer, index_t id, const rows& q, const rows& k, const rows& v) override {
    held_.prefill(layer, id, q, k, v);
  }
  void prefill_attention(index_t layer, index_t id, const rows& q, const results& out, const results& lse) override {
    held_.prefill_attention(layer, id, q, out, lse);
  }
  void end_prefill(index_t id) override { held_.end_prefill(id); }
  void decode(index_t layer, const std::vector<index_t>& ids, const rows& q, const rows& k, const rows& v,
              const results& out, const results& lse) override {
    tessera::batch& step = steps_[ids];
    if (layer == 0 || step.tokens != q.tokens) step = held_.prepare_step(ids, q.tokens);
    held_.decode(layer, step, q, k, v, out, lse);
  }
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
  std::vector<std::vector<index_t>> attended(index_t layer, index_t id) const override { return held_.attended(layer, id); }
  void overwrite(index_t layer, index_t id, index_t head, const std::vector<index_t>& but, bool keys_too) override {
    const auto view = held_.view(layer, id);
    using stored = std::remove_pointer_t<decltype(view.k)>;
    for (index_t slot = 0; slot < view.length(0, head); ++slot) {
      if (std::binary_search(but.begin(), but.end(), view.position(0, head, slot))) continue;
      std::fill_n(view.value(0, head, slot), dim, stored(1e20f));
      if (keys_too) std::fill_n(view.key(0, head, slot), dim, stored(-1e20f));
    }
  }
  offset_t bytes(index_t id) const override { return held_.bytes(id); }
  offset_t bytes_read(index_t id) const override { return held_.bytes_read(id); }
  offset_t full_bytes(index_t tokens) const override { return held_.full_bytes(tokens); }

 private:
  tessera::cache<Recipe> held_;
  std::map<std::vector<index_t>, tessera::batch> steps_;  // of each batch of ids, the last one
};

}  // namespace methods_test
