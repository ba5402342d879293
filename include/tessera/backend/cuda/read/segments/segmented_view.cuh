// A view on the device whose slots say which segment of the text they belong to.
#pragma once

#include "../../../../core/stored/slot_column.hpp"
#include "../../../../core/views.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

template <class View>
struct segmented_view : View {
  slot_column<const index_t> segments;  // of what is stored

  /// Of a view of candidates, the segment of the stored slot that is meant.
  TESSERA_HD index_t segment(index_t sequence, index_t head, index_t slot) const {
    const auto& table = this->table;
    if constexpr (requires { table.slots; }) {
      slot = table.slots[table.begin[offset_t(sequence) * this->kv_heads + head] + slot];
    }
    return segments.at(sequence, head, this->kv_heads, slot);
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
