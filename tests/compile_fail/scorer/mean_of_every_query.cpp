// expect: tessera: a mean over query rows needs a window
#include <tessera/scorer/accumulated_attention.hpp>

struct mean_attention : tessera::accumulated_attention {
  static constexpr tessera::row_join rows = tessera::row_join::mean;
};
static_assert(tessera::check_scorer<mean_attention>());
