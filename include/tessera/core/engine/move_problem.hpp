// What appending and packing read and write, on both backends.
#pragma once

#include <type_traits>

#include "../model_shape.hpp"
#include "../selection.hpp"
#include "../stored/segment_cursor.hpp"
#include "../stored/slot_column.hpp"
#include "page_pool.hpp"

TESSERA_NAMESPACE_BEGIN

namespace detail {

/// Whether rows of two heads of a sequence have other addresses in a table already.
template <class Table>
bool table_tells_heads(const Table& table, index_t kv_heads) {
  if constexpr (page_table<Table>) return table.tables(kv_heads) > 1;
  return std::is_same_v<Table, ragged>;
}

}  // namespace detail

/// Checks that each row of a view that is written has its own scale, where rows have scales. Writing a scale that rows
/// share would change rows that are stored already.
/// Static scales are not written.
/// Errors   a stride of 0 between rows; one array of scales for keys and values: tessera::error.
template <class View>
void require_row_scales(const View& view) {
  if constexpr (View::encoding_type::scaled && !static_scales<typename View::encoding_type>) {
    using table = std::remove_cvref_t<decltype(view.table)>;
    const auto needs = [](const char* name, offset_t stride, bool needed) {
      require(stride != 0 || !needed, name, stride, "other than 0: a written row gets a scale of its own",
              "keep a scale for each row, or take static_fp8_elements where a tensor or a head has one scale");
    };
    require(view.scales.k != view.scales.v || !view.scales.k, "scales of keys and values", "one array",
            "an array for each", "keep a scale for each row of k, and another for each row of v");
    needs("stride of scales from token to token", view.scales.token, true);
    needs("stride of scales from head to head", view.scales.head,
          view.kv_heads > 1 && !detail::table_tells_heads(view.table, view.kv_heads));
    needs("stride of scales from sequence to sequence, or page to page", view.scales.outer,
          paged_table<table> || (std::is_same_v<table, contiguous> && view.sequences > 1));
  }
}

/// What to append; on the device every pointer is a device pointer. Row t of `k` and `v` goes to slot
/// length(sequence, head) + t. Lengths, positions and the position behind the last are below 2^31: the CPU checks it.
template <class View, class E>
struct append_problem {
  static_assert(!std::is_const_v<typename View::stored_type>,
                "tessera: append writes to its view: a kv_view<E>, not a kv_view<const E>");
  static_assert(
      written_encoding<typename View::encoding_type>,
      "tessera: append writes rows of elements, and of blocks that can be made of them; the engine writes its "
      "own blocks");
  View view;                            ///< with memory for the new tokens; its lengths do not count them yet
  rows_view<const E> k, v;              ///< [sequences, tokens, kv_heads, dim]; on the device dim stride 1. Of latent
                                        ///< rows `v` is `k` with its own dim, or has no data
  index_t* lengths = nullptr;           ///< the memory of view.lengths, or another of its strides; gets the new lengths
  const index_t* new_tokens = nullptr;  ///< [sequences], at most k.tokens; null: all of them
  const index_t* first_position = nullptr;  ///< [sequences]; null: positions go on from the old length
  slot_column<index_t> positions{};
  slot_column<float> scores{};               ///< of new tokens: 0
  page_pool pool{};                          ///< for the CPU's checks
  slot_column<index_t> segments{};           ///< of new tokens: by `boundaries`, which must be there
  const std::uint8_t* boundaries = nullptr;  ///< [sequences, k.tokens], 1 after which a segment ends, else 0
  segment_cursor* texts = nullptr;           ///< [sequences], of each text; advanced

  /// Errors   shapes that differ, missing memory, scales that rows share: tessera::error.
  void check() const {
    require_dim(k, View::k_dim, "k");
    require_dim(v, View::v_dim, "v");
    if (k.tokens != v.tokens || k.tokens < 0) {
      fail("tokens of v", v.tokens, std::to_string(k.tokens) + ", as of k", "append k and v together");
    }
    if (segments.data && !(boundaries && texts)) {
      fail("boundaries and texts", "null", "flags for the new tokens, and a cursor a sequence",
           "say after which tokens a segment ends, and where each text stands");
    }
    if (k.tokens == 0 || view.sequences <= 0) return;
    check_shapes();
    const bool has_scales = !View::encoding_type::scaled || (view.scales.k && view.scales.v);
    if constexpr (View::is_latent) {
      const bool alike = v.sequence_stride == k.sequence_stride && v.token_stride == k.token_stride;
      if (v.data && (v.data != k.data || !alike)) {
        fail("v of latent rows", "other rows than k", "the same rows as k, or none",
             "append k alone: its first elements are the value");
      }
    }
    const bool has_values = View::is_latent || (v.data && view.v);
    if (!k.data || !has_values || !view.k || !view.lengths || !has_scales) {
      fail("memory of the problem", "null", "memory behind k, v, the view, its lengths and its scales",
           "pass the rows, and where they go");
    }
    require_row_scales(view);
  }
  /// Errors   rows of other sequences or heads than the view's: tessera::error. The CPU asks without new tokens too.
  void check_shapes() const {
    const auto fits = [&](const auto& rows) { return rows.sequences == view.sequences && rows.heads == view.kv_heads; };
    if (fits(k) && fits(v)) return;
    fail("shapes of k and v", shape_text(k) + " and " + shape_text(v),
         "new rows of the view's " + std::to_string(view.sequences) + " sequences and " +
             std::to_string(view.kv_heads) + " kv_heads",
         "append to every sequence of the view; new_tokens may be 0");
  }
};
/// k and v may be rows of memory that the caller writes elsewhere.
template <class View, class K, class V, class... Rest>
append_problem(View, rows_view<K>, rows_view<V>, Rest...) -> append_problem<View, common_element<K, V>>;

/// What to keep and where it goes; on the device every pointer is a device pointer.
///
/// Rows of a head begin at slot 0, or end at a slot that `ends` gives: an engine whose tables go by position (vLLM)
/// packs a prompt towards its end, so that pages in front become free and the next token's slot stays where it was.
///
/// In place, `target` is `source`. That is safe because the selection ascends, and because every chosen slot lies below
/// its end. A page in which a row moves must then be in one table only: pack shared pages into new ones.
template <class From, class To>
struct pack_problem {
  static_assert(!std::is_const_v<typename To::stored_type>,
                "tessera: pack writes to the view `target`: a kv_view<E>, not a kv_view<const E>");
  From source;
  selection_view chosen;  ///< row = sequence * kv_heads + head; its counts are the new lengths
  To target;
  slot_column<index_t> positions{};  ///< of `target`; filled with source.position(slot)
  slot_column<const float> source_scores{};
  slot_column<float> scores{};
  index_t* lengths = nullptr;  ///< strided as target.length_strides; gets the counts
  page_pool pool{};            ///< of both views, for the CPU's checks
  slot_column<const index_t> source_segments{};
  slot_column<index_t> segments{};
  const index_t* ends =
      nullptr;  ///< [sequences], the slot behind the last row of each head; null: rows begin at slot 0

  /// The slot of `target` for a sequence's i-th chosen row of `count`.
  TESSERA_HD index_t target_slot(index_t sequence, index_t count, index_t i) const {
    return ends ? ends[sequence] - count + i : i;
  }

  /// Errors   views of other batches, a column to write without one to read, scales that rows share, static scales of
  ///          which a row would get another one: tessera::error.
  void check() const {
    require(target.sequences == source.sequences && target.kv_heads == source.kv_heads,
            "sequences and kv_heads to pack into",
            std::to_string(target.sequences) + " and " + std::to_string(target.kv_heads),
            std::to_string(source.sequences) + " and " + std::to_string(source.kv_heads), "pass views of one batch");
    require((!scores.data || source_scores.data) && (!segments.data || source_segments.data),
            "source_scores or source_segments", "null", "a column where `scores` or `segments` is given",
            "pass the columns that scores and segments are copied from");
    if (target.sequences > 0) require_row_scales(target);
    require_same_scales();
  }

 private:
  /// Rows move as they are stored: where scales are static, a row's target must have the same one.
  void require_same_scales() const {
    static_assert(static_scales<typename From::encoding_type> == static_scales<typename To::encoding_type>,
                  "tessera: pack moves rows as they are stored: both views have static scales, or neither");
    if constexpr (static_scales<typename To::encoding_type>) {
      const auto &a = source.scales, &b = target.scales;
      require(
          a.k == b.k && a.v == b.v && a.outer == 0 && b.outer == 0 && a.token == 0 && b.token == 0 && a.head == b.head,
          "static scales of the two views", "other ones, or some by row", "the same, one for a tensor or for each head",
          "give both views the same arrays of scales");
    }
  }
};

TESSERA_NAMESPACE_END
