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
/// of blocks: for each kv_head a row of as many blocks as its tokens need. A copy shares its pages with the original;
/// who writes to a shared page gets one of its own first.
/// Bytes    of an entry: the columns of its heads in the pages of their groups, of shared pages its part.
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
    view.k_strides = {offset_t(page_) * view_type::k_units, 0, view_type::k_units, 1};
    view.v_strides = {offset_t(page_) * view_type::v_units, 0, view_type::v_units, 1};
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
    lay_out(entry, wanted, lengths);
  }

  void plan_keep(std::size_t entry, const host_vector<index_t>&, const selection& chosen) {
    if (!pool_.any_shared()) return;
    const index_t first = first_moved(chosen);
    own_pages(entry, [&](index_t) { return first; }, chosen.counts);
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
  void lay_out(std::size_t entry, const host_vector<index_t>& tokens) { lay_out(entry, tokens, tokens); }

  /// The same; slots of head h from `first[h]` on will be written.
  void lay_out(std::size_t entry, const host_vector<index_t>& tokens, const host_vector<index_t>& first) {
    table added = tables_[entry];
    added.tokens = tokens;
    std::size_t blocks = 0;
    for (const index_t count : tokens) blocks += std::size_t(ceil_div(count, page_));
    added.blocks.reserve(blocks);
    table previous = std::exchange(tables_[entry], std::move(added));
    try {
      acquire_pages(entry);
      own_pages(entry, [&](index_t head) { return first[std::size_t(head)]; }, tokens);
    } catch (...) {
      tables_[entry] = std::move(previous);
      release_pages(entry);
      throw;
    }
    fill(entry);
  }

  void expect(index_t id, index_t tokens, bool moves_rows) {
    offset_t pages = tokens > 0 ? pool_.reserved(id) : 0;
    pages = (std::max)(pages, pages_with(id, tokens));
    const index_t shared = tokens > 0 ? pool_.shared_pages(id) : 0;
    const index_t written = moves_rows || shared == 0 ? shared : pages_written(id);
    const index_t copies = (std::min)(shared, (std::max)(pool_.reserved_copies(id), written));
    pool_.reserve(id, index_t((std::min<offset_t>)(pages, (std::numeric_limits<index_t>::max)())), copies);
  }
  /// Reserves pages for a prompt, which may replace all that the sequence shares.
  void reserve(index_t id, index_t pages) { pool_.reserve(id, pages, pool_.shared_pages(id)); }

  /// A fork in the middle of an announced prompt: both have what was reserved, and may replace all that they share.
  void share_reservation(index_t id, index_t copy) {
    reserve(copy, pool_.reserved(id));
    reserve(id, pool_.reserved(id));
  }

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
    tables_[target] = tables_[source];
    // The pages of a sequence belong to all of its layers.
    if (source % std::size_t(groups_.layers) == 0) pool_.share(id_of(source), id_of(target));
  }
  offset_t bytes(std::size_t entry) const {
    if (entry >= tables_.size()) return 0;
    offset_t bytes = 0;
    for (index_t h = 0; h < groups_.kv_heads; ++h) {
      const index_t group = group_of(entry, h);
      bytes += pool_.bytes(id_of(entry), group, groups_.blocks_of_page(group) * page_ * Layout::token_bytes());
    }
    return bytes;
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
  std::size_t entry_of(index_t layer, index_t id) const {
    return std::size_t(id) * std::size_t(groups_.layers) + std::size_t(layer);
  }
  index_t id_of(std::size_t entry) const { return index_t(entry / std::size_t(groups_.layers)); }
  index_t head_of(std::size_t entry, index_t head) const {
    return index_t(entry % std::size_t(groups_.layers)) * groups_.kv_heads + head;
  }
  index_t group_of(std::size_t entry, index_t head) const { return groups_.group[std::size_t(head_of(entry, head))]; }
  /// Tokens of a head of the model.
  index_t tokens_of(index_t id, index_t member) const {
    return tables_[entry_of(member / groups_.kv_heads, id)].tokens[std::size_t(member % groups_.kv_heads)];
  }
  /// Tokens of the longest head of a group.
  index_t longest(index_t id, index_t group) const {
    index_t result = 0;
    for (const index_t member : groups_.row(group)) result = (std::max)(result, tokens_of(id, member));
    return result;
  }

  /// Shared pages of a sequence that new tokens would be written to.
  index_t pages_written(index_t id) const {
    index_t pages = 0;
    for (index_t group = 0; group < groups_.count(); ++group) {
      index_t shortest = no_index;
      for (const index_t member : groups_.row(group)) {
        const index_t tokens = tokens_of(id, member);
        shortest = shortest == no_index ? tokens : (std::min)(shortest, tokens);
      }
      pages += pool_.shared_pages(id, group, shortest / (page_ * groups_.blocks_of_page(group)), page_count(id, group));
    }
    return pages;
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
  /// Gives an entry pages of its own in place of those that it shares and in which slots of head h from first(h) to
  /// below `last[h]` lie. Nothing changes where pages or memory run out. Without such pages it needs no memory.
  template <class First>
  void own_pages(std::size_t entry, const First& first, const host_vector<index_t>& last) {
    if (!pool_.any_shared()) return;
    const index_t id = id_of(entry);
    index_t copies = 0;
    const auto each_group = [&](const auto& visit) {
      for (index_t h = 0; h < groups_.kv_heads; ++h) {
        const index_t group = group_of(entry, h), tokens = page_ * groups_.blocks_of_page(group);
        if (h != first_member(entry, group)) continue;
        index_t begin = no_index, end = 0;
        for (index_t other = h; other < groups_.kv_heads; ++other) {
          if (group_of(entry, other) != group || first(other) >= last[std::size_t(other)]) continue;
          const index_t written = first(other) / tokens;
          begin = begin == no_index ? written : (std::min)(begin, written);
          end = (std::max)(end, ceil_div(last[std::size_t(other)], tokens));
        }
        if (begin != no_index) visit(group, begin, (std::min)(end, page_count(id, group)));
      }
    };
    each_group([&](index_t group, index_t begin, index_t end) { copies += pool_.shared_pages(id, group, begin, end); });
    if (copies == 0) return;
    pool_.plan_copies(id, copies);
    grow(index_t(pool_.made() + (std::max)(0, copies - pool_.idle())));
    each_group([&](index_t group, index_t begin, index_t end) {
      for (index_t i = begin; i < end; ++i) {
        if (pool_.shared_pages(id, group, i, i + 1) == 0) continue;
        const index_t source = pool_.pages(id, group)[std::size_t(i)];
        copy_page(source, pool_.replace(id, group, i));
      }
    });
    for (index_t layer = 0; layer < groups_.layers; ++layer) fill(entry_of(layer, id));
  }
  void copy_page(index_t source, index_t target) {
    const auto rows = [&](auto& all, offset_t dim) {
      const offset_t count = offset_t(page_) * groups_.heads * dim;
      std::copy_n(all.begin() + source * count, count, all.begin() + target * count);
    };
    rows(k_, view_type::k_units), rows(v_, view_type::v_units);
    if constexpr (encoding_type::scaled) rows(k_scales_, 1), rows(v_scales_, 1);
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
  /// Writes an entry's table. Needs no memory: `lay_out` has allocated it.
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
    enlarge(k_, rows * view_type::k_units);
    enlarge(v_, rows * view_type::v_units);
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
