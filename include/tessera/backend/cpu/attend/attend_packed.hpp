// Attention over packed segments and the whole rows after them, on the CPU. Each part is attended in its own basis; the
// results are merged once.
#pragma once

#include <algorithm>
#include <memory>

#include "../../../core/host/host_vector.hpp"
#include "../store/packed/packed_view.hpp"
#include "attend.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Slots of a packed view that lie in one segment (null: in the whole rows), as kernels of plain views load them: rows
/// come in the part's own basis. Slots keep their numbers of the whole view.
template <class Layout>
struct part_view {
  using encoding_type = typename Layout::encoding_type;
  static constexpr int k_dim = Layout::k_dim;
  static constexpr int v_dim = Layout::v_dim;

  const packed_view<Layout>& all;
  const typename packed_view<Layout>::segment_type* segment;
  index_t begin;  // the stored slot of its first row
  index_t position(index_t sequence, index_t head, index_t slot) const { return all.position(sequence, head, slot); }
  index_t row(index_t head, index_t slot) const { return all.stored_slot(head, slot) - begin; }
};

template <class Layout>
void load_key(const part_view<Layout>& part, index_t sequence, index_t head, index_t slot, float* to) {
  if (!part.segment) return load_key(part.all.whole, sequence, head, part.row(head, slot), to);
  part.segment->unpack_key(head, part.row(head, slot), to);
  std::fill(to + part.segment->format.k.channels, to + Layout::k_dim, 0.0f);
}
template <class Layout>
void load_value(const part_view<Layout>& part, index_t sequence, index_t head, index_t slot, float* to) {
  if (!part.segment) return load_value(part.all.whole, sequence, head, part.row(head, slot), to);
  part.segment->unpack_value(head, part.row(head, slot), to);
  std::fill(to + part.segment->format.v.channels, to + Layout::v_dim, 0.0f);
}

namespace detail {

/// Attention of one block of query rows of one head over every part of a packed view.
template <class Layout>
class packed_rows_block {
  static constexpr int D = Layout::k_dim, Dv = Layout::v_dim, largest = D > Dv ? D : Dv;
  using view_type = packed_view<Layout>;

 public:
  template <class Q>
  void attend(const view_type& view, const query_rows<Q>& queries, const logit_rule& rule, index_t head,
              const slot_source& slots, index_t first, int count, const attention_output& output) {
    const index_t group = queries.q.heads / view.kv_heads;
    load_queries<D>(queries, rule, 0, head, group, first, count, queries_);
    for (int r = 0; r < count; ++r) positions_[r] = queries.position(0, (first + r) / group);
    parts_ = 0;
    index_t from = 0, begin = 0;
    const auto end_of = [&](index_t stored_end) {
      index_t low = from, high = slots.count;
      while (low < high) {
        const index_t middle = low + (high - low) / 2;
        if (view.stored_slot(head, slots[middle]) < stored_end) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      return low;
    };
    for (const auto& segment : *view.segments) {
      const index_t length = segment->lengths[std::size_t(head)], to = end_of(begin + length);
      if (from < to) attend_part(part_view<Layout>{view, segment.get(), begin}, head, slots, from, to, rule, count);
      from = to;
      begin += length;
    }
    if (from < slots.count || parts_ == 0) {
      attend_part(part_view<Layout>{view, nullptr, begin}, head, slots, from, slots.count, rule, count);
    }
    for (int r = 0; r < count; ++r) {
      const index_t token = (first + r) / group, q_head = head * group + (first + r) % group;
      merge_row<Dv>(
          parts_, [&](index_t p) { return states_[std::size_t(p * tile_rows + r)]; },
          [&](index_t p) { return out_.data() + (offset_t(p) * tile_rows + r) * Dv; },
          rule.sink_logits ? rule.sink_logits + q_head : nullptr, output.out.row(0, token, q_head),
          output.lse.data ? output.lse.row(0, token, q_head) : nullptr);
    }
  }

  /// Room for views of so many segments.
  void reserve(std::size_t segments) {
    states_.resize((segments + 1) * tile_rows);
    out_.resize((segments + 1) * tile_rows * Dv);
  }

 private:
  void attend_part(const part_view<Layout>& part, index_t head, const slot_source& slots, index_t first, index_t last,
                   const logit_rule& rule, int rows) {
    const auto* segment = part.segment;
    rotate_rows<D>(queries_, rows, segment ? segment->k_basis(head, D) : nullptr,
                   segment ? segment->format.k.channels : D, turned_, tile_.queries);
    const std::size_t first_row = std::size_t(parts_++) * tile_rows;
    std::fill_n(states_.data() + first_row, rows, softmax_state{});
    std::fill_n(partial_, rows * Dv, 0.0f);
    attend_converted_rows(part, 0, head, slots, first, last, rule, rows, positions_, tile_,
                          partial_rows<Dv>{partial_, states_.data() + first_row});
    rotate_rows_back<Dv>(partial_, rows, segment ? segment->v_basis(head, Dv) : nullptr,
                         segment ? segment->format.v.channels : Dv, out_.data() + first_row * Dv);
  }

  tile_memory<D, Dv> tile_;
  alignas(64) float queries_[tile_rows * D];
  alignas(64) float turned_[largest * largest];
  alignas(64) float partial_[tile_rows * Dv];
  index_t positions_[tile_rows];
  index_t parts_ = 0;
  host_vector<softmax_state> states_;
  host_vector<float> out_;  // [parts, tile_rows, Dv], in the engine's basis
};

template <class Layout, class Q>
void attend_packed(const packed_view<Layout>& view, const query_rows<Q>& queries, const logit_rule& rule,
                   const selection_view* chosen, const attention_output& output, executor& workers) {
  check_attention(view, queries, output);
  const index_t rows = queries.q.tokens * (queries.q.heads / view.kv_heads), blocks = ceil_div(rows, tile_rows);
  host_vector<std::unique_ptr<packed_rows_block<Layout>>> memories;  // allocated before anything is written
  while (index_t(memories.size()) < workers.threads()) {
    std::unique_ptr<packed_rows_block<Layout>> memory(
        new packed_rows_block<Layout>);  // make_unique would write zeros over it
    memories.push_back(std::move(memory));
    memories.back()->reserve(view.segments->size());
  }
  workers.for_each(view.kv_heads * blocks, [&](index_t item, int worker) {
    const index_t block = blocks - 1 - item % blocks, head = item / blocks, first = block * tile_rows;
    memories[std::size_t(worker)]->attend(view, queries, rule, head, source_of(view, chosen, 0, head), first,
                                          int((std::min<index_t>)(tile_rows, rows - first)), output);
  });
}

}  // namespace detail

/// As for a plain view. The rows of a part are read once for each 64 query rows. Queries are rotated, and outputs
/// rotated back, once for each part.
template <class Layout, class Q>
void prefill_attention(const packed_view<Layout>& view, const query_rows<Q>& queries, const logit_rule& rule,
                       const attention_output& output, executor& workers) {
  detail::attend_packed(view, queries, rule, nullptr, output, workers);
}
template <class Layout, class Q>
void decode_attention(const packed_view<Layout>& view, const query_rows<Q>& queries, const logit_rule& rule,
                      const selection_view* chosen, const attention_output& output, decode_workspace&,
                      executor& workers) {
  detail::attend_packed(view, queries, rule, chosen, output, workers);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
