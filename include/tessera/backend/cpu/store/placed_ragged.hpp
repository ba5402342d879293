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

/// Pages of all layers and sequences come from one pool; its memory grows by an eighth. Each place has a flat table of
/// blocks, one row a kv_head, of as many blocks as the head's tokens need.
/// Bytes    of a place: what the columns of its heads take in the pages that their groups hold.
template <class Layout>
class placed_rows<Layout, ragged_pages> {
 public:
  using encoding_type = typename Layout::encoding_type;
  using view_type = kv_view<view_element<encoding_type>, Layout::k_dim, csr_table, Layout::v_dim>;

  placed_rows(const ragged_pages& where, index_t layers, index_t kv_heads)
      : page_(where.page), groups_(where.groups(layers, kv_heads)), pool_(groups_.count(), where.most_pages) {}

  view_type view(std::size_t place, const host_vector<index_t>& lengths) {
    const table& here = tables_[place];
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

  void make_room(std::size_t place, const host_vector<index_t>& lengths, index_t tokens) {
    host_vector<index_t> wanted = lengths;
    for (index_t& own : wanted) own += tokens;
    lay_out(place, wanted);
  }

  void keep(std::size_t place, const host_vector<index_t>& lengths, const selection& chosen, executor& workers) {
    pack(view(place, lengths), chosen.view(), view(place, lengths), workers);
    std::copy(chosen.counts.begin(), chosen.counts.end(), tables_[place].tokens.begin());
    give_back(place);
    fill(place);  // of fewer blocks than before
  }

  void expect(index_t id, index_t tokens) {
    offset_t pages = tokens > 0 ? pool_.reserved(id) : 0;
    pages = (std::max)(pages, pages_with(id, tokens));
    reserve(id, index_t((std::min<offset_t>)(pages, (std::numeric_limits<index_t>::max)())));
  }
  void reserve(index_t id, index_t pages) { pool_.reserve(id, pages); }

  /// Pages that a sequence holds when each of its heads in every layer has `tokens` more.
  offset_t pages_with(index_t id, index_t tokens) const {
    offset_t pages = 0;
    for (index_t group = 0; group < groups_.count(); ++group)
      pages += groups_.pages_for(group, longest(id, group) + tokens, page_);
    return pages;
  }

  void open(std::size_t place) {
    const std::size_t wanted = (place / std::size_t(groups_.layers) + 1) * std::size_t(groups_.layers);
    while (tables_.size() < wanted) tables_.emplace_back(groups_.kv_heads);
    pool_.open(id_of(place));
    clear(place);
  }
  void clear(std::size_t place) {
    table& here = tables_[place];
    std::fill(here.tokens.begin(), here.tokens.end(), 0);
    std::fill(here.begins.begin(), here.begins.end(), 0);
    here.blocks.clear();
    give_back(place);
    pool_.reserve(id_of(place), 0);
  }
  void copy(std::size_t from, std::size_t to) {
    lay_out(to, tables_[from].tokens);
    const table &held = tables_[from], &fresh = tables_[to];
    for (std::size_t i = 0; i < held.blocks.size(); ++i) {
      const auto rows = [&](auto& all, offset_t dim) {
        const offset_t each = page_ * dim;
        std::copy_n(all.begin() + held.blocks[i] * each, each, all.begin() + fresh.blocks[i] * each);
      };
      rows(k_, Layout::k_dim), rows(v_, Layout::v_dim);
      if constexpr (encoding_type::scaled) rows(k_scales_, 1), rows(v_scales_, 1);
    }
  }
  offset_t bytes(std::size_t place) const {
    if (place >= tables_.size()) return 0;
    offset_t blocks = 0;
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      const index_t group = group_of(place, h);
      blocks += offset_t(page_count(id_of(place), group)) * groups_.blocks_of_page(group);
    }
    return blocks * page_ * Layout::token_bytes();
  }

  const head_groups& groups() const { return groups_; }
  index_t page() const { return page_; }
  /// Pages that a group of a sequence holds.
  index_t page_count(index_t id, index_t group) const { return index_t(pool_.pages(id, group).size()); }
  const ragged_pool& pool() const { return pool_; }

 private:
  struct table {
    explicit table(index_t kv_heads) : tokens(std::size_t(kv_heads), 0), begins(std::size_t(kv_heads) + 1, 0) {}
    host_vector<index_t> tokens;  // by kv_head, those that there is room for
    host_vector<index_t> begins;  // where each kv_head's row of blocks begins
    host_vector<index_t> blocks;
  };

  index_t id_of(std::size_t place) const { return index_t(place / std::size_t(groups_.layers)); }
  index_t head_of(std::size_t place, index_t head) const {
    return index_t(place % std::size_t(groups_.layers)) * groups_.kv_heads + head;
  }
  index_t group_of(std::size_t place, index_t head) const { return groups_.group[std::size_t(head_of(place, head))]; }
  /// Tokens of the longest head of a group.
  index_t longest(index_t id, index_t group) const {
    index_t most = 0;
    for (const index_t member : groups_.row(group)) {
      const std::size_t place = std::size_t(id) * std::size_t(groups_.layers) + std::size_t(member / groups_.kv_heads);
      most = (std::max)(most, tables_[place].tokens[std::size_t(member % groups_.kv_heads)]);
    }
    return most;
  }

  /// Pages that a group's longest head needs.
  index_t pages_of(index_t id, index_t group) const { return groups_.pages_for(group, longest(id, group), page_); }

  /// Blocks for so many tokens of each head; as before where there are no pages, or no memory, for them.
  void lay_out(std::size_t place, const host_vector<index_t>& tokens) {
    table fresh = tables_[place];
    fresh.tokens = tokens;
    std::size_t blocks = 0;
    for (const index_t own : tokens) blocks += std::size_t(ceil_div(own, page_));
    fresh.blocks.reserve(blocks);
    table before = std::exchange(tables_[place], std::move(fresh));
    try {
      take_pages(place);
    } catch (...) {
      tables_[place] = std::move(before);
      give_back(place);
      throw;
    }
    fill(place);
  }
  void take_pages(std::size_t place) {
    const index_t id = id_of(place);
    offset_t more = 0;
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      const index_t group = group_of(place, h);
      if (h == first_member(place, group)) more += (std::max)(0, pages_of(id, group) - page_count(id, group));
    }
    grow(index_t(pool_.made() + (std::max<offset_t>)(0, more - pool_.idle())));
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      const index_t group = group_of(place, h);
      pool_.acquire(id, group, pages_of(id, group));
    }
  }
  void give_back(std::size_t place) {
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      const index_t group = group_of(place, h);
      pool_.release(id_of(place), group, pages_of(id_of(place), group));
    }
  }
  /// The first kv_head of a place's layer that is in a group.
  index_t first_member(std::size_t place, index_t group) const {
    index_t head = 0;
    while (group_of(place, head) != group) ++head;
    return head;
  }
  /// Writes a place's table down. Needs no memory: `make_room` has taken it.
  void fill(std::size_t place) {
    table& here = tables_[place];
    here.blocks.clear();
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      here.begins[std::size_t(h)] = index_t(here.blocks.size());
      const auto pages = pool_.pages(id_of(place), group_of(place, h));
      for (index_t i = 0; i < ceil_div(here.tokens[std::size_t(h)], page_); ++i) {
        here.blocks.push_back(groups_.block(head_of(place, h), i, pages));
      }
    }
    here.begins.back() = index_t(here.blocks.size());
  }

  /// To exactly so many: resize alone would take twice as many.
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
  index_t page_, pages_ = 0;  // tokens of a page; pages that there is memory for
  head_groups groups_;
  ragged_pool pool_;
  host_vector<stored> k_, v_;
  host_vector<float> k_scales_, v_scales_;
  host_vector<table> tables_;  // by place
};

}  // namespace cpu
TESSERA_NAMESPACE_END
