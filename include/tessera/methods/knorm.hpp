// KNorm: the keys of smallest norm.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/key_norm.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the tokens whose keys have the smallest Euclidean norm; looks at no query.
/// Paper    Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv:2406.11430.
/// Differs  as kvpress 0.5.5 has it: in every layer, nothing protected.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct knorm : recipe<retain<key_norm, uniform, top_tokens>, Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "knorm";
  static constexpr const char* paper = "KNorm, arXiv:2406.11430";
};

TESSERA_NAMESPACE_END
