// SnapKV: the tokens that the prompt's last queries look at.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/observation_window.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the last `window` (32) tokens and the best others by their queries' attention, max-pooled over 7 neighbours.
/// Paper    Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv:2404.14469.
/// Differs  one keep set per kv_head (sum over the group), kept in position order; window 32 and max-pool 7 as in its
///          LongBench configuration.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct snapkv
    : recipe<retain<observation_window, uniform, top_tokens>, Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "snapkv";
  static constexpr const char* paper = "SnapKV, arXiv:2404.14469";
};

TESSERA_NAMESPACE_END
