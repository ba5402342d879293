// The segments of packed rows of every (layer, sequence) on the device.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../core/sequence_layer.hpp"
#include "choices/keep_means.cuh"
#include "choices/keep_segment.cuh"
#include "segment_table.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// How the segments of a segment_table come, grow and go. What a forked sequence shares lies in the other entry's
/// planes, or in pages that both hold. When an entry of planes is cleared, or drops rows, an entry that still reads its
/// rows copies them to its own planes.
/// Appended rows are planned first: `plan_rows` for each, then `grew` in the same order, or `forget_plan`.
///
/// Memory   tables when made, rows as `Memory` says; bases and sets when segments begin. Copies are independent. They
///          share bases, which are written once.
template <class Memory>
class segment_store : public segment_table<Memory> {
  using base = segment_table<Memory>;

 public:
  using base::bytes, base::end_row, base::rows, base::rows_by_head, base::segments;

  segment_store(const segment_formats& formats, index_t layers, index_t sequences, index_t kv_heads,
                index_t max_segments, Memory memory)
      : base(formats, layers, sequences, kv_heads, max_segments, std::move(memory)),
        first_slots_(std::size_t(kv_heads)),
        copied_(std::size_t(layers)) {}

  /// Points the tables of a copy to its own memory.
  void point_tables_here() {
    forget_plan();
    base::point_tables_here();
  }

  /// Plans `rows` more rows of the last segment, or, without one or where `begins`, of a new segment in the formats of
  /// `like`.   Errors   too little memory: tessera::error, and nothing has changed.
  void plan_rows(sequence_layer owner, const segment_record& like, bool begins, index_t rows) {
    const std::size_t entry = order_.index(owner);
    auto& all = records_[entry];
    if (begins || all.empty())
      memory_.plan(like.without_rows(), rows, 0);
    else
      memory_.plan(all.back(), rows, shortest_of(host_rows_.data() + first_of(entry, all.back())));
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
    set_rows(entry, begun, 0);
    memory_.grow(entry, i, begun, rows, 0, stream);
    write_entry(entry, i, begun, records_[entry].size(), stream);
    return begun;
  }
  /// Releases what `begin_unseen` began.
  void forget_unseen(host_vector<segment_record>& unseen) {
    for (segment_record& record : unseen) memory_.release(record);
    unseen.clear();
  }
  /// Adds a segment of which every head has as many rows, or rows[head] of them.
  void add_segment(sequence_layer owner, segment_record record, cudaStream_t stream) {
    add_segment(owner, std::move(record), nullptr, stream);
  }
  void add_segment(sequence_layer owner, segment_record record, const index_t* rows, cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    set_rows(entry, record, record.rows);
    if (rows) std::copy_n(rows, heads_, host_rows_.begin() + first_of(entry, record));
    for (index_t h = 0; h < heads_; ++h) stored(entry)[h] += rows ? rows[h] : record.rows;
    records_[entry].push_back(std::move(record));
    write_entry(entry, records_[entry].size() - 1, stream);
  }
  /// Adds a segment of rows[head] rows, which the caller writes.   Errors   as plan_rows.
  void add_loaded(sequence_layer owner, segment_record record, const host_vector<index_t>& rows, cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    const index_t longest = *std::max_element(rows.begin(), rows.end());
    forget_plan();
    segment_record begun = behind(owner, std::move(record), {});
    make_room(owner, 1);
    memory_.plan(begun, longest, 0);
    memory_.grow(entry, segments(owner).size(), begun, longest, 0, stream);
    begun.rows = longest;
    add_segment(owner, std::move(begun), rows.data(), stream);
  }
  /// Where the rows of the i-th segment lie.
  device_segment on_device(sequence_layer owner, std::size_t i) const { return segment(order_.index(owner), i); }
  /// The last segment grows by `rows`, which were planned.
  void grew(sequence_layer owner, index_t rows, cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    auto& all = records_[entry];
    index_t* const last = host_rows_.data() + first_of(entry, all.back());
    memory_.grow(entry, all.size() - 1, all.back(), rows, shortest_of(last), stream);
    all.back().rows += rows;
    for (index_t h = 0; h < heads_; ++h) last[h] += rows, stored(entry)[h] += rows;
  }
  /// Plans that the last segment grows by added(head) rows of each head; `last`: what it will be before. Or, where it
  /// `begins`, that a segment in its format begins with them.   Errors   as plan_rows.
  template <class Added>
  void plan_rows_by_head(const segment_record& last, const index_t* rows, bool begins, const Added& added) {
    if (begins)
      memory_.plan(last.without_rows(), longest_of(nullptr, added), 0);
    else
      memory_.plan(last, longest_of(rows, added) - last.rows, shortest_of(rows));
  }
  /// The last segment grows by added(head) rows of each head, which were planned.
  template <class Added>
  void grew_by_head(sequence_layer owner, const Added& added, cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    segment_record& last = records_[entry].back();
    index_t* const rows = host_rows_.data() + first_of(entry, last);
    memory_.grow(entry, records_[entry].size() - 1, last, longest_of(rows, added) - last.rows, shortest_of(rows),
                 stream);
    for (index_t h = 0; h < heads_; ++h) rows[h] += added(h), stored(entry)[h] += added(h);
    last.rows = *std::max_element(rows, rows + heads_);
  }

  /// Called when before(head) rows of the i-th segment have become more. Makes the means of blocks that were not whole,
  /// and of those behind them.
  template <class Before>
  void renew_means(sequence_layer owner, std::size_t i, const Before& before, cudaStream_t stream) {
    const segment_record& record = segments(owner)[i];
    const index_t* const rows = rows_by_head(owner, record);
    bool changes = false;
    for (index_t h = 0; record.block > 1 && h < heads_; ++h) {
      const bool whole = before(h) % record.block == 0 || before(h) == rows[h];
      first_slots_[std::size_t(h)] = whole ? ceil_div(rows[h], record.block) : before(h) / record.block;
      changes = changes || !whole;
    }
    if (changes) cuda::renew_means(on_device(owner, i), first_slots_.data(), rows, heads_, stream);
  }

  /// What `keep` will make of a sequence's segments; counts [segments, kv_heads], rows that stay.
  /// Errors   too little memory: tessera::error; `forget` releases what was planned before.
  void plan_keep(sequence_layer owner, const index_t* counts, host_vector<kept_segment>& plan) {
    const auto& all = segments(owner);
    plan.reserve(all.size());
    index_t end = 0;
    for (const segment_record& record : all) {
      const index_t* const rows = rows_by_head(owner, record);
      kept_segment& kept = plan.emplace_back();
      kept.record = record;
      kept.drops = !std::equal(rows, rows + heads_, counts);
      kept.record.first_row = end, kept.record.rows = *std::max_element(counts, counts + heads_);
      kept.moves = kept.drops || (Memory::moves_with_first_row && record.first_row != end);
      if (kept.moves) kept.record.home = order_.index(owner);
      if (kept.drops) memory_.plan_keep(kept);
      end += kept.record.rows;
      counts += heads_;
    }
  }
  void forget(host_vector<kept_segment>& plan) {
    for (kept_segment& kept : plan) memory_.forget(kept);
    plan.clear();
  }
  /// Keeps the chosen rows of every head, as planned. The others of a segment move next to each other, and segments
  /// behind those before them. Means of blocks that change are made anew.
  /// Shapes   chosen: ascending slots of every head, of which the first ones are packed; counts as for `plan_keep`.
  void keep(sequence_layer owner, const selection_view& chosen, const index_t* counts, host_vector<kept_segment>& plan,
            cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    for (index_t id = 0; id < order_.sequences; ++id) {
      if (id != owner.id) hand_over(entry, order_.index({owner.layer, id}), owner.layer, stream);
    }
    index_t* const total = stored(entry);
    std::fill_n(total, heads_, 0);  // rows that stay, before each segment
    std::fill(first_slots_.begin(), first_slots_.end(), 0);
    for (std::size_t s = 0; s < plan.size(); ++s, counts += heads_) {
      segment_record& record = records_[entry][s];
      index_t* const rows = host_rows_.data() + first_of(entry, record);
      const device_segment from = memory_.set_aside(segment(entry, s), record, stream);
      std::swap(record, plan[s].record);
      memory_.write_tables(entry, s, record, stream);
      const device_segment to = segment(entry, s);
      const segment_slots slots{total, first_slots_.data(), counts};
      if (plan[s].moves) keep_segment(from, to, chosen, slots, heads_, stream);
      if (plan[s].drops && to.block > 0) keep_means(to, chosen, slots, heads_, stream);
      memory_.release_dropped(plan[s], record);
      for (index_t h = 0; h < heads_; ++h) first_slots_[std::size_t(h)] += std::exchange(rows[h], counts[h]);
      for (index_t h = 0; h < heads_; ++h) total[h] += counts[h];
      write_entry(entry, s, stream);
    }
    plan.clear();
  }

  /// Reserves memory on the host for `commit_copy`, which gives an empty entry the segments of another one. In planes
  /// the first `shared` segments are shared, and the others are copied; in pages all are shared. `copy_tables` follows
  /// all layers' copies.
  void plan_copy(index_t layer, index_t from, index_t to) {
    records_[order_.index({layer, to})].reserve(records_[order_.index({layer, from})].size());
    copied_[std::size_t(layer)] = records_[order_.index({layer, from})];
  }
  void commit_copy(index_t layer, index_t from, index_t to, std::size_t shared, cudaStream_t stream) {
    const std::size_t entry = order_.index({layer, to}), source = order_.index({layer, from});
    std::copy_n(stored(source), heads_, stored(entry));
    scattered_[entry] = scattered_[source];
    for (segment_record& record : copied_[std::size_t(layer)]) {
      memory_.share(record, entry);
      std::copy_n(host_rows_.begin() + first_of(source, record), heads_, host_rows_.begin() + first_of(entry, record));
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
    std::fill_n(stored(left), heads_, 0);
    scattered_[left] = false;
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
      memory_.plan(record, rows, 0);
    } catch (...) {
      return false;
    }
    memory_.grow(entry, first, record, rows, 0, stream);
    record.rows = rows;
    set_rows(entry, record, rows);  // all heads have as many: no row was dropped
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

 private:
  using base::counts_, base::first_of, base::hand_over, base::heads_, base::host_rows_, base::memory_, base::move,
      base::order_, base::records_, base::scattered_, base::segment, base::set_rows, base::stored, base::take_over,
      base::write_entry;

  index_t shortest_of(const index_t* rows) const { return *std::min_element(rows, rows + heads_); }
  /// The longest of rows[head] + added(head); null: of 0.
  template <class Added>
  index_t longest_of(const index_t* rows, const Added& added) const {
    index_t longest = 0;
    for (index_t h = 0; h < heads_; ++h) longest = (std::max)(longest, (rows ? rows[h] : 0) + added(h));
    return longest;
  }
  /// The record of a segment behind all others, with a slot that no other segment has.
  segment_record behind(sequence_layer owner, segment_record record, const host_vector<segment_record>& unseen) const {
    const std::size_t entry = order_.index(owner);
    record.first_row = unseen.empty() ? end_row(owner) : unseen.back().first_row + unseen.back().rows;
    record.rows = 0, record.slot = 0, record.home = entry;
    const auto has = [&](const host_vector<segment_record>& all) {
      return std::any_of(all.begin(), all.end(),
                         [&](const segment_record& other) { return other.slot == record.slot; });
    };
    while (has(records_[entry]) || has(unseen)) ++record.slot;
    return record;
  }

  host_vector<index_t> first_slots_;                 // [kv_heads], scratch
  host_vector<host_vector<segment_record>> copied_;  // by layer, of `plan_copy`
};

}  // namespace cuda
TESSERA_NAMESPACE_END
