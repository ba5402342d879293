// Rows in fixed pages on the device, from one pool.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../layout/fixed_pages.hpp"
#include "../../../../runtime/counted_pages.hpp"
#include "placed_runs.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int pages_at_a_time = 96;
struct some_pages {
  index_t pages[pages_at_a_time];
};
template <int Threads>
__global__ void __launch_bounds__(Threads)
    set_pages_entry(const __grid_constant__ some_pages given, index_t count, index_t* to) {
  if (index_t(threadIdx.x) < count) to[threadIdx.x] = given.pages[threadIdx.x];
}

}  // namespace detail

/// Pages [pages, Page, kv_heads, dim], and a row of page numbers for every entry, which the device reads. The host
/// knows who has which page. Nothing moves when an entry grows. A copy shares its pages with the original; who writes
/// to a shared page gets one of its own first.
template <class Layout, int Page>
class placed_rows<Layout, fixed_pages<Page>> {
 public:
  using encoding_type = typename Layout::encoding_type;
  using stored_type = typename encoding_type::stored_type;
  using view_type = kv_view<view_element<encoding_type>, Layout::k_dim, csr_table, Layout::v_dim>;

  static constexpr bool keeps_in_place = true;
  static offset_t rows_for(const fixed_pages<Page>&, index_t entries, index_t kv_heads, index_t tokens) {
    return entries * fixed_pages<Page>::pages_for(tokens) * Page * kv_heads;
  }

  /// `rows`: tokens of single kv_heads, as for every placement; a page holds Page * kv_heads of them.
  placed_rows(const fixed_pages<Page>&, index_t layers, index_t sequences, index_t kv_heads, index_t tokens,
              offset_t rows)
      : sequences_(sequences),
        heads_(kv_heads),
        widest_(index_t(fixed_pages<Page>::pages_for(tokens))),
        pages_(index_t((rows + page_rows() - 1) / page_rows())),
        counted_(pages_),
        entry_pages_(std::size_t(layers) * std::size_t(sequences)),
        rows_(std::size_t(pages_ * page_rows()) * (view_type::k_units + view_type::v_units)),
        scales_(encoding_type::scaled ? std::size_t(2 * pages_ * page_rows()) : 0),
        tables_(entry_pages_.size() * std::size_t(widest_)),
        firsts_(1, sequences, 1) {
    require(offset_t(sequences) * widest_ <= offset_t(1) << 30, "pages of all tables", offset_t(sequences) * widest_,
            "at most 2^30", "lower cache_options::tokens or sequences");
    host_vector<index_t> firsts;
    for (index_t id = 0; id < sequences; ++id) firsts.push_back(id * widest_);
    check(cudaMemcpy(firsts_.entry({}), firsts.data(), firsts.size() * sizeof(index_t), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }

  view_type view(sequence_layer owner) const { return view(owner.layer, firsts_.entry({0, owner.id}), 1); }
  view_type batch_view(index_t layer, index_t batch) const { return view(layer, firsts_.batch(0), batch); }
  detail::gathered_column column() const { return firsts_.gathered(); }

  void plan() { planned_ = copies_planned_ = 0; }
  static constexpr bool moves() { return false; }
  void abandon() { plan(); }

  void plan_room(std::size_t entry, const stored_tokens& held, index_t tokens) {
    host_vector<index_t>& table = entry_pages_[entry];
    const std::size_t wanted = pages_for(offset_t(held.longest) + tokens);
    plan_pages(table, first_page(held), wanted);
    if (wanted > table.capacity()) table.reserve((std::max)(wanted, 2 * table.size()));  // commit_room allocates none
    tokens_planned_ = tokens;
  }
  void commit_room(std::size_t entry, const index_t*, const stored_tokens& held, cudaStream_t stream) {
    acquire(entry, first_page(held), pages_for(offset_t(held.longest) + tokens_planned_), stream);
  }
  void grew(std::size_t, index_t) {}

  void plan_keep(std::size_t entry, const token_bound&, const token_bound& kept) {
    host_vector<index_t>& table = entry_pages_[entry];
    plan_pages(table, 0, (std::min)(table.size(), pages_for(kept.longest)));
  }
  /// Rows move down in their own pages. Pages beyond `kept` return to the pool.
  template <class Mover, class Problem>
  void keep(std::size_t entry, const Problem& problem, const Mover& mover, const token_bound& kept,
            cudaStream_t stream) {
    const std::size_t left = (std::min)(entry_pages_[entry].size(), pages_for(kept.longest));
    acquire(entry, 0, left, stream);
    mover.in_place.run(problem, mover.scratch.data(), stream);
    release(entry_pages_[entry], left);
  }
  void shrank(std::size_t entry, index_t, const token_bound& kept) {
    release(entry_pages_[entry], pages_for(kept.longest));
  }
  /// Pages that neither `kept` nor the tokens need for which room was committed return to the pool.
  void dropped(std::size_t entry, index_t, const token_bound& kept) {
    release(entry_pages_[entry], pages_for(offset_t(kept.longest) + tokens_planned_));
  }

  void plan_copy(std::size_t from, std::size_t to, const token_bound&) {
    entry_pages_[to].reserve(entry_pages_[from].size());
  }
  void commit_copy(std::size_t from, std::size_t to, const index_t*, const token_bound&, cudaStream_t) {
    entry_pages_[to] = entry_pages_[from];
    for (const index_t page : entry_pages_[to]) counted_.share(page);
  }
  void copy_tables(index_t id, index_t to, cudaStream_t stream) const {
    std::size_t longest = 0;
    for (std::size_t entry = std::size_t(id); entry < entry_pages_.size(); entry += std::size_t(sequences_))
      longest = (std::max)(longest, entry_pages_[entry].size());
    copy_in_layers(tables_.data(), index_t(entry_pages_.size()) / sequences_, offset_t(sequences_) * widest_,
                   offset_t(id) * widest_, offset_t(to) * widest_, offset_t(longest), stream);
  }

  void plan_empty(std::size_t entry, const stored_tokens& held) { plan_room(entry, held, 0); }
  void commit_empty(std::size_t entry, const index_t* lengths, const stored_tokens& held, cudaStream_t stream) {
    commit_room(entry, lengths, held, stream);
  }

  void clear(std::size_t entry) { release(entry_pages_[entry], 0); }
  offset_t bytes(std::size_t entry) const {
    return counted_.bytes(entry_pages_[entry], page_rows() * Layout::token_bytes());
  }
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    offset_t pages = 0;
    for (const layer_peak& peak : peaks) pages += fixed_pages<Page>::pages_for(peak.stored.longest);
    return {pages * page_rows() * Layout::token_bytes(), pages};
  }
  capacity available() const { return {capacity::unlimited, offset_t(pages_) - counted_.used()}; }
  offset_t peak_bytes() const { return peak_used_ * page_rows() * Layout::token_bytes(); }

  // Packed rows lie in pages of the same pool: see packed_pages.

  static constexpr index_t page = Page;
  static constexpr int k_dim = Layout::k_dim, v_dim = Layout::v_dim;
  /// Bytes of a page's keys and values. Keys of all pages lie from `memory` on, and behind them all values.
  static constexpr offset_t k_page_bytes(offset_t kv_heads) {
    return Page * kv_heads * view_type::k_units * offset_t(sizeof(stored_type));
  }
  static constexpr offset_t v_page_bytes(offset_t kv_heads) {
    return Page * kv_heads * view_type::v_units * offset_t(sizeof(stored_type));
  }
  std::byte* memory() const { return reinterpret_cast<std::byte*>(rows_.data()); }
  index_t pages() const { return pages_; }
  const counted_pages& counted() const { return counted_; }
  /// Adds `more` pages to `to`, which has memory for them. Errors: fewer are free, and nothing changes.
  void acquire_pages(offset_t more, host_vector<index_t>& to) {
    require_free(more, offset_t(pages_) - counted_.used());  // a plan of rows comes later, if any
    for (; more > 0; --more) to.push_back(counted_.acquire());
    peak_used_ = (std::max)(peak_used_, offset_t(counted_.used()));
  }
  void share_page(index_t page) { counted_.share(page); }
  void release_page(index_t page) { counted_.release(page); }
  /// Copies pages one by one; `plan_page_copy` has allocated host memory for it.
  void plan_page_copy() { copies_.make_room(std::size_t(copies_planned_) + 1); }
  void copy_page(index_t source, index_t target, cudaStream_t stream) {
    copies_.add(source, target);
    copies_.run<Layout>(keys(), values(), scales_.data(), pages_, page_rows(), nullptr, stream);
  }

 private:
  offset_t page_rows() const { return offset_t(Page) * heads_; }
  stored_type* keys() const { return rows_.data(); }
  stored_type* values() const { return rows_.data() + pages_ * page_rows() * view_type::k_units; }
  void require_free(offset_t more, offset_t available) const {
    if (more <= available) return;
    fail("pages of the cache", std::to_string(more) + " more",
         "at most what is free, which is " + std::to_string(available) + " of " + std::to_string(pages_),
         "raise cache_options::rows, or close a sequence");
  }
  static std::size_t pages_for(offset_t tokens) { return std::size_t(fixed_pages<Page>::pages_for(tokens)); }
  static std::size_t first_page(const stored_tokens& held) { return std::size_t(held.least / Page); }

  /// Plans that a table has `wanted` pages, and those from `first` on for its entry alone.
  void plan_pages(const host_vector<index_t>& table, std::size_t first, std::size_t wanted) {
    const index_t copies = counted_.shared_of(table, first, wanted);
    const offset_t more = offset_t(wanted - (std::min)(wanted, table.size())) + copies;
    const offset_t available = offset_t(pages_) - counted_.used() - planned_;
    require_free(more, available);
    copies_planned_ += copies;
    if (copies > 0) copies_.make_room(std::size_t(copies_planned_));
    planned_ += more;
  }
  void acquire(std::size_t entry, std::size_t first, std::size_t wanted, cudaStream_t stream) {
    host_vector<index_t>& table = entry_pages_[entry];
    const bool copies = counted_.shared_of(table, first, wanted) > 0;
    if (!copies && wanted <= table.size()) return;
    index_t* on_device = tables_.data() + offset_t(entry) * widest_;
    for (std::size_t i = first; copies && i < (std::min)(wanted, table.size()); ++i) {
      if (!counted_.is_shared(table[i])) continue;
      const index_t target = counted_.acquire();
      copies_.add(table[i], target, index_t(i));
      counted_.release(table[i]);
      table[i] = target;
    }
    copies_.run<Layout>(keys(), values(), scales_.data(), pages_, page_rows(), on_device, stream);
    while (table.size() < wanted) {
      detail::some_pages some{};
      const index_t count = index_t((std::min)(wanted - table.size(), std::size_t(detail::pages_at_a_time)));
      for (index_t i = 0; i < count; ++i) some.pages[i] = counted_.acquire();
      detail::set_pages_entry<128><<<1, 128, 0, stream>>>(some, count, on_device + table.size());
      check(cudaGetLastError(), "launch of set_pages");
      table.insert(table.end(), some.pages, some.pages + count);
    }
    peak_used_ = (std::max)(peak_used_, offset_t(counted_.used()));
  }
  void release(host_vector<index_t>& table, std::size_t left) {
    for (; table.size() > left; table.pop_back()) counted_.release(table.back());
  }
  view_type view(index_t layer, const index_t* firsts, index_t batch) const {
    view_type view;
    view.k = keys();
    view.v = values();
    view.k_strides = {page_rows() * view_type::k_units, view_type::k_units, offset_t(heads_) * view_type::k_units, 1};
    view.v_strides = {page_rows() * view_type::v_units, view_type::v_units, offset_t(heads_) * view_type::v_units, 1};
    view.sequences = batch;
    view.kv_heads = heads_;
    view.table = {firsts, tables_.data() + offset_t(layer) * sequences_ * widest_, Page, 1};
    if constexpr (encoding_type::scaled) {
      view.scales = {scales_.data(), scales_.data() + pages_ * page_rows(), page_rows(), 1, heads_};
    }
    return view;
  }

  index_t sequences_, heads_, widest_;
  index_t pages_;
  offset_t planned_ = 0, copies_planned_ = 0, peak_used_ = 0;
  index_t tokens_planned_ = 0;
  counted_pages counted_;
  page_copies copies_;
  host_vector<host_vector<index_t>> entry_pages_;  // by entry
  device_buffer<stored_type> rows_;                // keys of all pages, then their values
  device_buffer<float> scales_;
  device_buffer<index_t> tables_;
  id_column<index_t> firsts_;  // where a sequence's table begins within its layer's
};

}  // namespace cuda
TESSERA_NAMESPACE_END
