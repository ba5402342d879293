// expect: tessera: a scorer that observes queries needs float weigh(float logit, float lse) const
#include <tessera/concepts/scorer.hpp>

struct weightless {
  static constexpr const char* name = "weightless";
  static constexpr tessera::observes observed = tessera::observes::window;
  static constexpr bool comparable_across_heads = true;
  tessera::index_t window = 8;
  tessera::index_t protected_tail(tessera::index_t) const { return 0; }
  void check(tessera::index_t) const {}
};

static_assert(tessera::check_scorer<weightless>());
