// RocketKV: a coarse eviction by SnapKV when the prompt ends, then hybrid sparse attention over what is left.
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

/// Budget t is what a step's estimate and attention read together. The first stage keeps S / c^r tokens less `max_new`
/// by SnapKV's scores (window 32, max-pool 63); the second estimates and attends half each. See `two_stage`.
/// Paper    Behnam et al., RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression,
///          arXiv:2502.14051, Sec. 3.3 (first stage), 3.4 (second), 3.6 (budget); rounding of its accuracy code.
/// Differs  fp32 softmax in the window; the prompt's last token is part of the prompt and of the window (the reference
///          decodes it as the first sparse step); `dense_layers` is 0 (its published settings: 2); later turns keep at
///          least what a step attends.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct rocketkv : recipe<retain<observation_window, two_stage<uniform>, top_tokens>, Layout,
                         retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, once> {
  static constexpr const char* name = "rocketkv";
  static constexpr const char* paper = "RocketKV, arXiv:2502.14051";

  rocketkv() { this->retain.scorer.pool = 63; }
};

TESSERA_NAMESPACE_END
