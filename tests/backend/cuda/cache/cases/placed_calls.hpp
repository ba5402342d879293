// Random calls over packed rows in pages beside the same in planes: both give the same outputs, to the bit.
#pragma once

#include "calls_case.hpp"
#include "support/calls/random_cache_calls.hpp"

namespace gpu_test {

/// Placements take different memory, which is compared elsewhere.
template <class Method>
struct placed_calls final : device_calls<Method> {
  using device_calls<Method>::device_calls;
  std::unique_ptr<support::called_cache> copy() const override { return std::make_unique<placed_calls>(*this); }
  offset_t bytes(index_t) const override { return 0; }
};

/// The cache of pages and its twin of planes. Each cache of pages has all its pages when its sequences have been closed.
template <class Paged, class Plain>
class both_placements {
 public:
  both_placements(const model_shape& shape, const cuda::cache_options& options, support::rng random)
      : shape_(shape), options_(options), random_(random) {}
  std::unique_ptr<support::called_cache> next() {
    if (made_++ % 2 == 0) return std::make_unique<placed_calls<Paged>>(shape_, configured<Paged>(), options_);
    return std::make_unique<placed_calls<Plain>>(shape_, configured<Plain>(), options_);
  }

 private:
  template <class Method>
  Method configured() const {
    support::rng random = random_;
    Method made;
    if (random.chance(0.5)) support::keep_all_elements(made);
    made.layout.rows.element = random.pick({packed_element::same, packed_element::fp8, packed_element::int4});
    made.layout.rows.segment = random.pick({32, 64, 65536});
    if constexpr (Method::layout_type::rows_type::basis_type::rotates)
      made.layout.rows.prefill = random.pick({prefill_rows::whole, prefill_rows::packed});
    if constexpr (requires { made.retrieve.tokens; }) made.set_budget(random.pick({24, 40, 64}));
    if constexpr (requires { made.retain.scorer.window; }) made.retain.scorer.window = random.between(1, 4);
    if constexpr (requires { made.retain.budget.max_new; }) made.retain.budget.max_new = random.between(4, 12);
    return made;
  }
  model_shape shape_;
  cuda::cache_options options_;
  support::rng random_;
  int made_ = 0;
};

template <class Paged, class Plain>
void call_both(std::uint64_t seed) {
  index_t refused = 0;
  const index_t conversations = support::scaled(40);
  for (index_t block = 0; block < conversations; ++block) {
    if (!support::is_mine(block)) continue;
    CAPTURE(seed, block);
    support::rng random(seed + std::uint64_t(block));
    const model_shape shape{random.between(1, 3), random.pick({2, 4}), random.pick({1, 2})};
    cuda::cache_options options;
    options.sequences = random.between(2, 4);
    options.tokens = random.pick({64, 128, 300});
    options.step_tokens = random.pick({1, 4, 8});
    options.draft_tokens = 16;
    const support::called_limits limits{true, options.sequences, options.step_tokens, options.tokens, false};
    both_placements<Paged, Plain> made(shape, options, random);
    support::called_method known = on_both<Paged>().known;
    known.read = 24;
    const support::called_caches caches{shape, known, limits, [&] { return made.next(); }, {}};
    support::agreement seen;
    try {
      REQUIRE(support::wrong_of_random_calls(random, caches, 150, &seen) == "");
    } catch (const error& refusal) {
      CHECK_THAT(refusal.what(), contains("; expected "));
      ++refused;
    }
  }
  CHECK(refused <= conversations / 2);
}

}  // namespace gpu_test
