// Rows of whole numbers of 8 bits.
#pragma once

#include "../concepts/layout.hpp"

TESSERA_NAMESPACE_BEGIN

/// K and V as whole numbers from -127 to 127, each row with one fp32 scale by which its largest element becomes 127.
/// `T` is what engines hand over and what kernels compute with.
///
/// The error of an element is at most half a step, 1/254 of the row's largest element. A row with an element that is
/// not finite reads as NaN altogether: whole numbers have none.
/// Bytes    k_dim + v_dim + 8 per token and kv_head: 0.516 of bf16 at 128.
template <element T, int D, int Dv = D>
struct int8_rows {
  static constexpr const char* name = "int8_rows";
  using encoding_type = int8_elements<T>;
  static constexpr int k_dim = D;
  static constexpr int v_dim = Dv;
};

static_assert(check_row_format<int8_rows<bf16, 128>>());

TESSERA_NAMESPACE_END
