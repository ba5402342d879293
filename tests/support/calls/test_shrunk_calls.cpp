// A cache that is wrong on purpose is found by random calls, and with few of them.
#include "catch.hpp"

#include <algorithm>
#include <iostream>
#include <sstream>

#include <tessera/methods/snapkv.hpp>

#include "random_cache_calls.hpp"

namespace {

using tessera::index_t;
using method = tessera::snapkv<tessera::fp32, 64>;

/// Once it has forked, a step of two sequences and several tokens has other outputs in every cache.
class wrong_cache final : public support::cpu_calls<method> {
 public:
  using cpu_calls::cpu_calls;
  std::unique_ptr<called_cache> copy() const override { return std::make_unique<wrong_cache>(*this); }
  index_t fork(index_t id) override {
    const index_t forked = cpu_calls::fork(id);
    has_forked_ = true;
    return forked;
  }
  void decode(index_t layer, const tessera::batch& step, const rows& q, const rows& k, const rows& v,
              const results& out, const results& lse) override {
    cpu_calls::decode(layer, step, q, k, v, out, lse);
    static int steps = 0;
    if (has_forked_ && step.sequences() == 2 && step.tokens > 1) *out.data += float(++steps);
  }

 private:
  bool has_forked_ = false;
};

template <class Cache>
support::called_caches caches_of() {
  support::called_caches caches;
  caches.shape = {2, 4, 2};
  caches.method.has_budget = caches.method.has_two = caches.method.by_layer = true;
  caches.make = [] {
    method made;
    made.set_budget(24);
    made.retain.scorer.window = 2;
    return std::make_unique<Cache>(
        tessera::cache<method>({2, 4, 2}, made, std::make_shared<tessera::cpu::executor>(1)));
  };
  return caches;
}

/// What is printed meanwhile.
struct printed {
  std::ostringstream text;
  std::streambuf* previous = std::cout.rdbuf(text.rdbuf());
  ~printed() { std::cout.rdbuf(previous); }
};

}  // namespace

TEST_CASE("a cache that is wrong after a fork is found, and shown in a handful of calls") {
  printed output;
  std::string wrong;
  for (std::uint64_t seed = 1; seed < 400 && wrong.empty(); ++seed) {
    support::rng random(seed);
    wrong = support::wrong_of_random_calls(random, caches_of<wrong_cache>(), 250);
  }
  const std::string text = output.text.str();
  CAPTURE(text);
  CHECK(wrong == "a twin's outputs are the cache's to the bit");
  CHECK_THAT(text, contains("  cache->open();\n"));
  CHECK_THAT(text, contains("  cache->fork(0);\n") || contains("  cache->fork_by_bytes(0);\n"));
  CHECK_THAT(text, contains(" = cache->prepare_step({"));
  CHECK_THAT(text, contains("  cache->decode(0, step"));
  CHECK(std::count(text.begin(), text.end(), ';') <= 6 + 2);  // those calls, and two lines that they need
}

TEST_CASE("nothing is printed of a cache that is right") {
  printed output;
  support::rng random(1);
  CHECK(support::wrong_of_random_calls(random, caches_of<support::plain_cpu_calls<method>>(), 250) == "");
  CHECK(output.text.str().empty());
}
