// Quest: everything stays stored, each step reads the pages whose keys could match best.
#pragma once

#include "../attention/gathered_decode.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/page_min_max.hpp"
#include "../selector/top_pages.hpp"

TESSERA_NAMESPACE_BEGIN

/// Budget t: a step attends the pages that t / 2 tokens need, ceil(t / 2 / page) of them: the newest page, and others
/// by the bound of their extremes.
/// Paper    Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv:2406.10774.
/// Differs  half of the budget is attended, the other half stands for the estimate, as in RocketKV's comparison
///          (arXiv:2502.14051, App. A.3): Quest's own code attends all of it, at least three pages. With page 16 as
///          published the estimate is not tied to the budget; `page=0` takes S / t, which ties it. One choice per
///          kv_head (sum over the group); `dense_layers` is 0 (the original leaves the first two dense: 2).
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct quest : recipe<retain_all, Layout, retrieve<page_min_max, top_pages>, gathered_decode, once> {
  static constexpr const char* name = "quest";
  static constexpr const char* paper = "Quest, arXiv:2406.10774";
};

TESSERA_NAMESPACE_END
