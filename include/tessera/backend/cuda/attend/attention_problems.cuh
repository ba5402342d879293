// What attention reads and writes on the GPU: the problems of a decode step, of a prompt chunk and of a step over
// packed rows.
#pragma once

#include "../../../core/logit_rule.hpp"
#include "../../../core/selection.hpp"
#include "../../../core/views.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The input and output of a decode step. Every pointer is a device pointer; lengths are read on the device.
/// `Out` is float, bf16 or fp16.
template <class View, class Out = float>
struct decode_problem {
  static_assert(check_attended_rows<View>());
  using T = typename View::element_type;
  View view;
  rows_view<const T> q;           ///< [sequences, tokens, q_heads, k_dim]
  const index_t* first_position;  ///< [sequences], position of the step's first token
  logit_rule rule;
  rows_view<Out> out;     ///< [sequences, tokens, q_heads, v_dim]
  rows_view<float> lse;   ///< [sequences, tokens, q_heads]; data null: not wanted
  selection_view chosen;  ///< row = sequence * kv_heads + head; indices null: everything stored
  index_t usual_row = 0;  ///< a hint: the usual number of tokens in a row; 0: the stride of `chosen`, or unknown
};

/// The input and output of a prompt chunk. Every pointer is a device pointer; lengths are read on the device.
template <class View, class Out = float>
struct prefill_problem {
  static_assert(check_attended_rows<View>());
  using T = typename View::element_type;
  View view;                      ///< includes the chunk itself
  rows_view<const T> q;           ///< [sequences, tokens, q_heads, k_dim]
  const index_t* first_position;  ///< [sequences], position of the chunk's first token
  logit_rule rule;
  rows_view<Out> out;    ///< [sequences, tokens, q_heads, v_dim]
  rows_view<float> lse;  ///< [sequences, n, q_heads], of all tokens or only of the newest n; data null: not wanted

  __device__ void write_lse(index_t sequence, index_t token, index_t q_head, float value) const {
    const index_t row = token - (q.tokens - lse.tokens);
    if (lse.data && row >= 0) *lse.row(sequence, row, q_head) = value;
  }
};

/// The input and output of a decode step over packed rows. Every pointer is a device pointer; lengths are read on the
/// device.
template <class View, class Out>
struct packed_problem {
  using T = typename View::element_type;
  View view;
  rows_view<const T> q;           ///< [sequences, tokens, q_heads, k_dim]
  const index_t* first_position;  ///< [sequences], position of the step's first token
  logit_rule rule;
  rows_view<Out> out;    ///< [sequences, tokens, q_heads, v_dim]
  rows_view<float> lse;  ///< [sequences, tokens, q_heads]; data null: not wanted
  selection_view
      chosen;  ///< of units, row = sequence * kv_heads + head; indices null: everything; whole rows are always read
  index_t unit = 1;  ///< rows of a unit; 0: as many as the segment's block; every segment begins a new unit
  /// [sequences * kv_heads, max_segments + 1]: where each segment's units begin in `chosen`. If given, splits have
  /// equally many rows although units differ in length. Null: every unit counts the same.
  const index_t* chosen_begins = nullptr;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
