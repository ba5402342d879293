// H2O: heavy hitters by accumulated attention, and recent tokens.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/each_step.hpp"
#include "../scorer/accumulated_attention.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the newest `recent` tokens (half of the budget) and the tokens that have received most attention from all
/// queries so far; evicts after every step, scores persist.
/// Paper    Zhang et al., H2O: Heavy-Hitter Oracle, arXiv:2306.14048.
/// Differs  per kv_head (scores summed over the group); the prompt's scores are exact causal column sums.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct h2o : recipe<retain<accumulated_attention, uniform, top_tokens>, Layout, retrieve_all, dense_decode,
                    each_step> {
  static constexpr const char* name = "h2o";
  static constexpr const char* paper = "H2O, arXiv:2306.14048";
};

TESSERA_NAMESPACE_END
