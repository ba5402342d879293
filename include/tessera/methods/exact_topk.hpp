// Exact top-k: everything stays stored, each step reads the tokens with the largest true attention.
#pragma once

#include "../attention/gathered_decode.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/exact_score.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// The oracle of retrieval: `budget` tokens per kv_head and step, chosen by exact probabilities summed over the group.
/// Paper    Exact-TopK of RocketKV, arXiv:2502.14051, Appendix A.3.
/// Differs  one selection per kv_head; the paper's oracle selects for each query head.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct exact_topk : recipe<retain_all, Layout, retrieve<exact_score, top_tokens>, gathered_decode, once> {
  static constexpr const char* name = "exact_topk";
  static constexpr const char* paper = "Exact-TopK, arXiv:2502.14051 App. A.3";
};

TESSERA_NAMESPACE_END
