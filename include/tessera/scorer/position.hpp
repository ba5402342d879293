// StreamingLLM's scorer: sinks first, then the newest.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by its logical position: the first `sinks` positions above all, then the newer the better, by how far
/// the token lies before the next one.
///
/// Shapes   scores [kv_heads, tokens]; exact for the newest 2^24 positions, however long the text.   Unit: token.
/// Errors   sinks below 0, or no room left beside the sinks: tessera::error.
/// Cost     none: neither K nor queries are read.
/// Paper    StreamingLLM, arXiv:2309.17453. Differs: keys stay rotated for their original positions and queries use
///          true positions (the original re-assigns positions inside the cache).
struct position {
  static constexpr const char* name = "position";
  static constexpr observes observed = observes::nothing;
  static constexpr bool comparable_across_heads = false;

  index_t sinks = 4;

  TESSERA_HD float score(index_t at, index_t next) const { return at < sinks ? infinity : float(at - next); }

  index_t protected_tail(index_t) const { return 0; }

  void check(index_t budget) const {
    check_parameters(*this);
    require(sinks < budget, "sinks", sinks, "at most one less than the budget, which is " + std::to_string(budget),
            "lower the sinks or raise the budget: recent tokens need room too");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("sinks", self.sinks, value_range{0, max_tokens}, "first tokens that are always kept");
  }
};

static_assert(check_scorer<position>());

TESSERA_NAMESPACE_END
