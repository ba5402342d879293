// Rows in fixed pages on the device, from one pool.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../layout/fixed_pages.hpp"
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
/// knows who owns which page. Nothing moves when an entry grows.
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
        entry_pages_(std::size_t(layers) * std::size_t(sequences)),
        k_(std::size_t(pages_ * page_rows()) * Layout::k_dim),
        v_(std::size_t(pages_ * page_rows()) * Layout::v_dim),
        scales_(encoding_type::scaled ? std::size_t(2 * pages_ * page_rows()) : 0),
        tables_(entry_pages_.size() * std::size_t(widest_)),
        firsts_(1, sequences, 1) {
    require(offset_t(sequences) * widest_ <= offset_t(1) << 30, "pages of all tables", offset_t(sequences) * widest_,
            "at most 2^30", "lower cache_options::tokens or sequences");
    for (index_t page = pages_ - 1; page >= 0; --page) free_.push_back(page);
    host_vector<index_t> firsts;
    for (index_t id = 0; id < sequences; ++id) firsts.push_back(id * widest_);
    check(cudaMemcpy(firsts_.entry({}), firsts.data(), firsts.size() * sizeof(index_t), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }

  view_type view(sequence_layer owner) const { return view(owner.layer, firsts_.entry({0, owner.id}), 1); }
  view_type batch_view(index_t layer, index_t batch) const { return view(layer, firsts_.batch(0), batch); }
  detail::gathered_column column() const { return firsts_.gathered(); }

  void plan() { planned_ = 0; }
  static constexpr bool moves() { return false; }
  void abandon() { planned_ = 0; }

  void plan_room(std::size_t entry, const token_bound& held, index_t tokens) {
    const offset_t more = missing(entry, offset_t(held.longest) + tokens);
    require(planned_ + more <= offset_t(free_.size()), "pages of the cache", std::to_string(more) + " more",
            "at most what is free, which is " + std::to_string(offset_t(free_.size()) - planned_) + " of " +
                std::to_string(pages_),
            "raise cache_options::rows, or close a sequence");
    host_vector<index_t>& table = entry_pages_[entry];
    const std::size_t wanted = table.size() + std::size_t(more);
    if (wanted > table.capacity()) table.reserve((std::max)(wanted, 2 * table.size()));  // commit_room allocates none
    planned_ += more;
    tokens_planned_ = tokens;
  }
  void commit_room(std::size_t entry, const index_t*, const token_bound& held, cudaStream_t stream) {
    host_vector<index_t>& table = entry_pages_[entry];
    offset_t more = missing(entry, offset_t(held.longest) + tokens_planned_);
    for (; more > 0;) {
      detail::some_pages some{};
      const index_t count = index_t((std::min<offset_t>)(more, detail::pages_at_a_time));
      for (index_t i = 0; i < count; ++i) {
        some.pages[i] = free_.back();
        free_.pop_back();
      }
      detail::set_pages_entry<128>
          <<<1, 128, 0, stream>>>(some, count, tables_.data() + offset_t(entry) * widest_ + offset_t(table.size()));
      check(cudaGetLastError(), "launch of set_pages");
      table.insert(table.end(), some.pages, some.pages + count);
      more -= count;
    }
    peak_used_ = (std::max)(peak_used_, offset_t(pages_) - offset_t(free_.size()));
  }
  void grew(std::size_t, index_t) {}

  void plan_keep(std::size_t, const token_bound&, const token_bound&) {}
  /// Rows move down in their own pages. Pages beyond `kept` return to the pool.
  template <class Mover, class Problem>
  void keep(std::size_t entry, const Problem& problem, const Mover& mover, const token_bound& kept,
            cudaStream_t stream) {
    mover.in_place.run(problem, mover.scratch.data(), stream);
    release(entry_pages_[entry], std::size_t(fixed_pages<Page>::pages_for(kept.longest)));
  }
  void shrank(std::size_t entry, index_t, const token_bound& kept) {
    release(entry_pages_[entry], std::size_t(fixed_pages<Page>::pages_for(kept.longest)));
  }
  /// No page is released: they count as room for the new tokens.
  void dropped(std::size_t, index_t) {}

  void plan_copy(std::size_t to, const token_bound& held) { plan_room(to, held, 0); }
  void commit_copy(std::size_t from, std::size_t to, const index_t* lengths, const token_bound& held,
                   cudaStream_t stream) {
    commit_room(to, lengths, held, stream);
    const block_pool<Layout> pool{k_.data(), v_.data(), scales_.data(), pages_, page_rows()};
    pool.copy(1, index_t(fixed_pages<Page>::pages_for(held.longest)), nullptr, Page,
              tables_.data() + offset_t(from) * widest_, tables_.data() + offset_t(to) * widest_, widest_, stream);
  }

  void commit_empty(std::size_t entry, const index_t* lengths, const token_bound& held, cudaStream_t stream) {
    commit_room(entry, lengths, held, stream);
  }

  void clear(std::size_t entry) { release(entry_pages_[entry], 0); }
  offset_t bytes(std::size_t entry) const {
    return offset_t(entry_pages_[entry].size()) * page_rows() * Layout::token_bytes();
  }
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    offset_t pages = 0;
    for (const layer_peak& peak : peaks) pages += fixed_pages<Page>::pages_for(peak.stored.longest);
    return {pages * page_rows() * Layout::token_bytes(), pages};
  }
  capacity available() const { return {capacity::unlimited, offset_t(free_.size())}; }
  offset_t peak_bytes() const { return peak_used_ * page_rows() * Layout::token_bytes(); }

 private:
  offset_t page_rows() const { return offset_t(Page) * heads_; }
  offset_t missing(std::size_t entry, offset_t tokens) const {
    return (std::max<offset_t>)(0, fixed_pages<Page>::pages_for(tokens) - offset_t(entry_pages_[entry].size()));
  }
  void release(host_vector<index_t>& table, std::size_t left) {
    while (table.size() > left) {
      free_.push_back(table.back());
      table.pop_back();
    }
  }
  view_type view(index_t layer, const index_t* firsts, index_t batch) const {
    view_type view;
    view.k = k_.data();
    view.v = v_.data();
    view.k_strides = {page_rows() * Layout::k_dim, Layout::k_dim, offset_t(heads_) * Layout::k_dim, 1};
    view.v_strides = {page_rows() * Layout::v_dim, Layout::v_dim, offset_t(heads_) * Layout::v_dim, 1};
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
  offset_t planned_ = 0, peak_used_ = 0;
  index_t tokens_planned_ = 0;
  host_vector<index_t> free_;
  host_vector<host_vector<index_t>> entry_pages_;  // by entry
  device_buffer<stored_type> k_, v_;
  device_buffer<float> scales_;
  device_buffer<index_t> tables_;
  id_column<index_t> firsts_;  // where a sequence's table begins within its layer's
};

}  // namespace cuda
TESSERA_NAMESPACE_END
