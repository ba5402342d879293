// Ada-SnapKV: SnapKV with a budget that heads of a layer compete for.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/adaptive.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/observation_window.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// SnapKV's scores; every head is sure of a `floor` (0.2) of the budget, the rest goes where the layer's scores are.
/// Paper    Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv:2407.11550.
/// Differs  scores are sums over the window and the group (the reference takes means: the same order); kept in
///          position order.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct ada_snapkv
    : recipe<retain<observation_window, adaptive, top_tokens>, Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "ada_snapkv";
  static constexpr const char* paper = "Ada-KV, arXiv:2407.11550";
};

TESSERA_NAMESPACE_END
