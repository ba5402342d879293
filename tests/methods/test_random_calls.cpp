// Calls in random order with random arguments, valid and not, against a model of what a cache promises.
#include "catch.hpp"

#include <cstdlib>

#include "methods/support/any_cache.hpp"
#include "support/calls/random_cache_calls.hpp"

using namespace methods_test;

namespace {

/// Calls that every method gets in an ordinary run; TESSERA_RANDOM_CALLS asks for another number in all.
index_t calls_of_a_method() {
  const char* wanted = std::getenv("TESSERA_RANDOM_CALLS");
  return wanted ? std::max(1, std::atoi(wanted) / int(all_methods().size())) : support::scaled(1000);
}

support::called_caches caches_of(const std::string& method, support::rng& random) {
  tessera::model_shape shape{random.between(1, 3), random.pick({2, 4}), random.pick({1, 2})};
  if (shape.q_heads % shape.kv_heads != 0) shape.q_heads = shape.kv_heads;
  support::called_method known;
  known.read = random.pick({16, 24, 40});
  settings chosen{method, known.read};
  for (const number& one : numbers_of(method)) {
    known.has_budget = known.has_budget || one.name == "budget";
    if (one.name == "window") chosen.values["window"] = random.between(1, 4);
    if (one.name == "recent" && method == "fastkvzip") chosen.values["recent"] = random.between(0, 4);
    if (one.name == "observed") chosen.values["observed"] = random.between(1, 4);
    // Else sequences of a batch may differ in what is due.
    if (one.name == "every") chosen.values["every"] = chosen.values["first"] = 1;
    if (one.name == "max_new") chosen.values["max_new"] = random.between(4, 12);
    if (one.name == "chunk") chosen.values["chunk"] = random.between(1, 20);
    if (one.name == "newest") chosen.values["newest"] = random.between(0, 2);
    if (one.name == "page") chosen.values["page"] = random.between(1, 5);
    if (one.name == "heads") chosen.values["heads"] = random.pick({1, shape.kv_heads});
    if (one.name == "segment") chosen.values["segment"] = random.between(1, 40);
    if (one.name == "reference") chosen.values["reference"] = random.between(1, 64);
    if (one.name == "least_segment") chosen.values["least_segment"] = random.between(32, 48);
    if (one.name == "channels" && random.chance(0.5)) chosen.values["channels"] = 0.25;
    if (one.name == "sampled_rows") chosen.values["sampled_rows"] = random.between(1, 12);
    if (one.name == "dense_layers") chosen.values["dense_layers"] = random.pick({0, 0, 0, 1});
  }
  for (const auto& [word, choices] : {std::pair{"strategy", 2},
                                      {"cluster", 3},
                                      {"per", 2},
                                      {"lines", 2},
                                      {"algorithm", 2},
                                      {"element", 5},
                                      {"reduce", 2}})
    chosen.values[word] = random.between(0, choices - 1);
  for (const number& one : numbers_of(method)) {
    if (one.name == "segment") known.searches = chosen.values["strategy"] > 0;
  }
  for (const number& one : numbers_of(method)) {
    if (one.name == "truncate" && !known.searches) chosen.values["prefill"] = random.between(0, 1);
  }
  if (random.chance(0.7)) chosen.values["profile"] = random.between(0, 3);
  known.filters = traits_of(method).filters;
  known.by_layer = traits_of(method).by_layer;
  known.segments = traits_of(method).segments;
  known.step_segments = traits_of(method).step_segments;
  known.has_two = traits_of(method).scorer != traits::first::none;
  known.exact = method.find("exact") != std::string::npos && !traits_of(method).plans;
  const auto workers = std::make_shared<tessera::cpu::executor>(1);
  return {shape, known, {}, [=] { return make_cache(chosen, shape, workers); }, {}};
}

}  // namespace

TEST_CASE("random calls do what the contract says, and a refused one leaves a cache as it was") {
  constexpr index_t at_once = 250;  // to one cache
  const index_t calls = calls_of_a_method();
  index_t block = 0;
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    for (index_t done = 0; done < calls; done += at_once) {
      if (!support::is_mine(block++)) continue;
      CAPTURE(done);
      support::rng random(std::uint64_t(9001 + done));
      const auto caches = caches_of(method, random);
      REQUIRE(support::wrong_of_random_calls(random, caches, std::min(at_once, calls - done)) == "");
    }
  }
}
