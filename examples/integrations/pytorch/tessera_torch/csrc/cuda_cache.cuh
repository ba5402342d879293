// A recipe's cache on a GPU, in the memory that PyTorch gives.
#pragma once

#include <memory>
#include <tessera/backend/cuda/any_cache.cuh>
#include <utility>

#include "recipe_settings.hpp"

namespace tessera_torch {

/// Reads rows of the layout's element type where they lie and writes outputs of it. Memory is the request's: taken for
/// `sequences` and `tokens` when the cache is made, and anew by `set_budget` and `fit_memory`.
template <class Recipe>
class cuda_cache final : public tessera::cuda::any_cache_of<Recipe, typename Recipe::layout_type::element_type> {
  using base = tessera::cuda::any_cache_of<Recipe, typename Recipe::layout_type::element_type>;
  using allocate_from = tessera::cuda::allocate_from;
  using memory_source = tessera::cuda::memory_source;

 public:
  explicit cuda_cache(const cache_request& request) : cuda_cache(request, allocate_from(source_of(request.memory))) {}

  std::unique_ptr<tessera::any_cache> copy_in(const device_memory& memory) const {
    const allocate_from here(source_of(memory));
    auto twin = std::make_unique<cuda_cache>(*this);
    twin->memory_ = source_of(memory);
    return twin;
  }
  std::unique_ptr<tessera::any_cache> clone() const override {
    const allocate_from here(memory_);
    return std::make_unique<cuda_cache>(*this);
  }

  void set_budget(index_t tokens, void* stream) override {
    const allocate_from here(memory_);
    base::set_budget(tokens, stream);
  }
  void fit_memory(index_t tokens, void* stream) override {
    const allocate_from here(memory_);
    base::fit_memory(tokens, stream);
  }

 private:
  cuda_cache(const cache_request& request, const allocate_from&)  // which lives until the cache is made
      : base(request.shape, requested<Recipe>(request), options_of(request), request.table),
        memory_(source_of(request.memory)) {}

  static memory_source source_of(const device_memory& memory) {
    if (!memory.take) return {tessera::cuda::detail::allocate_by_cuda, tessera::cuda::detail::release_by_cuda};
    return {memory.take, memory.give_back, memory.context};
  }
  static tessera::cuda::cache_options options_of(const cache_request& request) {
    tessera::cuda::cache_options options;
    options.sequences = request.sequences;
    options.tokens = request.tokens;
    options.step_tokens = request.step_tokens;
    options.smallest_budget = request.smallest_budget;
    if (drops_by_layer<Recipe> && request.first_prompt > 0) options.rows = rows_of(request, options);
    return options;
  }
  /// Rows for first prompts whose layers end one by one, and what follows them; 0: as many as everything takes, if that is less.
  static offset_t rows_of(const cache_request& request, tessera::cuda::cache_options options) {
    const offset_t all =
        offset_t(request.shape.layers + 1) * request.shape.kv_heads * request.sequences * request.tokens;
    options.sequences = 1;
    options.rows = 1;
    const typename base::cache_type small(request.shape, requested<Recipe>(request), options);
    const tessera::turn_extent turn{request.first_prompt, request.first_answer, 0, 1, true};
    const offset_t bytes = request.sequences * small.bound(turn).bytes, token = Recipe::layout_type::token_bytes(),
                   rows = (bytes + token - 1) / token;
    return rows < all ? rows : 0;
  }

  memory_source memory_;
};

}  // namespace tessera_torch
