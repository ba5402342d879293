// The plain cache: rows as they are given, in runs.
#pragma once

#include "dense_rows.hpp"
#include "runs.hpp"
#include "stored.hpp"

TESSERA_NAMESPACE_BEGIN

/// Bytes    (k_dim + v_dim) * sizeof(T) per token and kv_head.
template <element T, int D, int Dv = D>
using dense = stored<dense_rows<T, D, Dv>, runs>;

static_assert(check_layout<dense<bf16, 128>>());

TESSERA_NAMESPACE_END
