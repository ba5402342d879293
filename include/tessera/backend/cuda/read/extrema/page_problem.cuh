// What a step's choice of pages reads and writes, and which slots its queries see.
#pragma once

#include "../../../../core/logit_rule.hpp"
#include "../../../../core/plan/stage_plan.hpp"
#include "../../../../core/stored/page_extrema.hpp"
#include "../../../../core/views.hpp"
#include "../../device/search.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What a step's choice reads and writes; every pointer is a device pointer, every length is read on the device.
template <class View>
struct page_problem {
  using T = typename View::element_type;
  View view;                                  ///< what steps may read; lengths count the step's own tokens
  const read_plan* plans = nullptr;           ///< [sequences], in the order of the view's
  page_extrema_view<T, View::k_dim> index{};  ///< of the view
  index_t unfolded = 0;                       ///< newest slots of every row that the index has yet to take in
  rows_view<const T> q;                       ///< [sequences, tokens, q_heads, k_dim]
  const index_t* first_position = nullptr;    ///< [sequences], position of the step's first token
  logit_rule rule;
  index_t* out = nullptr;  ///< [rows, out_stride], ascending slots of the view; row = sequence * kv_heads + head
  offset_t out_stride = 0;
  index_t* counts = nullptr;  ///< [rows]
  float* mass = nullptr;  ///< [rows, tokens * group] or null: what the chosen slots hold of the estimated probabilities
};

namespace detail {

inline constexpr int most_step_tokens = 8;
inline constexpr int most_query_rows = 128;  // of a group: step tokens times query heads

struct slot_run {
  index_t begin, end;
};

/// Slots that a query at some position sees, by one warp: a run, for positions ascend. A probe of 32 slots at a time
/// costs one trip to memory, and most runs end where the slots do: `last` is the position of slot n - 1.
template <class View>
__device__ slot_run visible_run(const View& view, index_t sequence, index_t head, const logit_rule& rule, index_t n,
                                index_t last, index_t query, int lane) {
  const auto first_above = [&](index_t position) -> index_t {
    if (!view.positions) return (min)((max)(position + 1, 0), n);
    if (last <= position) return n;
    return first_where_in_warp(n - 1, lane, [&](index_t i) { return view.position(sequence, head, i) > position; });
  };
  return {rule.sliding_window > 0 ? first_above(query - rule.sliding_window) : 0, first_above(query)};
}

/// A plan in two loads that neighbours share.
__device__ inline read_plan load_plan(const read_plan* plan) {
  uint4 words[2];
  words[0] = __ldg(reinterpret_cast<const uint4*>(plan));
  words[1] = __ldg(reinterpret_cast<const uint4*>(plan) + 1);
  read_plan loaded;
  __builtin_memcpy(&loaded, words, sizeof(loaded));
  return loaded;
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
