// expect: tessera: a scorer of statistics needs float expect(float mean, float variance) const
#include <tessera/scorer/expected_weight.hpp>

struct expectless : tessera::expected_weight {
  float expect(float mean) const { return mean; }
};

static_assert(tessera::check_scorer<expectless>());
