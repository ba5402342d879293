// SparQ: everything stays stored, each step reads a few channels of every key and then the best tokens.
#pragma once

#include "../attention/gathered_decode.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/chosen_channels.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Budget t: a step reads k_dim * t / S channels of every key and attends t / 2 tokens, a quarter of them the newest;
/// the mass that is missed goes to the mean of V.
/// Paper    Ribar et al., SparQ Attention: Bandwidth-Efficient LLM Inference, arXiv:2312.04985.
/// Differs  the budget covers estimate and attention, half and half, as in RocketKV's comparison (arXiv:2502.14051,
///          App. A.3); the paper's own setting is `channels=32` with 128 tokens attended. See `chosen_channels`.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct sparq : recipe<retain_all, Layout, retrieve<chosen_channels, top_tokens>, gathered_decode, once> {
  static constexpr const char* name = "sparq";
  static constexpr const char* paper = "SparQ, arXiv:2312.04985";
};

TESSERA_NAMESPACE_END
