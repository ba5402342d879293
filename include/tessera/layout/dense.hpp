// Kept tokens as plain rows.
#pragma once

#include "../concepts/layout.hpp"

TESSERA_NAMESPACE_BEGIN

/// Stores K and V rows of kept tokens contiguously by kv_head, in position order, new tokens appended behind them.
/// Heads may hold different numbers of tokens (views use `ragged`).
/// Bytes    (k_dim + v_dim) * sizeof(T) per token and kv_head.
template <element T, int D, int Dv = D>
struct dense {
  static_assert(supported_head_dim<D> && supported_head_dim<Dv>,
                "tessera: dense takes head dims 64, 80, 96, 128, 192 and 256");
  static constexpr const char* name = "dense";
  using element_type = T;
  static constexpr int k_dim = D;
  static constexpr int v_dim = Dv;
  template <class Unit>
  static constexpr bool accepts = true;  // a row stands for itself: any unit of tokens can be stored

  static constexpr offset_t token_bytes() { return offset_t(D + Dv) * offset_t(sizeof(T)); }
};

static_assert(check_layout<dense<bf16, 128>>());

TESSERA_NAMESPACE_END
