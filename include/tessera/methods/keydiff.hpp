// KeyDiff: the keys that differ most from their mean.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/key_difference.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the tokens whose keys point away from the mean direction of all keys; looks at no query.
/// Paper    Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv:2504.15364.
/// Differs  as kvpress 0.5.5 has it: once, over the whole prompt, where the paper evicts block by block.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct keydiff : recipe<retain<key_difference, uniform, top_tokens>, Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "keydiff";
  static constexpr const char* paper = "KeyDiff, arXiv:2504.15364";
};

TESSERA_NAMESPACE_END
