// expect: tessera: a scorer that observes the window must hold index_t window, the queries it observes
#include <tessera/concepts/scorer.hpp>

struct windowless {
  static constexpr const char* name = "windowless";
  static constexpr tessera::observes observed = tessera::observes::window;
  static constexpr bool comparable_across_heads = true;
  float weigh(float logit, float) const { return logit; }
  tessera::index_t protected_tail(tessera::index_t) const { return 0; }
  void check(tessera::index_t) const {}
};

static_assert(tessera::check_scorer<windowless>());
