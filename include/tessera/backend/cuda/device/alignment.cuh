// Where 16-byte accesses are possible, and where the arrays of a workspace begin.
#pragma once

#include <string>

#include "../../../core/error.hpp"
#include "../../../core/views.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

TESSERA_HD inline bool on_16_bytes(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

/// Whether every row begins on 16 bytes with its elements side by side.
template <class T>
bool rows_on_16_bytes(const T* data, const row_strides& strides) {
  const auto whole = [](offset_t stride) { return stride * offset_t(sizeof(T)) % 16 == 0; };
  return on_16_bytes(data) && strides.dim == 1 && whole(strides.outer) && whole(strides.head) && whole(strides.token);
}
template <class T>
bool rows_on_16_bytes(const rows_view<T>& rows) {
  return rows_on_16_bytes(rows.data, {rows.sequence_stride, rows.head_stride, rows.token_stride, 1});
}

/// Errors   the first address or stride that does not fit: tessera::error with `name`.
template <class T>
void require_rows_on_16_bytes(const std::string& name, const T* data, const row_strides& strides) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  require(address % 16 == 0, "address of " + name, address, "a multiple of 16", "align the tensor to 16 bytes");
  constexpr offset_t step = 16 / offset_t(sizeof(T));
  for (const offset_t stride : {strides.outer, strides.head, strides.token}) {
    require(stride % step == 0, "stride of " + name, stride, "a multiple of " + std::to_string(step) + " elements",
            "pad the rows to 16 bytes");
  }
  require(strides.dim == 1, "dim stride of " + name, strides.dim, "1", "store the elements of a row side by side");
}
template <class T>
void require_rows_on_16_bytes(const std::string& name, const rows_view<T>& rows) {
  require_rows_on_16_bytes(name, rows.data, {rows.sequence_stride, rows.head_stride, rows.token_stride, 1});
}

/// Arrays of a workspace begin on 256 bytes, as cudaMalloc's do.
constexpr std::size_t padded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
/// Bytes of an array of a workspace, padded so that another may follow.
template <class T>
constexpr std::size_t array_bytes(std::size_t count) {
  return padded(count * sizeof(T));
}

}  // namespace cuda
TESSERA_NAMESPACE_END
