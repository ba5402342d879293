// Tri-shape: A-shape, and a prompt's last rows attend everything.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../layout/dense.hpp"
#include "../prefill/sinks_and_band.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"

TESSERA_NAMESPACE_BEGIN

/// As `a_shape`, and the last 128 rows of each prompt chunk are dense. Has no budget.
/// Paper    Tri-shape of SCBench, arXiv:2412.10319, with the sizes that LoopServe runs it with (arXiv:2507.13681, Table
///          7).
/// Differs  as `sinks_and_band`.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct tri_shape : recipe<retain_all, Layout, retrieve_all, dense_decode, once, sinks_and_band> {
  static constexpr const char* name = "tri_shape";
  static constexpr const char* paper = "Tri-shape, arXiv:2412.10319";

  tri_shape() { this->prefill.dense_rows = 128; }
};

TESSERA_NAMESPACE_END
