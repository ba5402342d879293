// Scoring, second pass with products of four warps (wgmma): adds up what up to 64 query rows contribute to each token.
#pragma once

#include <climits>

#include "../../device/kernel.cuh"
#include "score_sum.cuh"
#include "wide_keys.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// All query rows lie in shared memory. A warp copies the keys of its 16 tokens to its own ring and from there to
/// registers, and waits for no other warp.
template <class View, class Scorer>
struct wide_sum_kernel {
  using T = typename View::element_type;
  using problem_type = score_problem<View>;
  using wide = wide_product<T>;
  using token_sums = score_sums<1, false, joins_rows_by<Scorer> == row_join::maximum>;
  static constexpr int D = View::k_dim, warps = 16, threads = warps * 32, rows_held = 64, tile = warps * 16;
  static constexpr int stages = 3, query_bytes = rows_held * D * 2, key_bytes = 16 * D * 2, align = 1024;

  static std::size_t shared_bytes(index_t rows) {
    return std::size_t(align + query_bytes + warps * stages * key_bytes) + std::size_t(rows) * sizeof(index_t);
  }

  /// Facts about the query rows, from the engine or the first pass.
  struct row_facts {
    alignas(8) float lse[rows_held];
    index_t positions[rows_held];  // INT_MIN where there is no query
  };

  __device__ static void load_queries(const problem_type& p, const scored_head& at, std::uint32_t to,
                                      row_facts& facts) {
    constexpr int pieces = D / 8;
    for (int id = threadIdx.x; id < rows_held * pieces; id += threads) {
      const int r = id / pieces, piece = id % pieces;
      const bool valid = r < at.query_rows;
      copy_async16(to + wide::offset(rows_held, r, piece), at.query(p, valid ? r : 0) + piece * 8, valid);
    }
    if (threadIdx.x < rows_held) {
      const index_t query = index_t(threadIdx.x);
      facts.positions[query] = query < at.query_rows ? at.position_of(query) : INT_MIN;
    }
  }
  /// Returns whether some row contributes nothing. All threads call it; it ends with a barrier.
  __device__ static bool load_lse(const problem_type& p, const sum_shape& shape, const scored_head& at, index_t row,
                                  row_facts& facts) {
    const index_t query = index_t(threadIdx.x);
    float lse = 0;
    if (query < (min)(at.query_rows, index_t(rows_held))) lse = *lse_of_row(p, shape, at, row, query);
    if (query < rows_held) facts.lse[query] = lse;
    return __syncthreads_or(!(lse > -infinity));
  }

  /// What the rows contribute to a warp's tokens, from their products. `Sure`: all rows see all tokens, no logit is
  /// capped, and every row contributes; a logit that is NaN makes it return false. Both variants give the same bits.
  template <bool Sure>
  __device__ __forceinline__ static bool weigh(const problem_type& p, const Scorer& scorer, const scored_head& at,
                                               float scale, const typename wide::sums& product, index_t mine,
                                               const row_facts& facts, int lane, token_sums& sums) {
    index_t key_position[2];
    if constexpr (Sure) {
      float check = 0;  // finite while all logits are: an addition a logit is cheaper than a comparison
#pragma unroll
      for (int n = 0; n < 8; ++n) check += (product[n][0] + product[n][1]) + (product[n][2] + product[n][3]);
      if (!__all_sync(~0u, check - check == 0)) return false;
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const index_t token = mine + h * 8 + lane / 4;
        key_position[h] = token < at.tokens ? p.view.position(at.sequence, at.head, token) : INT_MAX;
      }
    }
#pragma unroll
    for (int group = 0; group < rows_held; group += 16) {
      float s[1][2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int first = group + n * 8 + lane % 4 * 2;
        const float2 lse = *reinterpret_cast<const float2*>(&facts.lse[first]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float of_row = i % 2 ? lse.y : lse.x;
          // Rounded before `weigh` sees it: fused into its subtraction, the bits would differ from those of the other
          // way.
          float x = __fmul_rn(product[group / 8 + n][i], scale);
          if constexpr (Sure) {
            s[0][n][i] = scorer.weigh(x, of_row);
          } else {
            if (p.rule.soft_cap > 0) x = capped_logit(p.rule, x);
            // A row that sees no token adds nothing; neither does a token that is not seen, nor a row that does not
            // exist.
            const bool counts =
                p.rule.visible(facts.positions[first + i % 2], key_position[i / 2]) && of_row != -infinity;
            s[0][n][i] = counts ? scorer.weigh(x < infinity ? x : nanf(""), of_row) : 0.0f;
          }
        }
      }
      if (Sure && at.query_rows < rows_held) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (group + i / 4 * 8 + lane % 4 * 2 + i % 2 >= at.query_rows) s[0][i / 4][i % 4] = 0;
        }
      }
      sums.add(s, lane);
    }
    return true;
  }

  __device__ __forceinline__ static void multiply(const std::uint32_t (&k)[D / 16][4], std::uint32_t queries,
                                                  typename wide::sums& product) {
    wide::begin();
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      wide::multiply(product, k[step],
                     wide::operand(queries + std::uint32_t(step % 4 * 32) + wide::offset(rows_held, 0, step / 4 * 8)),
                     step > 0);
    }
    wide::commit();
    wide::finish(product);
  }

  __device__ static void run(const problem_type& p, const Scorer& scorer, const sum_shape& shape) {
    extern __shared__ __align__(1024) unsigned char wide_memory[];
    __shared__ block_scan<threads, index_t> scan;
    __shared__ row_facts facts;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = p.rule.scale_for(D);
    const std::uint32_t own_place =
        wide::offset(16, lane % 16, lane / 16);  // of the chunk that this lane names for step 0
    bool waits = true;                           // for the first pass
    const std::uint32_t queries = (shared_address(wide_memory) + align - 1) / align * align;
    const std::uint32_t keys = queries + std::uint32_t(query_bytes + warp * stages * key_bytes);
    auto* ends = reinterpret_cast<index_t*>(wide_memory + (queries - shared_address(wide_memory)) + query_bytes +
                                            warps * stages * key_bytes);
    const auto line = work_line::plan(
        ends, scan, p.view.sequences * p.view.kv_heads, index_t(blockIdx.x), index_t(gridDim.x), [&](index_t row) {
          return ceil_div((min)(p.view.length(row / p.view.kv_heads, row % p.view.kv_heads), shape.capacity), tile);
        });
    index_t begin = line.begin;
    for (index_t row = line.first_row; begin < line.end; ++row) {
      const index_t stop = (min)(line.end, line.ends[row]), row_begin = line.row_begin(row);
      if (stop <= begin) continue;
      const auto at = scored_head::find(p, row, shape.capacity);
      const index_t first_tile = begin - row_begin, count = stop - begin;
      begin = stop;
      const index_t newest = at.query_rows > 0 ? at.position_of(at.query_rows - 1) : INT_MIN;
      // From the newest tile backwards: the first pass has left the newest tiles in the L2.
      const auto first_of_tile = [&](index_t i) { return (first_tile + count - 1 - i) * tile; };
      // Four warps that multiply keys together copy those keys together.
      const auto seen = [&](index_t of_group) {
        return at.query_rows > 0 && of_group < at.tokens &&
               token_span::read(p.view, at, of_group, 64).seen_by_any(p.rule, at.first_position, newest);
      };
      index_t sure_tokens = slots_seen_by_all(p, at);
      const wide_keys<View, 16> rows(p.view, at, lane);
      const auto put = [&](index_t i) {
        if (i < count) {
          const index_t of_group = first_of_tile(i) + warp / 4 * 64, mine = of_group + warp % 4 * 16;
          const std::uint32_t to = keys + std::uint32_t(i % stages * key_bytes);
          if (of_group + 64 <= sure_tokens) {
            rows.bring_whole(p.view, at, mine, to);
          } else if (seen(of_group)) {
            rows.bring(p.view, at, mine, to);
          }
        }
        commit_copies();
      };
      __syncthreads();  // all warps have finished with the previous row's queries
      load_queries(p, at, queries, facts);
      commit_copies();
      for (int s = 0; s < stages; ++s) put(s);
      wait_copies<stages>();
      wide::publish();
      if (waits) wait_for_earlier();  // from here on the first pass's sums are read and scores are written
      waits = false;
      if (load_lse(p, shape, at, row, facts)) sure_tokens = 0;
      for (index_t i = 0; i < count; ++i) {
        const index_t of_group = first_of_tile(i) + warp / 4 * 64, mine = of_group + warp % 4 * 16;
        wait_copies<stages - 1>();
        __syncwarp();
        std::uint32_t k[D / 16][4];
        const std::uint32_t from = keys + std::uint32_t(i % stages * key_bytes);
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
          load_matrices(k[step],
                        ((from + own_place) ^ std::uint32_t(step % 4 * 32)) + std::uint32_t(step / 4 * 16 * 128));
        }
        __syncwarp();
        put(i + stages);
        token_sums sums{};
        const bool sure = of_group + 64 <= sure_tokens;
        if (sure || seen(of_group)) {
          typename wide::sums product;
          multiply(k, queries, product);
          if (!sure || !weigh<true>(p, scorer, at, scale, product, mine, facts, lane, sums)) {
            weigh<false>(p, scorer, at, scale, product, mine, facts, lane, sums);
          }
        }
        sums.write(p.score_row(row) + mine, at.tokens - mine, p.accumulate, lane);
      }
      wait_copies<0>();
    }
    if (waits) wait_for_earlier();
  }
};

template <class View, class Scorer>
__global__ void __launch_bounds__(compiled_for_hopper ? 512 : 32, 1)
    wide_sum_entry(const __grid_constant__ score_problem<View> problem, Scorer scorer, sum_shape shape) {
  if constexpr (compiled_for_hopper) wide_sum_kernel<View, Scorer>::run(problem, scorer, shape);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
