// Which segments of packed rows a layout may come to have on the device: how many, and of which formats.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>

#include "../../../../channels/all_channels.hpp"
#include "../../../../channels/head_channels.hpp"
#include "../../../../channels/top_groups.hpp"
#include "../../../../core/host/host_vector.hpp"
#include "../../../../layout/as_given.hpp"
#include "../../../../layout/packed_rows.hpp"
#include "../../../../layout/rotated.hpp"
#include "../../../../layout/stored.hpp"
#include "../../../../runtime/layer_roles.hpp"
#include "../packed/packed_places.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Where the rows of a packing layout lie that are not packed.
template <packing_layout Layout>
using whole_layout = stored<typename Layout::rows_type::whole_rows, typename Layout::placement_type>;

template <class Channels>
inline constexpr bool knows_channels =
    std::is_same_v<Channels, top_groups> || std::is_same_v<Channels, head_channels> ||
    std::is_same_v<Channels, all_channels>;
/// Whether the device packs by a layout's policies; a sentence where it does not.
template <packing_layout Layout>
constexpr bool check_device_packing() {
  static_assert(knows_channels<typename Layout::rows_type::key_channels> &&
                    knows_channels<typename Layout::rows_type::value_channels>,
                "tessera: the device packs by top_groups, head_channels and all_channels; let another channel selector "
                "say host_only");
  static_assert(std::is_same_v<typename Layout::rows_type::basis_type, rotated> ||
                    std::is_same_v<typename Layout::rows_type::basis_type, as_given>,
                "tessera: the device knows the bases rotated and as_given; let another one say host_only");
  static_assert(!Layout::rows_type::basis_type::rotates ||
                    !std::is_same_v<typename Layout::rows_type::key_channels, head_channels>,
                "tessera: the device chooses one set of channels for a head in the engine's basis; take as_given");
  return true;
}
/// Errors   elements and lengths that the device does not pack: tessera::error.
template <packing_layout Layout>
void require_packable(const Layout& layout, index_t block) {
  using T = typename Layout::element_type;
  const auto& rows = layout.rows;
  for (const packed_format& format : {rows.key_format(), rows.value_format()}) {
    require(format.element != (std::is_same_v<T, bf16> ? packed_element::fp16 : packed_element::bf16), "element",
            "the other type of 16 bits", "same, fp8 or int4 on the device", "take a cache of that type, or the CPU's");
  }
  if (block == 0) return;
  require(rows.segment % block == 0, "segment", rows.segment,
          "a multiple of the block on the device, which is " + std::to_string(block), "cut prompts into whole blocks");
  for (index_t whole = 0; whole <= 2 * rows.tail.tail; ++whole) {
    require(rows.tail.packed_after_prompt(whole) % block == 0, "tail", rows.tail.tail, "one that packs whole blocks",
            "take full_tails where a step reads blocks");
  }
}

/// By layer: its number among those that pack, or none.
struct packing_layers {
  host_vector<index_t> of;
  index_t count = 0;
  packing_layers(index_t layers, const layer_roles& roles) {
    for (index_t layer = 0; layer < layers; ++layer) of.push_back(roles.follows_recipe(layer) ? count++ : no_index);
  }
};

/// Whether strategies are searched.
template <packing_layout Layout>
bool searches(const Layout& layout) {
  if constexpr (searching_layout<Layout>) return layout.rows.strategy.searched();
  return false;
}
/// Segments that a conversation of at most `tokens` tokens may have: those of its prompts, each cut at its own end,
/// and, where strategies are searched, one of decoded tokens behind each, and others as they end, in two parts if a
/// strategy came on the way.
template <packing_layout Layout>
index_t most_segments(const Layout& layout, index_t tokens) {
  const index_t of_prompts = ceil_div(tokens, layout.rows.segment) + 1 + tokens / Layout::rows_type::own_segment_tokens;
  if constexpr (searching_layout<Layout>) {
    if (searches(layout)) {
      const index_t least = (std::min)(layout.rows.strategy.least_segment, layout.rows.segment);
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
    widest.key.channels = (std::max)(widest.key.channels, strategy_shares.back());
    widest.value.channels = (std::max)(widest.value.channels, strategy_shares.back());
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
