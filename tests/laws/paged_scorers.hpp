// The laws of scorers that read pages in place of keys.
#pragma once

#include <cstring>

#include <tessera/concepts/scorer.hpp>

#include "catch.hpp"
#include "support/random.hpp"

namespace support {

using namespace tessera;

template <paged_scorer S>
void obeys_the_laws_of_paged_scorers(const S& policy) {
  rng random(44);
  CHECK(std::strlen(S::name) > 0);
  CHECK_NOTHROW(policy.check(64));
  for (const index_t read : {1, 2, 31, 32, 33, 1000}) {
    CHECK(policy.protected_tail(read) >= 0);
    CHECK(policy.protected_tail(read) <= read);
  }
  for (index_t i = 0; i < scaled(2'000); ++i) {
    const int dim = random.pick({64, 80, 96, 128, 192, 256});
    const double ratio = 1 + random.uniform() * random.pick({1.0, 10.0, 1000.0});
    const S fitted = policy.fitted(ratio, dim);
    REQUIRE((fitted.page >= 1 && fitted.channels >= 1 && fitted.channels <= dim));
    // Fitting a second time changes nothing, and more compression never reads more.
    const S again = fitted.fitted(ratio, dim), smaller = policy.fitted(ratio * 2, dim);
    REQUIRE((again.page == fitted.page && again.channels == fitted.channels));
    REQUIRE((smaller.page >= fitted.page || smaller.channels <= fitted.channels));
    // All channels chosen: the scale is the rule's, to the bit, or not used at all.
    const float mass = std::abs(random.normal()) + 1e-3f;
    const float scale = fitted.row_scale(0.125f, mass, mass);
    REQUIRE((scale == 0.125f || (!S::normalised && scale == 1)));
    REQUIRE(fitted.row_scale(0.125f, mass / 2, mass) >= scale);
  }
  const S exact = policy.fitted(1.0, 64);
  CHECK(exact.channels == 64);
}

}  // namespace support
