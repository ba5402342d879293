// What a decode step reads and writes on the GPU, and the checks that the host makes before a launch.
#pragma once

#include <string>

#include "../../../../core/error.hpp"
#include "../../../../core/logit_rule.hpp"
#include "../../../../core/selection.hpp"
#include "../../../../core/views.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What a decode step reads and writes; every pointer is a device pointer, every length is read on the device.
/// `Out` is float, bf16 or fp16.
template <class View, class Out = float>
struct decode_problem {
  using T = typename View::element_type;
  View view;
  rows_view<const T> q;           ///< [sequences, tokens, q_heads, k_dim]
  const index_t* first_position;  ///< [sequences], position of the step's first token
  logit_rule rule;
  rows_view<Out> out;     ///< [sequences, tokens, q_heads, v_dim]
  rows_view<float> lse;   ///< [sequences, tokens, q_heads]; data null: not wanted
  selection_view chosen;  ///< row = sequence * kv_heads + head; indices null: everything stored
};

namespace detail {

/// Rows are copied 16 bytes at a time: every one must begin on 16 bytes, its elements side by side.
inline void require_rows_of_16_bytes(const std::string& name, const void* data, const row_strides& strides) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  require(address % 16 == 0, "address of " + name, address, "a multiple of 16", "align the tensor to 16 bytes");
  for (const offset_t stride : {strides.outer, strides.head, strides.token}) {
    require(stride % 8 == 0, "stride of " + name, stride, "a multiple of 8 elements", "pad the rows to 16 bytes");
  }
  require(strides.dim == 1, "dim stride of " + name, strides.dim, "1", "store the elements of a row side by side");
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
