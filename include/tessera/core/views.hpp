// Non-owning views of keys, values, queries and outputs, over any engine's memory.
#pragma once

#include <concepts>
#include <type_traits>

#include "config.hpp"
#include "encoding.hpp"
#include "types.hpp"

TESSERA_SHARED_NAMESPACE_BEGIN

/// Strides of one tensor of rows, in elements; in blocks where rows are stored in blocks.
/// `outer` steps from sequence to sequence, or from page to page where a table maps slots to pages.
/// NHD and HND differ only in `head` and `token`; `dim` is 1 except for a transposed V.
struct row_strides {
  offset_t outer = 0;
  offset_t head = 0;
  offset_t token = 0;
  offset_t dim = 1;
};

/// The address of a slot: `row_strides::outer` multiplies `outer`, `row_strides::token` multiplies `row`.
struct slot_address {
  offset_t outer;
  offset_t row;
};

/// The scales of encoded rows. The row at address (outer, row) of a head has the scale number
/// outer * `outer` + head * `head` + row * `token`, in `k` and in `v`. Null: rows have no scales.
template <class S>
struct row_scales {
  S* k = nullptr;
  S* v = nullptr;
  offset_t outer = 0;
  offset_t head = 0;
  offset_t token = 1;
  TESSERA_HD TESSERA_INLINE offset_t index(const slot_address& slot, index_t head_index) const {
    return slot.outer * outer + head_index * head + slot.row * token;
  }
  /// The same scales, only read.
  template <std::same_as<const S> Read>
  requires(!std::is_const_v<S>) TESSERA_HD TESSERA_INLINE constexpr operator row_scales<Read>() const {
    return {k, v, outer, head, token};
  }
};

/// No table: slot `s` of sequence `b` is row `s` of outer index `b`.
struct contiguous {
  TESSERA_HD TESSERA_INLINE slot_address locate(index_t sequence, index_t, index_t slot) const {
    return {sequence, slot};
  }
};

/// Rows of every (sequence, kv_head) stand one after another in a pool: `begin[sequence * kv_heads + head]` rows in.
struct ragged {
  const offset_t* begin = nullptr;
  index_t kv_heads = 1;
  TESSERA_HD TESSERA_INLINE slot_address locate(index_t sequence, index_t head, index_t slot) const {
    return {0, begin[offset_t(sequence) * kv_heads + head] + slot};
  }
};

/// A dense block table, as in vLLM: `blocks [sequences, max_blocks]` with `sequence_stride` max_blocks (at 0 all
/// sequences share one row), or one per head `[sequences, kv_heads, max_blocks]` with `head_stride` set (TANGRAM's
/// virtual block ids are such a table over pages of one head).
struct block_table {
  const index_t* blocks = nullptr;
  index_t page = 16;
  offset_t sequence_stride = 0;
  offset_t head_stride = 0;
  TESSERA_HD TESSERA_INLINE slot_address locate(index_t sequence, index_t head, index_t slot) const {
    return {blocks[sequence * sequence_stride + head * head_stride + slot / page], slot % page};
  }
  /// The pages behind the slots of a (sequence, kv_head), in order; tables of a sequence.
  TESSERA_HD TESSERA_INLINE const index_t* pages(index_t sequence, index_t head) const {
    return blocks + sequence * sequence_stride + head * head_stride;
  }
  TESSERA_HD TESSERA_INLINE index_t tables(index_t kv_heads) const { return head_stride != 0 ? kv_heads : 1; }
};

/// A CSR page table, as in FlashInfer: the pages of row r are `indices[indptr[r] .. indptr[r + 1])`.
/// `tables_per_sequence` is 1, or kv_heads when every head has its own row.
struct csr_table {
  const index_t* indptr = nullptr;
  const index_t* indices = nullptr;
  index_t page = 16;
  index_t tables_per_sequence = 1;
  TESSERA_HD TESSERA_INLINE slot_address locate(index_t sequence, index_t head, index_t slot) const {
    return {indices[indptr[row(sequence, head)] + slot / page], slot % page};
  }
  TESSERA_HD TESSERA_INLINE offset_t row(index_t sequence, index_t head) const {
    return offset_t(sequence) * tables_per_sequence + (tables_per_sequence > 1 ? head : 0);
  }
  TESSERA_HD TESSERA_INLINE const index_t* pages(index_t sequence, index_t head) const {
    return indices + indptr[row(sequence, head)];
  }
  TESSERA_HD TESSERA_INLINE index_t tables(index_t) const { return tables_per_sequence; }
};

/// A table of pages whose ids lie in memory, for each sequence or each (sequence, kv_head). Operations that hand out,
/// free or rename pages need one.
///   page                             slots of a page, at least 1: of all sequences and heads alike
///   pages(sequence, head)            the ids behind the slots, in order
///   tables(kv_heads) -> index_t      of a sequence: 1, or kv_heads
/// Law      locate(sequence, head, slot) is {pages(sequence, head)[slot / page], slot % page}.
template <class T>
concept page_table = requires(const T table, index_t i) {
  { table.page } -> std::convertible_to<index_t>;
  { table.pages(i, i) } -> std::same_as<const index_t*>;
  { table.tables(i) } -> std::same_as<index_t>;
};

/// A table of pages whose ids are computed: an engine's own, where no array holds them.
///   page                                     as above
///   page_of(sequence, head, i) -> index_t    the id of the i-th page, which `row_strides::outer` multiplies
/// Law      locate(sequence, head, slot) is {page_of(sequence, head, slot / page), slot % page}.
template <class T>
concept computed_page_table = requires(const T table, index_t i) {
  { table.page } -> std::convertible_to<index_t>;
  { table.page_of(i, i, i) } -> std::same_as<index_t>;
};

/// A table whose slots lie in pages. Attention looks a page up once and steps through its rows (`takes_paged_path`).
/// It reads the same rows as a look-up of every slot, and gives the same bits.
template <class T>
concept paged_table = page_table<T> || computed_page_table<T>;
static_assert(page_table<block_table> && page_table<csr_table> && paged_table<csr_table>);
static_assert(!paged_table<contiguous> && !paged_table<ragged>);

/// Some of the slots behind another table, in any order: slot `s` of (sequence, head) is that table's slot
/// `slots[begin[sequence * kv_heads + head] + s]`. There are two uses. To every operation a view over candidates is a
/// smaller cache; where slot and position coincide behind `table`, `slots` also serves as the view's `positions`. And
/// an engine that reuses cells lists each sequence's cells by ascending position; the view's `positions` are then those
/// of the list, or null where they are 0, 1, 2, ... Heads that share cells share a list: their `begin` are equal.
/// cpu::ordered_slots makes such lists from positions.
template <class Table>
struct filtered {
  Table table{};
  const index_t* slots = nullptr;
  const offset_t* begin = nullptr;
  index_t kv_heads = 1;
  TESSERA_HD TESSERA_INLINE slot_address locate(index_t sequence, index_t head, index_t slot) const {
    return table.locate(sequence, head, slots[begin[offset_t(sequence) * kv_heads + head] + slot]);
  }
};

/// What is known of a view's positions.
enum class slot_order {
  unsaid,    ///< operations check that they ascend: the CPU before it works, the device beside the work
  ascending  ///< the caller guarantees it: no check
};

/// Stored keys and values of a batch, one layer.
///
/// `E` is an element type, or an encoding (core/encoding.hpp) whose rows may have scales; const for what is only read.
/// A view of memory that may be written converts to one that only reads.
/// Shapes   K [sequences, kv_heads, slots, k_dim], V [.., v_dim] in any strides, behind any table. Of latent rows
///          (`latent_view`) `v` and `v_strides` are not read.
/// Lengths  `lengths[sequence * length_strides.sequence + head * length_strides.head]`; head stride 0 = one per
///          sequence. Strides are 0 until they are set: sequence stride 0 = one length for all sequences.
/// Positions  ascending logical positions by slot, null where slot and position coincide; strided alike, or, with
///            `position_begin`, the row of (sequence, head) begins at that offset (ragged storage). Positions that do
///            not ascend are refused where `order` does not say that they do; see cpu::ordered_slots.
template <class E, int D, class Table = contiguous, int Dv = D>
struct kv_view {
  static_assert(encoding<encoding_of<E>>,
                "tessera: kv_view takes float, fp16, bf16 or an encoding such as fp8_elements<bf16>; see as_elements");
  using encoding_type = std::conditional_t<encoding<encoding_of<E>>, encoding_of<E>, raw_elements<fp32>>;
  static constexpr bool is_latent = latent_encoding<encoding_type>;
  static_assert(is_latent || (supported_head_dim<D> && supported_head_dim<Dv>),
                "tessera: kv_view takes head dims 64, 80, 96, 128, 192, 256 and 512");
  static_assert(!is_latent || supported_latent_dims<D, Dv>,
                "tessera: a view of latent rows takes keys of 576 elements, of which 512 are the value");
  static constexpr int unit = elements_of_unit<typename encoding_type::stored_type>;
  static_assert(D % unit == 0 && Dv % unit == 0,
                "tessera: a row of blocks has a head dim of whole blocks: of 32 elements 64, 96, 128, 192, 256 or 512");
  using element_type = typename encoding_type::element_type;
  static constexpr bool is_raw = raw_encoding<encoding_type>;
  static constexpr int k_dim = D;
  static constexpr int v_dim = Dv;
  /// What a row takes of `stored_type`; the value of a latent row takes nothing.
  static constexpr int k_units = D / unit, v_units = is_latent ? 0 : Dv / unit;
  /// What `k` and `v` point to, and a row's scale.
  using stored_type = std::conditional_t<std::is_const_v<E>, const typename encoding_type::stored_type,
                                         typename encoding_type::stored_type>;
  using scale_type = std::conditional_t<std::is_const_v<E>, const float, float>;

  struct batch_strides {
    offset_t sequence = 0;
    offset_t head = 0;
  };

  stored_type* k = nullptr;
  stored_type* v = nullptr;
  row_strides k_strides, v_strides;
  index_t sequences = 0;
  index_t kv_heads = 0;
  const index_t* lengths = nullptr;
  batch_strides length_strides{};
  const index_t* positions = nullptr;
  batch_strides position_strides{};
  const offset_t* position_begin = nullptr;
  slot_order order = slot_order::unsaid;
  Table table{};
  row_scales<scale_type> scales{};

  TESSERA_HD TESSERA_INLINE index_t length(index_t sequence, index_t head) const {
    return lengths[sequence * length_strides.sequence + head * length_strides.head];
  }
  TESSERA_HD TESSERA_INLINE stored_type* key(index_t sequence, index_t head, index_t slot) const {
    const slot_address address = table.locate(sequence, head, slot);
    return k + address.outer * k_strides.outer + head * k_strides.head + address.row * k_strides.token;
  }
  TESSERA_HD TESSERA_INLINE stored_type* value(index_t sequence, index_t head, index_t slot) const {
    if constexpr (is_latent) return key(sequence, head, slot);
    const slot_address address = table.locate(sequence, head, slot);
    return v + address.outer * v_strides.outer + head * v_strides.head + address.row * v_strides.token;
  }
  /// From one element of a value to the next.
  TESSERA_HD TESSERA_INLINE offset_t value_stride() const { return is_latent ? k_strides.dim : v_strides.dim; }
  /// What the stored elements of a slot's key, or value, are multiplied by.
  TESSERA_HD TESSERA_INLINE float key_scale(index_t sequence, index_t head, index_t slot) const {
    if constexpr (!encoding_type::scaled) return 1;
    return scales.k[scales.index(table.locate(sequence, head, slot), head)];
  }
  TESSERA_HD TESSERA_INLINE float value_scale(index_t sequence, index_t head, index_t slot) const {
    if constexpr (!encoding_type::scaled) return 1;
    return scales.v[scales.index(table.locate(sequence, head, slot), head)];
  }
  /// One element of a slot's key, decoded and rounded to the element type.
  TESSERA_HD TESSERA_INLINE element_type key_element(index_t sequence, index_t head, index_t slot, int channel) const {
    const auto stored = key(sequence, head, slot)[channel / unit * k_strides.dim];
    if constexpr (is_raw) {
      return stored;
    } else if constexpr (unit > 1) {
      return element_type(stored.element(channel % unit));
    } else {
      return element_type(float(stored) * key_scale(sequence, head, slot));
    }
  }
  TESSERA_HD TESSERA_INLINE index_t position(index_t sequence, index_t head, index_t slot) const {
    return positions ? positions[position_row(sequence, head) + slot] : slot;
  }
  /// Where the positions of a (sequence, kv_head) begin.
  TESSERA_HD TESSERA_INLINE offset_t position_row(index_t sequence, index_t head) const {
    return position_begin ? position_begin[offset_t(sequence) * kv_heads + head]
                          : sequence * position_strides.sequence + head * position_strides.head;
  }
  /// The same memory, only read.
  template <std::same_as<const E> Read>
  requires(!std::is_const_v<E>) TESSERA_HD TESSERA_INLINE constexpr operator kv_view<Read, D, Table, Dv>() const {
    return {k,
            v,
            k_strides,
            v_strides,
            sequences,
            kv_heads,
            lengths,
            {length_strides.sequence, length_strides.head},
            positions,
            {position_strides.sequence, position_strides.head},
            position_begin,
            order,
            table,
            scales};
  }
};

/// Latent rows of an engine (MLA, DeepSeek V2 and V3): [sequences, slots, 576], of one kv_head. A token's key is its
/// row; its value is the row's first 512 elements, and the other 64 carry the position. Queries are absorbed: 576
/// elements for each query head, multiplied by the weights that would turn latent rows into keys of a head.
template <class T, class Table = contiguous>
using latent_view = kv_view<std::conditional_t<std::is_const_v<T>, const latent_elements<std::remove_const_t<T>>,
                                               latent_elements<std::remove_const_t<T>>>,
                            576, Table, 512>;

/// Whether kernels read the rows of a view. A sentence says why not.
template <class View>
constexpr bool check_device_rows() {
  static_assert(!View::is_latent,
                "tessera: on the device attention alone reads latent rows; score, index and pack them on the CPU");
  static_assert(View::is_latent || (View::k_dim <= largest_head_dim && View::v_dim <= largest_head_dim),
                "tessera: kernels take head dims up to 256; rows of 512 are for the CPU");
  return true;
}

/// Whether attention on the device reads the rows of a view: latent rows too.
template <class View>
constexpr bool check_attended_rows() {
  if constexpr (!View::is_latent) return check_device_rows<View>();
  return true;
}

/// Whether attention on the GPU looks up the pages of this view instead of every slot: true where its table is a
/// `paged_table`. An engine with its own table may assert it. Rows behind `contiguous` and `ragged` need no look-up.
/// Which pages gain is known at run time. Decode steps without a selection: pages of 16 slots, or of a multiple of 32.
/// Prompts of raw fp16 or bf16 rows, on sm_90: pages of a multiple of 8 slots. The CPU looks every slot up.
template <class View>
inline constexpr bool takes_paged_path = paged_table<std::remove_cvref_t<decltype(View::table)>>;

/// Rows of queries (or outputs, or new keys and values) of a batch: X [sequences, tokens, heads, dim].
///
/// `T` is const for rows that are only read. Rows that may be written convert to these. A template that deduces the
/// element type takes a `rows_view` of any type: see `common_element`.
template <class T>
struct rows_view {
  static_assert(row_element<std::remove_const_t<T>>, "tessera: rows hold float, fp16, bf16 or fp8; see as_elements");
  T* data = nullptr;
  offset_t sequence_stride = 0;
  offset_t token_stride = 0;
  offset_t head_stride = 0;
  index_t sequences = 1;
  index_t tokens = 0;
  index_t heads = 0;
  index_t dim = 0;  ///< elements of a row; 0: unknown; otherwise checked (core/model_shape.hpp)

  TESSERA_HD TESSERA_INLINE T* row(index_t sequence, index_t token, index_t head) const {
    return data + sequence * sequence_stride + token * token_stride + head * head_stride;
  }
  /// The rows of one sequence; null stays null.
  TESSERA_HD TESSERA_INLINE rows_view sequence(index_t b) const {
    rows_view result = *this;
    if (data) result.data += b * sequence_stride;
    result.sequences = 1;
    return result;
  }
  /// The same rows, only read.
  template <std::same_as<const T> Read>
  requires(!std::is_const_v<T>) TESSERA_HD TESSERA_INLINE constexpr operator rows_view<Read>() const {
    return {data, sequence_stride, token_stride, head_stride, sequences, tokens, heads, dim};
  }
};

/// The same rows, only read: for calls that deduce the element type of a `rows_view<const E>`.
template <class T>
TESSERA_HD TESSERA_INLINE constexpr rows_view<const T> read_only(const rows_view<T>& rows) {
  return rows;
}

/// The type that `common_element` names.
template <class First, class... Others>
struct element_in_common {
  static_assert((std::is_same_v<std::remove_const_t<First>, std::remove_const_t<Others>> && ...),
                "tessera: k and v of one call hold one element type; convert one of them; q may have another");
  using type = std::remove_const_t<First>;
};

/// The element type E that k and v of one call have in common, of memory that may be written or not. A public call
/// deduces it and passes its rows on as `rows_view<const E>`; q has a type of its own:
///   template <class K, class V, class Q = K>   // the default: q may be {}
///   void prefill(const rows_view<Q>& q, const rows_view<K>& k, const rows_view<V>& v) {
///     store_rows<common_element<K, V>>(k, v);
///   }
template <class... T>
using common_element = typename element_in_common<T...>::type;

/// Query heads m, m + step, ... of rows. With the group's size as step: the m-th query head of every group, so that
/// each KV head has one. Null stays null.
template <class T>
TESSERA_INLINE rows_view<T> every_head(rows_view<T> rows, index_t m, index_t step) {
  if (rows.data) rows.data += m * rows.head_stride;
  rows.head_stride *= step;
  rows.heads /= step;
  return rows;
}

/// A contiguous [sequences, tokens, heads, dim] tensor (NHD).
template <class T>
TESSERA_HD TESSERA_INLINE rows_view<T> nhd_rows(T* data, index_t tokens, index_t heads, index_t dim,
                                                index_t sequences = 1) {
  const offset_t token = offset_t(heads) * dim;
  return {data, tokens * token, token, dim, sequences, tokens, heads, dim};
}

/// A contiguous [sequences, heads, tokens, dim] tensor (HND).
template <class T>
TESSERA_HD TESSERA_INLINE rows_view<T> hnd_rows(T* data, index_t tokens, index_t heads, index_t dim,
                                                index_t sequences = 1) {
  const offset_t head = offset_t(tokens) * dim;
  return {data, heads * head, dim, head, sequences, tokens, heads, dim};
}

TESSERA_SHARED_NAMESPACE_END
