// Which segments of packed rows a layout may come to have on the device: how many, and of which formats.
#pragma once

#include <algorithm>
#include <numeric>

#include "../../../../layout/packed_rows.hpp"
#include "../../../../layout/stored.hpp"
#include "../packed/packed_places.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Where the rows of a packing layout lie that are not packed.
template <packing_layout Layout>
using whole_layout = stored<typename Layout::rows_type::whole_rows, typename Layout::placement_type>;

/// Whether strategies are searched.
template <packing_layout Layout>
bool searches(const Layout& layout) {
  if constexpr (searching_layout<Layout>) return layout.rows.strategy.searched();
  return false;
}
/// Segments that a conversation of at most `tokens` tokens may have: those of its prompts, each cut at its own end, and, where
/// strategies are searched, one of decoded tokens behind each, and others as they end, in two parts if a strategy came on the way.
template <packing_layout Layout>
index_t most_segments(const Layout& layout, index_t tokens) {
  const index_t of_prompts = ceil_div(tokens, layout.rows.segment) + 1 + tokens / Layout::rows_type::own_segment_tokens;
  if constexpr (searching_layout<Layout>) {
    if (searches(layout)) {
      const index_t least = std::min(layout.rows.strategy.least_segment, layout.rows.segment);
      return 2 * (of_prompts + ceil_div(tokens, least));
    }
  }
  return of_prompts;
}
/// What its segments are made by, with means of `block` rows, or none.
template <packing_layout Layout>
segment_formats formats_of(const Layout& layout, index_t block) {
  segment_formats made{layout.rows.key_format(),
                       layout.rows.value_format(),
                       Layout::k_dim,
                       Layout::v_dim,
                       block,
                       Layout::rows_type::basis_type::rotates};
  if constexpr (searching_layout<Layout>) {
    if (!searches(layout)) return made;
    auto widest = layout.rows;
    widest.key.channels = std::max(widest.key.channels, strategy_shares.back());
    widest.value.channels = std::max(widest.value.channels, strategy_shares.back());
    widest.key.group = widest.value.group = 1;
    made.widest_k = widest.key_format(), made.widest_v = widest.value_format();
    if (block > 0) made.least_block = std::gcd(block, strategy_blocks.back());
    made.alike = false;
  }
  return made;
}

/// What the blocks of all segments divide.
template <packing_layout Layout>
index_t encoded_block(const Layout& layout, index_t block) {
  return searches(layout) && block > 0 ? std::lcm(block, strategy_blocks.front()) : block;
}

}  // namespace cuda
TESSERA_NAMESPACE_END
