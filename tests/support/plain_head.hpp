// The plainest form of what a kv_head stores, for tests to compare with.
#pragma once

#include <vector>

#include "oracle.hpp"

namespace support {

using tessera::index_t;

/// What a kv_head should hold, slot by slot: a position, a score, a segment, and rows as they decode.
struct plain_head {
  std::vector<index_t> positions;
  std::vector<float> scores;
  std::vector<index_t> segments{};  ///< where they are held
  std::vector<std::vector<float>> keys, values;

  void keep(const index_t* slots, index_t count) {
    plain_head kept;
    for (index_t i = 0; i < count; ++i) {
      const auto from = std::size_t(slots[i]);
      kept.positions.push_back(positions[from]);
      kept.scores.push_back(scores[from]);
      if (from < segments.size()) kept.segments.push_back(segments[from]);
      kept.keys.push_back(keys[from]);
      kept.values.push_back(values[from]);
    }
    *this = kept;
  }
  oracle::attended attend(const float* query, index_t position, int k_dim, int v_dim) const {
    std::vector<const float*> k, v;
    for (std::size_t i = 0; i < keys.size(); ++i) k.push_back(keys[i].data()), v.push_back(values[i].data());
    return oracle::attend(query, position, k, v, positions, k_dim, v_dim);
  }
};

}  // namespace support
