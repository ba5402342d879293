// What a decode step reads and writes on the GPU.
#pragma once

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
  index_t usual_row = 0;  ///< tokens that a row usually has, a hint alone; 0: the stride of `chosen`, or not known
};

}  // namespace cuda
TESSERA_NAMESPACE_END
