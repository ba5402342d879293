// Moving stored tokens on the CPU: appending new ones, keeping chosen ones.
#pragma once

#include <cstring>
#include <string>

#include "../../../core/model_shape.hpp"
#include "../../../core/selection.hpp"
#include "../kernel/executor.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
inline namespace TESSERA_HOST_ISA {

/// Writes new tokens behind the stored ones of every (sequence, kv_head), encoding them as the view stores rows.
/// Shapes   k, v [sequences, tokens, kv_heads, dim]; the view's lengths are those before, and it has room for `tokens`
/// more.
/// Errors   rows of other sequences, tokens, heads or head dims: tessera::error, before anything is written.
template <class View, class E>
void append(const View& view, const rows_view<const E>& k, const rows_view<const E>& v) {
  using encoding = typename View::encoding_type;
  require_dim(k, View::k_dim, "k");
  require_dim(v, View::v_dim, "v");
  for (const index_t sequences : {k.sequences, v.sequences}) {
    require(sequences == view.sequences, "sequences of k and v", sequences, std::to_string(view.sequences),
            "pass the rows of every sequence of the view");
  }
  for (const index_t heads : {k.heads, v.heads}) {
    require(heads == view.kv_heads, "heads of k and v", heads, std::to_string(view.kv_heads),
            "pass [sequences, tokens, kv_heads, head_dim]");
  }
  require(k.tokens == v.tokens && k.tokens >= 0, "tokens of v", v.tokens,
          "those of k, which are " + std::to_string(k.tokens), "pass k and v of the same tokens");
  for (index_t b = 0; b < view.sequences; ++b) {
    for (index_t h = 0; h < view.kv_heads; ++h) {
      const index_t length = view.length(b, h);
      for (index_t t = 0; t < k.tokens; ++t) {
        const index_t slot = length + t;
        const float key_scale =
            encode_row<encoding>(k.row(b, t, h), View::k_dim, view.key(b, h, slot), view.k_strides.dim);
        const float value_scale =
            encode_row<encoding>(v.row(b, t, h), View::v_dim, view.value(b, h, slot), view.v_strides.dim);
        if constexpr (encoding::scaled) {
          const offset_t at = view.scales.index(view.table.locate(b, h, slot), h);
          view.scales.k[at] = key_scale;
          view.scales.v[at] = value_scale;
        }
      }
    }
  }
}

/// Copies the chosen slots of every (sequence, kv_head) to slots 0, 1, 2, ... of `to`: what is stored, with its scales.
/// `to` may be `from`: indices ascend, so a row is read before anything is written over it.
/// Errors   views of other sequences or heads: tessera::error, before anything is written.
/// Cost     reads and writes each chosen row once. Rows of other sequences and heads are untouched.
template <class From, class To>
void pack(const From& from, const selection_view& chosen, const To& to, executor& workers) {
  static_assert(std::is_same_v<typename From::encoding_type, typename To::encoding_type> && From::k_dim == To::k_dim &&
                    From::v_dim == To::v_dim,
                "tessera: pack copies rows between views of one encoding and head dims");
  using S = typename To::stored_type;
  require(to.sequences == from.sequences && to.kv_heads == from.kv_heads, "sequences and kv_heads to pack into",
          std::to_string(to.sequences) + " and " + std::to_string(to.kv_heads),
          std::to_string(from.sequences) + " and " + std::to_string(from.kv_heads), "pass views of one batch");
  const auto copy_row = [](const S* source, offset_t source_stride, S* target, offset_t target_stride, int dim) {
    if (source == target) return;
    if (source_stride == 1 && target_stride == 1) {
      std::memmove(target, source, std::size_t(dim) * sizeof(S));
    } else {
      for (int d = 0; d < dim; ++d) target[d * target_stride] = source[d * source_stride];
    }
  };
  workers.for_each(from.sequences * from.kv_heads, [&](index_t row, int) {
    const index_t b = row / from.kv_heads, h = row % from.kv_heads;
    const index_t* slots = chosen.row(row);
    for (index_t i = 0; i < chosen.count(row); ++i) {
      copy_row(from.key(b, h, slots[i]), from.k_strides.dim, to.key(b, h, i), to.k_strides.dim, To::k_dim);
      copy_row(from.value(b, h, slots[i]), from.v_strides.dim, to.value(b, h, i), to.v_strides.dim, To::v_dim);
      if constexpr (To::encoding_type::scaled) {
        const offset_t at = to.scales.index(to.table.locate(b, h, i), h);
        to.scales.k[at] = from.key_scale(b, h, slots[i]);
        to.scales.v[at] = from.value_scale(b, h, slots[i]);
      }
    }
  });
}

}  // namespace TESSERA_HOST_ISA
}  // namespace cpu
TESSERA_NAMESPACE_END
