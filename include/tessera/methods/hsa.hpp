// HSA: RocketKV's hybrid sparse attention alone. Everything stays stored, each step reads the best tokens by an
// estimate.
#pragma once

#include "../attention/gathered_decode.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/hybrid_min_max.hpp"
#include "../selector/tokens_or_pages.hpp"

TESSERA_NAMESPACE_BEGIN

/// The second stage of `rocketkv` over the whole cache: budget t, of which a step attends t / 2 tokens and the estimate
/// over pages and chosen channels reads the worth of the other half. The same as `rocketkv` with `split` 0.
/// Paper    Behnam et al., RocketKV, arXiv:2502.14051, Sec. 3.4, App. B.1.1.
/// Differs  page and channels are planned whenever a turn's prompt ends, for all tokens until then and `max_new`.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct hsa : recipe<retain_all, Layout, retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, once> {
  static constexpr const char* name = "hsa";
  static constexpr const char* paper = "HSA of RocketKV, arXiv:2502.14051";
};

TESSERA_NAMESPACE_END
