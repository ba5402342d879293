// expect: tessera: a schedule fires before a step reads or at its end, not at both
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/concepts/schedule.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scorer/position.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;

struct always {
  static constexpr const char* name = "always";
  static constexpr bool fires_at(moment) { return true; }
  bool due(moment, const turn_clock&) const { return true; }
};

template struct tessera::recipe<retain<position, uniform, top_tokens>, dense<bf16, 128>, retrieve_all, dense_decode,
                                always>;
