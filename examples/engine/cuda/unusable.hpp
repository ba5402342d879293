// The word on the device in which kernels note a number that nothing can be computed with.
#pragma once

#include <string>
#include <tessera/core/error.hpp>

#include "device.hpp"
#include "ops.hpp"

namespace engine::cuda {

/// See unusable_number. Everything is ordered by the stream.
class unusable_word {
 public:
  explicit unusable_word(cudaStream_t stream) : noted_(1), fetched_(1), stream_(stream) { forget(); }

  unsigned long long* data() { return noted_.data(); }
  /// Enqueues its way to the host.
  void fetch() {
    check(cudaMemcpyAsync(fetched_.data(), noted_.data(), noted_.bytes(), cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
  }
  /// What has been fetched. Errors: a number that nothing can be computed with, by name.
  void require_none() {
    if (*fetched_.data() == unusable_number::none) return;
    const auto found = unusable_number::from(*fetched_.data());
    forget();
    const char* const cure = "check the weights";
    if (found.of == unusable_number::logit)
      tessera::fail("the logit of token id " + std::to_string(found.place), "not finite", "a finite number", cure);
    const char* const names[] = {"a query", "a key", "a value"};
    tessera::fail(std::string(names[found.of]) + " of layer " + std::to_string(found.layer) + ", head " +
                      std::to_string(found.place) + ", token " + std::to_string(found.position),
                  "larger or no number", "at most 1e18: products of larger ones overflow float", cure);
  }

 private:
  void forget() { check(cudaMemsetAsync(noted_.data(), 0xff, noted_.bytes(), stream_), "cudaMemsetAsync"); }

  device_array<unsigned long long> noted_;
  pinned_array<unsigned long long> fetched_;
  cudaStream_t stream_;
};

}  // namespace engine::cuda
