// Scores that a cache on the device takes from the engine, as cache/callers/given_scores.hpp has them.
#pragma once

#include "backend/cuda/device.hpp"
#include "cache/callers/given_scores.hpp"
#include "tessera/backend/cuda/cache.cuh"

namespace gpu_test {

/// One layer's, where the method takes some. Waits.
template <class Method>
void give_device_scores(cuda::cache<Method>& held, index_t layer, index_t id) {
  support::give_scores<Method>(held, layer, id, [&](index_t tokens, const std::vector<float>& scores) {
    if constexpr (Method::retain_type::takes_scores) {
      const buffer<float> there(scores);
      held.set_scores(layer, id, 0, tokens, there.data, nullptr);
      cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
  });
}
template <class Method>
void give_device_scores(cuda::cache<Method>& held, index_t id) {
  for (index_t layer = 0; layer < held.shape().layers; ++layer) give_device_scores(held, layer, id);
}

}  // namespace gpu_test
