// Moving stored tokens on the CPU: appending new ones, keeping chosen ones.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "../../../core/engine/move_problem.hpp"
#include "../kernel/executor.hpp"
#include "page_checks.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Writes new tokens behind the stored ones of every (sequence, kv_head), in the view's encoding. Fills the columns and
/// advances the lengths, as cuda::append does.
/// Errors   missing memory, scales that rows share, shapes that differ, more new tokens than `k` has, slots outside the
///          tables, positions not behind the stored ones: tessera::error, before anything is written.
template <class View, class E>
void append(const append_problem<View, E>& p) {
  using encoding = typename View::encoding_type;
  const default_float_mode mode;
  const View& view = p.view;
  p.check();
  p.check_shapes();
  const auto added = [&](index_t b) { return p.new_tokens ? p.new_tokens[b] : p.k.tokens; };
  for (index_t b = 0; b < view.sequences; ++b) {
    require(added(b) >= 0 && added(b) <= p.k.tokens, "new tokens of sequence " + std::to_string(b), added(b),
            "0 to " + std::to_string(p.k.tokens), "pass k and v of all of them");
    for (index_t h = 0; h < view.kv_heads; ++h) {
      const index_t length = view.length(b, h), first = p.first_position ? p.first_position[b] : length;
      require(first >= 0, "first_position of sequence " + std::to_string(b), first, "0 or more",
              "pass the position of the first new token");
      if ((std::max)(length, first) <= (std::numeric_limits<index_t>::max)() - added(b)) continue;
      fail("tokens of sequence " + std::to_string(b), offset_t((std::max)(length, first)) + added(b),
           "at most " + std::to_string((std::numeric_limits<index_t>::max)()), "go on in another sequence");
    }
  }
  require_pages(view, p.pool, [&](index_t b, index_t h) { return view.length(b, h) + added(b); });
  const auto first_of = [&](index_t b, index_t h) {
    return p.first_position ? p.first_position[b] : view.length(b, h);
  };
  for (index_t row = 0; p.positions.data && row < view.sequences * view.kv_heads; ++row) {
    const index_t b = row / view.kv_heads, h = row % view.kv_heads, length = view.length(b, h);
    if (length == 0 || added(b) == 0) continue;
    const index_t last = p.positions.entry(b, h, view.kv_heads, length - 1);
    if (first_of(b, h) > last) continue;  // makes its strings only for an error
    fail("position of the first new token (" + detail::row_name(b, h) + ")", first_of(b, h),
         "more than that of the last stored one, which is " + std::to_string(last),
         "pass first_position: where something was dropped, a length is no position");
  }
  if (p.segments.data) {
    for (index_t b = 0; b < view.sequences; ++b)
      require_boundaries({p.boundaries + offset_t(b) * p.k.tokens, std::size_t(added(b))}, added(b));
  }
  for (index_t b = 0; b < view.sequences; ++b) {
    for (index_t h = 0; h < view.kv_heads; ++h) {
      const index_t length = view.length(b, h);
      segment_cursor text = p.segments.data ? p.texts[b] : segment_cursor{};
      for (index_t t = 0; t < added(b); ++t) {
        const index_t slot = length + t;
        constexpr bool by_given = static_scales<encoding>;
        const float key_scale = encode_row<encoding>(p.k.row(b, t, h), View::k_dim, view.key(b, h, slot),
                                                     view.k_strides.dim, by_given ? view.key_scale(b, h, slot) : 1);
        float value_scale = 1;
        if constexpr (!View::is_latent) {
          value_scale = encode_row<encoding>(p.v.row(b, t, h), View::v_dim, view.value(b, h, slot), view.v_strides.dim,
                                             by_given ? view.value_scale(b, h, slot) : 1);
        }
        if constexpr (encoding::scaled && !by_given) {
          const offset_t scale = view.scales.index(view.table.locate(b, h, slot), h);
          view.scales.k[scale] = key_scale;
          view.scales.v[scale] = value_scale;
        }
        if (p.positions.data) {
          p.positions.entry(b, h, view.kv_heads, slot) = first_of(b, h) + t;
        }
        if (p.scores.data) p.scores.entry(b, h, view.kv_heads, slot) = 0;
        if (p.segments.data) {
          p.segments.entry(b, h, view.kv_heads, slot) = text.advance(p.boundaries[offset_t(b) * p.k.tokens + t] != 0);
        }
      }
    }
    if (p.segments.data) p.texts[b].advance(p.boundaries + offset_t(b) * p.k.tokens, added(b));
  }
  if (!p.lengths) return;
  const index_t lengths = view.length_strides.head != 0 ? view.kv_heads : 1;  // of a sequence
  for (index_t b = 0; b < view.sequences; ++b) {
    for (index_t h = 0; h < lengths; ++h) {
      p.lengths[b * view.length_strides.sequence + h * view.length_strides.head] = view.length(b, h) + added(b);
    }
  }
}

/// Appends rows alone: no columns, no lengths.
/// Shapes   k, v [sequences, tokens, kv_heads, dim]; the view has memory for `tokens` more than its lengths.
template <class View, class K, class V>
void append(const View& view, const rows_view<K>& k, const rows_view<V>& v) {
  append(append_problem<View, common_element<K, V>>{view, k, v});
}

/// Copies the chosen slots of every (sequence, kv_head) to slots 0, 1, 2, ... of another view, or of the same one,
/// with their scales, positions, scores and segments, as cuda::pack does. With `ends` they go to the slots before an
/// end. In place this is safe: indices ascend, so a row is read before it is overwritten. Towards an end the last row
/// moves first.
/// Errors   a selection that does not ascend within the stored slots; an end before the rows that shall lie there, or
///          in place at or before a chosen slot; scales that rows of `target` share; a column to write without one to
///          read; with `pool.pages`, table entries outside it and moves into a page of another table: tessera::error,
///          before anything moves.
/// Cost     reads and writes each chosen row once. Rows of other sequences and heads are untouched.
template <class From, class To>
void pack(const pack_problem<From, To>& p, executor& workers) {
  static_assert(std::is_same_v<typename From::encoding_type, typename To::encoding_type> && From::k_dim == To::k_dim &&
                    From::v_dim == To::v_dim,
                "tessera: pack copies rows between views of one encoding and head dims");
  using S = typename To::stored_type;
  p.check();
  require_memory(p.source, true, true);
  require_selection(p.source, p.chosen);
  require_pages(p.source, p.pool);
  require_ends(p);
  require_pages(p.target, p.pool, [&](index_t b, index_t h) {
    const index_t count = p.chosen.count(offset_t(b) * p.target.kv_heads + h);
    return p.target_slot(b, count, count);
  });
  require_own_pages(p);
  if (p.lengths && p.target.length_strides.head == 0) require_even_counts(p.target, p.chosen);
  const auto copy_row = [](const S* source, offset_t source_stride, S* target, offset_t target_stride, int dim) {
    if (source == target) return;
    const int units = dim / elements_of_unit<S>;
    if (source_stride == 1 && target_stride == 1) {
      std::memmove(target, source, std::size_t(units) * sizeof(S));
    } else {
      for (int i = 0; i < units; ++i) target[i * target_stride] = source[i * source_stride];
    }
  };
  const From& source = p.source;
  const To& target = p.target;
  workers.for_each(source.sequences * source.kv_heads, [&](index_t row, int) {
    const index_t b = row / source.kv_heads, h = row % source.kv_heads;
    const index_t* slots = p.chosen.row(row);
    const index_t count = p.chosen.count(row);
    for (index_t turn = 0; turn < count; ++turn) {
      const index_t i = p.ends ? count - 1 - turn : turn;
      const index_t slot = slots[i], to = p.target_slot(b, count, i);
      copy_row(source.key(b, h, slot), source.k_strides.dim, target.key(b, h, to), target.k_strides.dim, To::k_dim);
      if constexpr (!To::is_latent) {
        copy_row(source.value(b, h, slot), source.v_strides.dim, target.value(b, h, to), target.v_strides.dim,
                 To::v_dim);
      }
      if constexpr (To::encoding_type::scaled && !static_scales<typename To::encoding_type>) {
        const offset_t scale = target.scales.index(target.table.locate(b, h, to), h);
        target.scales.k[scale] = source.key_scale(b, h, slot);
        target.scales.v[scale] = source.value_scale(b, h, slot);
      }
      if (p.positions.data) p.positions.entry(b, h, target.kv_heads, to) = source.position(b, h, slot);
      if (p.scores.data) p.scores.entry(b, h, target.kv_heads, to) = p.source_scores.entry(b, h, source.kv_heads, slot);
      if (p.segments.data)
        p.segments.entry(b, h, target.kv_heads, to) = p.source_segments.entry(b, h, source.kv_heads, slot);
    }
  });
  for (index_t row = 0; p.lengths && row < target.sequences * target.kv_heads; ++row) {
    p.lengths[row / target.kv_heads * target.length_strides.sequence +
              row % target.kv_heads * target.length_strides.head] = p.chosen.count(row);
  }
}

/// Packs rows alone: no columns, no lengths.
template <class From, class To>
void pack(const From& source, const selection_view& chosen, const To& target, executor& workers) {
  pack(pack_problem<From, To>{source, chosen, target}, workers);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
