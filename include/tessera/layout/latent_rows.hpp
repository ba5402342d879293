// Latent rows: one row is key and value.
#pragma once

#include "../concepts/layout.hpp"
#include "runs.hpp"
#include "stored.hpp"

TESSERA_NAMESPACE_BEGIN

/// Latent rows of multi-head latent attention: K [576], of which the first 512 elements are V. Nothing is stored twice.
/// All query heads of a layer share the rows: kv_heads is 1 and queries are absorbed (`latent_view`). Calls that take k
/// and v take the same rows for both, v with its own dim; other rows are refused.
/// Bytes    576 * sizeof(T) per token, whatever the number of query heads.
/// Paper    DeepSeek-V2, arXiv:2405.04434, section 2.1.
template <element T, int D = 576, int Dv = 512>
struct latent_rows {
  static constexpr const char* name = "latent_rows";
  using encoding_type = latent_elements<T>;
  static constexpr int k_dim = D;
  static constexpr int v_dim = Dv;
};

static_assert(check_row_format<latent_rows<bf16>>());

/// Latent rows in runs: full<bf16, 576, 512, latent<bf16>>.
template <element T>
using latent = stored<latent_rows<T>, runs>;

TESSERA_NAMESPACE_END
