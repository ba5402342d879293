// Rows in fixed pages on the CPU, from one pool.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../layout/fixed_pages.hpp"
#include "placed_runs.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// All pages come from one pool that grows by an eighth. Released pages are used first.
/// Bytes    of an entry: its pages. The pool's spare pages belong to none.
template <class Layout, int Page>
class placed_rows<Layout, fixed_pages<Page>> {
 public:
  using encoding_type = typename Layout::encoding_type;
  using view_type = kv_view<view_element<encoding_type>, Layout::k_dim, csr_table, Layout::v_dim>;

  placed_rows(const fixed_pages<Page>&, index_t, index_t kv_heads) : heads_(kv_heads) {}

  view_type view(std::size_t entry, const host_vector<index_t>& lengths) {
    view_type view;
    view.k = k_.data();
    view.v = v_.data();
    view.k_strides = {page_rows() * Layout::k_dim, Layout::k_dim, offset_t(heads_) * Layout::k_dim, 1};
    view.v_strides = {page_rows() * Layout::v_dim, Layout::v_dim, offset_t(heads_) * Layout::v_dim, 1};
    view.sequences = 1;
    view.kv_heads = heads_;
    view.lengths = lengths.data();
    view.length_strides = {0, 1};
    view.table = {&first_page, table_of(entry).data(), Page, 1};
    if constexpr (encoding_type::scaled) view.scales = {k_scales_.data(), v_scales_.data(), page_rows(), 1, heads_};
    return view;
  }

  void make_room(std::size_t entry, const host_vector<index_t>& lengths, index_t tokens) {
    const offset_t longest = *std::max_element(lengths.begin(), lengths.end());
    host_vector<index_t>& table = table_of(entry);
    acquire(table, std::size_t(fixed_pages<Page>::pages_for(longest + tokens)));
  }

  void keep(std::size_t entry, const host_vector<index_t>& lengths, const selection& chosen, executor& workers) {
    pack(view(entry, lengths), chosen.view(), view(entry, lengths), workers);
    const offset_t longest = *std::max_element(chosen.counts.begin(), chosen.counts.end());
    release(table_of(entry), std::size_t(fixed_pages<Page>::pages_for(longest)));
  }

  void truncate(std::size_t entry, const host_vector<index_t>& lengths) {
    const offset_t longest = *std::max_element(lengths.begin(), lengths.end());
    release(table_of(entry), std::size_t(fixed_pages<Page>::pages_for(longest)));
  }
  void expect(index_t, index_t) {}
  void open(std::size_t entry) { release(table_of(entry), 0); }
  void clear(std::size_t entry) { release(tables_[entry], 0); }
  void copy(std::size_t source, std::size_t target) {
    acquire(table_of(target), table_of(source).size());
    for (std::size_t i = 0; i < tables_[source].size(); ++i) {
      const auto rows = [&](auto& all, offset_t dim) {
        const offset_t count = page_rows() * dim;
        std::copy_n(all.begin() + tables_[source][i] * count, count, all.begin() + tables_[target][i] * count);
      };
      rows(k_, Layout::k_dim), rows(v_, Layout::v_dim);
      if constexpr (encoding_type::scaled) rows(k_scales_, 1), rows(v_scales_, 1);
    }
  }
  void lay_out(std::size_t entry, const host_vector<index_t>& lengths) { make_room(entry, lengths, 0); }
  offset_t bytes(std::size_t entry) const {
    return entry < tables_.size() ? offset_t(tables_[entry].size()) * page_rows() * Layout::token_bytes() : 0;
  }
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    offset_t pages = 0;
    for (const layer_peak& peak : peaks) pages += fixed_pages<Page>::pages_for(peak.stored.longest);
    return {pages * page_rows() * Layout::token_bytes(), pages};
  }
  capacity available() const { return {capacity::unlimited, capacity::unlimited}; }

 private:
  offset_t page_rows() const { return offset_t(Page) * heads_; }
  host_vector<index_t>& table_of(std::size_t entry) {
    if (tables_.size() <= entry) tables_.resize(entry + 1);
    return tables_[entry];
  }
  /// Adds pages to a table until it has `wanted`, or none of them.
  void acquire(host_vector<index_t>& table, std::size_t wanted) {
    if (wanted <= table.size()) return;
    const std::size_t missing = wanted - table.size();
    if (std::size_t(free_pages_) < missing) grow(index_t(missing) - free_pages_);
    table.reserve(wanted);
    for (std::size_t i = 0; i < missing; ++i) {
      table.push_back(first_free_);
      first_free_ = next_free_[std::size_t(first_free_)];
      --free_pages_;
    }
  }
  void release(host_vector<index_t>& table, std::size_t left) {
    for (; table.size() > left; table.pop_back()) release_page(table.back());
  }
  void release_page(index_t page) {
    next_free_[std::size_t(page)] = first_free_;
    first_free_ = page;
    ++free_pages_;
  }
  /// Allocates exactly `count`: resize alone would allocate twice as many.
  template <class X>
  static void enlarge(host_vector<X>& numbers, std::size_t count) {
    numbers.reserve(count);
    numbers.resize(count);
  }
  void grow(index_t least) {
    const index_t added = (std::max)(least, pages_ / 8);
    const std::size_t rows = std::size_t(page_rows()) * std::size_t(pages_ + added);
    enlarge(next_free_, std::size_t(pages_ + added));
    enlarge(k_, rows * Layout::k_dim);
    enlarge(v_, rows * Layout::v_dim);
    if constexpr (encoding_type::scaled) {
      enlarge(k_scales_, rows);
      enlarge(v_scales_, rows);
    }
    for (index_t page = pages_ + added - 1; page >= pages_; --page) release_page(page);
    pages_ += added;
  }

  static constexpr index_t first_page = 0;  // begin of the table of the view's one sequence

  using stored = typename encoding_type::stored_type;
  index_t heads_, pages_ = 0;
  // A linked list of the free pages, as long as the pool: a release allocates nothing, also in a copy of the pool.
  host_vector<index_t> next_free_;
  index_t first_free_ = no_index, free_pages_ = 0;
  host_vector<stored> k_, v_;
  host_vector<float> k_scales_, v_scales_;
  host_vector<host_vector<index_t>> tables_;  // by entry
};

}  // namespace cpu
TESSERA_NAMESPACE_END
