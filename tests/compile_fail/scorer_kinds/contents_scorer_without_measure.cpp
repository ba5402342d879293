// expect: tessera: a scorer by contents needs void measure(float x, float anchor, float* sums) const
#include <tessera/concepts/scorer.hpp>

struct measureless {
  static constexpr const char* name = "measureless";
  static constexpr tessera::observes observed = tessera::observes::nothing;
  static constexpr bool comparable_across_heads = true;
  static constexpr tessera::stored_rows reads = tessera::stored_rows::keys;
  static constexpr int measures = 1;
  void measure(float x, float* sums) const { sums[0] += x; }
  float score(const float* sums) const { return sums[0]; }
  tessera::index_t protected_tail(tessera::index_t) const { return 0; }
  void check(tessera::index_t) const {}
};

static_assert(tessera::check_scorer<measureless>());
