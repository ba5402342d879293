// Rows in ragged pages on the device, from one pool.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../layout/ragged_pages.hpp"
#include "../../../../runtime/kept_lengths.hpp"
#include "../../../../runtime/ragged_pool.hpp"
#include "placed_runs.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Upper bounds, known to the host, of what every entry of a store holds. An entry is a (layer, sequence).

/// The bounds of one entry: of all its heads together, and of each head.
struct stored_tokens : token_bound {
  const index_t* first;  ///< [kv_heads], bounds when slots were last chosen
  index_t since;         ///< tokens that every head has gained since
  index_t head(index_t h) const { return (std::min)(longest, first[h] + since); }
};

/// The bounds of all entries. A step costs one addition per entry.
class stored_bounds {
 public:
  stored_bounds(index_t entries, index_t kv_heads)
      : heads_(kv_heads),
        bounds_(std::size_t(entries)),
        since_(std::size_t(entries)),
        first_(std::size_t(entries) * std::size_t(kv_heads)) {}

  const host_vector<token_bound>& bounds() const { return bounds_; }
  const token_bound& bound(std::size_t entry) const { return bounds_[entry]; }
  stored_tokens tokens(std::size_t entry) const {
    return {bounds_[entry], first_.data() + entry * std::size_t(heads_), since_[entry]};
  }
  host_vector<index_t> by_head(std::size_t entry) const {
    host_vector<index_t> all;
    for (index_t h = 0; h < heads_; ++h) all.push_back(tokens(entry).head(h));
    return all;
  }

  void grew(std::size_t entry, index_t tokens) {
    bounds_[entry].longest += tokens;
    bounds_[entry].total += offset_t(heads_) * tokens;
    since_[entry] += tokens;
  }
  void keep(std::size_t entry, const kept_bound& kept) {
    const stored_tokens previous = tokens(entry);
    for (index_t h = 0; h < heads_; ++h) {
      first_[entry * std::size_t(heads_) + std::size_t(h)] =
          kept.by_head.empty() ? (std::min)(previous.head(h), kept.longest) : kept.by_head[std::size_t(h)];
    }
    since_[entry] = 0;
    bounds_[entry] = kept;
  }
  /// Slots were dropped in place: no head has more than the longest one now.
  void shrank(std::size_t entry, const token_bound& kept) {
    bounds_[entry] = {(std::min)(bounds_[entry].longest, kept.longest), (std::min)(bounds_[entry].total, kept.total)};
  }
  void copy(std::size_t from, std::size_t to) {
    bounds_[to] = bounds_[from];
    since_[to] = since_[from];
    std::copy_n(first_.begin() + offset_t(from) * heads_, heads_, first_.begin() + offset_t(to) * heads_);
  }
  void clear(std::size_t entry) {
    bounds_[entry] = {};
    since_[entry] = 0;
    std::fill_n(first_.begin() + offset_t(entry) * heads_, heads_, 0);
  }

 private:
  index_t heads_;
  host_vector<token_bound> bounds_;  // by entry
  host_vector<index_t> since_;       // by entry
  host_vector<index_t> first_;       // [entries, kv_heads]
};

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
/// sequence, kv_head). One launch writes the table's new elements after a change. Nothing moves when an entry grows.
/// Bytes    of an entry: the columns of its heads in the pages that their groups own.
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
        wanted_(std::size_t(sequences) * std::size_t(groups_.count())),
        wanted_by_(std::size_t(sequences)),
        k_(std::size_t(offset_t(pages_) * page_rows()) * Layout::k_dim),
        v_(std::size_t(offset_t(pages_) * page_rows()) * Layout::v_dim),
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
    for (const std::size_t at : touched_) wanted_[at] = 0;
    touched_.clear();
    std::fill(wanted_by_.begin(), wanted_by_.end(), 0);
    more_ = 0;
    entries_planned_ = 0;
  }
  static constexpr bool moves() { return false; }
  void abandon() { plan(); }

  /// Errors   fewer pages than the plan needs are neither owned nor promised: tessera::error.
  void plan_room(std::size_t entry, const stored_tokens& held, index_t tokens) {
    for (index_t h = 0; h < heads_; ++h) {
      const index_t group = group_of(entry, h), capacity = capacity_[entry * std::size_t(heads_) + std::size_t(h)];
      want(id_of(entry), group, groups_.pages_for(group, held.head(h) + tokens, page_));
      entries_planned_ +=
          std::size_t((std::max)(0, ceil_div(held.head(h) + tokens, page_) - ceil_div(capacity, page_)));
    }
    entries_.reserve(entries_planned_);
    require(pool_.claimed() + more_ <= pages_, "pages of the pool", pages_,
            "at least " + std::to_string(pool_.claimed() + more_),
            "raise cache_options::rows or the placement's max_pages, or close a sequence");
    tokens_planned_ = tokens;
  }
  void commit_room(std::size_t entry, const index_t*, const stored_tokens& held, cudaStream_t) {
    const index_t id = id_of(entry);
    for (index_t h = 0; h < heads_; ++h) {
      const index_t tokens = held.head(h) + tokens_planned_, group = group_of(entry, h);
      index_t& capacity = capacity_[entry * std::size_t(heads_) + std::size_t(h)];
      if (tokens <= capacity) continue;
      pool_.acquire(id, group, groups_.pages_for(group, tokens, page_));
      const auto pages = pool_.pages(id, group);
      const offset_t row = (offset_t(entry) * heads_ + h) * widest_;
      for (index_t i = ceil_div(capacity, page_); i < ceil_div(tokens, page_); ++i) {
        entries_.push_back({index_t(row + i), groups_.block(head_of(entry, h), i, pages)});
      }
      capacity = tokens;
    }
    peak_used_ = (std::max)(peak_used_, offset_t(pool_.made()) - pool_.idle());
  }
  /// Writes what is new in the tables. Called when all entries of a plan have been committed.
  void finish(cudaStream_t stream) {
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
  void grew(std::size_t, index_t) {}

  void plan_keep(std::size_t, const token_bound&, const token_bound&) {}
  /// Rows move down in their own pages. A group's pages beyond its longest head return to the pool.
  template <class Mover, class Problem>
  void keep(std::size_t entry, const Problem& problem, const Mover& mover, const stored_tokens& kept,
            cudaStream_t stream) {
    mover.in_place.run(problem, mover.scratch.data(), stream);
    for (index_t h = 0; h < heads_; ++h) capacity_[entry * std::size_t(heads_) + std::size_t(h)] = kept.head(h);
    release_pages(entry);
  }
  void shrank(std::size_t entry, index_t, const stored_tokens& left) {
    for (index_t h = 0; h < heads_; ++h) {
      index_t& capacity = capacity_[entry * std::size_t(heads_) + std::size_t(h)];
      capacity = (std::min)(capacity, left.head(h));
    }
    release_pages(entry);
  }
  /// No page is released: they count as room for the new tokens.
  void dropped(std::size_t, index_t) {}
  void plan_copy(std::size_t to, const stored_tokens& held) { plan_room(to, held, 0); }
  void commit_copy(std::size_t from, std::size_t to, const index_t* lengths, const stored_tokens& held,
                   cudaStream_t stream) {
    commit_room(to, lengths, held, stream);
    finish(stream);  // its table is read now
    const block_pool<Layout> pool{k_.data(), v_.data(), scales_.data(), offset_t(pages_) * groups_.heads, page_};
    const auto table = [&](std::size_t entry) { return tables_.data() + offset_t(entry) * heads_ * widest_; };
    pool.copy(heads_, ceil_div(held.longest, page_), lengths, page_, table(from), table(to), widest_, stream);
  }
  void commit_empty(std::size_t entry, const index_t* lengths, const stored_tokens& held, cudaStream_t stream) {
    commit_room(entry, lengths, held, stream);
    finish(stream);
  }
  void clear(std::size_t entry) {
    std::fill_n(capacity_.begin() + offset_t(entry) * heads_, heads_, 0);
    release_pages(entry);
    pool_.reserve(id_of(entry), 0);
  }

  /// Sets `pages` aside for a sequence, those that it owns included.
  void reserve(index_t id, index_t pages) { pool_.reserve(id, pages); }
  /// Sets aside the pages that a sequence needs for `tokens` more in every head; 0: only those that it owns.
  /// `held_of(layer)`: what its heads store.
  template <class HeldOf>
  void expect(index_t id, index_t tokens, const HeldOf& held_of) {
    host_vector<index_t> longest(std::size_t(groups_.count()), 0);
    for (index_t layer = 0; layer < layers_; ++layer) {
      const stored_tokens held = held_of(layer);
      for (index_t h = 0; h < heads_; ++h) {
        index_t& largest = longest[std::size_t(groups_.group[std::size_t(layer * heads_ + h)])];
        largest = (std::max)(largest, (std::min)(held.head(h) + tokens, widest_ * page_));
      }
    }
    offset_t pages = tokens > 0 ? pool_.reserved(id) : 0, with = 0;
    for (index_t group = 0; group < groups_.count(); ++group)
      with += groups_.pages_for(group, longest[std::size_t(group)], page_);
    pool_.reserve(id, index_t((std::max)(pages, with)));
  }

  const head_groups& groups() const { return groups_; }
  index_t page() const { return page_; }
  /// Pages that a group of a sequence owns.
  index_t page_count(index_t id, index_t group) const { return index_t(pool_.pages(id, group).size()); }
  const ragged_pool& pages() const { return pool_; }

  offset_t bytes(std::size_t entry) const {
    offset_t blocks = 0;
    for (index_t h = 0; h < heads_; ++h) {
      const index_t group = group_of(entry, h);
      blocks += offset_t(page_count(id_of(entry), group)) * groups_.blocks_of_page(group);
    }
    return blocks * page_ * Layout::token_bytes();
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

  offset_t page_rows() const { return offset_t(page_) * groups_.heads; }
  index_t pages_of(offset_t rows) const { return index_t((rows + page_rows() - 1) / page_rows()); }
  index_t id_of(std::size_t entry) const { return index_t(entry) % sequences_; }
  index_t head_of(std::size_t entry, index_t head) const { return index_t(entry) / sequences_ * heads_ + head; }
  index_t group_of(std::size_t entry, index_t head) const { return groups_.group[std::size_t(head_of(entry, head))]; }

  /// Plans that a group of a sequence owns at least `pages` pages.
  void want(index_t id, index_t group, index_t pages) {
    const std::size_t at = std::size_t(id) * std::size_t(groups_.count()) + std::size_t(group);
    const index_t planned = (std::max)(wanted_[at], page_count(id, group));
    if (pages <= planned) return;
    pool_.make_room(id, group, pages);
    if (wanted_[at] == 0) touched_.push_back(at);
    wanted_[at] = pages;
    const index_t claim = (std::max)(pool_.page_count(id) + wanted_by_[std::size_t(id)], pool_.reserved(id));
    wanted_by_[std::size_t(id)] += pages - planned;
    more_ += (std::max)(pool_.page_count(id) + wanted_by_[std::size_t(id)], pool_.reserved(id)) - claim;
  }
  void release_pages(std::size_t entry) {
    const index_t id = id_of(entry);
    for (index_t h = 0; h < heads_; ++h) {
      const index_t group = group_of(entry, h);
      index_t longest = 0;
      for (const index_t member : groups_.row(group)) {
        const index_t layer = member / heads_;
        longest = (std::max)(
            longest, capacity_[(std::size_t(layer) * std::size_t(sequences_) + std::size_t(id)) * std::size_t(heads_) +
                               std::size_t(member % heads_)]);
      }
      pool_.release(id, group, groups_.pages_for(group, longest, page_));
    }
  }

  view_type view(index_t layer, const index_t* firsts, index_t batch) const {
    view_type view;
    view.k = k_.data();
    view.v = v_.data();
    view.k_strides = {offset_t(page_) * Layout::k_dim, 0, Layout::k_dim, 1};
    view.v_strides = {offset_t(page_) * Layout::v_dim, 0, Layout::v_dim, 1};
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
  host_vector<index_t> capacity_;   // by entry and kv_head: tokens that its pages have room for
  host_vector<index_t> wanted_;     // by sequence and group: pages that the plan needs; 0: no more than are owned
  host_vector<index_t> wanted_by_;  // by sequence: planned pages beyond those that it owns
  host_vector<std::size_t> touched_;
  offset_t more_ = 0;  // pages that the plan claims beyond those that are claimed already
  index_t tokens_planned_ = 0;
  offset_t peak_used_ = 0;
  std::size_t entries_planned_ = 0;
  host_vector<table_entry> entries_;  // of the tables, until they are written
  device_buffer<stored_type> k_, v_;
  device_buffer<float> scales_;
  device_buffer<index_t> tables_;
  id_column<index_t> firsts_;  // [sequences, kv_heads], where a row of blocks begins within its layer's
};

}  // namespace cuda
TESSERA_NAMESPACE_END
