// A recipe's cache on the GPU as an any_cache: the device's counterpart of cpu_cache.hpp.
#pragma once

#include <cuda_runtime.h>
#include <tessera/backend/cuda/cache.cuh>

#include "recipe_settings.hpp"

namespace tessera_torch {

/// Reads rows of the layout's element type where they lie and writes outputs of it. Memory is the library's own: it
/// allocates for `sequences` and `tokens` when it is made, and PyTorch's figures do not show it.
template <class Recipe>
class cuda_cache final : public any_cache {
  using cache_type = tessera::cuda::cache<Recipe, typename Recipe::layout_type::element_type>;
  using T = typename cache_type::T;

 public:
  explicit cuda_cache(const cache_request& request)
      : cache_(request.shape, requested<Recipe>(request), options_of(request)) {}

  std::unique_ptr<any_cache> clone() const override { return std::make_unique<cuda_cache>(*this); }
  index_t open() override { return cache_.open(); }
  void close(index_t id) override { cache_.close(id); }

  void prompt(index_t layer, index_t id, const tensor_rows& q, const tensor_rows& k, const tensor_rows& v,
              const tensor_rows& out, void* stream) override {
    if (layer == 0) cache_.reserve(id, k.tokens, at(stream));
    cache_.prefill(layer, id, q.as<const T>(), k.as<const T>(), v.as<const T>(), at(stream));
    cache_.prefill_attention(layer, id, q.as<const T>(), out.as<T>(), {}, at(stream));
  }
  void end_prompt(index_t id, void* stream) override { cache_.end_prefill(id, at(stream)); }

  void begin_step(const std::vector<index_t>& ids, index_t tokens, void* stream) override {
    step_ = cache_.prepare_step(ids, tokens, at(stream));
    cache_.begin_step(step_, at(stream));
  }
  void step(index_t layer, const tensor_rows& q, const tensor_rows& k, const tensor_rows& v, const tensor_rows& out,
            void* stream) override {
    cache_.decode(layer, step_, q.as<const T>(), k.as<const T>(), v.as<const T>(), out.as<T>(), {}, at(stream));
  }

  void set_budget(index_t tokens, void* stream) override { cache_.set_budget(tokens, at(stream)); }
  offset_t bytes(index_t id) const override { return cache_.bytes(id); }
  offset_t bytes_read(index_t id) const override { return cache_.bytes_read(id); }
  offset_t full_bytes(index_t tokens) const override { return cache_.full_bytes(tokens); }
  index_t next_position(index_t id) const override { return cache_.next_position(id); }
  std::vector<index_t> positions(index_t layer, index_t id, index_t head) const override {
    return cache_.positions(layer, id, head);
  }

 private:
  static cudaStream_t at(void* stream) { return static_cast<cudaStream_t>(stream); }
  static tessera::cuda::cache_options options_of(const cache_request& request) {
    tessera::cuda::cache_options options;
    options.sequences = request.sequences;
    options.tokens = request.tokens;
    return options;
  }

  cache_type cache_;
  tessera::batch step_;
};

}  // namespace tessera_torch
