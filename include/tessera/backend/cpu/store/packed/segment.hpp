// A segment on the CPU: packed rows of all kv_heads in one basis, and the means of their blocks.
#pragma once

#include <algorithm>
#include <memory>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/stored/packed_row.hpp"
#include "../../../../layout/packed_rows.hpp"
#include "../../kernel/tile.hpp"
#include "packed_memory.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The basis of a segment's vectors, and bits that all rows of a head share. Several segments may share a basis.
struct segment_basis {
  host_vector<float> k, v;                 // [kv_heads, channels, dim]; empty: as the engine hands vectors over
  host_vector<std::uint8_t> k_set, v_set;  // [kv_heads, set_bytes]; empty: every row has bits

  offset_t bytes() const {
    return offset_t((k.capacity() + v.capacity()) * sizeof(float) + k_set.capacity() + v_set.capacity());
  }
};

/// to [rows, D] = from [rows, D] in a basis [channels, D] (null: unchanged), with 0 behind the channels. The result of
/// a row does not depend on other rows. `turned` [D, D] is scratch.
template <int D>
void rotate_rows(const float* from, int rows, const float* basis, index_t channels, float* turned, float* to) {
  std::fill_n(to, rows * D, 0.0f);
  if (!basis) {
    std::copy_n(from, rows * D, to);
    return;
  }
  std::fill_n(turned, D * D, 0.0f);
  for (index_t c = 0; c < channels; ++c) {
    for (int d = 0; d < D; ++d) turned[d * D + c] = basis[offset_t(c) * D + d];
  }
  multiply_add<D>(from, D, turned, D, rows, D, to, D);
}
/// to [rows, D] = from [rows, D] rotated back to the engine's basis.
template <int D>
void rotate_rows_back(const float* from, int rows, const float* basis, index_t channels, float* to) {
  if (!basis) {
    std::copy_n(from, rows * D, to);
    return;
  }
  std::fill_n(to, rows * D, 0.0f);
  multiply_add<D>(from, D, basis, D, rows, int(channels), to, D);
}

/// The format of a segment: of its vectors, and how many slots of a block have a mean key beside the rows (0: none).
struct segment_format {
  packed_format k, v;
  index_t block = 0;

  plane_bytes planes() const {
    return {k.value_bytes(), v.value_bytes(), k.bit_bytes(), v.bit_bytes(), k.scale_bytes(), v.scale_bytes()};
  }
  plane_bytes mean_planes() const { return {k.value_bytes(), 0, k.bit_bytes(), 0, k.scale_bytes(), 0}; }
  bool operator==(const segment_format&) const = default;
};

template <class Placement>
struct packed_segment {
  segment_format format;
  std::shared_ptr<const segment_basis> basis;
  host_vector<index_t> lengths;  // rows by kv_head
  host_vector<double> losses;    // by kv_head, summed over rows; 0 where no strategy is searched
  packed_memory<Placement> rows, means;

  packed_segment(const segment_format& made_by, std::shared_ptr<const segment_basis> in, index_t kv_heads)
      : format(made_by),
        basis(std::move(in)),
        lengths(std::size_t(kv_heads), 0),
        losses(std::size_t(kv_heads), 0.0),
        rows(made_by.planes(), kv_heads),
        means(made_by.mean_planes(), kv_heads) {}

  index_t blocks(index_t head) const { return blocks_of(lengths[std::size_t(head)]); }
  index_t blocks_of(index_t count) const { return format.block > 0 ? ceil_div(count, format.block) : 0; }
  host_vector<index_t> blocks_of(const host_vector<index_t>& counts) const {
    host_vector<index_t> result;
    for (const index_t count : counts) result.push_back(blocks_of(count));
    return result;
  }

  const float* k_basis(index_t head, int dim) const {
    return of_head(basis->k, head, offset_t(format.k.channels) * dim);
  }
  const float* v_basis(index_t head, int dim) const {
    return of_head(basis->v, head, offset_t(format.v.channels) * dim);
  }

  /// Writes the elements of a row in the segment's basis to `out` [channels].
  void unpack_key(index_t head, index_t row, float* out) const { unpack(rows, format.k, k_values, head, row, out); }
  void unpack_value(index_t head, index_t row, float* out) const { unpack(rows, format.v, v_values, head, row, out); }
  /// q [channels] . the mean key of a block.
  float mean_dot(index_t head, index_t block, const float* q) const {
    return packed_dot(format.k, q, bits(means, format.k, k_values, head, block), means.address(k_values, head, block),
                      scale(means, format.k, k_values, head, block));
  }
  /// The bits of a row, where rows have bits of their own.
  const std::uint8_t* key_bits(index_t head, index_t row) const { return bits(rows, format.k, k_values, head, row); }
  const std::uint8_t* value_bits(index_t head, index_t row) const { return bits(rows, format.v, v_values, head, row); }

  /// Copies a row of another segment of this format and basis.
  void copy_row(const packed_segment& other, index_t head, index_t row, index_t target_row) {
    const plane_bytes bytes = format.planes();
    for (int p = 0; p < packed_planes; ++p) {
      const auto plane = packed_plane(p);
      if (bytes[std::size_t(p)] == 0) continue;
      const std::byte* source = other.rows.address(plane, head, row);
      std::byte* target = rows.address(plane, head, target_row);
      if (source != target) std::copy_n(source, bytes[std::size_t(p)], target);
    }
  }
  void copy_mean(const packed_segment& other, index_t head, index_t block, index_t target_block) {
    const plane_bytes bytes = format.mean_planes();
    for (const packed_plane plane : {k_values, k_bits, k_scales}) {
      if (bytes[std::size_t(plane)] == 0) continue;
      std::copy_n(other.means.address(plane, head, block), bytes[std::size_t(plane)],
                  means.address(plane, head, target_block));
    }
  }

  /// Adds the rows of another segment of this format and basis, for which there is memory. Blocks must be full.
  void join(const packed_segment& added) {
    for (index_t h = 0; h < index_t(lengths.size()); ++h) {
      index_t& length = lengths[std::size_t(h)];
      for (index_t block = 0; block < added.blocks(h); ++block) copy_mean(added, h, block, blocks(h) + block);
      for (index_t row = 0; row < added.lengths[std::size_t(h)]; ++row) copy_row(added, h, row, length + row);
      length += added.lengths[std::size_t(h)];
      losses[std::size_t(h)] += added.losses[std::size_t(h)];
    }
  }

  /// Releases memory that is not needed, if there is memory for the smaller copy.
  void shrink() {
    rows.shrink(lengths);
    try {
      means.shrink(blocks_of(lengths));
    } catch (...) {  // no memory for the counts: the means stay
    }
  }
  offset_t bytes() const { return rows.bytes() + means.bytes(); }

 private:
  // The planes of V follow those of K.
  static packed_plane bits_of(packed_plane values) { return values == k_values ? k_bits : v_bits; }
  static packed_plane scales_of(packed_plane values) { return values == k_values ? k_scales : v_scales; }

  static const float* of_head(const host_vector<float>& all, index_t head, offset_t stride) {
    return all.empty() ? nullptr : all.data() + head * stride;
  }
  const std::uint8_t* bits(const packed_memory<Placement>& from, const packed_format& of, packed_plane values,
                           index_t head, index_t row) const {
    if (of.own_bits) return reinterpret_cast<const std::uint8_t*>(from.address(bits_of(values), head, row));
    return (values == k_values ? basis->k_set : basis->v_set).data() + offset_t(head) * of.set_bytes();
  }
  static float scale(const packed_memory<Placement>& from, const packed_format& of, packed_plane values, index_t head,
                     index_t row) {
    return of.scaled() ? tessera::detail::load_value<float>(from.address(scales_of(values), head, row), 0) : 1.0f;
  }
  void unpack(const packed_memory<Placement>& from, const packed_format& of, packed_plane values, index_t head,
              index_t row, float* to) const {
    unpack_row(of, bits(from, of, values, head, row), from.address(values, head, row),
               scale(from, of, values, head, row), to);
  }
};

/// Upper bound of the memory of a new sequence's segments, with their bases and the data that is kept to make them.
template <packing_layout Layout>
offset_t max_segment_bytes(const Layout& layout, index_t block, offset_t kv_heads,
                           const host_vector<layer_peak>& peaks) {
  using memory = packed_memory<typename Layout::placement_type>;
  constexpr offset_t number = sizeof(float), dims = Layout::k_dim + Layout::v_dim;
  const auto widest = widest_rows(layout);
  const segment_format made{widest.key_format(), widest.value_format(), block};
  const index_t least = searches_strategies(layout) ? (std::min)(block, strategy_blocks.back()) : block;
  const offset_t rotation = Layout::rows_type::basis_type::rotates ? number : 0;
  const offset_t basis =
      rotation * (offset_t(made.k.channels) * Layout::k_dim + offset_t(made.v.channels) * Layout::v_dim) +
      made.k.set_bytes() + made.v.set_bytes();
  offset_t bytes = 0;
  for (const layer_peak& peak : peaks) {
    if (!peak.follows_recipe) continue;
    const packed_peak packed = packed_peak_of(layout, peak.turn, peak.stored.longest);
    const offset_t longest = peak.stored.longest;
    // Where rows are dropped, what a step packs may have to stand behind the last segment, in its basis.
    const offset_t segments = packed.segments + peak.turn.answer / layout.rows.tail.tail;
    bytes += memory::max_rows(longest, peak.stored.total, segments, kv_heads) * row_bytes(made.planes());
    if (block > 0) {
      const offset_t blocks = longest / least + segments;
      bytes += memory::max_rows(blocks, blocks * kv_heads, segments, kv_heads) * row_bytes(made.mean_planes());
    }
    bytes += kv_heads * (packed.segments * basis + number * (packed.originals * dims + Layout::window * Layout::k_dim));
  }
  return bytes;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
