// Rows in fixed pages on the CPU, from one pool.
#pragma once

#include <algorithm>

#include "../../../core/host/host_vector.hpp"
#include "../../../layout/fixed_pages.hpp"
#include "../../../runtime/counted_pages.hpp"
#include "placed_runs.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// All pages come from one pool that grows by an eighth. Released pages are used first. A copy shares its pages with
/// the original; who writes to a shared page gets one of its own first.
/// Bytes    of an entry: its pages, of shared ones its part. The pool's spare pages belong to none.
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
    view.k_strides = {page_rows() * view_type::k_units, view_type::k_units, offset_t(heads_) * view_type::k_units, 1};
    view.v_strides = {page_rows() * view_type::v_units, view_type::v_units, offset_t(heads_) * view_type::v_units, 1};
    view.sequences = 1;
    view.kv_heads = heads_;
    view.lengths = lengths.data();
    view.length_strides = {0, 1};
    view.table = {&first_page, table_of(entry).data(), Page, 1};
    if constexpr (encoding_type::scaled) view.scales = {k_scales_.data(), v_scales_.data(), page_rows(), 1, heads_};
    return view;
  }

  void make_room(std::size_t entry, const host_vector<index_t>& lengths, index_t tokens) {
    const auto [shortest, longest] = std::minmax_element(lengths.begin(), lengths.end());
    acquire(table_of(entry), std::size_t(*shortest / Page),
            std::size_t(fixed_pages<Page>::pages_for(offset_t(*longest) + tokens)));
  }

  void plan_keep(std::size_t entry, const host_vector<index_t>&, const selection& chosen) {
    if (!counted_.any_shared()) return;
    const offset_t longest = *std::max_element(chosen.counts.begin(), chosen.counts.end());
    acquire(table_of(entry), std::size_t(first_moved(chosen) / Page),
            std::size_t(fixed_pages<Page>::pages_for(longest)));
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
  void expect(index_t, index_t, bool) {}
  void open(std::size_t entry) { release(table_of(entry), 0); }
  void clear(std::size_t entry) { release(tables_[entry], 0); }
  void copy(std::size_t source, std::size_t target) {
    table_of((std::max)(source, target));  // so that the assignment moves no table
    tables_[target] = tables_[source];
    for (const index_t page : tables_[target]) counted_.share(page);
  }
  void lay_out(std::size_t entry, const host_vector<index_t>& lengths) { make_room(entry, lengths, 0); }
  offset_t bytes(std::size_t entry) const {
    return entry < tables_.size() ? counted_.bytes(tables_[entry], page_rows() * Layout::token_bytes()) : 0;
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
  /// Adds pages to a table until it has `wanted`, and gives it pages of its own for those from `first` to below
  /// `wanted` that it shares. Nothing changes when memory runs out.
  void acquire(host_vector<index_t>& table, std::size_t first, std::size_t wanted) {
    const std::size_t missing = wanted - (std::min)(wanted, table.size());
    const index_t taken = index_t(missing) + counted_.shared_of(table, first, wanted);
    if (taken == 0) return;
    grow(counted_.used() + taken);
    table.reserve(wanted);
    for (std::size_t i = first; i < (std::min)(wanted, table.size()); ++i) {
      if (counted_.is_shared(table[i])) replace(table[i]);
    }
    for (std::size_t i = 0; i < missing; ++i) table.push_back(counted_.acquire());
  }
  /// Copies a shared page to one that this entry alone has.
  void replace(index_t& page) {
    const index_t target = counted_.acquire();
    const auto rows = [&](auto& all, offset_t dim) {
      const offset_t count = page_rows() * dim;
      std::copy_n(all.begin() + page * count, count, all.begin() + target * count);
    };
    rows(k_, view_type::k_units), rows(v_, view_type::v_units);
    if constexpr (encoding_type::scaled) rows(k_scales_, 1), rows(v_scales_, 1);
    counted_.release(page);
    page = target;
  }
  void release(host_vector<index_t>& table, std::size_t left) {
    for (; table.size() > left; table.pop_back()) counted_.release(table.back());
  }
  /// Allocates exactly `count`: resize alone would allocate twice as many.
  template <class X>
  static void enlarge(host_vector<X>& numbers, std::size_t count) {
    numbers.reserve(count);
    numbers.resize(count);
  }
  /// Enlarges the memory to `least` pages or more.
  void grow(index_t least) {
    if (least <= pages_) return;
    const index_t wanted = (std::max)(least, pages_ + pages_ / 8);
    const std::size_t rows = std::size_t(page_rows()) * std::size_t(wanted);
    counted_.make_room(wanted);
    enlarge(k_, rows * view_type::k_units);
    enlarge(v_, rows * view_type::v_units);
    if constexpr (encoding_type::scaled) {
      enlarge(k_scales_, rows);
      enlarge(v_scales_, rows);
    }
    pages_ = wanted;
  }

  static constexpr index_t first_page = 0;  // begin of the table of the view's one sequence

  using stored = typename encoding_type::stored_type;
  index_t heads_, pages_ = 0;
  counted_pages counted_;
  host_vector<stored> k_, v_;
  host_vector<float> k_scales_, v_scales_;
  host_vector<host_vector<index_t>> tables_;  // by entry
};

}  // namespace cpu
TESSERA_NAMESPACE_END
