// A recipe's cache on the device for the tool, and the memory that it takes.
#pragma once

#include <memory>
#include <tessera/backend/cuda/any_cache.cuh>
#include <utility>

#include "device_conversations.hpp"
#include "tool/methods/recipe_settings.hpp"

namespace tool {

/// Sizes of the cache that was asked for.
template <class Recipe>
tessera::cuda::cache_options device_options(const cache_request& request) {
  constexpr index_t longest_repeat = 2048 + 256;  // a part that is read again, and the sentence before it
  tessera::cuda::cache_options options;
  options.sequences = request.conversations + request.forks;
  options.tokens = request.tokens + (Recipe::retain_type::rereads ? longest_repeat : 0);
  options.index_tokens = request.index_tokens > 0 ? request.index_tokens : request.tokens;  // whatever the budget
  options.step_tokens = 8;
  if constexpr (tessera::packing_layout<typename Recipe::layout_type>) {
    // Rows of the pool for one prompt at a time, which then moves once, and the tails of all conversations.
    constexpr index_t tail = 512;
    const index_t prompt = request.turn_tokens + tessera::spare_room(request.turn_tokens) + tail;
    if (request.turn_tokens > 0)
      options.rows = tessera::offset_t(request.shape.layers) * request.shape.kv_heads *
                     (prompt + tessera::offset_t(request.conversations) * tail);
  }
  return options;
}

/// Null for a recipe that the CUDA backend does not run: see tessera::runs_on_devices.
template <class Recipe>
std::unique_ptr<method_cache> make_if_it_runs([[maybe_unused]] const cache_request& request) {
  if constexpr (tessera::runs_on_devices<Recipe>) {
    const recipe_with_profile<Recipe> wanted(request);
    const tessera::cuda::cache_options options = device_options<Recipe>(request);
    auto cache =
        std::make_unique<tessera::cuda::any_cache_of<Recipe>>(request.shape, wanted.recipe, options, wanted.profile);
    return device_conversations(std::move(cache), request.element, request.conversations, options.tokens,
                                options.rows > 0);
  } else {
    return nullptr;
  }
}

}  // namespace tool
