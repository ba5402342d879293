// Encoded rows behind every kind of table, and beside them the same rows decoded.
#pragma once

#include <cmath>
#include <vector>

#include <tessera/core/views.hpp>

#include "support/open_layouts.hpp"
#include "support/random.hpp"

namespace support {

/// Rows of random values as `E` stores them behind a table, and plain fp32 rows of exactly what they decode to.
template <class E, int D, int Dv, class Table>
struct encoded_pair {
  std::vector<typename E::stored_type> k, v;
  std::vector<float> k_scales, v_scales, k_decoded, v_decoded;
  std::vector<index_t> lengths;
  tessera::kv_view<E, D, Table, Dv> encoded;
  tessera::kv_view<tessera::fp32, D, tessera::contiguous, Dv> decoded;

  encoded_pair(index_t sequences, const std::vector<index_t>& all_lengths, tessera::offset_t rows, const Table& table,
               tessera::row_strides k_strides, tessera::row_strides v_strides)
      : k(std::size_t(rows * D)),
        v(std::size_t(rows * Dv)),
        k_scales(std::size_t(rows), std::nanf("")),
        v_scales(k_scales),
        lengths(all_lengths) {
    const auto slots = std::size_t(*std::max_element(lengths.begin(), lengths.end()));
    k_decoded.assign(lengths.size() * slots * D, std::nanf(""));
    v_decoded.assign(lengths.size() * slots * Dv, std::nanf(""));
    const tessera::offset_t head = tessera::offset_t(slots), sequence = head * (index_t(lengths.size()) / sequences);
    decoded.k_strides = {sequence * D, head * D, D};
    decoded.v_strides = {sequence * Dv, head * Dv, Dv};
    encoded.k_strides = k_strides;
    encoded.v_strides = v_strides;
    encoded.sequences = decoded.sequences = sequences;
    encoded.kv_heads = decoded.kv_heads = index_t(lengths.size()) / sequences;
    encoded.length_strides = {encoded.kv_heads, 1};
    decoded.length_strides = {encoded.kv_heads, 1};
    encoded.table = table;
    encoded.scales.outer = k_strides.outer / D;
    encoded.scales.head = k_strides.head / D;
    encoded.scales.token = k_strides.token / D;
    point();
  }
  encoded_pair(const encoded_pair&) = delete;

  /// Writes one row, K and V, and what it decodes to.
  void set(index_t sequence, index_t head, index_t slot, const float* key, const float* value) {
    const float key_scale = tessera::encode_row<E>(key, D, encoded.key(sequence, head, slot), encoded.k_strides.dim);
    const float value_scale =
        tessera::encode_row<E>(value, Dv, encoded.value(sequence, head, slot), encoded.v_strides.dim);
    const auto at = std::size_t(encoded.scales.index(encoded.table.locate(sequence, head, slot), head));
    k_scales[at] = key_scale;
    v_scales[at] = value_scale;
    decode(sequence, head, slot);
  }
  /// To be called after a stored row or its scale was written to.
  void decode(index_t sequence, index_t head, index_t slot) {
    for (int d = 0; d < D; ++d) {
      decoded.key(sequence, head, slot)[d] =
          float(encoded.key(sequence, head, slot)[d * encoded.k_strides.dim]) * encoded.key_scale(sequence, head, slot);
    }
    for (int d = 0; d < Dv; ++d) {
      decoded.value(sequence, head, slot)[d] = float(encoded.value(sequence, head, slot)[d * encoded.v_strides.dim]) *
                                               encoded.value_scale(sequence, head, slot);
    }
  }
  void fill(rng& random) {
    for (index_t b = 0; b < encoded.sequences; ++b) {
      for (index_t h = 0; h < encoded.kv_heads; ++h) {
        for (index_t s = 0; s < encoded.length(b, h); ++s) {
          // Rows of very different sizes: a scale that is left out, or another row's, must show.
          const float size = random.pick({0.5f, 1.0f, 2.0f});
          set(b, h, s, normals(random, D, size).data(), normals(random, Dv, size * size).data());
        }
      }
    }
  }

  auto reading() const { return const_view(encoded); }
  auto reading_decoded() const { return const_view(decoded); }

 private:
  void point() {
    encoded.k = k.data();
    encoded.v = v.data();
    decoded.k = k_decoded.data();
    decoded.v = v_decoded.data();
    encoded.lengths = decoded.lengths = lengths.data();
    if (E::scaled) {
      encoded.scales.k = k_scales.data();
      encoded.scales.v = v_scales.data();
    }
  }
  template <class X, class Where>
  static tessera::kv_view<const X, D, Where, Dv> const_view(const tessera::kv_view<X, D, Where, Dv>& from) {
    tessera::kv_view<const X, D, Where, Dv> view;
    view.k = from.k;
    view.v = from.v;
    view.k_strides = from.k_strides;
    view.v_strides = from.v_strides;
    view.sequences = from.sequences;
    view.kv_heads = from.kv_heads;
    view.lengths = from.lengths;
    view.length_strides = {from.length_strides.sequence, from.length_strides.head};
    view.table = from.table;
    view.scales = {from.scales.k, from.scales.v, from.scales.outer, from.scales.head, from.scales.token};
    return view;
  }
};

/// Calls body(pair) for rows of the given lengths [sequences, kv_heads] behind every kind of table: contiguous, with a
/// transposed V, ragged, pages behind a dense table and behind a CSR table, and every other slot of a filtered one; or (to compile less) the first two only.
template <class E, int D, int Dv, bool every = true, class Body>
void behind_every_table(rng& random, index_t sequences, const std::vector<index_t>& lengths, Body&& body) {
  using namespace tessera;
  const index_t heads = index_t(lengths.size()) / sequences, lanes = index_t(lengths.size());
  const index_t slots = *std::max_element(lengths.begin(), lengths.end()), room = 2 * slots;
  const auto run = [&]<class Table>(offset_t rows, const Table& table, row_strides k, row_strides v) {
    encoded_pair<E, D, Dv, Table> pair(sequences, lengths, rows, table, k, v);
    pair.fill(random);
    body(pair);
  };
  run(offset_t(lanes) * slots, contiguous{}, {offset_t(heads) * slots * D, offset_t(slots) * D, D},
      {offset_t(heads) * slots * Dv, offset_t(slots) * Dv, Dv});
  run(offset_t(lanes) * slots, contiguous{}, {offset_t(heads) * slots * D, offset_t(slots) * D, D},
      {offset_t(heads) * slots * Dv, offset_t(slots) * Dv, 1, slots});
  if constexpr (every) {
    std::vector<offset_t> begin{0};
    for (const index_t length : lengths) begin.push_back(begin.back() + length + 3);
    run(begin.back(), ragged{begin.data(), heads}, {0, 0, D}, {0, 0, Dv});

    constexpr index_t page = 8;
    const index_t pages = ceil_div(slots, page);
    std::vector<index_t> blocks, indptr{0};
    for (index_t i = 0; i < sequences * pages; ++i) blocks.push_back(i);
    for (std::size_t i = blocks.size(); i > 1; --i)
      std::swap(blocks[i - 1], blocks[std::size_t(random.between(0, index_t(i) - 1))]);
    for (index_t b = 0; b < sequences; ++b) indptr.push_back((b + 1) * pages);
    run(offset_t(sequences) * pages * page * heads, block_table{blocks.data(), page, pages, 0},
        {offset_t(page) * heads * D, D, offset_t(heads) * D}, {offset_t(page) * heads * Dv, Dv, offset_t(heads) * Dv});
    run(offset_t(sequences) * pages * page * heads, csr_table{indptr.data(), blocks.data(), page, 1},
        {offset_t(page) * heads * D, offset_t(page) * D, D}, {offset_t(page) * heads * Dv, offset_t(page) * Dv, Dv});

    std::vector<index_t> every_other;
    std::vector<offset_t> lists;
    for (index_t lane = 0; lane < lanes; ++lane) {
      lists.push_back(offset_t(every_other.size()));
      for (index_t s = 0; s < lengths[std::size_t(lane)]; ++s) every_other.push_back(2 * s + 1);
    }
    run(offset_t(lanes) * room, filtered<contiguous>{{}, every_other.data(), lists.data(), heads},
        {offset_t(heads) * room * D, offset_t(room) * D, D}, {offset_t(heads) * room * Dv, offset_t(room) * Dv, Dv});
  }
}

}  // namespace support
