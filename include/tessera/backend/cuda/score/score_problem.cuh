// What scoring reads and writes, and the pieces that both of its passes share.
#pragma once

#include "../../../concepts/scorer.hpp"
#include "../../../core/logit_rule.hpp"
#include "../../../core/views.hpp"
#include "../device/alignment.cuh"
#include "../device/mma.cuh"
#include "../device/whole_numbers.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Query rows, stored keys, and the memory of their scores. Every pointer is a device pointer; lengths are read on the
/// device.
template <class View>
struct score_problem {
  static_assert(check_device_rows<View>());
  using T = typename View::element_type;
  View view;                                ///< values are not read
  rows_view<const T> q;                     ///< [sequences, n_q, q_heads, k_dim], rows of 16-byte alignment
  const index_t* first_position = nullptr;  ///< [sequences], position of the first query
  const index_t* valid = nullptr;           ///< [sequences], how many of the n_q queries count; null: all
  logit_rule rule;
  rows_view<const float> lse;  ///< [sequences, n_q, q_heads] from the engine. Where it is NaN or +infinity, or data is
                               ///< null, it is computed here
  float* scores = nullptr;     ///< row = sequence * kv_heads + head, one float per slot
  const offset_t* offsets = nullptr;  ///< [rows], where a row's scores begin; null: row * row_stride
  offset_t row_stride = 0;
  /// `lse` has the log-sum-exp of every row. Each is used as given, and the launches that compute missing ones are
  /// omitted.
  bool lse_complete = false;
  bool accumulate = false;  ///< adds to the scores instead of overwriting them

  TESSERA_HD float* score_row(index_t row) const { return scores + (offsets ? offsets[row] : row * row_stride); }
  TESSERA_HD index_t valid_queries(index_t sequence) const {
    const index_t given = valid ? valid[sequence] : q.tokens;
    return given < 0 ? 0 : (given < q.tokens ? given : q.tokens);
  }
};

namespace detail {

/// The (sequence, kv_head) rows of a batch, laid end to end and cut into units. Each block works on an equally long
/// run.
struct work_line {
  const index_t* ends;  // shared memory, [rows]: inclusive prefix sum of units
  index_t first_row, begin, end;

  __device__ index_t row_begin(index_t row) const { return row ? ends[row - 1] : 0; }

  /// All threads call it; it ends with a barrier. At most max_pieces blocks.
  template <int Threads, class UnitsOf>
  __device__ static work_line plan(index_t* ends, block_scan<Threads, index_t>& scan, index_t rows, index_t block,
                                   index_t blocks, const UnitsOf& units_of) {
    scan_units(rows, ends, scan, units_of);
    const even_pieces pieces(ends[rows - 1], blocks);
    const index_t begin = pieces.begin(block);
    return {ends, row_of_unit(ends, rows, begin), begin, pieces.begin(block + 1)};
  }
};

/// One (sequence, kv_head) and the query rows that score it. Row r is query r / group, head r % group of the group.
struct scored_head {
  index_t sequence, head, tokens, group;
  index_t first_position;
  index_t query_rows;  // valid ones

  template <class View>
  __device__ static scored_head find(const score_problem<View>& p, index_t row, index_t capacity) {
    scored_head found;
    found.sequence = row / p.view.kv_heads;
    found.head = row % p.view.kv_heads;
    found.tokens = (min)(p.view.length(found.sequence, found.head), capacity);
    found.group = p.q.heads / p.view.kv_heads;
    found.first_position = p.first_position[found.sequence];
    found.query_rows = p.valid_queries(found.sequence) * found.group;
    return found;
  }
  __device__ index_t position_of(index_t query_row) const { return first_position + query_row / group; }

  template <class View>
  __device__ auto query(const score_problem<View>& p, index_t query_row) const {
    return p.q.row(sequence, query_row / group, head * group + query_row % group);
  }
  /// The engine's log-sum-exp of a row; valid below infinity.
  template <class View>
  __device__ float given_lse(const score_problem<View>& p, index_t query_row) const {
    if (!p.lse.data) return infinity;
    return *p.lse.row(sequence, query_row / group, head * group + query_row % group);
  }
};

/// Whether the engine gives the log-sum-exps of the `Rows` rows from the first on. All threads of a block call it, and
/// there are at least `Rows` of them.
template <int Rows, class View>
__device__ bool all_rows_given(const score_problem<View>& p, const scored_head& at, index_t first_query) {
  if (!p.lse.data) return false;
  const index_t query = first_query + index_t(threadIdx.x);
  const bool held = int(threadIdx.x) < Rows && query < at.query_rows;
  return !__syncthreads_or(held && !(at.given_lse(p, query) < infinity));
}

/// The positions at the ends of a run of tokens. Positions ascend, so the ends decide what queries at [oldest, newest]
/// see.
struct token_span {
  index_t first, last;

  template <class View>
  __device__ static token_span read(const View& view, const scored_head& at, index_t begin, index_t count) {
    return {view.position(at.sequence, at.head, begin),
            view.position(at.sequence, at.head, (min)(begin + count, at.tokens) - 1)};
  }
  __device__ bool seen_by_any(const logit_rule& rule, index_t oldest, index_t newest) const {
    return first <= newest && (rule.sliding_window <= 0 || oldest - last < rule.sliding_window);
  }
  __device__ bool seen_by_all(const logit_rule& rule, index_t oldest, index_t newest) const {
    return last <= oldest && (rule.sliding_window <= 0 || newest - first < rule.sliding_window);
  }
};

/// Keys and queries of D 16-bit elements, staged for matrix loads.
template <int D>
TESSERA_HD constexpr staged_rows score_rows_staged() {
  return {D / 8, true};
}

/// Eight neighbouring elements of a row of blocks, as eight elements of T.
template <class T, class Block>
__device__ uint4 decoded_chunk(const block_elements<Block>& from, float) {
  std::uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = pack_pair<T>(from[i * 2], from[i * 2 + 1]);
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}
/// The same of elements that are stored one by one, times their row's scale.
template <class T, class Stored>
__device__ uint4 decoded_chunk(const Stored* from, float scale) {
  struct alignas(sizeof(Stored) == 1 ? 8 : 16) eight {
    Stored element[8];
  };
  const eight stored = *reinterpret_cast<const eight*>(from);
  std::uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = pack_pair<T>(float(stored.element[i * 2]) * scale, float(stored.element[i * 2 + 1]) * scale);
  }
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/// A warp copies `Tokens` keys from slot `first` on, chunk by chunk, to the address `address_of(token, chunk)`; zeros
/// after the end. Raw rows are copied asynchronously. Encoded rows pass through registers and are visible after the
/// warp's next barrier.
template <int Tokens, class View, class AddressOf>
__device__ __forceinline__ void stage_keys_at(const View& view, const scored_head& at, index_t first,
                                              const AddressOf& address_of, int lane) {
  using T = typename View::element_type;
  using stored = typename View::encoding_type::stored_type;
  constexpr int chunks = View::k_dim / 8;
  const index_t mine = (min)(first + lane % Tokens, at.tokens - 1);
  const auto row = reinterpret_cast<unsigned long long>(view.key(at.sequence, at.head, mine));
  [[maybe_unused]] const float scale = view.key_scale(at.sequence, at.head, mine);
#pragma unroll
  for (int i = 0; i < Tokens * chunks / 32; ++i) {
    const int id = i * 32 + lane, token = id / chunks, chunk = id % chunks;
    const auto from = row_elements(reinterpret_cast<const stored*>(__shfl_sync(~0u, row, token)), chunk * 8);
    const bool valid = first + token < at.tokens;
    if constexpr (View::is_raw) {
      copy_async16(address_of(token, chunk), from, valid);
    } else {
      const float of_row = __shfl_sync(~0u, scale, token);
      store_shared16(address_of(token, chunk), valid ? decoded_chunk<T>(from, of_row) : make_uint4(0, 0, 0, 0));
    }
  }
}

/// The same in the layout of score_rows_staged.
template <int Tokens, class View>
__device__ void stage_keys(const View& view, const scored_head& at, index_t first, std::uint32_t to, int lane) {
  const auto address_of = [to](int token, int chunk) {
    return to + score_rows_staged<View::k_dim>().offset(token, chunk);
  };
  stage_keys_at<Tokens>(view, at, first, address_of, lane);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
