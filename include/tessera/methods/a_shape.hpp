// A-shape: prompts attend their first tokens and the newest before each row.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../layout/dense.hpp"
#include "../prefill/sinks_and_band.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"

TESSERA_NAMESPACE_BEGIN

/// A prompt's rows attend the first 128 positions and the newest 4096; steps read everything. Has no budget.
/// Paper    the A-shape of MInference, arXiv:2407.02490, with the sizes that LoopServe runs it with (arXiv:2507.13681,
///          Table 7).
/// Differs  as `sinks_and_band`.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct a_shape : recipe<retain_all, Layout, retrieve_all, dense_decode, once, sinks_and_band> {
  static constexpr const char* name = "a_shape";
  static constexpr const char* paper = "A-shape of MInference, arXiv:2407.02490";
};

TESSERA_NAMESPACE_END
