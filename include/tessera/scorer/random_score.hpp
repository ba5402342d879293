// Scores by chance: a floor for what a scorer is worth.
#pragma once

#include <cstdint>

#include "../concepts/scorer.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by a pseudorandom number in [0, 1) that depends on `seed` and on the token's position alone. It is
/// the same in every head, layer and turn, whatever else is stored.
/// Shapes   scores [kv_heads, tokens].   Unit: token.   Cost  none: neither K nor queries are read.
/// Errors   a seed out of range: tessera::error.
struct random_score {
  static constexpr const char* name = "random_score";
  static constexpr observes observed = observes::nothing;
  static constexpr bool comparable_across_heads = true;

  index_t seed = 0;

  TESSERA_HD float score(index_t at, index_t) const {
    std::uint32_t word = std::uint32_t(at) * 0x9e3779b9u + std::uint32_t(seed) * 0x85ebca6bu + 0x165667b1u;
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    return float((word ^ (word >> 16)) >> 8) * 0x1p-24f;
  }

  index_t protected_tail(index_t) const { return 0; }

  void check(index_t) const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("seed", self.seed, value_range{0, max_tokens}, "another seed, other tokens");
  }
};

static_assert(check_scorer<random_score>());

TESSERA_NAMESPACE_END
