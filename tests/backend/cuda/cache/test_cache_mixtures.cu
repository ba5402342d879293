// The CUDA cache of mixtures that no paper has, one first stage before another second one, against the CPU's.
#include "cases/cache_case.hpp"
#include "tessera/attention/gathered_decode.hpp"
#include "tessera/budget/adaptive.hpp"
#include "tessera/budget/uniform.hpp"
#include "tessera/layout/dense.hpp"
#include "tessera/recipe.hpp"
#include "tessera/schedule/each_step.hpp"
#include "tessera/schedule/once.hpp"
#include "tessera/scorer/accumulated_attention.hpp"
#include "tessera/scorer/chosen_channels.hpp"
#include "tessera/scorer/hybrid_min_max.hpp"
#include "tessera/scorer/observation_window.hpp"
#include "tessera/scorer/page_min_max.hpp"
#include "tessera/selector/top_tokens.hpp"

using namespace tessera;
using namespace gpu_test;

template <class Retain, class Scorer>
using mixture = recipe<Retain, dense<bf16, 64>, tessera::retrieve<Scorer, top_tokens>, gathered_decode, once>;

TEST_CASE("Ada-SnapKV's first stage before HSA holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<mixture<retain<observation_window, adaptive, top_tokens>, hybrid_min_max>>(20);
}
TEST_CASE("SnapKV before Quest holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<mixture<retain<observation_window, uniform, top_tokens>, page_min_max>>(20);
}
TEST_CASE("H2O's first stage before SparQ holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<recipe<retain<accumulated_attention, uniform, top_tokens>, dense<bf16, 64>,
                            tessera::retrieve<chosen_channels, top_tokens>, gathered_decode, each_step>>(20);
}
