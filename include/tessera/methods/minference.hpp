// MInference: fixed numbers of vertical and slash lines, by a prompt's last rows.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../layout/dense.hpp"
#include "../prefill/vertical_slash.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"

TESSERA_NAMESPACE_BEGIN

/// A prompt's rows attend the 1000 columns and 6096 diagonals with most attention of its last 64 rows; steps read
/// everything. Has no budget.
/// Paper    Jiang et al., MInference 1.0, arXiv:2407.02490, its vertical-slash pattern.
/// Differs  as `vertical_slash`; its block-sparse pattern and the offline search for each head's pattern are left out.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct minference : recipe<retain_all, Layout, retrieve_all, dense_decode, once, vertical_slash> {
  static constexpr const char* name = "minference";
  static constexpr const char* paper = "MInference, arXiv:2407.02490";
};

TESSERA_NAMESPACE_END
