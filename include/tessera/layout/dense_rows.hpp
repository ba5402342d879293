// Rows as they are given.
#pragma once

#include "../concepts/layout.hpp"

TESSERA_NAMESPACE_BEGIN

/// Elements of K and V as the engine hands them over, all of them: scorers and indexes may read them in place.
/// Bytes    (k_dim + v_dim) * sizeof(T) per token and kv_head.
template <element T, int D, int Dv = D>
struct dense_rows {
  static constexpr const char* name = "dense_rows";
  using encoding_type = raw_elements<T>;
  static constexpr int k_dim = D;
  static constexpr int v_dim = Dv;
};

static_assert(check_row_format<dense_rows<bf16, 128>>());

TESSERA_NAMESPACE_END
