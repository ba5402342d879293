// TOVA: the tokens that the newest query looks at.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/each_step.hpp"
#include "../scope/per_layer.hpp"
#include "../scorer/newest_attention.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the newest token and those that the newest query of all heads attends most; evicts after every step. One set
/// for all heads of a layer.
/// Paper    Oren et al., Transformers are Multi-State RNNs, arXiv:2401.06104.
/// Differs  as kvpress 0.5.5 has it: the newest token stays whatever its score. A step of several tokens goes by its
///          last one.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct tova : recipe<retain<newest_attention, uniform, top_tokens, per_layer<over_heads::mean>>, Layout, retrieve_all,
                     dense_decode, each_step> {
  static constexpr const char* name = "tova";
  static constexpr const char* paper = "TOVA, arXiv:2401.06104";
};

TESSERA_NAMESPACE_END
