// KVzip: what a model needs to write the text once more, one threshold over all layers and heads.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scope/per_model.hpp"
#include "../scorer/reconstruction.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the tokens with the largest scores of all layers' heads, `budget` a head on average, chosen without a
/// question. Needs    the engine to pass each turn's prompt through the model once more before it ends:
/// `cache::reread`.
/// Paper    Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv:2505.23416.
/// Differs  as kvpress 0.5.5 has it: parts of 2,048 tokens are the engine's choice, the first `sinks` (4) tokens stay
///          in place of the system prompt. A later turn re-reads its own prompt; what it decoded before goes first.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct kvzip
    : recipe<retain<reconstruction, uniform, top_tokens, per_model>, Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "kvzip";
  static constexpr const char* paper = "KVzip, arXiv:2505.23416";
};

TESSERA_NAMESPACE_END
