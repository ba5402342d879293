// The index of paged retrieval: smallest and largest key values of runs of consecutive slots, channel by channel.
#pragma once

#include "../config.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Extrema of every page of every (sequence, kv_head); row = sequence * kv_heads + head.
///
/// Shapes   a row is [2, D, room]: the smaller values, then the larger ones; a channel's pages stand side by side, so
///          that a scorer that reads few channels reads whole cache lines. Page p is slots [p * page, (p + 1) * page)
///          of what the head stores (or of its candidates); the last page may be short.
///          Pages of one slot hold their key once, whatever it is: [D, room], the keys by channel.
/// Values   those of stored keys, exactly. What is not finite is left out; NaN where a page has nothing else.
/// Rows     `begins[row]` elements in, with room for `rooms[row]` pages; both null: every row has `room` pages, and
///          space for both sides.
/// Pages    `page` slots in every row; on the device sequences differ, and each one's `read_plan` says its page.
template <class T, int D>
struct page_extrema_view {
  T* data = nullptr;
  index_t page = 1;
  index_t room = 0;
  const offset_t* begins = nullptr;
  const index_t* rooms = nullptr;

  TESSERA_HD index_t pages_of_room(offset_t row) const { return rooms ? rooms[row] : room; }
  TESSERA_HD T* lower(offset_t row, int channel) const {
    const offset_t width = pages_of_room(row);
    return data + (begins ? begins[row] : row * 2 * D * width) + channel * width;
  }
  TESSERA_HD T* upper(offset_t row, int channel) const {
    return lower(row, channel) + D * offset_t(pages_of_room(row));
  }
};

/// Neither NaN nor infinity.
TESSERA_HD inline bool is_finite(float x) { return x - x == 0; }

/// Elements of one row with room for so many pages.
TESSERA_HD inline offset_t page_row_elements(index_t page, int k_dim, index_t room) {
  return offset_t(page == 1 ? 1 : 2) * k_dim * room;
}

/// The new extremum of a page that held `held` (NaN: nothing yet) when a key with `fresh` joins it.
TESSERA_HD inline float lower_with(float held, float fresh) {
  return is_finite(fresh) && !(held <= fresh) ? fresh : held;
}
/// The same of the larger values.
TESSERA_HD inline float upper_with(float held, float fresh) {
  return is_finite(fresh) && !(held >= fresh) ? fresh : held;
}

TESSERA_NAMESPACE_END
