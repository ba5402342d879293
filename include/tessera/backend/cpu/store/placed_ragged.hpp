// Rows in ragged pages on the CPU, from one pool.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "../../../core/host/host_vector.hpp"
#include "../../../layout/ragged_pages.hpp"
#include "../../../runtime/ragged_pool.hpp"
#include "placed_runs.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Pages of all layers and sequences come from one pool, whose memory grows by an eighth. Each entry has a flat table
/// of blocks: for each kv_head a row of as many blocks as its tokens need.
/// Bytes    of an entry: the columns of its heads in the pages of their groups.
template <class Layout>
class placed_rows<Layout, ragged_pages> {
 public:
  using encoding_type = typename Layout::encoding_type;
  using view_type = kv_view<view_element<encoding_type>, Layout::k_dim, csr_table, Layout::v_dim>;

  placed_rows(const ragged_pages& where, index_t layers, index_t kv_heads)
      : page_(where.page), groups_(where.groups(layers, kv_heads)), pool_(groups_.count(), where.max_pages) {}

  view_type view(std::size_t entry, const host_vector<index_t>& lengths) {
    const table& here = tables_[entry];
    view_type view;
    view.k = k_.data();
    view.v = v_.data();
    view.k_strides = {offset_t(page_) * Layout::k_dim, 0, Layout::k_dim, 1};
    view.v_strides = {offset_t(page_) * Layout::v_dim, 0, Layout::v_dim, 1};
    view.sequences = 1;
    view.kv_heads = groups_.kv_heads;
    view.lengths = lengths.data();
    view.length_strides = {0, 1};
    view.table = {here.begins.data(), here.blocks.data(), page_, groups_.kv_heads};
    if constexpr (encoding_type::scaled) view.scales = {k_scales_.data(), v_scales_.data(), page_, 0, 1};
    return view;
  }

  void make_room(std::size_t entry, const host_vector<index_t>& lengths, index_t tokens) {
    host_vector<index_t> wanted = lengths;
    for (index_t& count : wanted) count += tokens;
    lay_out(entry, wanted);
  }

  void keep(std::size_t entry, const host_vector<index_t>& lengths, const selection& chosen, executor& workers) {
    pack(view(entry, lengths), chosen.view(), view(entry, lengths), workers);
    truncate(entry, chosen.counts);
  }
  void truncate(std::size_t entry, const host_vector<index_t>& lengths) {
    std::copy(lengths.begin(), lengths.end(), tables_[entry].tokens.begin());
    release_pages(entry);
    fill(entry);  // of fewer blocks than before
  }

  /// Gives each head blocks for `tokens[h]` tokens. Nothing changes where pages or memory run out.
  void lay_out(std::size_t entry, const host_vector<index_t>& tokens) {
    table added = tables_[entry];
    added.tokens = tokens;
    std::size_t blocks = 0;
    for (const index_t count : tokens) blocks += std::size_t(ceil_div(count, page_));
    added.blocks.reserve(blocks);
    table previous = std::exchange(tables_[entry], std::move(added));
    try {
      acquire_pages(entry);
    } catch (...) {
      tables_[entry] = std::move(previous);
      release_pages(entry);
      throw;
    }
    fill(entry);
  }

  void expect(index_t id, index_t tokens) {
    offset_t pages = tokens > 0 ? pool_.reserved(id) : 0;
    pages = (std::max)(pages, pages_with(id, tokens));
    reserve(id, index_t((std::min<offset_t>)(pages, (std::numeric_limits<index_t>::max)())));
  }
  void reserve(index_t id, index_t pages) { pool_.reserve(id, pages); }

  /// Pages that a sequence needs when each of its heads in every layer has `tokens` more.
  offset_t pages_with(index_t id, index_t tokens) const {
    offset_t pages = 0;
    for (index_t group = 0; group < groups_.count(); ++group)
      pages += groups_.pages_for(group, longest(id, group) + tokens, page_);
    return pages;
  }

  void open(std::size_t entry) {
    const std::size_t wanted = (entry / std::size_t(groups_.layers) + 1) * std::size_t(groups_.layers);
    while (tables_.size() < wanted) tables_.emplace_back(groups_.kv_heads);
    pool_.open(id_of(entry));
    clear(entry);
  }
  void clear(std::size_t entry) {
    table& here = tables_[entry];
    std::fill(here.tokens.begin(), here.tokens.end(), 0);
    std::fill(here.begins.begin(), here.begins.end(), 0);
    here.blocks.clear();
    release_pages(entry);
    pool_.reserve(id_of(entry), 0);
  }
  void copy(std::size_t source, std::size_t target) {
    lay_out(target, tables_[source].tokens);
    const table &original = tables_[source], &copied = tables_[target];
    for (std::size_t i = 0; i < original.blocks.size(); ++i) {
      const auto rows = [&](auto& all, offset_t dim) {
        const offset_t count = page_ * dim;
        std::copy_n(all.begin() + original.blocks[i] * count, count, all.begin() + copied.blocks[i] * count);
      };
      rows(k_, Layout::k_dim), rows(v_, Layout::v_dim);
      if constexpr (encoding_type::scaled) rows(k_scales_, 1), rows(v_scales_, 1);
    }
  }
  offset_t bytes(std::size_t entry) const {
    if (entry >= tables_.size()) return 0;
    offset_t blocks = 0;
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      const index_t group = group_of(entry, h);
      blocks += offset_t(page_count(id_of(entry), group)) * groups_.blocks_of_page(group);
    }
    return blocks * page_ * Layout::token_bytes();
  }
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    const offset_t pages = upper_bound_pages(groups_, page_, peaks);
    return {pages * page_bytes(), pages};
  }
  capacity available() const {
    return {capacity::unlimited, pool_.capacity() == 0 ? capacity::unlimited : pool_.capacity() - pool_.claimed()};
  }

  const head_groups& groups() const { return groups_; }
  index_t page() const { return page_; }
  /// Pages of a group of a sequence.
  index_t page_count(index_t id, index_t group) const { return index_t(pool_.pages(id, group).size()); }
  const ragged_pool& pool() const { return pool_; }

 private:
  struct table {
    explicit table(index_t kv_heads) : tokens(std::size_t(kv_heads), 0), begins(std::size_t(kv_heads) + 1, 0) {}
    host_vector<index_t> tokens;  // by kv_head, for which there are blocks
    host_vector<index_t> begins;  // where each kv_head's row of blocks begins
    host_vector<index_t> blocks;
  };

  offset_t page_bytes() const { return offset_t(page_) * groups_.heads * Layout::token_bytes(); }
  index_t id_of(std::size_t entry) const { return index_t(entry / std::size_t(groups_.layers)); }
  index_t head_of(std::size_t entry, index_t head) const {
    return index_t(entry % std::size_t(groups_.layers)) * groups_.kv_heads + head;
  }
  index_t group_of(std::size_t entry, index_t head) const { return groups_.group[std::size_t(head_of(entry, head))]; }
  /// Tokens of the longest head of a group.
  index_t longest(index_t id, index_t group) const {
    index_t result = 0;
    for (const index_t member : groups_.row(group)) {
      const std::size_t entry = std::size_t(id) * std::size_t(groups_.layers) + std::size_t(member / groups_.kv_heads);
      result = (std::max)(result, tables_[entry].tokens[std::size_t(member % groups_.kv_heads)]);
    }
    return result;
  }

  /// Pages that a group's longest head needs.
  index_t pages_of(index_t id, index_t group) const { return groups_.pages_for(group, longest(id, group), page_); }

  void acquire_pages(std::size_t entry) {
    const index_t id = id_of(entry);
    offset_t more = 0;
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      const index_t group = group_of(entry, h);
      if (h == first_member(entry, group)) more += (std::max)(0, pages_of(id, group) - page_count(id, group));
    }
    grow(index_t(pool_.made() + (std::max<offset_t>)(0, more - pool_.idle())));
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      const index_t group = group_of(entry, h);
      pool_.acquire(id, group, pages_of(id, group));
    }
  }
  void release_pages(std::size_t entry) {
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      const index_t group = group_of(entry, h);
      pool_.release(id_of(entry), group, pages_of(id_of(entry), group));
    }
  }
  /// The first kv_head of an entry's layer that is in a group.
  index_t first_member(std::size_t entry, index_t group) const {
    index_t head = 0;
    while (group_of(entry, head) != group) ++head;
    return head;
  }
  /// Writes an entry's table. Needs no memory: `make_room` has allocated it.
  void fill(std::size_t entry) {
    table& here = tables_[entry];
    here.blocks.clear();
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      here.begins[std::size_t(h)] = index_t(here.blocks.size());
      const auto pages = pool_.pages(id_of(entry), group_of(entry, h));
      for (index_t i = 0; i < ceil_div(here.tokens[std::size_t(h)], page_); ++i) {
        here.blocks.push_back(groups_.block(head_of(entry, h), i, pages));
      }
    }
    here.begins.back() = index_t(here.blocks.size());
  }

  /// Allocates exactly `count`: resize alone would allocate twice as many.
  template <class X>
  static void enlarge(host_vector<X>& numbers, std::size_t count) {
    numbers.reserve(count);
    numbers.resize(count);
  }
  void grow(index_t least) {
    if (least <= pages_) return;
    const index_t wanted = (std::max)(least, pages_ + pages_ / 8);
    const std::size_t rows = std::size_t(page_) * std::size_t(groups_.heads) * std::size_t(wanted);
    enlarge(k_, rows * Layout::k_dim);
    enlarge(v_, rows * Layout::v_dim);
    if constexpr (encoding_type::scaled) {
      enlarge(k_scales_, rows);
      enlarge(v_scales_, rows);
    }
    pages_ = wanted;
  }

  using stored = typename encoding_type::stored_type;
  index_t page_, pages_ = 0;  // tokens of a page; pages in memory
  head_groups groups_;
  ragged_pool pool_;
  host_vector<stored> k_, v_;
  host_vector<float> k_scales_, v_scales_;
  host_vector<table> tables_;  // by entry
};

}  // namespace cpu
TESSERA_NAMESPACE_END
