// Every number of every method at the ends of what it may be, and beyond.
#include "catch.hpp"

#include "methods/support/any_cache.hpp"
#include "support/calls/parameter_ends.hpp"

using namespace methods_test;

namespace {

const tessera::model_shape shape{2, 4, 2};

support::cache_maker maker_of(const std::string& method) {
  return [=, workers = std::make_shared<tessera::cpu::executor>(1)](index_t budget,
                                                                    const std::map<std::string, double>& values) {
    return make_cache({method, budget, values}, shape, workers);
  };
}

}  // namespace

TEST_CASE("every parameter works at the ends of its range, or is refused by a sentence") {
  index_t worked = 0;
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    worked += support::take_ends(numbers_of(method), shape, false, maker_of(method));
  }
  CHECK(worked > support::scaled(500));
}

TEST_CASE("every parameter beyond its range is refused by its name, with the range") {
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    support::refuse_beyond(numbers_of(method), maker_of(method));
  }
}
