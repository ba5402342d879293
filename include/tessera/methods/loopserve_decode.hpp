// LoopServe's decoding alone: prompts are dense.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/every_outputs.hpp"
#include "../scope/per_head_or_query.hpp"
#include "../scorer/newest_queries.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// `loopserve` without its lines: a fresh choice of `budget` tokens after a turn's `first` outputs and after every
/// `every` more.
/// Paper    LoopServe-D of arXiv:2507.13681, Sec. 6.2.
/// Differs  as `loopserve`.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct loopserve_decode : recipe<filter<newest_queries, uniform, top_tokens, per_head_or_query>, Layout, retrieve_all,
                                 dense_decode, every_outputs> {
  static constexpr const char* name = "loopserve_decode";
  static constexpr const char* paper = "LoopServe-D, arXiv:2507.13681";
};

TESSERA_NAMESPACE_END
