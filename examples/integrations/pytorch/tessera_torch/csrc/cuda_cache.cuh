// A recipe's cache on the GPU as an any_cache: the device's counterpart of cpu_cache.hpp.
#pragma once

#include <cuda_runtime.h>
#include <tessera/backend/cuda/cache.cuh>

#include "recipe_settings.hpp"

namespace tessera_torch {

/// Reads rows of the layout's element type where they lie and writes outputs of it. Memory is the request's: taken for
/// `sequences` and `tokens` when the cache is made, and anew by `set_budget`.
template <class Recipe>
class cuda_cache final : public any_cache {
  using cache_type = tessera::cuda::cache<Recipe, typename Recipe::layout_type::element_type>;
  using T = typename cache_type::element_type;
  using allocate_from = tessera::cuda::allocate_from;

 public:
  explicit cuda_cache(const cache_request& request)
      : table_(request.table), memory_(source_of(request.memory)), cache_(made_of(request, memory_)) {}

  std::unique_ptr<any_cache> clone(const device_memory& memory) const override {
    const allocate_from here(source_of(memory));
    auto twin = std::make_unique<cuda_cache>(*this);
    twin->memory_ = source_of(memory);
    return twin;
  }
  index_t open(const tessera::sequence_options& options, void* stream) override {
    return cache_.open(options, at(stream));
  }

  void reserve(index_t id, index_t tokens, void* stream) override { cache_.reserve(id, tokens, at(stream)); }
  void prompt(index_t layer, index_t id, const tensor_rows& q, const tensor_rows& k, const tensor_rows& v,
              const tensor_rows& out, text_flags boundaries, bool is_last, void* stream) override {
    const bool ends = is_last && drops_by_layer<Recipe>;  // then one layer at a time is whole
    if (layer == 0 && !ends) cache_.reserve(id, k.tokens, at(stream));
    cache_.prefill(layer, id, q.as<const T>(), k.as<const T>(), v.as<const T>(), at(stream), boundaries);
    cache_.prefill_attention(layer, id, q.as<const T>(), out.as<T>(), {}, at(stream));
    if (ends) end_if_possible([&] { cache_.end_layer(layer, id, at(stream)); });
  }
  void reread([[maybe_unused]] index_t layer, [[maybe_unused]] index_t id, [[maybe_unused]] index_t first,
              [[maybe_unused]] index_t count, [[maybe_unused]] const tensor_rows& q,
              [[maybe_unused]] const tensor_rows& k, [[maybe_unused]] const tensor_rows& v,
              [[maybe_unused]] const tensor_rows& out, [[maybe_unused]] void* stream) override {
    if constexpr (Recipe::retain_type::rereads) {
      cache_.reread(layer, id, first, count, q.as<const T>(), k.as<const T>(), v.as<const T>(), out.as<T>(),
                    at(stream));
    }
  }
  void end_prompt(index_t id, void* stream) override { cache_.end_prefill(id, at(stream)); }
  void truncate(index_t id, index_t position, void* stream) override { cache_.truncate(id, position, at(stream)); }
  index_t settled(index_t id) const override { return cache_.settled(id); }
  void save([[maybe_unused]] index_t id, [[maybe_unused]] const std::function<void(const void*, std::size_t)>& sink,
            [[maybe_unused]] void* stream) override {
    if constexpr (cache_type::saves) return cache_.save(id, sink, at(stream));
    fail_to_save();
  }
  void load([[maybe_unused]] index_t id, [[maybe_unused]] const std::function<std::size_t(void*, std::size_t)>& source,
            [[maybe_unused]] void* stream) override {
    if constexpr (cache_type::saves) {
      cache_.close(id, at(stream));
      return require_same_id(cache_.load(source, at(stream)), id);
    }
    fail_to_save();
  }

  int prepare_step(const std::vector<index_t>& ids, index_t tokens, text_flags boundaries, void* stream) override {
    step_ = cache_.prepare_step(ids, tokens, at(stream), boundaries);
    return int(step_.evicts_first) + 2 * int(step_.evicts_last);
  }
  void begin_step(void* stream) override { cache_.begin_step(step_, at(stream)); }
  void step(index_t layer, const tensor_rows& q, const tensor_rows& k, const tensor_rows& v, const tensor_rows& out,
            void* stream) override {
    cache_.decode(layer, step_, q.as<const T>(), k.as<const T>(), v.as<const T>(), out.as<T>(), {}, at(stream));
  }

  void set_budget(index_t tokens, void* stream) override {
    const allocate_from here(memory_);
    cache_.set_budget(tokens, at(stream));
  }
  void fit_memory(index_t tokens, void* stream) override {
    const allocate_from here(memory_);
    cache_.fit_memory(tokens, at(stream));
  }
  offset_t bytes(index_t id) const override { return cache_.bytes(id); }
  offset_t bytes_read(index_t id) const override { return cache_.bytes_read(id); }
  offset_t full_bytes(index_t tokens) const override { return cache_.full_bytes(tokens); }
  index_t next_position(index_t id) const override { return cache_.next_position(id); }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const override {
    return cache_.positions(layer, id, head);
  }

 private:
  using memory_source = tessera::cuda::memory_source;

  [[noreturn]] static void fail_to_save() {
    tessera::fail("method of a saved cache", "one of packed rows", "one of whole rows on a GPU",
                  "save it on the CPU, or keep the tokens");
  }
  static cudaStream_t at(void* stream) { return static_cast<cudaStream_t>(stream); }
  static memory_source source_of(const device_memory& memory) {
    if (!memory.take) return {tessera::cuda::detail::allocate_by_cuda, tessera::cuda::detail::release_by_cuda};
    return {memory.take, memory.give_back, memory.context};
  }
  static cache_type made_of(const cache_request& request, const memory_source& memory) {
    const allocate_from here(memory);
    tessera::cuda::cache_options options;
    options.sequences = request.sequences;
    options.tokens = request.tokens;
    options.step_tokens = request.step_tokens;
    options.smallest_budget = request.smallest_budget;
    if (drops_by_layer<Recipe> && request.first_prompt > 0) options.rows = rows_of(request, options);
    return cache_type(request.shape, requested<Recipe>(request), options);
  }
  /// Rows for first prompts whose layers end one by one, and what follows them; 0: as many as everything takes, if that is less.
  static offset_t rows_of(const cache_request& request, tessera::cuda::cache_options options) {
    const offset_t all =
        offset_t(request.shape.layers + 1) * request.shape.kv_heads * request.sequences * request.tokens;
    options.sequences = 1;
    options.rows = 1;
    const cache_type small(request.shape, requested<Recipe>(request), options);
    const tessera::turn_extent turn{request.first_prompt, request.first_answer, 0, 1, true};
    const offset_t bytes = request.sequences * small.bound(turn).bytes, token = Recipe::layout_type::token_bytes(),
                   rows = (bytes + token - 1) / token;
    return rows < all ? rows : 0;
  }

  std::shared_ptr<const std::vector<double>> table_;  // the recipe's budget may read it
  memory_source memory_;
  cache_type cache_;
  tessera::batch step_;
};

}  // namespace tessera_torch
