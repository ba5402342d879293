// Packed rows in conversations of few tokens.
#pragma once

#include <tessera/layout/packed_rows.hpp>
#include <tessera/layout/stored.hpp>

namespace support {

/// Segments and bases of so few rows that short conversations have several: of the default ones they would have none.
template <class Recipe>
void shorten_segments(Recipe& recipe, tessera::index_t rows = 64) {
  if constexpr (tessera::packing_layout<typename Recipe::layout_type>) {
    if constexpr (Recipe::layout_type::rows_type::basis_type::rotates) recipe.layout.rows.segment = rows;
  }
}

}  // namespace support
