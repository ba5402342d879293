// Rows in 8 bits an element.
#pragma once

#include "../concepts/layout.hpp"

TESSERA_NAMESPACE_BEGIN

/// K and V as e4m3, each row with one fp32 scale by which its largest element becomes 448. `T` is what engines hand
/// over and what kernels compute with.
///
/// The error of an element is at most 1/16 of the element, or 2^-10 of (the row's largest / 448) if that is more. An
/// infinity is stored as NaN, because no scale can represent it.
/// Bytes    k_dim + v_dim + 8 per token and kv_head: 0.516 of bf16 at 128.
/// Paper    FP8 Formats for Deep Learning, arXiv:2209.05433 (e4m3).
template <element T, int D, int Dv = D>
struct fp8_rows {
  static constexpr const char* name = "fp8_rows";
  using encoding_type = fp8_elements<T>;
  static constexpr int k_dim = D;
  static constexpr int v_dim = Dv;
};

static_assert(check_row_format<fp8_rows<bf16, 128>>());

TESSERA_NAMESPACE_END
