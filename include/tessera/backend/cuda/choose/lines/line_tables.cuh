// Lines of a prompt chunk as kernels read them: what chooses lines writes it, attention along lines reads it.
#pragma once

#include "../../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The lines of one sequence's chunk by query head, on the device. Columns are slots: they hold as long as nothing
/// moves.
struct line_tables {
  index_t words = 0;  ///< 32 * words is above every position and slot
  const std::uint32_t* slash =
      nullptr;  ///< [q_heads, words + 1]: bit 32 * words - 1 - d is distance d; the last word is 0
  const std::uint32_t* vertical = nullptr;  ///< [q_heads, words]: bit s is slot s
  const index_t* columns = nullptr;         ///< [q_heads, 32 * words]: slots of vertical lines, ascending
  const index_t* column_counts = nullptr;   ///< [q_heads]
  const index_t* order = nullptr;  ///< [q_heads]: the heads with most entries first; null: as they are numbered
  index_t dense_rows = 0;          ///< so many of the chunk's last rows attend everything

  TESSERA_HD index_t positions() const { return words * 32; }
  TESSERA_HD const std::uint32_t* slash_of(index_t q_head) const { return slash + offset_t(q_head) * (words + 1); }
  TESSERA_HD const std::uint32_t* vertical_of(index_t q_head) const { return vertical + offset_t(q_head) * words; }
  TESSERA_HD const index_t* columns_of(index_t q_head) const { return columns + offset_t(q_head) * positions(); }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
