// The index of paged retrieval: smallest and largest key values of runs of consecutive slots, channel by channel.
#pragma once

#include "../config.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Extrema of every page of every (sequence, kv_head); row = sequence * kv_heads + head.
///
/// Shapes   a row is [2, D, capacity]: the smaller values, then the larger ones. The pages of a channel stand side by
///          side, so that a scorer of few channels reads whole cache lines. Page p has the slots
///          [p * page, (p + 1) * page) of the head (or of its candidates); the last page may be short.
///          A page of one slot stores its key once: the row is [D, capacity], keys by channel.
/// Values   those of stored keys, exactly. What is not finite is left out; NaN where a page has nothing else.
/// Rows     a row begins at element `begins[row]` and has memory for `capacities[row]` pages. Both null: every row has
///          memory for `capacity` pages, and for both sides.
/// Pages    `page` slots in every row; on the device sequences differ, and each one's `read_plan` says its page.
template <class T, int D>
struct page_extrema_view {
  T* data = nullptr;
  index_t page = 1;
  index_t capacity = 0;
  const offset_t* begins = nullptr;
  const index_t* capacities = nullptr;

  TESSERA_HD index_t capacity_of(offset_t row) const { return capacities ? capacities[row] : capacity; }
  TESSERA_HD T* lower(offset_t row, int channel) const {
    const offset_t width = capacity_of(row);
    return data + (begins ? begins[row] : row * 2 * D * width) + channel * width;
  }
  TESSERA_HD T* upper(offset_t row, int channel) const { return lower(row, channel) + D * offset_t(capacity_of(row)); }
};

/// Neither NaN nor infinity.
TESSERA_HD inline bool is_finite(float x) { return x - x == 0; }

/// Elements of one row with memory for `capacity` pages.
TESSERA_HD inline offset_t page_row_elements(index_t page, int k_dim, index_t capacity) {
  return offset_t(page == 1 ? 1 : 2) * k_dim * capacity;
}

/// The smaller of a page's extremum (NaN: none yet) and the value of a key that joins the page.
TESSERA_HD inline float lower_with(float extremum, float value) {
  return is_finite(value) && !(extremum <= value) ? value : extremum;
}
/// The larger of the two.
TESSERA_HD inline float upper_with(float extremum, float value) {
  return is_finite(value) && !(extremum >= value) ? value : extremum;
}

TESSERA_NAMESPACE_END
