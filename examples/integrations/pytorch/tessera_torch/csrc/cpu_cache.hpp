// A recipe's cache on the CPU as an any_cache.
#pragma once

#include <tessera/cache.hpp>

#include "recipe_settings.hpp"

namespace tessera_torch {

/// Reads rows of the layout's element type where they lie; outputs are fp32.
template <class Recipe>
class cpu_cache final : public any_cache {
  using cache_type = tessera::cache<Recipe>;
  using T = typename Recipe::layout_type::element_type;

 public:
  explicit cpu_cache(const cache_request& request)
      : table_(request.table), cache_(request.shape, requested<Recipe>(request), request.workers) {}

  std::unique_ptr<any_cache> clone(const device_memory&) const override { return std::make_unique<cpu_cache>(*this); }
  index_t open(const tessera::sequence_options& options, void*) override { return cache_.open(options); }

  void reserve(index_t, index_t, void*) override {}
  void prompt(index_t layer, index_t id, const tensor_rows& q, const tensor_rows& k, const tensor_rows& v,
              const tensor_rows& out, text_flags boundaries, bool is_last, void*) override {
    cache_.prefill(layer, id, q.as<const T>(), k.as<const T>(), v.as<const T>(), boundaries);
    cache_.prefill_attention(layer, id, q.as<const T>(), out.as<float>());
    if (is_last && drops_by_layer<Recipe>) end_if_possible([&] { cache_.end_layer(layer, id); });
  }
  void reread([[maybe_unused]] index_t layer, [[maybe_unused]] index_t id, [[maybe_unused]] index_t first,
              [[maybe_unused]] index_t count, [[maybe_unused]] const tensor_rows& q,
              [[maybe_unused]] const tensor_rows& k, [[maybe_unused]] const tensor_rows& v,
              [[maybe_unused]] const tensor_rows& out, void*) override {
    if constexpr (Recipe::retain_type::rereads) {
      cache_.reread(layer, id, first, count, q.as<const T>(), k.as<const T>(), v.as<const T>(), out.as<float>());
    }
  }
  void end_prompt(index_t id, void*) override { cache_.end_prefill(id); }
  void truncate(index_t id, index_t position, void*) override { cache_.truncate(id, position); }
  index_t settled(index_t id) const override { return cache_.settled(id); }
  void save(index_t id, const std::function<void(const void*, std::size_t)>& sink, void*) override {
    cache_.save(id, sink);
  }
  void load(index_t id, const std::function<std::size_t(void*, std::size_t)>& source, void*) override {
    cache_.close(id);
    require_same_id(cache_.load(source), id);
  }

  int prepare_step(const std::vector<index_t>& ids, index_t tokens, text_flags boundaries, void*) override {
    step_ = cache_.prepare_step(ids, tokens, boundaries);
    return 0;
  }
  void begin_step(void*) override {}
  void step(index_t layer, const tensor_rows& q, const tensor_rows& k, const tensor_rows& v, const tensor_rows& out,
            void*) override {
    cache_.decode(layer, step_, q.as<const T>(), k.as<const T>(), v.as<const T>(), out.as<float>());
  }

  void set_budget(index_t tokens, void*) override { cache_.set_budget(tokens); }
  void fit_memory(index_t, void*) override {}
  offset_t bytes(index_t id) const override { return cache_.bytes(id); }
  offset_t bytes_read(index_t id) const override { return cache_.bytes_read(id); }
  offset_t full_bytes(index_t tokens) const override { return cache_.full_bytes(tokens); }
  index_t next_position(index_t id) const override { return cache_.next_position(id); }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const override {
    return cache_.positions(layer, id, head);
  }

 private:
  std::shared_ptr<const std::vector<double>> table_;  // the recipe's budget may read it
  cache_type cache_;
  tessera::batch step_;
};

}  // namespace tessera_torch
