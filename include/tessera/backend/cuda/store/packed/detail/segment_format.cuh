// What the segments of packed rows are made of, and what the host knows of each.
#pragma once

#include <memory>
#include <numeric>
#include <string>
#include <type_traits>

#include "../../../../../channels/all_channels.hpp"
#include "../../../../../channels/head_channels.hpp"
#include "../../../../../channels/top_groups.hpp"
#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../core/sequence_layer.hpp"
#include "../../../../../layout/packed/as_given.hpp"
#include "../../../../../layout/packed/rotated.hpp"
#include "../../../../../layout/packed_rows.hpp"
#include "../../../../../layout/stored.hpp"
#include "../../../../../runtime/layer_roles.hpp"
#include "../../../device/copy.cuh"
#include "../../../device/memory.cuh"
#include "../packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The formats of the segments of a layout.
struct segment_formats {
  packed_format k, v;
  int k_dim = 0, v_dim = 0;
  index_t block = 0;  ///< rows whose mean key lies beside them; 0: none
  bool rotates = false;
  packed_format widest_k = k, widest_v = v;  ///< the longest rows that a segment may have, of as many channels
  index_t least_block = block;               ///< of any segment
  bool alike = true;                         ///< all are made by `k`, `v` and `block`
  bool drops = false;                        ///< rows are dropped: each segment may end in a short block

  offset_t k_basis() const { return rotates ? offset_t(k.channels) * k_dim : 0; }  ///< floats of one head
  offset_t v_basis() const { return rotates ? offset_t(v.channels) * v_dim : 0; }
};

/// Bases and sets of channels that were made together, shared by everything that reads them.
using segment_bases = std::shared_ptr<const device_buffer<float>>;
using segment_sets = std::shared_ptr<const device_buffer<std::uint32_t>>;

/// What the host knows of a segment.
struct segment_record {
  /// first_row: where its rows lie behind those of others; rows: of its longest head; slot: where rows are counted by
  /// head, as long as it exists.
  index_t first_row = 0, rows = 0, slot = 0;
  packed_format k{}, v{};
  index_t block = 0;
  std::size_t home = 0;  ///< in planes: the entry in whose planes its rows lie, where they were packed
  host_vector<index_t> row_pages{}, mean_pages{};  ///< in pages: where its rows and the means of its blocks lie
  segment_bases bases{};                           ///< null: as the engine hands vectors over
  const float *k_basis = nullptr, *v_basis = nullptr;
  segment_sets sets{};  ///< null: every row has bits
  const std::uint32_t *k_set = nullptr, *v_set = nullptr;

  /// The formats, bases and sets alone.
  segment_record without_rows() const {
    segment_record made{.k = k, .v = v, .block = block};
    made.bases = bases, made.k_basis = k_basis, made.v_basis = v_basis;
    made.sets = sets, made.k_set = k_set, made.v_set = v_set;
    return made;
  }
};

/// What becomes of a segment when rows are dropped.
struct kept_segment {
  segment_record record;
  bool drops = false;  ///< rows of it
  bool moves = false;  ///< its rows, in place or elsewhere
  /// In pages: others hold its pages, so its rows, or its means, get new ones.
  bool rows_elsewhere = false, means_elsewhere = false;
};

/// Bytes of a row of a format, and of the set that rows of a head share.
inline offset_t packed_row_bytes(const packed_format& of) {
  return value_stride(of.value_bytes()) + (of.own_bits ? bit_words(of) * 4 : 0) + of.scale_bytes();
}
inline offset_t packed_set_bytes(const packed_format& of) { return of.own_bits ? 0 : bit_words(of) * 4; }
/// Blocks of a segment.
inline index_t blocks_of(const segment_record& of) { return of.block > 0 ? ceil_div(of.rows, of.block) : 0; }

namespace detail {

/// Writes a segment to the table, with the rows of its first `heads` kv_heads, and `counted` to the number of segments.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    write_segment_entry(device_segment* to, const __grid_constant__ device_segment made,
                        const __grid_constant__ some_numbers rows, index_t heads, index_t* count, index_t counted) {
  if (threadIdx.x == 0) *to = made, *count = counted;
  for (index_t h = index_t(threadIdx.x); h < heads; h += Threads) made.rows[h] = rows.values[h];
}

/// Copies the vectors of one kind of a head, in words of 32 bits. All blocks of a row of the grid share the work.
template <int Threads>
__device__ void copy_vectors(const packed_vectors& from, const packed_vectors& to, index_t head, index_t rows) {
  const auto copy = [&](index_t row_words, const auto& address_of) {
    for (offset_t i = offset_t(blockIdx.x) * Threads + threadIdx.x; i < offset_t(rows) * row_words;
         i += offset_t(gridDim.x) * Threads) {
      const index_t row = index_t(i / row_words), word = index_t(i % row_words);
      static_cast<std::uint32_t*>(address_of(to, row))[word] =
          static_cast<const std::uint32_t*>(address_of(from, row))[word];
    }
  };
  const packed_format& format = to.format;
  copy(value_stride(format.value_bytes()) / 4,
       [&](const packed_vectors& of, index_t row) -> void* { return of.values_of(head, row); });
  if (format.own_bits)
    copy(bit_words(format), [&](const packed_vectors& of, index_t row) -> void* { return of.own_bits_of(head, row); });
  if (format.scaled()) copy(1, [&](const packed_vectors& of, index_t row) -> void* { return &of.scale_of(head, row); });
}

/// Copies a segment that was made elsewhere to its window. blockIdx: part, head, kind.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    move_segment_entry(const __grid_constant__ device_segment from, const __grid_constant__ device_segment to,
                       index_t rows, index_t blocks) {
  const index_t head = index_t(blockIdx.y);
  if (blockIdx.z == 0) copy_vectors<Threads>(from.k, to.k, head, rows);
  if (blockIdx.z == 1) copy_vectors<Threads>(from.v, to.v, head, rows);
  if (blockIdx.z == 2 && to.block > 0) copy_vectors<Threads>(from.means, to.means, head, blocks);
}

}  // namespace detail

// Of which formats the segments of a layout are on the device.

/// The layout of the rows of a packing layout that are not packed.
template <packing_layout Layout>
using whole_layout = stored<typename Layout::rows_type::whole_rows, typename Layout::placement_type>;

template <class Channels>
inline constexpr bool knows_channels =
    std::is_same_v<Channels, top_groups> || std::is_same_v<Channels, head_channels> ||
    std::is_same_v<Channels, all_channels>;
/// Whether the device packs by a layout's policies; a static_assert says why where it does not.
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
/// Checks that the device packs a layout.   Errors   elements and lengths that it does not pack: tessera::error.
template <packing_layout Layout>
void require_packable(const Layout& layout, index_t block) {
  using T = typename Layout::element_type;
  const auto& rows = layout.rows;
  for (const packed_format& format : {rows.key_format(), rows.value_format()}) {
    require(format.element != (std::is_same_v<T, bf16> ? packed_element::fp16 : packed_element::bf16), "element",
            "the other type of 16 bits", "same, fp8 or int4 on the device", "take a cache of that type, or the CPU's");
  }
  if constexpr (requires(const typename Layout::placement_type& where) { where.groups(1, 1); })
    require(!rows.packs_chunks(), "prefill", "packed", "whole in ragged pages on the device",
            "take fixed_pages or runs");
  if (block == 0) return;
  const index_t unit = rows.searches() ? std::lcm(block, strategy_blocks.back()) : block;
  require(rows.segment % unit == 0, "segment", rows.segment,
          "a multiple of the block on the device, which is " + std::to_string(unit), "cut prompts into whole blocks");
  for (index_t whole = 0; whole <= 2 * rows.tail.tail; ++whole) {
    require(rows.tail.packed_after_prompt(whole) % block == 0, "tail", rows.tail.tail, "one that packs whole blocks",
            "take full_tails where a step reads blocks");
  }
}

/// Puts the positions of `packed` packed rows, which are their slots, before those of each head's whole rows.
/// `are_stored`: positions of whole rows come from a column; else they count from 0.
inline host_vector<host_vector<index_t>> with_packed_positions(host_vector<host_vector<index_t>> all, index_t packed,
                                                               bool are_stored) {
  for (host_vector<index_t>& head : all) {
    for (index_t& position : head) position += are_stored ? 0 : packed;
    head.insert(head.begin(), std::size_t(packed), 0);
    std::iota(head.begin(), head.begin() + packed, 0);
  }
  return all;
}

/// The number of each layer among those that pack, or no_index.
struct packing_layers {
  host_vector<index_t> number;
  index_t count = 0;
  packing_layers(index_t layers, const layer_roles& roles) {
    for (index_t layer = 0; layer < layers; ++layer) number.push_back(roles.follows_recipe(layer) ? count++ : no_index);
  }
  /// An owner's layer among those that pack.
  sequence_layer owner(sequence_layer of) const { return {number[std::size_t(of.layer)], of.id}; }
};

/// Segments of a sequence beyond `max_segments`, where tokens are dropped from blocks that have means: rows that follow
/// a block that is not whole begin a segment.
inline constexpr index_t segments_behind_choices = 32;
/// The most segments that a sequence of `tokens` tokens has on the device.
template <packing_layout Layout>
index_t max_device_segments(const Layout& layout, index_t tokens, index_t block, bool drops) {
  return max_segments(layout, tokens) + (drops && block > 1 ? segments_behind_choices : 0);
}

/// The formats of a layout's segments, with means of `block` rows; 0: without means.
template <packing_layout Layout>
segment_formats formats_of(const Layout& layout, index_t block, bool drops = false) {
  segment_formats made{layout.rows.key_format(),
                       layout.rows.value_format(),
                       Layout::k_dim,
                       Layout::v_dim,
                       block,
                       Layout::rows_type::basis_type::rotates};
  made.drops = drops;
  if (!searches_strategies(layout)) return made;
  const auto widest = widest_rows(layout);
  made.widest_k = widest.key_format(), made.widest_v = widest.value_format();
  if (block > 0) made.least_block = std::gcd(block, strategy_blocks.back());
  made.alike = false;
  return made;
}

/// A common multiple of the blocks of all segments.
template <packing_layout Layout>
index_t encoded_block(const Layout& layout, index_t block) {
  return searches_strategies(layout) && block > 0 ? std::lcm(block, strategy_blocks.front()) : block;
}

}  // namespace cuda
TESSERA_NAMESPACE_END
