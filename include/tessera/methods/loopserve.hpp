// LoopServe: few lines while a prompt is read, a fresh choice of tokens while the answer grows.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../prefill/lasting_lines.hpp"
#include "../recipe.hpp"
#include "../schedule/every_outputs.hpp"
#include "../scope/per_head_or_query.hpp"
#include "../scorer/newest_queries.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// A prompt's rows attend the vertical and slash lines that carry `alpha` of a sample's attention. Everything stays
/// stored. The first `first` outputs of a turn read everything; then an answer's steps read the `budget` tokens that
/// the newest `observed` queries look at, chosen after those and after every `every` outputs more, and what has been
/// decoded since.
/// Paper    Li et al., LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues,
///          arXiv:2507.13681, Sec. 5.1 (lines), 5.2 and Algorithm 6 (fresh choices, the first after 16 outputs);
///          alpha 0.955, 48 rows, every 16 outputs, budget 1024 as in its Table 7.
/// Differs  as `covering_lines` and `newest_queries`; one list per kv_head (sum over the group), `per` q_head as
///          printed; an answer's tokens are not computed again with the next prompt.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct loopserve : recipe<filter<newest_queries, uniform, top_tokens, per_head_or_query>, Layout, retrieve_all,
                          dense_decode, every_outputs, lasting_lines> {
  static constexpr const char* name = "loopserve";
  static constexpr const char* paper = "LoopServe, arXiv:2507.13681";
};

TESSERA_NAMESPACE_END
