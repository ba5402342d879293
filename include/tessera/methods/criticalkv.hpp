// CriticalKV: attention first, then attention times what the value does to the output.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/observation_window.hpp"
#include "../scorer/value_norm.hpp"
#include "../scorer/weighted_by.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps half of the budget by SnapKV's scores, its window among it, and the rest by these scores times the L1 norm of
/// the value behind the output projection (`model_shape::output_projection`; without one, of the value itself).
/// Paper    Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective,
///          arXiv:2502.03805.
/// Differs  as kvpress 0.5.5 has it, over SnapKV as it is here (window 32, max-pool 7, sums over the group); the window
///          is always kept.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct criticalkv : recipe<retain<weighted_by<observation_window, value_norm>, uniform, top_tokens>, Layout,
                           retrieve_all, dense_decode, once> {
  static constexpr const char* name = "criticalkv";
  static constexpr const char* paper = "CriticalKV, arXiv:2502.03805";
};

TESSERA_NAMESPACE_END
