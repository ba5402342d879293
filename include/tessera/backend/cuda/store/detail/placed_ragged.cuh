// Rows in ragged pages on the device, from one pool.
#pragma once

#include <algorithm>
#include <limits>
#include <string>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../layout/ragged_pages.hpp"
#include "../../../../runtime/ragged_pool.hpp"
#include "placed_runs.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

inline constexpr int entries_at_a_time = 384;  // 3 KiB of a launch's parameters
struct some_entries {
  index_t index[entries_at_a_time], blocks[entries_at_a_time];
};
template <int Threads>
__global__ void __launch_bounds__(Threads)
    set_entries_entry(const __grid_constant__ some_entries given, index_t count, index_t* to) {
  for (index_t i = index_t(threadIdx.x); i < count; i += Threads) to[given.index[i]] = given.blocks[i];
}

}  // namespace detail

/// Pages of all layers and sequences come from one pool, whose memory is allocated when this is made. The host knows
/// who owns which page (runtime/ragged_pool.hpp). The device reads a flat table of blocks, one row for every (layer,
/// sequence, kv_head). One launch writes the table's new elements after a change. Nothing moves when an entry grows. A
/// copy shares its pages with the original; who writes to a shared page gets one of its own first.
/// Bytes    of an entry: the columns of its heads in the pages of their groups, of shared pages its part.
template <class Layout>
class placed_rows<Layout, ragged_pages> {
 public:
  using encoding_type = typename Layout::encoding_type;
  using stored_type = typename encoding_type::stored_type;
  using view_type = kv_view<view_element<encoding_type>, Layout::k_dim, csr_table, Layout::v_dim>;

  static constexpr bool keeps_in_place = true;
  static offset_t rows_for(const ragged_pages& where, index_t entries, index_t kv_heads, index_t tokens) {
    return offset_t(entries) * kv_heads * ceil_div(tokens, where.page) * where.page;
  }

  /// `rows`: tokens of single kv_heads, as for every placement. It is ignored where the placement gives a number of
  /// pages.
  placed_rows(const ragged_pages& where, index_t layers, index_t sequences, index_t kv_heads, index_t tokens,
              offset_t rows)
      : layers_(layers),
        sequences_(sequences),
        heads_(kv_heads),
        page_(where.page),
        widest_(ceil_div(tokens, where.page)),
        groups_(where.groups(layers, kv_heads)),
        pages_(where.max_pages > 0 ? where.max_pages : pages_of(rows)),
        pool_(groups_.count(), pages_),
        capacity_(std::size_t(layers) * std::size_t(sequences) * std::size_t(kv_heads)),
        least_room_(std::size_t(layers) * std::size_t(sequences), unknown_room),
        wanted_(std::size_t(sequences) * std::size_t(groups_.count())),
        written_(wanted_.size()),
        needs_(std::size_t(sequences)),
        k_(std::size_t(offset_t(pages_) * page_rows()) * view_type::k_units),
        v_(std::size_t(offset_t(pages_) * page_rows()) * view_type::v_units),
        scales_(encoding_type::scaled ? std::size_t(2 * offset_t(pages_) * page_rows()) : 0),
        tables_(capacity_.size() * std::size_t(widest_)),
        firsts_(1, sequences, kv_heads) {
    require(tables_.size() < std::size_t(1) << 31, "entries of all page tables", tables_.size(), "below 2^31",
            "lower cache_options::tokens or sequences, or take larger pages");
    pool_.open(sequences - 1);
    host_vector<index_t> firsts;
    for (index_t row = 0; row < sequences * kv_heads; ++row) firsts.push_back(row * widest_);
    check(cudaMemcpy(firsts_.entry({}), firsts.data(), firsts.size() * sizeof(index_t), cudaMemcpyHostToDevice),
          "cudaMemcpy");
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // the caller's streams do not wait for it
  }

  view_type view(sequence_layer owner) const { return view(owner.layer, firsts_.entry({0, owner.id}), 1); }
  view_type batch_view(index_t layer, index_t batch) const { return view(layer, firsts_.batch(0), batch); }
  detail::gathered_column column() const { return firsts_.gathered(); }

  void plan() {
    for (const std::size_t at : touched_) wanted_[at] = 0, written_[at] = {};
    touched_.clear();
    std::fill(needs_.begin(), needs_.end(), sequence_needs{});
    more_ = 0;
    entries_planned_ = copies_planned_ = 0;
  }
  static constexpr bool moves() { return false; }
  void abandon() { plan(); }

  /// Errors   fewer pages than the plan needs are neither owned nor promised: tessera::error.
  void plan_room(std::size_t entry, const stored_tokens& held, index_t tokens) {
    tokens_planned_ = tokens;
    if (has_room(entry, tokens)) return;
    for (index_t h = 0; h < heads_; ++h) {
      const index_t group = group_of(entry, h), capacity = capacity_[entry * std::size_t(heads_) + std::size_t(h)];
      const index_t wanted = groups_.pages_for(group, held.head(h) + tokens, page_);
      want(id_of(entry), group, wanted);
      if (pool_.any_shared()) write(id_of(entry), group, page_with(group, held.least), wanted);
      entries_planned_ +=
          std::size_t((std::max)(0, ceil_div(held.head(h) + tokens, page_) - ceil_div(capacity, page_)));
    }
    require_planned();
  }
  void commit_room(std::size_t entry, const index_t*, const stored_tokens& held, cudaStream_t) {
    if (has_room(entry, tokens_planned_)) return;
    const index_t id = id_of(entry);
    index_t& least_room = least_room_[entry];
    least_room = nothing;
    for (index_t h = 0; h < heads_; ++h) {
      const index_t tokens = held.head(h) + tokens_planned_, group = group_of(entry, h);
      own_pages(id, group);
      index_t& capacity = capacity_[entry * std::size_t(heads_) + std::size_t(h)];
      const index_t blocks = ceil_div((std::max)(tokens, capacity), page_);
      least_room = (std::min)(least_room, blocks * page_ - held.head(h));
      if (tokens <= capacity) continue;
      pool_.acquire(id, group, groups_.pages_for(group, tokens, page_));
      const auto pages = pool_.pages(id, group);
      for (index_t i = ceil_div(capacity, page_); i < blocks; ++i)
        entries_.push_back({index_t(row_of(entry, h) + i), groups_.block(head_of(entry, h), i, pages)});
      capacity = tokens;
    }
    peak_used_ = (std::max)(peak_used_, offset_t(pool_.made()) - pool_.idle());
  }
  /// Copies pages, and writes what is new in the tables. Called when all entries of a plan have been committed.
  void finish(cudaStream_t stream) {
    copies_.run<Layout>(k_.data(), v_.data(), scales_.data(), pages_, page_rows(), nullptr, stream);
    for (std::size_t first = 0; first < entries_.size(); first += detail::entries_at_a_time) {
      detail::some_entries some;
      const std::size_t count = (std::min)(entries_.size() - first, std::size_t(detail::entries_at_a_time));
      for (std::size_t i = 0; i < count; ++i) {
        some.index[i] = entries_[first + i].index;
        some.blocks[i] = entries_[first + i].block;
      }
      detail::set_entries_entry<128><<<1, 128, 0, stream>>>(some, index_t(count), tables_.data());
      check(cudaGetLastError(), "launch of set_entries");
    }
    entries_.clear();
  }
  void grew(std::size_t entry, index_t tokens) { least_room_[entry] -= tokens; }

  void plan_keep(std::size_t entry, const token_bound&, const kept_bound& kept) {
    if (!pool_.any_shared()) return;
    for (index_t h = 0; h < heads_; ++h) {
      const index_t left = kept.by_head.empty() ? kept.longest : kept.by_head[std::size_t(h)];
      write(id_of(entry), group_of(entry, h), 0, groups_.pages_for(group_of(entry, h), left, page_));
    }
    require_planned();
  }
  /// Rows move down in their own pages. A group's pages beyond its longest head return to the pool.
  template <class Mover, class Problem>
  void keep(std::size_t entry, const Problem& problem, const Mover& mover, const stored_tokens& kept,
            cudaStream_t stream) {
    for (index_t h = 0; h < heads_; ++h) own_pages(id_of(entry), group_of(entry, h));
    finish(stream);
    mover.in_place.run(problem, mover.scratch.data(), stream);
    for (index_t h = 0; h < heads_; ++h) capacity_[entry * std::size_t(heads_) + std::size_t(h)] = kept.head(h);
    least_room_[entry] = unknown_room;
    release_pages(entry);
  }
  void shrank(std::size_t entry, index_t, const stored_tokens& left) {
    for (index_t h = 0; h < heads_; ++h) {
      index_t& capacity = capacity_[entry * std::size_t(heads_) + std::size_t(h)];
      capacity = (std::min)(capacity, left.head(h));
    }
    least_room_[entry] = unknown_room;
    release_pages(entry);
  }
  /// No page is released: they count as room for the new tokens.
  void dropped(std::size_t, index_t, const token_bound&) {}

  /// The pages of a sequence belong to all of its layers: those of the first one share them all.
  void plan_copy(std::size_t, std::size_t, const token_bound&) {}
  void commit_copy(std::size_t from, std::size_t to, const index_t*, const token_bound&, cudaStream_t) {
    if (from == std::size_t(id_of(from))) pool_.share(id_of(from), id_of(to));
    std::copy_n(capacity_.begin() + offset_t(from) * heads_, heads_, capacity_.begin() + offset_t(to) * heads_);
    least_room_[to] = unknown_room;
  }
  void copy_tables(index_t id, index_t to, cudaStream_t stream) const {
    copy_in_layers(tables_.data(), layers_, row_of(std::size_t(sequences_), 0), row_of(std::size_t(id), 0),
                   row_of(std::size_t(to), 0), offset_t(heads_) * widest_, stream);
  }
  void plan_empty(std::size_t entry, const stored_tokens& held) { plan_room(entry, held, 0); }
  void commit_empty(std::size_t entry, const index_t* lengths, const stored_tokens& held, cudaStream_t stream) {
    commit_room(entry, lengths, held, stream);
    finish(stream);
  }
  void clear(std::size_t entry) {
    std::fill_n(capacity_.begin() + offset_t(entry) * heads_, heads_, 0);
    least_room_[entry] = unknown_room;
    release_pages(entry);
    pool_.reserve(id_of(entry), 0);
  }

  /// Sets `pages` aside for a sequence, those that it owns included, and one for each page that it shares.
  void reserve(index_t id, index_t pages) { pool_.reserve(id, pages, pool_.shared_pages(id)); }
  /// A fork in the middle of an announced prompt: both have what was set aside, and may replace all that they share.
  void share_reservation(index_t id, index_t copy) {
    reserve(copy, pool_.reserved(id));
    reserve(id, pool_.reserved(id));
  }
  /// Sets aside the pages that a sequence needs for `tokens` more in every head; 0: only those that it owns.
  /// `held_of(layer)`: what its heads store.
  template <class HeldOf>
  void expect(index_t id, index_t tokens, const HeldOf& held_of) {
    host_vector<index_t> longest(std::size_t(groups_.count()), 0), shortest(longest.size(), nothing);
    for (index_t layer = 0; layer < layers_; ++layer) {
      const stored_tokens held = held_of(layer);
      for (index_t h = 0; h < heads_; ++h) {
        const std::size_t group = std::size_t(groups_.group[std::size_t(layer * heads_ + h)]);
        longest[group] = (std::max)(longest[group], (std::min)(held.head(h) + tokens, widest_ * page_));
        shortest[group] = (std::min)(shortest[group], held.least);
      }
    }
    offset_t pages = tokens > 0 ? pool_.reserved(id) : 0, with = 0;
    index_t copies = 0;
    for (index_t group = 0; group < groups_.count(); ++group) {
      with += groups_.pages_for(group, longest[std::size_t(group)], page_);
      if (tokens > 0 && pool_.any_shared())
        copies += pool_.shared_pages(id, group, page_with(group, shortest[std::size_t(group)]), page_count(id, group));
    }
    if (tokens > 0) copies = (std::min)(pool_.shared_pages(id), (std::max)(copies, pool_.reserved_copies(id)));
    pool_.reserve(id, index_t((std::max)(pages, with)), copies);
  }

  const head_groups& groups() const { return groups_; }
  index_t page() const { return page_; }
  /// Pages that a group of a sequence owns.
  index_t page_count(index_t id, index_t group) const { return index_t(pool_.pages(id, group).size()); }
  const ragged_pool& pages() const { return pool_; }

  offset_t bytes(std::size_t entry) const {
    offset_t bytes = 0;
    for (index_t h = 0; h < heads_; ++h) {
      const index_t group = group_of(entry, h);
      bytes += pool_.bytes(id_of(entry), group, groups_.blocks_of_page(group) * page_ * Layout::token_bytes());
    }
    return bytes;
  }
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    const offset_t pages = upper_bound_pages(groups_, page_, peaks);
    return {pages * page_rows() * Layout::token_bytes(), pages};
  }
  capacity available() const { return {capacity::unlimited, offset_t(pages_) - pool_.claimed()}; }
  offset_t peak_bytes() const { return peak_used_ * page_rows() * Layout::token_bytes(); }

 private:
  struct table_entry {
    index_t index, block;
  };
  /// What a plan needs for one sequence: pages beyond those that it has, and copies of those that it shares.
  struct sequence_needs {
    index_t pages = 0, copies = 0;
    offset_t claim = 0;  ///< that both add
  };
  static constexpr index_t nothing = (std::numeric_limits<index_t>::max)();
  static constexpr index_t unknown_room = -1;  // less than any call asks for, one that loads rows into no pages too
  struct page_range {
    index_t first = nothing, last = 0;
  };

  offset_t page_rows() const { return offset_t(page_) * groups_.heads; }
  index_t pages_of(offset_t rows) const { return index_t((rows + page_rows() - 1) / page_rows()); }
  index_t id_of(std::size_t entry) const { return index_t(entry) % sequences_; }
  std::size_t entry_of(index_t layer, index_t id) const {
    return std::size_t(layer) * std::size_t(sequences_) + std::size_t(id);
  }
  index_t head_of(std::size_t entry, index_t head) const { return index_t(entry) / sequences_ * heads_ + head; }
  index_t group_of(std::size_t entry, index_t head) const { return groups_.group[std::size_t(head_of(entry, head))]; }
  /// Where a head's row of the tables begins.
  offset_t row_of(std::size_t entry, index_t head) const { return (offset_t(entry) * heads_ + head) * widest_; }
  /// Which page of a group has the slot.
  index_t page_with(index_t group, index_t slot) const { return slot / (page_ * groups_.blocks_of_page(group)); }
  std::size_t place_of(index_t id, index_t group) const {
    return std::size_t(id) * std::size_t(groups_.count()) + std::size_t(group);
  }

  /// Whether the pages of an entry's heads have room for `tokens` more: most steps need no look at its heads.
  bool has_room(std::size_t entry, index_t tokens) const { return tokens <= least_room_[entry] && !pool_.any_shared(); }
  /// Plans that a group of a sequence owns at least `pages` pages.
  void want(index_t id, index_t group, index_t pages) {
    const std::size_t at = place_of(id, group);
    const index_t planned = (std::max)(wanted_[at], page_count(id, group));
    if (pages <= planned) return;
    pool_.make_room(id, group, pages);
    touched_.push_back(at);
    wanted_[at] = pages;
    need(id, pages - planned, 0);
  }
  /// Plans that a group of a sequence shares none of its pages from `first` to below `last`.
  void write(index_t id, index_t group, index_t first, index_t last) {
    const std::size_t at = place_of(id, group);
    const page_range before = written_[at];
    const page_range now{(std::min)(before.first, first),
                         (std::max)(before.last, (std::min)(last, page_count(id, group)))};
    if (now.first >= now.last) return;
    touched_.push_back(at);
    written_[at] = now;
    const index_t copies = pool_.shared_pages(id, group, now.first, now.last) -
                           pool_.shared_pages(id, group, (std::min)(before.first, before.last), before.last);
    if (copies == 0) return;
    need(id, 0, copies);
    copies_planned_ += std::size_t(copies);
    entries_planned_ += std::size_t(copies) * std::size_t(groups_.heads);
  }
  void need(index_t id, index_t pages, index_t copies) {
    sequence_needs& needs = needs_[std::size_t(id)];
    needs.pages += pages;
    needs.copies += copies;
    more_ -= needs.claim;
    needs.claim = pool_.claim_of(id, needs.pages, needs.copies);
    more_ += needs.claim;
  }
  void require_planned() {
    entries_.reserve(entries_planned_);
    copies_.make_room(copies_planned_);
    if (pool_.claimed() + more_ <= pages_) return;
    fail("pages of the pool", pages_, "at least " + std::to_string(pool_.claimed() + more_),
         "raise cache_options::rows or the placement's max_pages, or close a sequence");
  }
  /// Replaces the shared pages that the plan writes to. `finish` copies them.
  void own_pages(index_t id, index_t group) {
    page_range& written = written_[place_of(id, group)];
    for (index_t i = written.first; i < written.last; ++i) {
      if (pool_.shared_pages(id, group, i, i + 1) == 0) continue;
      const index_t source = pool_.pages(id, group)[std::size_t(i)], blocks = groups_.blocks_of_page(group);
      copies_.add(source, pool_.replace(id, group, i));
      for (const index_t head : groups_.row(group)) {
        const std::size_t entry = entry_of(head / heads_, id);
        const index_t capacity = capacity_[entry * std::size_t(heads_) + std::size_t(head % heads_)];
        for (index_t b = i * blocks; b < (std::min)((i + 1) * blocks, ceil_div(capacity, page_)); ++b) {
          entries_.push_back(
              {index_t(row_of(entry, head % heads_) + b), groups_.block(head, b, pool_.pages(id, group))});
        }
      }
    }
    written = {};
  }
  void release_pages(std::size_t entry) {
    const index_t id = id_of(entry);
    for (index_t h = 0; h < heads_; ++h) {
      const index_t group = group_of(entry, h);
      index_t longest = 0;
      for (const index_t member : groups_.row(group)) {
        const index_t layer = member / heads_;
        longest =
            (std::max)(longest, capacity_[entry_of(layer, id) * std::size_t(heads_) + std::size_t(member % heads_)]);
      }
      pool_.release(id, group, groups_.pages_for(group, longest, page_));
    }
  }

  view_type view(index_t layer, const index_t* firsts, index_t batch) const {
    view_type view;
    view.k = k_.data();
    view.v = v_.data();
    view.k_strides = {offset_t(page_) * view_type::k_units, 0, view_type::k_units, 1};
    view.v_strides = {offset_t(page_) * view_type::v_units, 0, view_type::v_units, 1};
    view.sequences = batch;
    view.kv_heads = heads_;
    view.table = {firsts, tables_.data() + offset_t(layer) * sequences_ * heads_ * widest_, page_, heads_};
    if constexpr (encoding_type::scaled) {
      view.scales = {scales_.data(), scales_.data() + offset_t(pages_) * page_rows(), page_, 0, 1};
    }
    return view;
  }

  index_t layers_, sequences_, heads_, page_, widest_;
  head_groups groups_;
  index_t pages_;
  ragged_pool pool_;
  host_vector<index_t> capacity_;      // by entry and kv_head: tokens that its pages have room for
  host_vector<index_t> least_room_;    // by entry: tokens that each of its heads can take in pages that it has
  host_vector<index_t> wanted_;        // by sequence and group: pages that the plan needs; 0: no more than are owned
  host_vector<page_range> written_;    // by sequence and group: pages that the plan writes to
  host_vector<sequence_needs> needs_;  // by sequence
  host_vector<std::size_t> touched_;
  offset_t more_ = 0;  // pages that the plan claims beyond those that are claimed already
  index_t tokens_planned_ = 0;
  offset_t peak_used_ = 0;
  std::size_t entries_planned_ = 0, copies_planned_ = 0;
  page_copies copies_;
  host_vector<table_entry> entries_;  // of the tables, until they are written
  device_buffer<stored_type> k_, v_;
  device_buffer<float> scales_;
  device_buffer<index_t> tables_;
  id_column<index_t> firsts_;  // [sequences, kv_heads], where a row of blocks begins within its layer's
};

}  // namespace cuda
TESSERA_NAMESPACE_END
