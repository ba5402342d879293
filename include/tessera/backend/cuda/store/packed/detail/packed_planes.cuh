// Packed rows on the device in planes: memory for `tokens` rows of every head.
#pragma once

#include <algorithm>

#include "../../../../../core/plan/capacity.hpp"
#include "segment_format.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// An entry is a (layer, sequence). Its rows lie one behind the other in planes with room for `tokens` of every
/// kv_head, and segments are windows of them, so the last one grows within its window. Means lie likewise: a segment
/// begins with a new block, and where rows are dropped, each one has room for a block more. Windows have room for the
/// longest rows, so a segment that is packed anew fits into its window.
/// Memory   all of it when made.
///
/// Members of a memory of packed rows, this one and packed_pages:
///   use(pool)                          called when made, copied or moved: pages come from this pool of whole rows
///   point(segment, entry, i, record)   sets where the rows and means of an entry's i-th segment lie
///   plan(record, rows, shortest), forget()   what `grow` will need for so many more rows of a segment whose
///                                      shortest head has `shortest`; errors: too little memory
///   check_pool(bytes)                  errors: a pool that is too large
///   pool_rows(formats, entries, kv_heads, tokens, segments)   whole rows of a pool's pages that suffice
///   planned_pages()                    pages that are planned
///   grow(entry, i, record, rows, shortest, stream)   gives a segment memory for more rows, which it does not count
///                                      yet; calls come in the order of those of `plan`
///   write_tables(entry, i, record, stream)   called when a segment's number has changed
///   moves_with_first_row               whether rows lie elsewhere when rows of segments before are dropped
///   plan_keep(kept), forget(kept)      where what stays of a segment and its means will lie; errors: too little memory
///   set_aside(segment, record, stream) the segment as it is read while its tables are written anew
///   release_dropped(old, record)       what a segment held and no longer holds
///   share(record, entry)               a copy of a segment, of that entry, holds the same memory where it can
///   release(record)                    a segment is gone
///   copy_tables(from, to, stream)      what the device knows of a sequence's memory, when all layers have been copied
///   bytes(record), upper_bound(tokens, segments), bytes()   of rows and means: of a segment, of a layer at most, of
///                                      everything that is not a pool's
class packed_planes {
 public:
  static constexpr packed_rows_in rows_in = packed_rows_in::planes;

  packed_planes(const segment_formats& formats, index_t layers, index_t sequences, index_t kv_heads, index_t tokens,
                index_t max_segments)
      : formats_(formats),
        heads_(kv_heads),
        k_(formats.widest_k, lanes(layers, sequences, kv_heads), tokens),
        v_(formats.widest_v, lanes(layers, sequences, kv_heads), tokens),
        means_(formats.widest_k, lanes(layers, sequences, kv_heads),
               formats.block > 0 ? ceil_div(tokens, formats.least_block) + (formats.drops ? max_segments : 0) : 0) {}

  void point(device_segment& to, std::size_t, std::size_t i, const segment_record& record) const {
    const std::size_t lane = record.home * std::size_t(heads_);
    // Where nothing is dropped, `least_block` divides first rows. Sequences that share a segment count it alike.
    index_t first_mean = formats_.block > 0 ? record.first_row / formats_.least_block : 0;
    if (formats_.drops && formats_.block > 0) first_mean += index_t(i);
    to.k = k_.vectors(lane, record.first_row, record.k), to.v = v_.vectors(lane, record.first_row, record.v);
    to.means = means_.vectors(lane, first_mean, record.k);
  }
  // All memory is there: nothing is planned, and nothing is released.
  template <class Pool>
  void use(Pool&) {}
  void plan(const segment_record&, index_t, index_t) {}
  void forget() {}
  static constexpr offset_t planned_pages() { return 0; }
  void grow(std::size_t, std::size_t, segment_record&, index_t, index_t, cudaStream_t) {}
  void write_tables(std::size_t, std::size_t, const segment_record&, cudaStream_t) const {}
  static constexpr bool moves_with_first_row = true;
  void plan_keep(kept_segment&) {}
  void forget(kept_segment&) {}
  const device_segment& set_aside(const device_segment& of, const segment_record&, cudaStream_t) const { return of; }
  void release_dropped(const kept_segment&, const segment_record&) {}
  void share(segment_record&, std::size_t) {}
  void release(segment_record&) {}
  void copy_tables(index_t, index_t, cudaStream_t) const {}

  offset_t bytes(const segment_record& record) const {
    const offset_t k = packed_row_bytes(record.k), v = packed_row_bytes(record.v);
    return heads_ * (record.rows * (k + v) + blocks_of(record) * k);
  }
  capacity upper_bound(offset_t tokens, offset_t segments) const {
    const offset_t blocks = formats_.block > 0 ? tokens / formats_.least_block + segments : 0;
    const offset_t k = packed_row_bytes(formats_.widest_k), v = packed_row_bytes(formats_.widest_v);
    return {heads_ * (tokens * (k + v) + blocks * k), 0};
  }
  offset_t bytes() const { return k_.bytes() + v_.bytes() + means_.bytes(); }

  static void check_pool(offset_t) {}
  static constexpr offset_t pool_rows(const segment_formats&, offset_t, offset_t, index_t, index_t) { return 0; }

 private:
  static std::size_t lanes(index_t layers, index_t sequences, index_t kv_heads) {
    return std::size_t(layers) * std::size_t(sequences) * std::size_t(kv_heads);
  }
  /// Rows of one kind: [lanes, capacity], of `format` or shorter ones.
  struct plane {
    packed_format format;
    index_t capacity;
    device_buffer<std::byte> values;
    device_buffer<std::uint32_t> bits;
    device_buffer<float> scales;
    plane(const packed_format& of, std::size_t lanes, index_t tokens)
        : format(of),
          capacity(tokens),
          values(lanes * std::size_t(tokens) * std::size_t(value_stride(of.value_bytes()))),
          bits(of.own_bits ? lanes * std::size_t(tokens) * std::size_t(bit_words(of)) : 0),
          scales(of.scaled() ? lanes * std::size_t(tokens) : 0) {}
    offset_t bytes() const { return offset_t(values.bytes() + bits.bytes() + scales.bytes()); }
    /// The rows of a lane from row `first` on, in format `made`.
    packed_vectors vectors(std::size_t lane, index_t first, const packed_format& made) const {
      const offset_t row = offset_t(lane) * capacity + first, stride = value_stride(format.value_bytes());
      return {made,
              capacity,
              values.data() + row * stride,
              format.own_bits ? bits.data() + row * bit_words(format) : nullptr,
              format.scaled() ? scales.data() + row : nullptr,
              nullptr,
              nullptr,
              capacity * stride,
              offset_t(capacity) * bit_words(format)};
    }
  };

  segment_formats formats_;
  index_t heads_;
  plane k_, v_, means_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
