// The index of paged retrieval on the CPU: owned memory, filled as tokens arrive.
#pragma once

#include <algorithm>
#include <limits>

#include "../../../../core/host/float_mode.hpp"
#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/stored/page_extrema.hpp"
#include "../../kernel/rows.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Per-channel extrema of pages of consecutive slots, for every kv_head of one layer and one sequence. Of encoded rows:
/// those of the decoded keys, each rounded to the element type `T`.
///
/// Folding a key into its page costs O(D) and gives the same result as building the page from all of its keys. After
/// rows are dropped, slots belong to other pages: call `reset` and build the index anew. A page of one slot stores its
/// key once, by channel. This second copy of K lets a scorer read only a few channels of every key.
template <class T, int D>
class page_index {
 public:
  /// Capacities are multiples of this many pages, so that a scorer may read whole vectors.
  static constexpr index_t capacity_step = 16;

  /// Empties the index, and sets the number of slots of a page.
  void reset(index_t kv_heads, index_t page) {
    page_ = page;
    filled_.assign(std::size_t(kv_heads), 0);
    begins_.assign(std::size_t(kv_heads), 0);
    capacities_.assign(std::size_t(kv_heads), 0);
    host_vector<T>().swap(data_);
  }

  index_t page() const { return page_; }

  /// Folds every slot of the view that is not folded yet, head by head.
  template <class View>
  void extend(const View& view) {
    const default_float_mode mode;
    bool fits = true;
    for (index_t h = 0; h < view.kv_heads; ++h) {
      fits &= ceil_div(view.length(0, h), page_) <= capacities_[std::size_t(h)];
    }
    if (!fits) grow(view);
    for (index_t h = 0; h < view.kv_heads; ++h) {
      const page_extrema_view<T, D> pages = target();
      for (index_t slot = filled_[std::size_t(h)]; slot < view.length(0, h); ++slot) {
        float key[D];
        load_key(view, 0, h, slot, key);
        if (page_ == 1) {
          for (int d = 0; d < D; ++d) pages.lower(h, d)[slot] = T(key[d]);
          continue;
        }
        const index_t p = slot / page_;
        const bool first = slot % page_ == 0;
        constexpr float none = std::numeric_limits<float>::quiet_NaN();
        for (int d = 0; d < D; ++d) {
          const float grown = View::is_raw ? key[d] : float(T(key[d]));
          T& low = pages.lower(h, d)[p];
          T& high = pages.upper(h, d)[p];
          low = T(lower_with(first ? none : float(low), grown));
          high = T(upper_with(first ? none : float(high), grown));
        }
      }
      filled_[std::size_t(h)] = view.length(0, h);
    }
  }

  /// Forgets slots that heads of these lengths do not have, and the page that they began.
  void truncate(const host_vector<index_t>& lengths) {
    for (std::size_t h = 0; h < filled_.size(); ++h) {
      if (filled_[h] > lengths[h]) filled_[h] = lengths[h] / page_ * page_;
    }
  }

  /// Valid until the index changes.
  page_extrema_view<const T, D> view() const { return {data_.data(), page_, 0, begins_.data(), capacities_.data()}; }

  /// Bytes allocated for pages.
  offset_t bytes() const { return offset_t(data_.capacity() * sizeof(T)); }
  /// Upper bound of the bytes of one head with `tokens` tokens in pages of `page` slots.
  static offset_t upper_bound(index_t page, index_t tokens) {
    return page_row_elements(page, D, capacity_for(ceil_div(tokens, page), true)) * offset_t(sizeof(T));
  }

 private:
  /// Pages to allocate for `pages`; an index that grows while decoding gets more.
  static index_t capacity_for(index_t pages, bool grows) {
    return ceil_div(pages + (grows ? pages / 64 : 0) + 1, capacity_step) * capacity_step;
  }
  page_extrema_view<T, D> target() { return {data_.data(), page_, 0, begins_.data(), capacities_.data()}; }

  template <class View>
  void grow(const View& view) {
    page_index grown;
    grown.reset(view.kv_heads, page_);
    offset_t total = 0;
    for (index_t h = 0; h < view.kv_heads; ++h) {
      const index_t pages = ceil_div(view.length(0, h), page_);
      grown.begins_[std::size_t(h)] = total;
      grown.capacities_[std::size_t(h)] = capacity_for(pages, filled_[std::size_t(h)] > 0);
      total += page_row_elements(page_, D, grown.capacities_[std::size_t(h)]);
    }
    grown.data_.assign(std::size_t(total), T(0.0f));
    for (index_t h = 0; h < view.kv_heads; ++h) {
      for (int d = 0; d < D; ++d) {
        const index_t used = ceil_div(filled_[std::size_t(h)], page_);
        std::copy_n(view_of(*this).lower(h, d), used, view_of(grown).lower(h, d));
        if (page_ > 1) std::copy_n(view_of(*this).upper(h, d), used, view_of(grown).upper(h, d));
      }
    }
    grown.filled_ = filled_;
    *this = std::move(grown);
  }
  static page_extrema_view<T, D> view_of(page_index& index) { return index.target(); }

  index_t page_ = 1;
  host_vector<index_t> filled_;      // slots of each head that are folded
  host_vector<offset_t> begins_;     // by head, in elements
  host_vector<index_t> capacities_;  // by head, in pages
  host_vector<T> data_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
