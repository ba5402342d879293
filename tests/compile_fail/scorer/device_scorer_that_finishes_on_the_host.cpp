// expect: tessera: this scorer's finish runs on the host only; a device needs float finish_at(in, n, i) with TESSERA_HD
#include <tessera/concepts/scorer.hpp>

struct host_only {
  static constexpr const char* name = "host_only";
  static constexpr tessera::observes observed = tessera::observes::step;
  static constexpr bool comparable_across_heads = true;
  float weigh(float logit, float) const { return logit; }
  tessera::index_t protected_tail(tessera::index_t) const { return 0; }
  void finish(const float*, tessera::index_t, float*, tessera::host_vector<float>&) const {}
  void check(tessera::index_t) const {}
};

static_assert(tessera::check_scorer<host_only>());
static_assert(tessera::check_device_scorer<host_only>());
