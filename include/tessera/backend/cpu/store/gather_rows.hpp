// Small arrays that an engine keeps by id, side by side for a batch, on the CPU.
#pragma once

#include <algorithm>

#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// rows[i] = by_id[ids[i]]: lengths, or a block table, of the sequences of a batch.
/// Shapes   by_id [any, width]; ids [count]; rows [count, width].
template <class T>
void gather_rows(const T* by_id, const index_t* ids, index_t count, index_t width, T* rows) {
  for (index_t i = 0; i < count; ++i) std::copy_n(by_id + offset_t(ids[i]) * width, width, rows + offset_t(i) * width);
}

/// by_id[ids[i]] = rows[i]: lengths that a call has changed go back.
template <class T>
void scatter_rows(const T* rows, const index_t* ids, index_t count, index_t width, T* by_id) {
  for (index_t i = 0; i < count; ++i) std::copy_n(rows + offset_t(i) * width, width, by_id + offset_t(ids[i]) * width);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
