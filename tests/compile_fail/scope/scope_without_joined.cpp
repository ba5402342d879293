// expect: tessera: a scope over a layer needs float join(joined, score) and float joined(total, heads)
#include <tessera/concepts/scope.hpp>

struct half_a_scope {
  static constexpr const char* name = "half_a_scope";
  float join(float joined, float score) const { return joined + score; }
};
static_assert(tessera::check_scope<half_a_scope>());
