// RocketKV-MT: RocketKV for conversations. Everything stays stored; each turn chooses anew what its steps may read.
#pragma once

#include "../attention/gathered_decode.hpp"
#include "../budget/two_stage.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/hybrid_min_max.hpp"
#include "../scorer/observation_window.hpp"
#include "../selector/tokens_or_pages.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// The plan and both stages of `rocketkv`, window 128, but the first stage lets tokens through instead of dropping the
/// others: at the end of each turn's prompt over the whole history. What the turn decodes joins. K and V are never
/// copied.
/// Paper    Behnam et al., RocketKV, arXiv:2502.14051, Sec. 3.5; window 128 as on SCBench (App. A.3).
/// Differs  as `rocketkv`; a list of slots stands for the reference's filtered copy of K and V.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct rocketkv_mt : recipe<filter<observation_window, two_stage<uniform>, top_tokens>, Layout,
                            retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, once> {
  static constexpr const char* name = "rocketkv_mt";
  static constexpr const char* paper = "RocketKV-MT, arXiv:2502.14051";

  rocketkv_mt() {
    this->retain.scorer.window = 128;
    this->retain.scorer.pool = 63;
  }
};

TESSERA_NAMESPACE_END
