// The memory of packed rows of every (layer, sequence) on the device, and the tables by which kernels find their segments.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "../step_table.cuh"
#include "packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What segments of a layout are made by.
struct segment_formats {
  packed_format k, v;
  int k_dim = 0, v_dim = 0;
  index_t block = 0;  ///< rows whose mean key lies beside them; 0: none
  bool rotates = false;

  offset_t k_basis() const { return rotates ? offset_t(k.channels) * k_dim : 0; }  ///< floats of one head
  offset_t v_basis() const { return rotates ? offset_t(v.channels) * v_dim : 0; }
};

/// Bases and sets of channels that were made together; whoever reads them holds them.
using segment_bases = std::shared_ptr<const device_buffer<float>>;
using segment_sets = std::shared_ptr<const device_buffer<std::uint32_t>>;

/// What the host knows of a segment.
struct segment_record {
  index_t first_row = 0, rows = 0, first_block = 0;
  segment_bases bases{};  ///< null: as the engine hands vectors over
  const float *k_basis = nullptr, *v_basis = nullptr;
  segment_sets sets{};  ///< null: every row has bits
  const std::uint32_t *k_set = nullptr, *v_set = nullptr;
};

namespace detail {

/// A new segment, the place's last one: empty.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    put_segment_entry(device_segment* to, const __grid_constant__ device_segment made, index_t kv_heads, index_t* count,
                      index_t counted) {
  if (threadIdx.x == 0) *to = made, *count = counted;
  for (index_t h = index_t(threadIdx.x); h < kv_heads; h += Threads) made.rows[h] = 0;
}

}  // namespace detail

/// Rows of a place lie one behind the other in planes that have room for `tokens` of every kv_head; segments are windows of them, so that
/// the last one grows where it lies. Means likewise: a segment begins with a new block. Heads of a place are equally long.
///
/// Memory   all of it when made, but for bases and sets. Copies are independent; they share bases, which nobody writes twice.
class packed_places {
 public:
  packed_places(const segment_formats& formats, index_t layers, index_t sequences, index_t kv_heads, index_t tokens,
                index_t most_segments)
      : formats_(formats),
        layers_(layers),
        sequences_(sequences),
        heads_(kv_heads),
        most_(most_segments),
        k_(formats.k, places() * std::size_t(kv_heads), tokens),
        v_(formats.v, places() * std::size_t(kv_heads), tokens),
        means_(formats.k, places() * std::size_t(kv_heads),
               formats.block > 0 ? ceil_div(tokens, formats.block) + most_segments : 0),
        table_(places() * std::size_t(most_segments)),
        counts_(places()),
        rows_(table_.size() * std::size_t(kv_heads)),
        order_(1, sequences, 1),
        records_(places()) {
    std::vector<index_t> ids;
    for (index_t id = 0; id < sequences; ++id) ids.push_back(id);
    check(cudaMemcpy(order_.of(0, 0), ids.data(), ids.size() * sizeof(index_t), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  packed_places(const packed_places& other)
      : formats_(other.formats_),
        layers_(other.layers_),
        sequences_(other.sequences_),
        heads_(other.heads_),
        most_(other.most_),
        k_(other.k_),
        v_(other.v_),
        means_(other.means_),
        table_(other.table_.size()),
        counts_(other.counts_),
        rows_(other.rows_),
        order_(other.order_),
        records_(other.records_) {
    point_table_here();
  }
  packed_places(packed_places&&) noexcept = default;
  packed_places& operator=(packed_places&&) noexcept = default;
  packed_places& operator=(const packed_places& other) { return *this = packed_places(other); }

  index_t most_segments() const { return most_; }
  const segment_formats& formats() const { return formats_; }
  const std::vector<segment_record>& segments(index_t layer, index_t id) const { return records_[place(layer, id)]; }
  index_t rows(index_t layer, index_t id) const {
    const auto& all = segments(layer, id);
    return all.empty() ? 0 : all.back().first_row + all.back().rows;
  }
  index_t blocks(index_t layer, index_t id) const {
    const auto& all = segments(layer, id);
    return all.empty() || formats_.block == 0 ? 0 : all.back().first_block + blocks_of(all.back().rows);
  }

  /// Sets where a view finds the segments of one sequence of a layer, or of the batch that the step table gathered.
  template <class View>
  void show(View& view, index_t layer, index_t id) const {
    point(view, place(layer, id));
    view.packed = rows(layer, id);
  }
  template <class View>
  void show_batch(View& view, index_t layer) const {
    point(view, place(layer, 0));
    view.places = order_.batch(0);
  }
  detail::gathered_column gathered() const { return order_.gathered(); }

  /// Begins a segment; `more` rows of it follow. It knows its bases and sets, and where its rows lie is set here.
  void begin_segment(index_t layer, index_t id, segment_record record, cudaStream_t stream) {
    const std::size_t at = place(layer, id);
    record.first_row = rows(layer, id), record.first_block = blocks(layer, id), record.rows = 0;
    auto& all = records_[at];
    all.push_back(std::move(record));
    detail::put_segment_entry<128><<<1, 128, 0, stream>>>(table_.data() + at * std::size_t(most_) + all.size() - 1,
                                                          segment(at, all.size() - 1), heads_, counts_.data() + at,
                                                          index_t(all.size()));
    check(cudaGetLastError(), "launch of put_segment");
  }
  /// Notes that the last segment took rows.
  void took(index_t layer, index_t id, index_t rows) { records_[place(layer, id)].back().rows += rows; }

  void clear(index_t layer, index_t id, cudaStream_t stream) {
    records_[place(layer, id)].clear();
    check(cudaMemsetAsync(counts_.data() + place(layer, id), 0, sizeof(index_t), stream), "cudaMemsetAsync");
  }

  /// Of rows and means of one place.
  offset_t bytes(index_t layer, index_t id) const {
    return heads_ * (rows(layer, id) * row_bytes() + blocks(layer, id) * mean_bytes() +
                     offset_t(segments(layer, id).size()) * basis_bytes());
  }
  /// Of all memory for rows and means.
  offset_t bytes() const { return k_.bytes() + v_.bytes() + means_.bytes(); }
  offset_t row_bytes() const { return bytes_of(formats_.k) + bytes_of(formats_.v); }
  offset_t mean_bytes() const { return formats_.block > 0 ? bytes_of(formats_.k) : 0; }
  /// Of one head.
  offset_t k_basis_bytes() const { return formats_.k_basis() * offset_t(sizeof(float)); }
  /// And of the sets that its rows share.
  offset_t basis_bytes() const {
    return (formats_.k_basis() + formats_.v_basis()) * offset_t(sizeof(float)) + set_bytes(formats_.k) +
           set_bytes(formats_.v);
  }

 private:
  /// Rows of one kind: [lanes, capacity].
  struct planes {
    packed_format format;
    index_t capacity;
    device_buffer<std::byte> values;
    device_buffer<std::uint32_t> bits;
    device_buffer<float> scales;
    planes(const packed_format& of, std::size_t lanes, index_t tokens)
        : format(of),
          capacity(tokens),
          values(lanes * std::size_t(tokens) * std::size_t(value_stride(of.value_bytes()))),
          bits(of.own_bits ? lanes * std::size_t(tokens) * std::size_t(bit_words(of)) : 0),
          scales(of.scaled() ? lanes * std::size_t(tokens) : 0) {}
    offset_t bytes() const { return offset_t(values.bytes() + bits.bytes() + scales.bytes()); }
    /// From row `first` of a lane on.
    packed_vectors from(std::size_t lane, index_t first) const {
      const offset_t row = offset_t(lane) * capacity + first;
      return {format,
              capacity,
              values.data() + row * value_stride(format.value_bytes()),
              format.own_bits ? bits.data() + row * bit_words(format) : nullptr,
              format.scaled() ? scales.data() + row : nullptr,
              nullptr,
              nullptr};
    }
  };
  static offset_t set_bytes(const packed_format& format) { return format.own_bits ? 0 : bit_words(format) * 4; }
  static offset_t bytes_of(const packed_format& format) {
    return value_stride(format.value_bytes()) + (format.own_bits ? bit_words(format) * 4 : 0) + format.scale_bytes();
  }

  std::size_t places() const { return std::size_t(layers_) * std::size_t(sequences_); }
  std::size_t place(index_t layer, index_t id) const {
    return std::size_t(layer) * std::size_t(sequences_) + std::size_t(id);
  }
  index_t blocks_of(index_t rows) const { return formats_.block > 0 ? ceil_div(rows, formats_.block) : 0; }

  template <class View>
  void point(View& view, std::size_t first) const {
    view.segments = table_.data() + first * std::size_t(most_);
    view.counts = counts_.data() + first;
    view.most_segments = most_;
  }
  device_segment segment(std::size_t at, std::size_t i) const {
    const segment_record& record = records_[at][i];
    const std::size_t lane = at * std::size_t(heads_);
    device_segment made{k_.from(lane, record.first_row), v_.from(lane, record.first_row),
                        means_.from(lane, record.first_block), formats_.block,
                        rows_.data() + (at * std::size_t(most_) + i) * std::size_t(heads_)};
    made.k.basis = made.means.basis = record.k_basis;
    made.v.basis = record.v_basis;
    made.k.set = made.means.set = record.k_set;
    made.v.set = record.v_set;
    return made;
  }
  void point_table_here() {
    std::vector<device_segment> all(table_.size());
    for (std::size_t at = 0; at < records_.size(); ++at) {
      for (std::size_t i = 0; i < records_[at].size(); ++i) all[at * std::size_t(most_) + i] = segment(at, i);
    }
    if (!all.empty()) {
      check(cudaMemcpy(table_.data(), all.data(), table_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
  }

  segment_formats formats_;
  index_t layers_, sequences_, heads_, most_;
  planes k_, v_, means_;
  device_buffer<device_segment> table_;               // [places, most_segments]
  device_buffer<index_t> counts_;                     // [places], segments
  device_buffer<index_t> rows_;                       // [places, most_segments, kv_heads]
  id_column<index_t> order_;                          // every id is its own place; the batch's copy says who is where
  std::vector<std::vector<segment_record>> records_;  // by place
};

}  // namespace cuda
TESSERA_NAMESPACE_END
