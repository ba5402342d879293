// A method's caches on both backends behind one interface, and the tests of every method that are compiled once, without nvcc.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/calls/cache_call.hpp"
#include "support/calls/numbers.hpp"
#include "tessera/backend/cuda/cache_options.hpp"

namespace gpu_test {
using namespace tessera;

/// What a method is run with; `values` by the parameter's name.
struct called_numbers {
  model_shape shape;
  index_t budget;
  std::map<std::string, double> values;
};
/// A method on both backends. Makers throw as the caches do.
struct called_on_both {
  support::called_method known;
  std::vector<support::number> numbers;
  std::function<std::unique_ptr<support::called_cache>(const called_numbers&, const cuda::cache_options&)> on_device;
  std::function<std::unique_ptr<support::called_cache>(const called_numbers&)> on_host;
};

/// Random calls of the device's cache, and where they are valid of the CPU's too: random_calls.cpp.
void make_random_calls(const called_on_both& method);

/// Every number at the ends of what it may be, and beyond, in the device's cache: parameter_ends.cpp.
void take_ends(const called_on_both& method);

}  // namespace gpu_test
