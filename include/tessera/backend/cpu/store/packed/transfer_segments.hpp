// Segments of packed rows to and from an archive.
#pragma once

#include <memory>
#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../runtime/saved/packed_format.hpp"
#include "../../../../runtime/saved/rows.hpp"
#include "segment.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Saves or loads planes of rows: `lengths` rows of each head, for which there is memory.
template <class Placement, class Archive>
void transfer_planes(packed_memory<Placement>& rows, const plane_bytes& planes, const host_vector<index_t>& lengths,
                     Archive& archive) {
  offset_t bytes = 0;
  for (int p = 0; p < packed_planes; ++p) {
    for (const index_t length : lengths) bytes += padded_bytes(offset_t(length) * planes[std::size_t(p)]);
  }
  archive.begin_array(std::size_t(bytes));
  for (int p = 0; p < packed_planes; ++p) {
    const auto plane = packed_plane(p);
    for (index_t h = 0; h < index_t(lengths.size()); ++h)
      transfer_rows(
          lengths[std::size_t(h)], planes[std::size_t(p)], [&](index_t row) { return rows.address(plane, h, row); },
          archive);
  }
  archive.end_array();
}

/// Saves or loads what a segment of `kv_heads` heads has beside its rows. `previous`: the segment before it, which may
/// have its basis; null: there is none. A loaded segment has memory for its rows.
template <class Placement, class Archive>
void transfer_segment(std::shared_ptr<packed_segment<Placement>>& segment, const packed_segment<Placement>* previous,
                      index_t kv_heads, index_t k_dim, index_t v_dim, Archive& archive) {
  segment_format format;
  std::shared_ptr<segment_basis> basis = std::make_shared<segment_basis>();
  bool shares = false;
  if constexpr (!Archive::loads) {
    format = segment->format;
    shares = previous && previous->basis == segment->basis;
    if (!shares) *basis = *segment->basis;
  }
  transfer_format(format.k, k_dim, archive);
  transfer_format(format.v, v_dim, archive);
  archive.number(format.block);
  archive.require(format.block >= 0 && format.block <= max_tokens, "with blocks that cannot be");
  archive.flag(shares);
  archive.require(!shares || previous, "with a basis of no segment");
  if (shares) {
    archive.require(previous->format.k == format.k && previous->format.v == format.v, "with a basis of other rows");
  } else {
    const auto vectors = [&](host_vector<float>& all, const packed_format& of, index_t dim) {
      const offset_t size = offset_t(kv_heads) * of.channels * dim;
      archive.numbers(all, size);
      archive.require(all.empty() || offset_t(all.size()) == size, "with a part of a basis");
    };
    const auto bits = [&](host_vector<std::uint8_t>& all, const packed_format& of) {
      const offset_t size = of.own_bits ? 0 : offset_t(kv_heads) * of.set_bytes();
      archive.numbers(all, size);
      archive.require(offset_t(all.size()) == size, "with a part of a basis");
      require_sets(all, of, archive);
    };
    vectors(basis->k, format.k, k_dim), vectors(basis->v, format.v, v_dim);
    bits(basis->k_set, format.k), bits(basis->v_set, format.v);
  }
  if constexpr (Archive::loads) {
    segment = std::make_shared<packed_segment<Placement>>(
        format, shares ? previous->basis : std::shared_ptr<const segment_basis>(std::move(basis)), kv_heads);
  }
  transfer_lengths(segment->lengths, max_tokens, archive);
  archive.rows(segment->losses.data(), segment->losses.size());
  if constexpr (Archive::loads) {
    const host_vector<index_t> none(std::size_t(kv_heads), 0);
    segment->rows.reserve(none, segment->lengths, false);
    segment->means.reserve(none, segment->blocks_of(segment->lengths), false);
  }
}
template <class Placement, class Archive>
void transfer_segment_rows(packed_segment<Placement>& segment, Archive& archive) {
  const segment_format& format = segment.format;
  transfer_planes(segment.rows, format.planes(), segment.lengths, archive);
  if (format.block > 0)
    transfer_planes(segment.means, format.mean_planes(), segment.blocks_of(segment.lengths), archive);
}

/// Saves or loads the segments of a layer, which have `packed` rows of each head, without their rows.
template <int D, int Dv, class Placement, class Archive>
void transfer_segments(host_vector<std::shared_ptr<packed_segment<Placement>>>& segments,
                       const host_vector<index_t>& packed, Archive& archive) {
  index_t count = index_t(segments.size());
  archive.number(count);
  archive.require(count >= 0 && count <= max_tokens, "with too many segments");
  host_vector<index_t> rows(packed.size(), 0);
  for (index_t i = 0; i < count; ++i) {
    if constexpr (Archive::loads) segments.emplace_back();
    transfer_segment(segments[std::size_t(i)], i > 0 ? segments[std::size_t(i - 1)].get() : nullptr,
                     index_t(packed.size()), D, Dv, archive);
    for (std::size_t h = 0; h < rows.size(); ++h) rows[h] += segments[std::size_t(i)]->lengths[h];
  }
  archive.require(rows == packed, "with segments of other rows");
}

}  // namespace cpu
TESSERA_NAMESPACE_END
