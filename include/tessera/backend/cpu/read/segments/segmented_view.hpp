// A view with the segments of its slots.
#pragma once

#include "../../../../core/stored/slot_column.hpp"
#include "../candidates.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

template <class View>
struct segmented_view : View {
  slot_column<const index_t> segments;  // of what is stored
  const candidates* chosen = nullptr;   // which of the stored slots are the view's; null: they are the same

  index_t segment(index_t head, index_t slot) const {
    return segments.entry(0, head, this->kv_heads, chosen ? chosen->row(head)[slot] : slot);
  }
};

/// to [k_dim] = the key of a slot of the rows themselves, packed ones too.
template <class View>
void load_key(const segmented_view<View>& view, index_t sequence, index_t head, index_t slot, float* to) {
  load_key(static_cast<const View&>(view), sequence, head, slot, to);
}
template <class View>
void load_value(const segmented_view<View>& view, index_t sequence, index_t head, index_t slot, float* to) {
  load_value(static_cast<const View&>(view), sequence, head, slot, to);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
