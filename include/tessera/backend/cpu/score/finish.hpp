// A scorer's last pass over a head's scores, on the host.
#pragma once

#include "../../../concepts/scorer.hpp"
#include "../../../core/host/host_vector.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The finished scores: `out`, or `in` itself where the scorer has no last pass.
/// Shapes   in, out [n], not the same memory.
template <class Scorer>
const float* finished(const Scorer& scorer, const float* in, index_t n, float* out, host_vector<float>& scratch) {
  if constexpr (pooling_scorer<Scorer>) {
    pool_scores(scorer.pooled(), in, n, out, scratch);
  } else if constexpr (finishing_scorer<Scorer>) {
    scorer.finish(in, n, out, scratch);
  } else if constexpr (slot_finishing_scorer<Scorer>) {
    for (index_t i = 0; i < n; ++i) out[i] = scorer.finish_at(in, n, i);
  } else {
    return in;
  }
  return out;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
