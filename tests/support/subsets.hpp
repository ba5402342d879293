// Random selections of what lies in rows of given lengths.
#pragma once

#include <vector>

#include <tessera/core/selection.hpp>

#include "random.hpp"

namespace support {

/// Each slot with probability `share`.
inline tessera::selection random_subset(rng& random, const std::vector<tessera::index_t>& lengths, double share) {
  tessera::selection chosen;
  chosen.reset(lengths);
  for (tessera::index_t r = 0; r < tessera::index_t(lengths.size()); ++r) {
    for (tessera::index_t slot = 0; slot < lengths[std::size_t(r)]; ++slot) {
      if (random.chance(share)) chosen.row(r)[chosen.counts[std::size_t(r)]++] = slot;
    }
  }
  return chosen;
}

}  // namespace support
