// Every number of every method at the ends of what it may be, and beyond.
#include "catch.hpp"

#include <cmath>
#include <limits>

#include "methods/support/conversation.hpp"

using namespace methods_test;

namespace {

const tessera::model_shape shape{2, 4, 2};

/// Two turns with steps of one and of several tokens; every output is a number.
void converse(any_cache& cache, const model_data& data) {
  const index_t id = cache.open();
  index_t next = 0;
  for (const index_t prompt : {37, 9}) {
    prefill(cache, id, data, next, prompt);
    next += prompt;
    cache.end_prefill(id);
    for (const index_t step : {1, 3}) {
      for (const float value : decode(cache, id, data, next, step)) REQUIRE(std::isfinite(value));
      next += step;
    }
  }
}

settings with(const std::string& method, const std::string& name, double value, index_t budget) {
  settings chosen{method, budget};
  if (name == "budget") {
    chosen.budget = index_t(value);
    chosen.values["window"] = 1;  // or no small budget has room for it
  } else {
    chosen.values[name] = value;
  }
  if (name == "layer") chosen.values["layers"] = value + 1;
  if (name == "layers") chosen.values["layer"] = 0;
  return chosen;
}

}  // namespace

TEST_CASE("every parameter works at the ends of its range, or is refused by a sentence") {
  support::rng random(73);
  const model_data data(random, shape, 60);
  const auto workers = std::make_shared<tessera::cpu::executor>(1);
  index_t worked = 0;
  for (const auto& method : all_methods()) {
    for (const number& one : numbers_of(method)) {
      for (const double value : {one.least, one.least + one.step, one.most - one.step, one.most}) {
        for (const index_t budget : {40, 16, 1 << 24}) {
          CAPTURE(method, one.name, value, budget);
          try {
            const auto cache = make_cache(with(method, one.name, value, budget), shape, workers);
            converse(*cache, data);
            ++worked;
          } catch (const tessera::error& refusal) {
            CHECK_THAT(refusal.what(), contains("; expected "));
          }
        }
      }
    }
  }
  CHECK(worked > 500);
}

TEST_CASE("every parameter beyond its range is refused by its name, with the range") {
  const auto workers = std::make_shared<tessera::cpu::executor>(1);
  for (const auto& method : all_methods()) {
    for (const number& one : numbers_of(method)) {
      constexpr double huge = std::numeric_limits<index_t>::max();
      for (const double value : {one.least - one.step, one.most + one.step, -huge, huge - 100, huge}) {
        CAPTURE(method, one.name, value);
        std::string said = "nothing";
        try {
          auto chosen = with(method, one.name, value, 1 << 24);
          if (one.name == "layer" || one.name == "layers") chosen.values = {{one.name, value}};
          make_cache(chosen, shape, workers);
        } catch (const tessera::error& refusal) {
          said = refusal.what();
        }
        std::ostringstream ends;
        ends << one.least << " to " << one.most;
        CHECK_THAT(said, contains(one.name + " is "));
        if (one.step == 1) {
          const auto whole = [](double end) { return std::to_string(index_t(end)); };
          CHECK_THAT(said, contains(whole(one.least) + " to " + whole(one.most)));
        } else {
          CHECK_THAT(said, contains(ends.str()));
        }
      }
    }
  }
}
