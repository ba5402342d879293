// LagKV: tokens that stand out beside the tokens behind them.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/lag_relative.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the first `sinks` (4) tokens, the newest ones, and of each partition of `lag` (128) tokens those whose keys
/// and values spread most on the scale of the next partition; looks at no query.
/// Paper    Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important,
///          arXiv:2504.04704.
/// Differs  as kvpress 0.5.5 has it: once, over the whole prompt, to a budget; ties to the lower slot.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct lagkv : recipe<retain<lag_relative, uniform, top_tokens>, Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "lagkv";
  static constexpr const char* paper = "LagKV, arXiv:2504.04704";
};

TESSERA_NAMESPACE_END
