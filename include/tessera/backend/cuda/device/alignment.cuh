// Checks of where 16-byte accesses are possible.
#pragma once

#include <string>

#include "../../../core/error.hpp"
#include "../../../core/views.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

TESSERA_HD inline bool on_16_bytes(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

/// Whether every row begins on 16 bytes and its elements are contiguous.
template <class T>
bool rows_on_16_bytes(const T* data, const row_strides& strides) {
  const auto whole = [](offset_t stride) { return stride * offset_t(sizeof(T)) % 16 == 0; };
  return on_16_bytes(data) && strides.dim == 1 && whole(strides.outer) && whole(strides.head) && whole(strides.token);
}
template <class T>
bool rows_on_16_bytes(const rows_view<T>& rows) {
  return rows_on_16_bytes(rows.data, {rows.sequence_stride, rows.head_stride, rows.token_stride, 1});
}

/// Errors   an address that is not a multiple of `bytes`: tessera::error with `name`.
inline void require_aligned(const char* name, const void* data, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(data) % bytes == 0) return;
  fail(std::string("address of ") + name, data, "a multiple of " + std::to_string(bytes), "align the memory");
}

/// Errors   the first address or stride that is not a multiple of `elements` elements: tessera::error with `name`.
template <class T>
void require_aligned_rows(const char* name, const T* data, const row_strides& strides, offset_t elements) {
  require_aligned(name, data, element_block<T> ? alignof(T) : std::size_t(elements) * sizeof(T));
  for (const offset_t stride : {strides.outer, strides.head, strides.token}) {
    if (stride % elements == 0) continue;
    fail(std::string("stride of ") + name, stride, "a multiple of " + std::to_string(elements) + " elements",
         "pad the rows");
  }
  if (strides.dim != 1) {
    fail(std::string("dim stride of ") + name, strides.dim, "1", "store the elements of a row side by side");
  }
}
template <class T>
void require_aligned_rows(const char* name, const rows_view<T>& rows, offset_t elements) {
  require_aligned_rows(name, rows.data, {rows.sequence_stride, rows.head_stride, rows.token_stride, 1}, elements);
}
/// Rows of blocks begin where a block may: kernels read them by word.
template <class T>
void require_rows_on_16_bytes(const char* name, const T* data, const row_strides& strides) {
  if constexpr (element_block<T>) {
    require_aligned_rows(name, data, strides, 1);
  } else {
    require_aligned_rows(name, data, strides, 16 / offset_t(sizeof(T)));
  }
}
template <class T>
void require_rows_on_16_bytes(const char* name, const rows_view<T>& rows) {
  require_aligned_rows(name, rows, 16 / offset_t(sizeof(T)));
}

}  // namespace cuda
TESSERA_NAMESPACE_END
