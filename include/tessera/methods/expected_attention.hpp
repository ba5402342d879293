// Expected Attention: what queries to come will look at, foretold from mean and covariance of those of the prompt.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/adaptive.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/expected_weight.hpp"
#include "../scorer/multiplied_by.hpp"
#include "../scorer/value_length.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the sinks and the tokens whose expected attention times the L2 norm of the value is largest. `floor` 1 gives
/// each head the same budget; below it, heads compete as in Ada-KV.
/// Needs    `model_shape::rope_frequencies`, and every query of a prompt.
/// Paper    Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
///          Distribution, arXiv:2510.00636.
/// Differs  as kvpress 0.5.5 has it (ExpectedAttentionPress). A floor below 1 is Ada-KV's own (adaptive.hpp), of what
///          heads have won; kvpress keeps the best of each head before heads compete.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct expected_attention : recipe<retain<multiplied_by<expected_weight, value_length>, adaptive, top_tokens>, Layout,
                                   retrieve_all, dense_decode, once> {
  static constexpr const char* name = "expected_attention";
  static constexpr const char* paper = "Expected Attention, arXiv:2510.00636";
  expected_attention() { this->retain.budget.floor = 1; }
};

TESSERA_NAMESPACE_END
