// Random calls of the device's caches: every method's test makes its own (method.cuh.in).
#include "support/calls/random_cache_calls.hpp"

#include "called_on_both.hpp"

using namespace tessera;
using support::random_cache_calls;

void gpu_test::make_random_calls(const called_on_both& method) {
  support::agreement seen;
  index_t made = 0, refused = 0;
  for (index_t done = 0, calls = support::scaled(600); done < calls;) {
    CAPTURE(done);  // the seed, but for its offset
    support::rng random(std::uint64_t(70601 + done));
    called_numbers numbers{{random.between(1, 3), random.pick({2, 4}), random.pick({1, 2})},
                           random.pick({24, 40, 64}),
                           {{"window", random.between(1, 4)}, {"max_new", random.between(4, 12)}}};
    support::called_method known = method.known;
    known.read = numbers.budget;
    cuda::cache_options options;
    options.sequences = random.between(2, 4);
    options.tokens = random.pick({64, 128, 300});
    options.step_tokens = random.pick({1, 4, 8});
    support::called_limits limits{true, options.sequences, options.step_tokens, options.tokens, random.chance(0.25)};
    const index_t rows = numbers.shape.layers * numbers.shape.kv_heads;
    if (limits.is_tight) options.rows = rows * random.between(80, 500);
    auto reference = random.chance(0.5) ? method.on_host(numbers) : nullptr;
    std::unique_ptr<random_cache_calls> twins;
    try {
      twins = std::make_unique<random_cache_calls>(
          random, numbers.shape, known, limits, [&] { return method.on_device(numbers, options); },
          std::move(reference), &seen);
    } catch (const error& refusal) {  // a budget too small for these numbers
      CHECK_THAT(refusal.what(), contains("; expected "));
      ++refused;
    }
    ++made;
    for (index_t i = 0; i < 150 && done < calls; ++i, ++done) {
      if (twins) twins->call();
    }
  }
  CHECK(refused <= made / 2);
  INFO(seen.swapped << " of " << seen.compared << " choices differ by what rounding explains");
  CHECK(seen.swapped <= 2 + seen.compared / 100);
}
