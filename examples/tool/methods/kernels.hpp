// The CPU kernels that all methods share, compiled once per element type (kernels.cpp.in) instead of once per method.
#pragma once

#include <tessera/cache.hpp>

// tool_layout, and TESSERA_TOOL_KERNELS_OF(storage, T): the kernels of every head dim that this build is for.
#include "tool_layouts.hpp"

namespace tool {

/// What a cache stores for one layer, as the kernels see it.
template <class Layout>
using stored_view = typename tessera::cpu::kv_store<Layout>::view_type;

}  // namespace tool

/// Declares (with `extern`) or defines (with nothing) the kernels of one element type, head dim and layout.
#define TESSERA_TOOL_KERNELS(storage, T, D, layout)                                                            \
  storage template void tessera::cpu::prefill_attention(                                                       \
      const tool::stored_view<tool::layout<T, D>>&, const tessera::cpu::query_rows<float>&,                    \
      const tessera::logit_rule&, const tessera::cpu::attention_output&, tessera::cpu::executor&);             \
  storage template void tessera::cpu::decode_attention(                                                        \
      const tool::stored_view<tool::layout<T, D>>&, const tessera::cpu::query_rows<float>&,                    \
      const tessera::logit_rule&, const tessera::selection_view*, const tessera::cpu::attention_output&,       \
      tessera::cpu::decode_workspace&, tessera::cpu::executor&);                                               \
  storage template void tessera::cpu::row_log_sum_exp(                                                         \
      const tool::stored_view<tool::layout<T, D>>&, const tessera::cpu::query_rows<float>&,                    \
      const tessera::logit_rule&, float*, tessera::cpu::score_workspace<D>&, tessera::cpu::executor&);         \
  storage template void tessera::cpu::detail::tile_logits(                                                     \
      const tool::stored_view<tool::layout<T, D>>&, tessera::index_t, tessera::index_t, tessera::index_t, int, \
      const tessera::logit_rule&, int, const tessera::index_t*, tessera::cpu::tile_memory<D, 64>&);            \
  storage template class tessera::cpu::kv_store<tool::layout<T, D>>;                                           \
  storage template void tessera::cpu::kv_store<tool::layout<T, D>>::append(                                    \
      tessera::sequence_layer, const tessera::rows_view<const float>&, const tessera::rows_view<const float>&, \
      tessera::index_t, const tessera::segment_marks&);

/// The same for prompts that attend along lines.
#define TESSERA_TOOL_LINE_KERNELS(storage, T, D, layout)                                                         \
  storage template void tessera::cpu::detail::attend_converted_rows(                                             \
      const tool::stored_view<tool::layout<T, D>>&, tessera::index_t, tessera::index_t,                          \
      const tessera::cpu::slot_source&, tessera::index_t, tessera::index_t, const tessera::cpu::line_rule&, int, \
      const tessera::index_t*, tessera::cpu::tile_memory<D, D>&, tessera::cpu::partial_rows<D>);

TESSERA_TOOL_ROW_KERNELS_OF(extern, tessera::fp32)
TESSERA_TOOL_KERNELS_OF(extern, tessera::fp32)
TESSERA_TOOL_KERNELS_OF(extern, tessera::fp16)
TESSERA_TOOL_KERNELS_OF(extern, tessera::bf16)
