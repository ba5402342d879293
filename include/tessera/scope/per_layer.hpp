// All heads of a layer keep the same slots.
#pragma once

#include "../concepts/scope.hpp"

TESSERA_NAMESPACE_BEGIN

/// How the scores of a layer's heads become one.
enum class over_heads { sum, mean, maximum };

/// One set for all heads of a layer: a token's score is the sum of its heads' scores, their mean or the largest of
/// them.
///
/// A scorer of queries adds up the query heads of a group; so the mean is that over the layer's query heads. The
/// maximum is that over kv_heads. NaN in one head makes the token's sum and mean NaN: it ranks last; the maximum goes
/// by the others.
/// Shapes   [kv_heads, tokens] -> [tokens]; heads of equal length.   Cost  one pass over the scores.
template <over_heads Join>
struct per_layer {
  static constexpr const char* name = Join == over_heads::sum    ? "per_layer sum"
                                      : Join == over_heads::mean ? "per_layer mean"
                                                                 : "per_layer maximum";

  TESSERA_HD float join(float joined, float score) const {
    if constexpr (Join == over_heads::maximum) return !(joined >= score) && score == score ? score : joined;
    return joined + score;
  }
  TESSERA_HD float joined(float total, index_t heads) const {
    return Join == over_heads::mean ? total / float(heads) : total;
  }
};

static_assert(check_scope<per_layer<over_heads::sum>>() && joining_scope<per_layer<over_heads::mean>>);

TESSERA_NAMESPACE_END
