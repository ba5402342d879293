// LoopServe's prefill alone: steps read everything.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../layout/dense.hpp"
#include "../prefill/covering_lines.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"

TESSERA_NAMESPACE_BEGIN

/// `loopserve` without its choices while decoding: a prompt's rows attend few lines, steps read all that is stored. Has
/// no budget.
/// Paper    LoopServe-P of arXiv:2507.13681, Sec. 6.2.
/// Differs  as `covering_lines`.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct loopserve_prefill : recipe<retain_all, Layout, retrieve_all, dense_decode, once, covering_lines> {
  static constexpr const char* name = "loopserve_prefill";
  static constexpr const char* paper = "LoopServe-P, arXiv:2507.13681";
};

TESSERA_NAMESPACE_END
