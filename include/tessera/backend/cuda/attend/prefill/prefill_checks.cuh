// What prefill attention asks of a problem before anything is launched.
#pragma once

#include <algorithm>
#include <limits>
#include <string>

#include "../../../../core/model_shape.hpp"
#include "../../device/check.cuh"
#include "prefill_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class A, class B>
bool same_rows(const rows_view<A>& a, const rows_view<B>& b) {
  return a.sequences == b.sequences && a.tokens == b.tokens && a.heads == b.heads;
}
template <class A>
std::string text_of_shape(const rows_view<A>& a) {
  return "[" + std::to_string(a.sequences) + ", " + std::to_string(a.tokens) + ", " + std::to_string(a.heads) + "]";
}
inline void require_aligned(const char* what, const void* data, std::size_t bytes) {
  require(reinterpret_cast<std::uintptr_t>(data) % bytes == 0, std::string("address of ") + what, data,
          "a multiple of " + std::to_string(bytes) + " bytes", "align the memory");
}
inline void require_prefill_rows(const char* what, const void* data, const row_strides& strides) {
  require_aligned(what, data, 16);
  const offset_t each[] = {strides.outer, strides.head, strides.token};
  for (const offset_t stride : each) {
    require(stride % 8 == 0, std::string("a stride of ") + what, stride, "a multiple of 8 elements (16 bytes)",
            "pad the rows");
  }
}

/// Throws unless everything fits together; returns how many blocks of `block_rows` query rows to launch, a block's rows
/// being those of `group` query heads.
template <class View, class Out>
index_t check_prefill(const prefill_problem<View, Out>& p, index_t sequences, index_t kv_heads, index_t q_heads,
                      index_t group, index_t block_rows) {
  require(p.view.sequences == sequences, "view.sequences", p.view.sequences, std::to_string(sequences),
          "pass the batch that the operation was made for");
  require(p.view.kv_heads == kv_heads, "view.kv_heads", p.view.kv_heads, std::to_string(kv_heads),
          "pass the model that the operation was made for");
  require(p.q.sequences == sequences && p.q.heads == q_heads && p.q.tokens >= 0, "q [sequences, tokens, q_heads]",
          text_of_shape(p.q), "[" + std::to_string(sequences) + ", any, " + std::to_string(q_heads) + "]",
          "pass one row per sequence, token and query head");
  require(same_rows(p.out, p.q), "out [sequences, tokens, q_heads]", text_of_shape(p.out), text_of_shape(p.q),
          "give out the shape of q");
  require(!p.lse.data || (p.lse.sequences == p.q.sequences && p.lse.heads == p.q.heads && p.lse.tokens >= 0 &&
                          p.lse.tokens <= p.q.tokens),
          "lse [sequences, tokens, q_heads]", text_of_shape(p.lse), text_of_shape(p.q) + ", or of fewer tokens",
          "give lse the shape of q or of its newest tokens, or no data");
  require_dim(p.q, View::k_dim, "q");
  require_dim(p.out, View::v_dim, "out");
  if (p.q.tokens == 0) return 0;
  require(p.view.k && p.view.v && p.view.lengths, "view", "null", "keys, values and lengths", "pass device memory");
  require(p.q.data && p.out.data && p.first_position, "problem", "null", "q, out and first_position",
          "pass device memory");
  require(p.view.k_strides.dim == 1 && p.view.v_strides.dim == 1, "stride of a row's elements",
          p.view.k_strides.dim != 1 ? p.view.k_strides.dim : p.view.v_strides.dim, "1", "transpose K and V back");
  if constexpr (View::encoding_type::scaled) {
    require(p.view.scales.k && p.view.scales.v, "scales of K and V", "null", "device memory",
            "point the view at the scales of its rows");
  }
  if constexpr (View::is_raw) {
    require_prefill_rows("keys", p.view.k, p.view.k_strides);
    require_prefill_rows("values", p.view.v, p.view.v_strides);
  }
  require_prefill_rows("q", p.q.data, row_strides{p.q.sequence_stride, p.q.head_stride, p.q.token_stride, 1});
  require_aligned("out", p.out.data, 2 * sizeof(Out));
  const offset_t strides[] = {p.out.sequence_stride, p.out.token_stride, p.out.head_stride};
  for (const offset_t stride : strides) {
    require(stride % 2 == 0, "a stride of out", stride, "an even number", "pad the rows");
  }
  const offset_t rows = offset_t(p.q.tokens) * group;
  const offset_t blocks = (rows + block_rows - 1) / block_rows * (offset_t(sequences) * (q_heads / group));
  constexpr offset_t most = (std::numeric_limits<index_t>::max)();
  require(rows <= most - block_rows && blocks <= most, "query rows of the chunk", rows * (q_heads / group) * sequences,
          "fewer than 2^31 for a head, in fewer than 2^31 blocks", "pass a shorter chunk");
  return index_t(blocks);
}

/// How `blocks` query blocks are cut for a device that holds `places` blocks at once: into parts, where there are too
/// few of them and there is a workspace. Blocks that go from item to item (`in_turns`) count in it what they have
/// taken.
template <class Kernel>
prefill_parts cut_prefill(index_t blocks, index_t places, bool in_turns, void* workspace, cudaStream_t stream) {
  constexpr index_t most_splits = 32;  // enough to fill a large device from eight blocks
  prefill_parts parts;
  parts.items = blocks;
  if (!workspace) return parts;
  parts.splits = std::clamp(places / blocks, 1, most_splits);
  parts.items *= parts.splits;
  parts.out = static_cast<float*>(workspace);
  parts.state = reinterpret_cast<float2*>(parts.out + std::size_t(places) * Kernel::block_rows * Kernel::Dv);
  if (in_turns && parts.items > places) {
    parts.taken = static_cast<index_t*>(workspace);  // no item has parts
    check(cudaMemsetAsync(parts.taken, 0, sizeof(index_t), stream), "cudaMemsetAsync");
  }
  return parts;
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
