// Which share of a prompt each kv_head of a model keeps: numbers that were calibrated once.
#pragma once

#include "../config.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Shares in (0, 1] by layer and kv_head, the caller's memory. Null: there are none.
struct share_table {
  const double* data = nullptr;  ///< [layers, kv_heads]
  index_t layers = 0;
  index_t kv_heads = 0;

  TESSERA_HD double share(index_t layer, index_t head) const { return data[offset_t(layer) * kv_heads + head]; }
};

TESSERA_NAMESPACE_END
