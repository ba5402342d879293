// Numbers that belong to stored tokens: one per slot, in memory that the view does not own.
#pragma once

#include <concepts>
#include <type_traits>

#include "../config.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// One number per stored slot beside K and V (positions, scores), by (sequence, head, slot). Data null: not there.
/// With `begin`, the row of (sequence, head) begins at begin[sequence * kv_heads + head], as in ragged storage.
template <class T>
struct slot_column {
  T* data = nullptr;
  offset_t sequence_stride = 0;
  offset_t head_stride = 0;
  const offset_t* begin = nullptr;
  TESSERA_HD T* row(index_t sequence, index_t head, index_t kv_heads) const {
    return data +
           (begin ? begin[offset_t(sequence) * kv_heads + head] : sequence * sequence_stride + head * head_stride);
  }
  TESSERA_HD T& entry(index_t sequence, index_t head, index_t kv_heads, index_t slot) const {
    return row(sequence, head, kv_heads)[slot];
  }
  /// The same column, only read.
  template <std::same_as<const T> Read>
  requires(!std::is_const_v<T>) TESSERA_HD constexpr operator slot_column<Read>() const {
    return {data, sequence_stride, head_stride, begin};
  }
};

TESSERA_NAMESPACE_END
