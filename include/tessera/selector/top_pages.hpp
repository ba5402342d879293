// The best whole pages: runs of slots that one step reads together.
#pragma once

#include "../concepts/selector.hpp"
#include "../core/error.hpp"

TESSERA_NAMESPACE_BEGIN

/// Chooses whole pages of `page` consecutive slots, as many as `keep` tokens need: ceil(keep / page), at most all.
///
/// The number of pages is fixed, so a short last page among them gives fewer tokens than `keep` and full ones may give
/// up to page - 1 more. Pages that hold some of the newest `tail` slots come first, even where there are more of them.
/// A page's score is that of its best slot; NaN counts as -infinity. In a recipe `page` is the scorer's.
/// Ties     to the lower page.   Cost  O(n) on average.
struct top_pages {
  static constexpr const char* name = "top_pages";
  using unit = page_unit;

  index_t page = 1;

  index_t select(const float* scores, index_t n, index_t tail, index_t keep, index_t* out,
                 top_k_scratch& scratch) const {
    if (n <= 0 || keep <= 0) return 0;
    auto& best = scratch.scores;
    best.assign(std::size_t(ceil_div(n, page)), -infinity);
    for (std::size_t p = 0; p < best.size(); ++p) {
      const index_t first = index_t(p) * page;
      for (index_t slot = first; slot < first + (std::min)(page, n - first); ++slot) {
        if (scores[slot] > best[p]) best[p] = scores[slot];
      }
    }
    return select_pages(best.data(), n, tail, keep, out, scratch);
  }

  /// The same by scores of pages [ceil(n / page)], none of them NaN.
  index_t select_pages(const float* scores, index_t n, index_t tail, index_t keep, index_t* out,
                       top_k_scratch& scratch) const {
    if (n <= 0 || keep <= 0) return 0;
    tail = std::clamp(tail, 0, n);
    const index_t pages = ceil_div(n, page), forced = tail > 0 ? pages - (n - tail) / page : 0;
    const index_t wanted = (std::min)((std::max)(forced, keep / page + (keep % page > 0)), pages);
    auto& ids = scratch.ids;
    ids.resize(std::size_t(wanted));
    index_t taken = top_k(scores, pages - forced, wanted - forced, ids.data(), scratch);
    for (index_t p = pages - forced; p < pages; ++p) ids[std::size_t(taken++)] = p;
    index_t count = 0;
    for (index_t i = 0; i < taken; ++i) {
      const index_t first = ids[std::size_t(i)] * page;
      for (index_t slot = first; slot < first + (std::min)(page, n - first); ++slot) out[count++] = slot;
    }
    return count;
  }

  void check() const {}

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_selector<top_pages>());

TESSERA_NAMESPACE_END
