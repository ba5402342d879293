// Random calls of the device's caches: every method's test makes its own (method.cuh.in).
#include "support/calls/random_cache_calls.hpp"

#include "called_on_both.hpp"

using namespace tessera;

void gpu_test::make_random_calls(const called_on_both& method) {
  support::agreement seen;
  index_t made = 0, refused = 0;
  for (index_t done = 0, calls = support::scaled(600); done < calls;) {
    CAPTURE(done);  // the seed, but for its offset
    support::rng random(std::uint64_t(70601 + done));
    called_numbers numbers{{random.between(1, 3), random.pick({2, 4}), random.pick({1, 2})},
                           random.pick({24, 40, 64}),
                           {{"window", random.between(1, 4)},
                            {"max_new", random.between(4, 12)},
                            {"newest", random.between(0, 2)},
                            {"every", 1},  // else sequences of a batch may differ in what is due
                            {"first", 1},
                            {"segment", 32 * random.between(1, 3)}}};
    for (const support::number& one : method.numbers) {
      if (one.name == "truncate")
        numbers.values["prefill"] = random.between(0, 1);  // of segments in bases of their own
    }
    cuda::cache_options options;
    options.sequences = random.between(2, 4);
    options.tokens = random.pick({64, 128, 300});
    options.step_tokens = random.pick({1, 4, 8});
    options.draft_tokens = 16;
    options.smallest_budget = random.pick({0, 16});
    support::called_limits limits{true, options.sequences, options.step_tokens, options.tokens, random.chance(0.25)};
    const index_t rows = numbers.shape.layers * numbers.shape.kv_heads;
    if (limits.is_tight) options.rows = rows * random.between(80, 500);
    support::called_caches caches{
        numbers.shape, method.known, limits, [&] { return method.on_device(numbers, options); }, {}};
    caches.method.read = numbers.budget;
    if (random.chance(0.5)) caches.make_reference = [&] { return method.on_host(numbers); };
    const index_t count = std::min(150, calls - done);
    std::string wrong;
    try {
      wrong = support::wrong_of_random_calls(random, caches, count, &seen);
    } catch (const error& refusal) {  // a budget too small for these numbers
      CHECK_THAT(refusal.what(), contains("; expected "));
      ++refused;
    }
    REQUIRE(wrong == "");
    ++made;
    done += count;
  }
  CHECK(refused <= made / 2);
  INFO(seen.swapped << " of " << seen.compared << " choices differ by what rounding explains");
  CHECK(seen.swapped <= 2 + seen.compared / 100);
}
