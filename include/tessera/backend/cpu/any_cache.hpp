// One recipe's cache on the CPU as an any_cache.
#pragma once

#include <memory>
#include <utility>

#include "../../runtime/any_cache.hpp"
#include "../../runtime/settings.hpp"
#include "../../runtime/turn/basic_cache.hpp"
#include "backend.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// See any_cache.
template <class Recipe>
class any_cache_of final : public any_cache {
 public:
  any_cache_of(const any_cache_request& request, std::shared_ptr<executor> workers)
      : cache_(request.shape, recipe_of<Recipe>(request), std::move(workers)) {}

  index_t open(const sequence_options& options) override { return cache_.open(options); }
  index_t fork(index_t id) override { return cache_.fork(id); }
  void save(index_t id, const std::function<void(const void*, std::size_t)>& sink) override { cache_.save(id, sink); }
  index_t load(const std::function<std::size_t(void*, std::size_t)>& source) override { return cache_.load(source); }
  void close(index_t id) override { cache_.close(id); }
  void truncate(index_t id, index_t position) override { cache_.truncate(id, position); }
  void cancel(index_t id) override { cache_.cancel(id); }
  index_t settled(index_t id) const override { return cache_.settled(id); }
  index_t next_position(index_t id) const override { return cache_.next_position(id); }

  void announce(index_t id, index_t tokens) override { cache_.announce(id, tokens); }
  mixed_batch prepare(const host_vector<batch_item>& items, std::span<const std::uint8_t> boundaries) override {
    return cache_.prepare(items, {}, boundaries);
  }
  void process(index_t layer, const mixed_batch& work, const rows_view<const float>& q, const rows_view<const float>& k,
               const rows_view<const float>& v, const rows_view<float>& out) override {
    cache_.process(layer, work, q, k, v, out);
  }
  void end_layer(index_t layer, index_t id) override { cache_.end_layer(layer, id); }
  void end_prefill(index_t id) override { cache_.end_prefill(id); }

  host_vector<index_t> positions(index_t layer, index_t id, index_t head) const override {
    return cache_.positions(layer, id, head);
  }
  capacity bound(index_t prompt, index_t answer, index_t chunk) const override {
    return cache_.bound(prompt, answer, chunk);
  }
  offset_t bytes(index_t id) const override { return cache_.bytes(id); }
  offset_t bytes_read(index_t id) const override { return cache_.bytes_read(id); }
  offset_t full_bytes(index_t tokens) const override { return cache_.full_bytes(tokens); }
  const model_shape& shape() const override { return cache_.shape(); }

  bool needs_segments() const override { return Recipe::needs_segments; }
  bool needs_step_segments() const override { return Recipe::needs_step_segments; }
  bool rereads() const override { return Recipe::retain_type::rereads; }
  bool drops() const override { return chooses_by_layer<Recipe> && Recipe::retain_type::drops; }

 private:
  basic_cache<Recipe, backend<Recipe>> cache_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
