// How much of a prompt's attention a method computes.
#pragma once

#include <cstdint>
#include <vector>

#include "tool/methods/method_cache.hpp"

namespace tool {

/// Pairs of a prompt's row and a key, summed over layers and query heads.
struct pair_count {
  double attended = 0, visible = 0;
};

/// Adds the chunk at the positions [first, next), the last one that a cache with traced lines has had.
inline void count_pairs(const method_cache& cache, const tessera::model_shape& shape, index_t first, index_t next,
                        pair_count& to) {
  const double visible = (double(next) * (next + 1) - double(first) * (first + 1)) / 2;  // of one query head
  std::vector<std::uint8_t> is_column;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const tessera::prompt_lines lines = cache.lines(layer);
    to.visible += visible * shape.q_heads;
    if (lines.heads.empty()) to.attended += visible * shape.q_heads;
    for (const tessera::line_set& head : lines.heads) {
      is_column.assign(std::size_t(next), 0);
      for (const index_t at : head.vertical) is_column[std::size_t(at)] = 1;
      std::size_t columns = 0;
      for (index_t row = first; row < next; ++row) {
        while (columns < head.vertical.size() && head.vertical[columns] <= row) ++columns;
        std::size_t pairs = columns;
        for (const index_t distance : head.slash) {
          if (distance > row) break;
          pairs += !is_column[std::size_t(row - distance)];
        }
        to.attended += row >= lines.dense_from ? double(row + 1) : double(pairs);
      }
    }
  }
}

}  // namespace tool
