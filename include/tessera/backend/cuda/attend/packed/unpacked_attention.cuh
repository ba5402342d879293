// Attention of a chunk of many queries to packed rows: pieces of them are turned back into whole rows.
#pragma once

#include <algorithm>
#include <array>

#include "../../../../core/model_shape.hpp"
#include "../../device/copy.cuh"
#include "../../device/memory.cuh"
#include "../../store/packed/scratch_rows.cuh"
#include "../../store/packed/unpack_slots.cuh"
#include "../merge.cuh"
#include "../prefill/prefill_attention.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// A piece of packed slots is turned back into whole rows of the cache's own placement, attended by the kernel of
/// prompts, and merged with the pieces before it. The whole rows come last. The step's kernel, which multiplies rows as
/// they are packed, would read them once for every few tokens of the chunk.
/// Memory   a piece's rows, and two outputs of a slice of the chunk in fp32 with their log-sum-exps.
/// Cost     for every slice and piece a launch that unpacks, the attention of prompts, a merge.
template <class Whole, class Out>
class unpacked_attention {
  using T = typename Whole::element_type;
  static constexpr int Dv = Whole::v_dim;

 public:
  /// `tokens`: the most that a sequence stores, or a chunk has. `piece`: slots that are turned back at a time, a power
  /// of two from 128 on; `slice`: tokens of a chunk that attend to them.
  unpacked_attention(const model_shape& shape, index_t tokens, const device_info& device, index_t piece = 16384,
                     index_t slice = 2048)
      : piece_(power_of_two(tokens, piece)),
        slice_((std::min)(tokens, slice)),
        q_heads_(shape.q_heads),
        rows_(shape.kv_heads, piece_),
        attend_(1, shape.kv_heads, shape.q_heads, device),
        scratch_(attend_.workspace_bytes()),
        out_(2 * std::size_t(slice_) * std::size_t(shape.q_heads) * Dv),
        lse_(2 * std::size_t(slice_) * std::size_t(shape.q_heads)) {}

  /// `lse` has the shape of q, or no data.
  template <class View>
  void run(const prefill_problem<View, Out>& p, cudaStream_t stream) const {
    for (index_t done = 0; done < p.q.tokens; done += slice_) {
      const auto some = [&](auto rows) {
        if (rows.data) rows.data += done * rows.token_stride;
        rows.tokens = (std::min)(slice_, p.q.tokens - done);
        return rows;
      };
      const auto q = some(p.q);
      const std::array<attention_part, 2> parts{part(0, q.tokens), part(1, q.tokens)};
      for (index_t first = 0; first < p.view.packed; first += piece_) {
        const index_t count = (std::min)(piece_, p.view.packed - first);
        unpack_slots(p.view, first, count, rows_.view(), rows_.lengths(), stream);
        attend(rows_.view(), q, add_number(position_.data(), p.first_position, done - first, 1, stream), p.rule,
               first > 0 ? 1 : 0, stream);
        if (first > 0) merge_parts<Dv>(parts, nullptr, output(0, q.tokens), sums(0, q.tokens), stream);
      }
      // Positions of whole rows count from 0 where they do not come from a column.
      const index_t shift = p.view.whole.positions ? 0 : p.view.packed;
      attend(p.view.whole, q, add_number(position_.data(), p.first_position, done - shift, 1, stream), p.rule, 1,
             stream);
      merge_parts<Dv>(parts, p.rule.sink_logits, some(p.out), some(p.lse), stream);
    }
  }

 private:
  /// Slots of a piece, which may be a page.
  static index_t power_of_two(index_t tokens, index_t piece) {
    index_t slots = 128;  // the kernel of prompts loads as many at a time
    while (slots < piece && slots < tokens) slots *= 2;
    return slots;
  }
  rows_view<float> output(int part, index_t tokens) const {
    return nhd_rows(out_.data() + offset_t(part) * slice_ * q_heads_ * Dv, tokens, q_heads_, Dv);
  }
  rows_view<float> sums(int part, index_t tokens) const {
    return nhd_rows(lse_.data() + offset_t(part) * slice_ * q_heads_, tokens, q_heads_, 1);
  }
  attention_part part(int i, index_t tokens) const {
    const auto constant = [](const rows_view<float>& rows) {
      return rows_view<const float>{rows.data,      rows.sequence_stride, rows.token_stride, rows.head_stride,
                                    rows.sequences, rows.tokens,          rows.heads,        rows.dim};
    };
    return {constant(output(i, tokens)), constant(sums(i, tokens))};
  }
  void attend(const Whole& view, const rows_view<const T>& q, const index_t* first, const logit_rule& rule, int part,
              cudaStream_t stream) const {
    attend_.run_part({view, q, first, rule, output(part, q.tokens), sums(part, q.tokens)}, scratch_.data(), stream);
  }

  index_t piece_, slice_, q_heads_;
  scratch_rows<Whole> rows_;
  prefill_attention<Whole, float> attend_;
  device_buffer<unsigned char> scratch_;
  device_buffer<float> out_, lse_;  // of two parts
  device_buffer<index_t> position_{1};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
