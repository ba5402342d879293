// A view of packed segments and of the whole rows behind them: one row of slots for every kv_head.
#pragma once

#include <memory>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../layout/packed_rows.hpp"
#include "../../../../layout/stored.hpp"
#include "../../kernel/rows.hpp"
#include "../placed_pages.hpp"
#include "../placed_runs.hpp"
#include "segment.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The layout of the rows of a packing layout that are not packed.
template <packing_layout Layout>
using whole_layout = stored<typename Layout::rows_type::whole_rows, typename Layout::placement_type>;

/// One layer of one sequence: slots of its segments in order, then its whole rows. `load_key` and `load_value` unpack
/// rows to the engine's basis; attention reads each segment in its own basis. With `slots` it has only some of the
/// slots, as `filtered` does for a plain view.
template <packing_layout Layout>
struct packed_view {
  using layout_type = Layout;
  using segment_type = packed_segment<typename Layout::placement_type>;
  using whole_view = typename placed_rows<whole_layout<Layout>>::view_type;
  using encoding_type = typename Layout::encoding_type;
  using element_type = typename Layout::element_type;
  static constexpr bool is_raw = false;
  static constexpr int k_dim = Layout::k_dim;
  static constexpr int v_dim = Layout::v_dim;

  const host_vector<std::shared_ptr<segment_type>>* segments = nullptr;
  whole_view whole{};
  const index_t* packed = nullptr;  ///< [kv_heads], slots in segments
  index_t sequences = 1;
  index_t kv_heads = 0;
  const index_t* lengths = nullptr;  ///< [kv_heads]
  const index_t* positions = nullptr;
  const offset_t* position_begin = nullptr;
  const index_t* slots = nullptr;  ///< stored slots of this view's slots; null: all are in it
  const offset_t* slot_begin = nullptr;

  index_t length(index_t, index_t head) const { return lengths[head]; }
  index_t position(index_t, index_t head, index_t slot) const {
    return positions ? positions[position_begin[head] + slot] : slot;
  }
  /// The stored slot of a slot of this view.
  index_t stored_slot(index_t head, index_t slot) const { return slots ? slots[slot_begin[head] + slot] : slot; }
};

/// The row of a slot: of a segment, or of the whole rows.
template <class Segment>
struct found_row {
  const Segment* segment = nullptr;  ///< null: a whole row
  index_t row = 0;
};

template <class Layout>
found_row<typename packed_view<Layout>::segment_type> find_row(const packed_view<Layout>& view, index_t head,
                                                               index_t slot) {
  index_t row = view.stored_slot(head, slot);
  if (row >= view.packed[head]) return {nullptr, row - view.packed[head]};
  for (const auto& segment : *view.segments) {
    const index_t length = segment->lengths[std::size_t(head)];
    if (row < length) return {segment.get(), row};
    row -= length;
  }
  return {};  // not reached: `packed` counts the segments' rows
}

/// to [k_dim] = the key of a slot in the engine's basis, unpacked.
template <class Layout>
void load_key(const packed_view<Layout>& view, index_t sequence, index_t head, index_t slot, float* to) {
  constexpr int D = Layout::k_dim;
  const auto [segment, row] = find_row(view, head, slot);
  if (!segment) return load_key(view.whole, sequence, head, row, to);
  alignas(64) float held[D] = {};
  segment->unpack_key(head, row, held);
  rotate_rows_back<D>(held, 1, segment->k_basis(head, D), segment->format.k.channels, to);
}
template <class Layout>
void load_value(const packed_view<Layout>& view, index_t sequence, index_t head, index_t slot, float* to) {
  constexpr int D = Layout::v_dim;
  const auto [segment, row] = find_row(view, head, slot);
  if (!segment) return load_value(view.whole, sequence, head, row, to);
  alignas(64) float held[D] = {};
  segment->unpack_value(head, row, held);
  rotate_rows_back<D>(held, 1, segment->v_basis(head, D), segment->format.v.channels, to);
}

/// The view with some of its slots: head h has the `counts[h]` slots from slots[begins[h]] on.
template <class Layout>
packed_view<Layout> view_of_slots(const packed_view<Layout>& all, const index_t* slots, const offset_t* begins,
                                  const index_t* counts, const index_t* positions) {
  packed_view<Layout> result = all;
  result.slots = slots;
  result.slot_begin = begins;
  result.lengths = counts;
  result.positions = positions;
  result.position_begin = begins;
  return result;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
