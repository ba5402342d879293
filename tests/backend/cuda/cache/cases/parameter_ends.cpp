// Every number of the device's caches at the ends of what it may be: every method's test takes its own (method.cuh.in).
#include "support/calls/parameter_ends.hpp"

#include "called_on_both.hpp"

using namespace tessera;

void gpu_test::take_ends(const called_on_both& method) {
  const model_shape shape{2, 4, 2};
  const auto make = [&](index_t budget, const std::map<std::string, double>& values) {
    cuda::cache_options options;
    options.tokens = 128;
    options.step_tokens = 4;
    return method.on_device({shape, budget, values}, options);
  };
  const index_t worked = support::take_ends(method.numbers, shape, true, make);
  if (!method.numbers.empty()) CHECK(worked > 0);
  support::refuse_beyond(method.numbers, make);
}
