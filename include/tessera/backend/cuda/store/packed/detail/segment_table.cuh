// What the host and kernels know of the segments of packed rows of every (layer, sequence).
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../core/sequence_layer.hpp"
#include "../../step_table.cuh"
#include "packed_pages.cuh"
#include "packed_planes.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The segments of every entry, which is a (layer, sequence), and the tables by which kernels find them. `Memory` says
/// where their rows and means lie: packed_planes or packed_pages. Heads may have different numbers of rows: the host
/// counts them beside the device.
template <class Memory>
class segment_table {
 public:
  static constexpr packed_rows_in rows_in = Memory::rows_in;

  segment_table(const segment_formats& formats, index_t layers, index_t sequences, index_t kv_heads,
                index_t max_segments, Memory memory)
      : formats_(formats),
        layers_(layers),
        order_{sequences},
        heads_(kv_heads),
        max_segments_(max_segments),
        memory_(std::move(memory)),
        table_(entries() * std::size_t(max_segments)),
        counts_(entries()),
        rows_(table_.size() * std::size_t(kv_heads)),
        host_rows_(rows_.size(), 0),
        stored_(entries() * std::size_t(kv_heads), 0),
        scattered_(entries(), false),
        batch_(1, sequences, 1),
        records_(entries()) {
    host_vector<index_t> ids;
    for (index_t id = 0; id < sequences; ++id) ids.push_back(id);
    check(cudaMemcpy(batch_.entry({}), ids.data(), ids.size() * sizeof(index_t), cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  /// Pages come from `pool`. Called when the store has been made, copied or moved.
  template <class Pool>
  void use(Pool& pool) {
    memory_.use(pool);
  }
  /// Points the tables of a copy to its own memory.
  void point_tables_here() {
    host_vector<device_segment> all(table_.size());
    for (std::size_t entry = 0; entry < records_.size(); ++entry) {
      for (std::size_t i = 0; i < records_[entry].size(); ++i)
        all[entry * std::size_t(max_segments_) + i] = segment(entry, i);
    }
    if (!all.empty()) {
      check(cudaMemcpy(table_.data(), all.data(), table_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
  }

  index_t max_segments() const { return max_segments_; }
  const segment_formats& formats() const { return formats_; }
  const host_vector<segment_record>& segments(sequence_layer owner) const { return records_[order_.index(owner)]; }
  /// Rows of the longest head, and of one head, in all segments.
  index_t rows(sequence_layer owner) const {
    const index_t* own = stored(order_.index(owner));
    return *std::max_element(own, own + heads_);
  }
  index_t rows(sequence_layer owner, index_t head) const { return stored(order_.index(owner))[head]; }
  /// [kv_heads], rows of a segment.
  const index_t* rows_by_head(sequence_layer owner, const segment_record& record) const {
    return host_rows_.data() + first_of(order_.index(owner), record);
  }
  /// Whether rows were dropped: then a slot says nothing of a position.
  bool is_scattered(sequence_layer owner) const { return scattered_[order_.index(owner)]; }
  void scatter(sequence_layer owner) { scattered_[order_.index(owner)] = true; }

  /// Points a view to the segments of one sequence of a layer, or of the batch that the step table gathered.
  template <class View>
  void show(View& view, sequence_layer owner) const {
    point(view, order_.index(owner));
    view.packed = rows(owner);
  }
  template <class View>
  void show_batch(View& view, index_t layer) const {
    point(view, order_.index({layer, 0}));
    view.entries = batch_.batch(0);
  }
  detail::gathered_column gathered() const { return batch_.gathered(); }

  /// Errors   a sequence cannot have so many segments: tessera::error.
  void require_segments(index_t wanted) const {
    require(wanted <= max_segments_, "segments of a sequence", wanted, "at most " + std::to_string(max_segments_),
            "raise cache_options::tokens");
  }

  /// The slots of a head's chosen blocks, which are counted over all segments, and those of the `whole` rows behind
  /// them.
  host_vector<index_t> slots_of_blocks(sequence_layer owner, index_t head, const host_vector<index_t>& chosen,
                                       index_t whole) const {
    host_vector<index_t> slots;
    index_t first_block = 0, slot = 0;
    for (const segment_record& segment : segments(owner)) {
      const index_t rows = rows_by_head(owner, segment)[head];
      for (index_t row = 0; row < rows; ++row, ++slot) {
        if (std::binary_search(chosen.begin(), chosen.end(), first_block + row / segment.block)) slots.push_back(slot);
      }
      first_block += ceil_div(rows, segment.block);
    }
    for (const index_t end = slot + whole; slot < end; ++slot) slots.push_back(slot);
    return slots;
  }

  /// An upper bound of the bytes that a step reads for `rows` rows of a head: rows of the longest format and the bases
  /// of all segments. Where blocks are scored, means and the bases of keys come on top.
  offset_t read_bytes(sequence_layer owner, offset_t rows, bool scored) const {
    offset_t longest = 0, total = 0;
    for (const segment_record& record : segments(owner)) {
      longest = (std::max)(longest, row_bytes(record));
      total += basis_bytes() + (scored ? mean_bytes(record) + k_basis_bytes() : 0);
    }
    return total + rows * longest;
  }
  /// Bytes of rows, means and bases of one entry; of a page that others hold too, its part. Segments that share a basis
  /// stand together.
  offset_t bytes(sequence_layer owner) const {
    offset_t total = 0;
    const segment_record* last = nullptr;
    for (const segment_record& record : segments(owner)) {
      const bool shares =
          last && last->k_basis == record.k_basis && last->k_set == record.k_set && last->v_set == record.v_set;
      total += memory_.bytes(record) + (shares ? 0 : heads_ * basis_bytes());
      last = &record;
    }
    return total;
  }
  /// The most that a layer of `tokens` tokens takes in at most `segments` segments.
  capacity upper_bound(offset_t tokens, offset_t segments) const {
    capacity all = memory_.upper_bound(tokens, segments);
    all.bytes += heads_ * segments * basis_bytes();
    return all;
  }
  /// Bytes of all memory for rows and means that is not a pool's.
  offset_t bytes() const { return memory_.bytes(); }
  static offset_t row_bytes(const segment_record& of) { return packed_row_bytes(of.k) + packed_row_bytes(of.v); }
  /// Bytes of the means of one head.
  static offset_t mean_bytes(const segment_record& of) { return blocks_of(of) * packed_row_bytes(of.k); }
  /// Bytes of the bases of keys of one head.
  offset_t k_basis_bytes() const { return formats_.k_basis() * offset_t(sizeof(float)); }
  /// Bytes of all bases of one head and of the sets that its rows share.
  offset_t basis_bytes() const {
    return (formats_.k_basis() + formats_.v_basis()) * offset_t(sizeof(float)) + packed_set_bytes(formats_.k) +
           packed_set_bytes(formats_.v);
  }

  /// The row behind all segments.
  index_t end_row(sequence_layer owner) const {
    const auto& all = segments(owner);
    return all.empty() ? 0 : all.back().first_row + all.back().rows;
  }

 protected:
  index_t* stored(std::size_t entry) { return stored_.data() + entry * std::size_t(heads_); }
  const index_t* stored(std::size_t entry) const { return stored_.data() + entry * std::size_t(heads_); }
  /// Where a segment's rows are counted.
  std::ptrdiff_t first_of(std::size_t entry, const segment_record& record) const {
    return std::ptrdiff_t((entry * std::size_t(max_segments_) + std::size_t(record.slot)) * std::size_t(heads_));
  }
  void set_rows(std::size_t entry, const segment_record& record, index_t rows) {
    std::fill_n(host_rows_.begin() + first_of(entry, record), heads_, rows);
  }
  std::size_t entries() const { return std::size_t(layers_) * std::size_t(order_.sequences); }
  template <class View>
  void point(View& view, std::size_t first) const {
    view.segments = table_.data() + first * std::size_t(max_segments_);
    view.counts = counts_.data() + first;
    view.max_segments = max_segments_;
  }
  device_segment segment(std::size_t entry, std::size_t i) const { return segment(entry, i, records_[entry][i]); }
  device_segment segment(std::size_t entry, std::size_t i, const segment_record& record) const {
    device_segment made;
    memory_.point(made, entry, i, record);
    made.block = record.block;
    made.rows = rows_.data() + first_of(entry, record);
    made.k.basis = made.means.basis = record.k_basis;
    made.v.basis = record.v_basis;
    made.k.set = made.means.set = record.k_set;
    made.v.set = record.v_set;
    return made;
  }
  void write_entry(std::size_t entry, std::size_t i, cudaStream_t stream) const {
    write_entry(entry, i, records_[entry][i], records_[entry].size(), stream);
  }
  /// Writes the i-th segment to the table; views count `counted` segments.
  void write_entry(std::size_t entry, std::size_t i, const segment_record& record, std::size_t counted,
                   cudaStream_t stream) const {
    const index_t* const rows = host_rows_.data() + first_of(entry, record);
    const index_t some = (std::min)(heads_, detail::some_numbers::capacity);
    detail::some_numbers given{};
    std::copy_n(rows, some, given.values);
    const device_segment made = segment(entry, i, record);
    detail::write_segment_entry<128><<<1, 128, 0, stream>>>(table_.data() + entry * std::size_t(max_segments_) + i,
                                                            made, given, some, counts_.data() + entry,
                                                            index_t(counted));
    check(cudaGetLastError(), "launch of write_segment");
    set_numbers(made.rows + some, rows + some, heads_ - some, stream);
  }
  /// Copies rows to a segment's window.
  void move(const device_segment& from, std::size_t entry, std::size_t i, cudaStream_t stream) const {
    const segment_record& to = records_[entry][i];
    detail::move_segment_entry<256>
        <<<dim3(32, unsigned(heads_), 3), 256, 0, stream>>>(from, segment(entry, i), to.rows, blocks_of(to));
    check(cudaGetLastError(), "launch of move_segment");
  }
  /// Copies a segment whose rows lie in another entry's planes to its own entry.
  void take_over(std::size_t entry, std::size_t i, cudaStream_t stream) {
    const device_segment elsewhere = segment(entry, i);
    records_[entry][i].home = entry;
    move(elsewhere, entry, i, stream);
    write_entry(entry, i, stream);
  }
  /// Copies to an entry what it shares with one that is cleared. Other entries that share it read it there from now
  /// on.
  void hand_over(std::size_t left, std::size_t entry, index_t layer, cudaStream_t stream) {
    for (std::size_t i = 0; i < records_[entry].size(); ++i) {
      if (records_[entry][i].home != left) continue;
      take_over(entry, i, stream);
      for (index_t other = 0; other < order_.sequences; ++other) {
        const std::size_t sharing = order_.index({layer, other});
        if (sharing == entry || i >= records_[sharing].size()) continue;
        segment_record& same = records_[sharing][i];
        if (same.home != left || same.first_row != records_[entry][i].first_row) continue;
        same.home = entry;
        write_entry(sharing, i, stream);
      }
    }
  }
  segment_formats formats_;
  index_t layers_;
  layer_major order_;
  index_t heads_, max_segments_;
  Memory memory_;
  device_buffer<device_segment> table_;  // [entries, max_segments]
  device_buffer<index_t> counts_;        // [entries], segments
  device_buffer<index_t> rows_;          // [entries, max_segments, kv_heads]
  host_vector<index_t> host_rows_;       // the same
  host_vector<index_t> stored_;          // [entries, kv_heads], rows in all segments
  host_vector<bool> scattered_;          // by entry
  id_column<index_t> batch_;             // [sequences] by id: the id; the batch's copy maps sequences to entries
  host_vector<host_vector<segment_record>> records_;  // by entry
};

}  // namespace cuda
TESSERA_NAMESPACE_END
