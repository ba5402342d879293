// The segments of packed rows of every (layer, sequence) on the device, and the tables by which kernels find them.
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

/// The segments of every entry; an entry is a (layer, sequence). `Memory` says where their rows and means lie:
/// packed_planes or packed_pages. What a forked sequence shares lies in the other entry's planes, or in pages that both
/// hold. When an entry of planes is cleared, an entry that still reads its rows copies them to its own planes.
/// Appended rows are planned first: `plan_rows` for each, then `grew` in the same order, or `forget_plan`.
///
/// Memory   tables when made, rows as `Memory` says; bases and sets when segments begin. Copies are independent. They
///          share bases, which are written once.
template <class Memory>
class segment_store {
 public:
  static constexpr packed_rows_in rows_in = Memory::rows_in;

  segment_store(const segment_formats& formats, index_t layers, index_t sequences, index_t kv_heads,
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
        batch_(1, sequences, 1),
        records_(entries()),
        copied_(std::size_t(layers)) {
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
    forget_plan();
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
  index_t rows(sequence_layer owner) const {
    const auto& all = segments(owner);
    return all.empty() ? 0 : all.back().first_row + all.back().rows;
  }

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

  /// Plans `rows` more rows of the last segment, or, without one or where `begins`, of a new segment in the formats of
  /// `like`.   Errors   too little memory: tessera::error, and nothing has changed.
  void plan_rows(sequence_layer owner, const segment_record& like, bool begins, index_t rows) {
    auto& all = records_[order_.index(owner)];
    if (begins || all.empty())
      memory_.plan(like.without_rows(), rows);
    else
      memory_.plan(all.back(), rows);
  }
  void forget_plan() {
    memory_.forget();
    for (auto& records : copied_) records.clear();
  }
  /// Pages that are planned and that nothing holds yet.
  offset_t planned_pages() const { return memory_.planned_pages(); }
  /// Begins a segment without rows. The record has its bases and sets; this sets where its rows will lie.
  void begin_segment(sequence_layer owner, segment_record record, cudaStream_t stream) {
    add_segment(owner, behind(owner, std::move(record), {}), stream);
  }
  /// Reserves memory on the host for `more` segments, so that `add_segment` allocates none.
  void make_room(sequence_layer owner, std::size_t more) {
    auto& all = records_[order_.index(owner)];
    all.reserve(all.size() + more);
  }
  /// Begins a segment of `rows` planned rows behind `unseen` ones. No view counts it before `add_segment`, but rows may
  /// be packed into it.
  segment_record begin_unseen(sequence_layer owner, segment_record record, index_t rows,
                              const host_vector<segment_record>& unseen, cudaStream_t stream) {
    segment_record begun = behind(owner, std::move(record), unseen);
    const std::size_t entry = order_.index(owner), i = records_[entry].size() + unseen.size();
    memory_.grow(entry, i, begun, rows, stream);
    write_entry(entry, i, begun, records_[entry].size(), stream);
    return begun;
  }
  /// Releases what `begin_unseen` began.
  void forget_unseen(host_vector<segment_record>& unseen) {
    for (segment_record& record : unseen) memory_.release(record);
    unseen.clear();
  }
  void add_segment(sequence_layer owner, segment_record record, cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    records_[entry].push_back(std::move(record));
    write_entry(entry, records_[entry].size() - 1, stream);
  }
  /// Adds a segment of `rows` rows, which the caller writes.   Errors   as plan_rows.
  void add_loaded(sequence_layer owner, segment_record record, index_t rows, cudaStream_t stream) {
    forget_plan();
    segment_record begun = behind(owner, std::move(record), {});
    make_room(owner, 1);
    memory_.plan(begun, rows);
    memory_.grow(order_.index(owner), segments(owner).size(), begun, rows, stream);
    begun.rows = rows;
    add_segment(owner, std::move(begun), stream);
  }
  /// Where the rows of the i-th segment lie.
  device_segment on_device(sequence_layer owner, std::size_t i) const { return segment(order_.index(owner), i); }
  /// The last segment grows by `rows`, which were planned.
  void grew(sequence_layer owner, index_t rows, cudaStream_t stream) {
    auto& all = records_[order_.index(owner)];
    memory_.grow(order_.index(owner), all.size() - 1, all.back(), rows, stream);
    all.back().rows += rows;
  }

  /// Reserves memory on the host for `commit_copy`, which gives an empty entry the segments of another one. In planes
  /// the first `shared` segments are shared, and the others are copied; in pages all are shared. `copy_tables` follows
  /// all layers' copies.
  void plan_copy(index_t layer, index_t from, index_t to) {
    records_[order_.index({layer, to})].reserve(records_[order_.index({layer, from})].size());
    copied_[std::size_t(layer)] = records_[order_.index({layer, from})];
  }
  void commit_copy(index_t layer, index_t to, std::size_t shared, cudaStream_t stream) {
    const std::size_t entry = order_.index({layer, to});
    for (segment_record& record : copied_[std::size_t(layer)]) {
      memory_.share(record, entry);
      records_[entry].push_back(std::move(record));
      const std::size_t i = records_[entry].size() - 1;
      if (i < shared || records_[entry][i].home == entry)
        write_entry(entry, i, stream);
      else
        take_over(entry, i, stream);
    }
    copied_[std::size_t(layer)].clear();
  }
  void copy_tables(index_t from, index_t to, cudaStream_t stream) const { memory_.copy_tables(from, to, stream); }

  void clear(sequence_layer owner, cudaStream_t stream) {
    const std::size_t left = order_.index(owner);
    for (segment_record& record : records_[left]) memory_.release(record);
    records_[left].clear();
    for (index_t other = 0; other < order_.sequences; ++other)
      hand_over(left, order_.index({owner.layer, other}), owner.layer, stream);
    check(cudaMemsetAsync(counts_.data() + order_.index(owner), 0, sizeof(index_t), stream), "cudaMemsetAsync");
  }

  /// Replaces segments `first` to `last` - 1 by one. `made` has their rows in the record's formats, in other memory,
  /// which must live until the copy is done. Later reads on the stream see the new segment.
  /// Returns  false where there are too few pages for it; then nothing has changed.
  bool replace_segments(sequence_layer owner, std::size_t first, std::size_t last, segment_record record,
                        const device_segment& made, cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    auto& all = records_[entry];
    record.first_row = all[first].first_row, record.slot = all[first].slot, record.rows = 0, record.home = entry;
    index_t rows = 0;
    for (std::size_t i = first; i < last; ++i) rows += all[i].rows;
    forget_plan();
    try {
      memory_.plan(record, rows);
    } catch (...) {
      return false;
    }
    memory_.grow(entry, first, record, rows, stream);
    record.rows = rows;
    for (std::size_t i = first; i < last; ++i) memory_.release(all[i]);
    all[first] = std::move(record);
    all.erase(all.begin() + offset_t(first) + 1, all.begin() + offset_t(last));
    move(made, entry, first, stream);
    const std::size_t end = last - first > 1 ? all.size() : first + 1;
    for (std::size_t i = first; i < end; ++i) {
      memory_.write_tables(entry, i, all[i], stream);
      write_entry(entry, i, stream);
    }
    return true;
  }

  /// Errors   a sequence cannot have so many segments: tessera::error.
  void require_segments(index_t wanted) const {
    require(wanted <= max_segments_, "segments of a sequence", wanted, "at most " + std::to_string(max_segments_),
            "raise cache_options::tokens");
  }

  /// The slots of chosen blocks, which are counted over all segments, and those of the whole rows behind them.
  host_vector<index_t> slots_of_blocks(sequence_layer owner, const host_vector<index_t>& chosen, index_t end) const {
    host_vector<index_t> slots;
    index_t first_block = 0;
    for (const segment_record& segment : segments(owner)) {
      for (index_t row = 0; row < segment.rows; ++row) {
        if (std::binary_search(chosen.begin(), chosen.end(), first_block + row / segment.block))
          slots.push_back(segment.first_row + row);
      }
      first_block += blocks_of(segment);
    }
    for (index_t slot = rows(owner); slot < end; ++slot) slots.push_back(slot);
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
  /// Bytes of rows, means and bases of one entry; of a page that others hold too, its part.
  offset_t bytes(sequence_layer owner) const {
    offset_t total = 0;
    for (const segment_record& record : segments(owner)) total += memory_.bytes(record) + heads_ * basis_bytes();
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

 private:
  std::size_t entries() const { return std::size_t(layers_) * std::size_t(order_.sequences); }
  template <class View>
  void point(View& view, std::size_t first) const {
    view.segments = table_.data() + first * std::size_t(max_segments_);
    view.counts = counts_.data() + first;
    view.max_segments = max_segments_;
  }
  /// The record of a segment behind all others, with a slot that no other segment has.
  segment_record behind(sequence_layer owner, segment_record record, const host_vector<segment_record>& unseen) const {
    const std::size_t entry = order_.index(owner);
    record.first_row = unseen.empty() ? rows(owner) : unseen.back().first_row + unseen.back().rows;
    record.rows = 0, record.slot = 0, record.home = entry;
    const auto has = [&](const host_vector<segment_record>& all) {
      return std::any_of(all.begin(), all.end(),
                         [&](const segment_record& other) { return other.slot == record.slot; });
    };
    while (has(records_[entry]) || has(unseen)) ++record.slot;
    return record;
  }
  device_segment segment(std::size_t entry, std::size_t i) const { return segment(entry, i, records_[entry][i]); }
  device_segment segment(std::size_t entry, std::size_t i, const segment_record& record) const {
    device_segment made;
    memory_.point(made, entry, i, record);
    made.block = record.block;
    made.rows = rows_.data() + (entry * std::size_t(max_segments_) + std::size_t(record.slot)) * std::size_t(heads_);
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
    detail::write_segment_entry<128><<<1, 128, 0, stream>>>(table_.data() + entry * std::size_t(max_segments_) + i,
                                                            segment(entry, i, record), heads_, record.rows,
                                                            counts_.data() + entry, index_t(counted));
    check(cudaGetLastError(), "launch of write_segment");
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
  id_column<index_t> batch_;             // [sequences] by id: the id; the batch's copy maps sequences to entries
  host_vector<host_vector<segment_record>> records_, copied_;  // by entry; by layer, of `plan_copy`
};

}  // namespace cuda
TESSERA_NAMESPACE_END
