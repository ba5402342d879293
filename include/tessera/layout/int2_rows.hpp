// Rows of groups of elements in 2 bits.
#pragma once

#include "../concepts/layout.hpp"

TESSERA_NAMESPACE_BEGIN

/// K and V in 2 bits an element. Neighbouring channels of a row form groups of 64, or of as many as divide both dims. A
/// group has a lowest value and a step of its own, in fp16. `T` is what engines hand over and what is computed with.
///
/// The error of an element is at most half a step, 1/6 of the group's range, and what fp16 rounds of its lowest
/// value. A group with an element that is not finite, or beyond fp16, reads as NaN altogether.
/// Bytes    a quarter of a byte an element, and 4 a group: 0.156 of bf16 at 128.
/// Paper    KIVI, arXiv:2402.02750: asymmetric, V by token. Differs: K by token, too, so every token is stored when
///          it comes and nothing waits for a block.
template <element T, int D, int Dv = D>
struct int2_rows {
  static constexpr const char* name = "int2_rows";
  using encoding_type = grouped_elements<T, 2, group_elements(D, Dv)>;
  static constexpr int k_dim = D;
  static constexpr int v_dim = Dv;
};

static_assert(check_row_format<int2_rows<bf16, 128>>());

TESSERA_NAMESPACE_END
