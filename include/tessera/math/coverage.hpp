// Logits from a few channels: how their scale makes up for the channels that are left out.
#pragma once

#include <cmath>

#include "../core/config.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The scale of logits that were summed over the channels which hold `chosen` of a query's `whole` sum of |q|:
/// scale / sqrt(chosen / whole). With it, logits of fewer terms vary about as much as logits of all terms. Exactly
/// `scale` if all channels are chosen; 0 for a query that is 0 on the chosen channels, whose logits are 0 anyway.
/// Paper    SparQ, arXiv:2312.04985, Sec. 4 (the temperature of its step 1).
TESSERA_HD inline float coverage_scale(float scale, float chosen, float whole) {
#ifdef __CUDA_ARCH__  // two instructions in place of two divisions and a root
  if (chosen == whole) return chosen > 0 ? scale : 0.0f;
  return chosen > 0 ? scale * rsqrtf(__fdividef(chosen, whole)) : 0.0f;
#else
  return chosen > 0 ? scale / std::sqrt(chosen / whole) : 0.0f;
#endif
}

TESSERA_NAMESPACE_END
