// What scoring reads and writes, and the pieces that both of its passes share.
#pragma once

#include "../../../concepts/scorer.hpp"
#include "../../../core/logit_rule.hpp"
#include "../../../core/views.hpp"
#include "../device/alignment.cuh"
#include "../device/even_cut.cuh"
#include "../device/mma.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Query rows, stored keys and where their scores go; every pointer is a device pointer, every length is read there.
template <class View>
struct score_problem {
  using T = typename View::element_type;
  View view;                                ///< values are not read
  rows_view<const T> q;                     ///< [sequences, n_q, q_heads, k_dim], rows of 16-byte alignment
  const index_t* first_position = nullptr;  ///< [sequences], position of the first query
  const index_t* valid = nullptr;           ///< [sequences], how many of the n_q queries count; null: all
  logit_rule rule;
  rows_view<const float> lse;  ///< [sequences, n_q, q_heads] from the engine; NaN and +infinity: that row's is computed
                               ///< here; data null: all are
  float* scores = nullptr;     ///< row = sequence * kv_heads + head, one float per slot
  const offset_t* offsets = nullptr;  ///< [rows], where a row's scores begin; null: row * row_stride
  offset_t row_stride = 0;
  /// No row's log-sum-exp is missing from `lse`: each is taken as it stands, and the launches that look for others are
  /// left out.
  bool lse_complete = false;
  bool accumulate = false;  ///< adds to what is there instead of writing over it

  TESSERA_HD float* score_row(index_t row) const { return scores + (offsets ? offsets[row] : row * row_stride); }
  TESSERA_HD index_t valid_queries(index_t sequence) const {
    const index_t given = valid ? valid[sequence] : q.tokens;
    return given < 0 ? 0 : (given < q.tokens ? given : q.tokens);
  }
};

namespace detail {

/// The (sequence, kv_head) rows of a batch laid end to end and cut into units; each block takes an even run of them.
struct work_line {
  const index_t* ends;  // shared memory, [rows]: inclusive prefix sum of units
  index_t first_row, begin, end;

  __device__ index_t row_begin(index_t row) const { return row ? ends[row - 1] : 0; }

  /// By all threads; it ends with a barrier. At most max_pieces blocks.
  template <int Threads, class UnitsOf>
  __device__ static work_line plan(index_t* ends, block_scan<Threads, index_t>& scan, index_t rows, index_t block,
                                   index_t blocks, const UnitsOf& units_of) {
    scan_units(rows, ends, scan, units_of);
    const even_pieces pieces(ends[rows - 1], blocks);
    const index_t begin = pieces.begin(block);
    return {ends, row_of_unit(ends, rows, begin), begin, pieces.begin(block + 1)};
  }
};

/// One (sequence, kv_head) and the query rows that score it; row r is query r / group, head r % group of the group.
struct scored_head {
  index_t sequence, head, tokens, group;
  index_t first_position;
  index_t query_rows;  // valid ones

  template <class View>
  __device__ static scored_head at(const score_problem<View>& p, index_t row, index_t capacity) {
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
  /// What the engine says of a row, below infinity; anything else: it says nothing.
  template <class View>
  __device__ float given_lse(const score_problem<View>& p, index_t query_row) const {
    if (!p.lse.data) return infinity;
    return *p.lse.row(sequence, query_row / group, head * group + query_row % group);
  }
};

/// Whether the engine gives the log-sum-exps of so many rows from the first on. By all threads of a block, at least as
/// many.
template <int Rows, class View>
__device__ bool all_rows_given(const score_problem<View>& p, const scored_head& at, index_t first_query) {
  if (!p.lse.data) return false;
  const index_t query = first_query + index_t(threadIdx.x);
  const bool held = int(threadIdx.x) < Rows && query < at.query_rows;
  return !__syncthreads_or(held && !(at.given_lse(p, query) < infinity));
}

/// Positions of the ends of a run of tokens: they ascend, so the ends tell what queries at [oldest, newest] see of it.
struct token_span {
  index_t first, last;

  template <class View>
  __device__ static token_span of(const View& view, const scored_head& at, index_t begin, index_t count) {
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

/// Eight neighbouring stored elements, times their row's scale, as eight elements of T.
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

/// A warp brings `Tokens` keys from slot `first` on, chunk by chunk where `place(token, chunk)` says; zeros beyond the
/// end. Raw rows are copied without waiting; encoded ones pass through registers and are there behind the warp's next
/// barrier.
template <int Tokens, class View, class Place>
__device__ __forceinline__ void stage_keys_at(const View& view, const scored_head& at, index_t first,
                                              const Place& place, int lane) {
  using T = typename View::element_type;
  using stored = typename View::encoding_type::stored_type;
  constexpr int chunks = View::k_dim / 8;
  const index_t mine = (min)(first + lane % Tokens, at.tokens - 1);
  const auto row = reinterpret_cast<unsigned long long>(view.key(at.sequence, at.head, mine));
  [[maybe_unused]] const float scale = view.key_scale(at.sequence, at.head, mine);
#pragma unroll
  for (int i = 0; i < Tokens * chunks / 32; ++i) {
    const int id = i * 32 + lane, token = id / chunks, chunk = id % chunks;
    const stored* from = reinterpret_cast<const stored*>(__shfl_sync(~0u, row, token)) + chunk * 8;
    const bool valid = first + token < at.tokens;
    if constexpr (View::is_raw) {
      copy_async16(place(token, chunk), from, valid);
    } else {
      const float of_row = __shfl_sync(~0u, scale, token);
      store_shared16(place(token, chunk), valid ? decoded_chunk<T>(from, of_row) : make_uint4(0, 0, 0, 0));
    }
  }
}

/// The same as score_rows_staged lays them.
template <int Tokens, class View>
__device__ void stage_keys(const View& view, const scored_head& at, index_t first, std::uint32_t to, int lane) {
  const auto place = [to](int token, int chunk) { return to + score_rows_staged<View::k_dim>().offset(token, chunk); };
  stage_keys_at<Tokens>(view, at, first, place, lane);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
