// Scoring, second pass: sums the weights of all query rows for each token, by the warp that holds the token's key.
#pragma once

#include <algorithm>
#include <climits>

#include "../../../../concepts/scorer.hpp"
#include "../../device/warp.cuh"
#include "../score_problem.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// How the weights of query rows become a token's score: in row order if the bits must not depend on chunks, otherwise
// in whatever order is cheaper.

namespace detail {

/// Running sums of a warp's 16 * KeyTiles tokens over query rows.
///
/// Weights have the layout of a 16x8x16 product: lane l holds tokens l / 4 + {0, 8} of each key tile against rows 2 *
/// (l % 4) + {0, 1} of each 8. In order: one lane adds all rows of a token one by one, and later calls continue the
/// same chain. Otherwise each lane keeps partial sums of its tokens, and the four lanes add them at the end. `Maximum`:
/// the largest weight instead of the sum; a NaN stays.
template <int KeyTiles, bool InOrder, bool Maximum = false>
struct score_sums {
  static constexpr int tokens = KeyTiles * 2;  // of a lane
  float sum[InOrder ? 1 : tokens];

  __device__ static float join(float a, float b) {
    if constexpr (Maximum) {
      float most;
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
      return most;
    } else {
      return a + b;
    }
  }

  /// The token that a lane adds in order. With one key tile, two lanes have the same token.
  __device__ static int token_of(int lane) { return lane % (KeyTiles == 2 ? 4 : 2) * 8 + lane / 4; }

  /// Continues from stored scores. `left` tokens are stored from the first on.
  __device__ void resume(const float* scores, index_t left, int lane) {
    if constexpr (InOrder) {
      if (token_of(lane) < left) sum[0] = scores[token_of(lane)];
    }
  }

  /// Adds weights w[key tile][8 rows][token half * 2 + row parity] of 16 query rows.
  __device__ void add(const float (&w)[KeyTiles][2][4], int lane) {
    if constexpr (!InOrder) {
#pragma unroll
      for (int i = 0; i < tokens; ++i) {
        const int k = i / 2, h = i % 2 * 2;
        sum[i] = join(sum[i], join(join(w[k][0][h], w[k][0][h + 1]), join(w[k][1][h], w[k][1][h + 1])));
      }
    } else if constexpr (KeyTiles == 2) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float x[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i][0] = w[i / 2][n][i % 2 * 2], x[i][1] = w[i / 2][n][i % 2 * 2 + 1];
        transpose(x, lane);
        sum[0] = add_rows(sum[0], x);
      }
    } else {
      // Lanes 0 and 1 add the first 8 rows of their token. Then lanes 2 and 3 add the other 8 rows of the same tokens.
      float x[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i][0] = w[0][i / 2][i % 2 * 2], x[i][1] = w[0][i / 2][i % 2 * 2 + 1];
      transpose(x, lane);
      const float first = __shfl_sync(~0u, add_rows(sum[0], x), lane & ~2);
      sum[0] = __shfl_sync(~0u, add_rows(first, x), lane | 2);
    }
  }

  __device__ void write(float* scores, index_t left, bool accumulate, int lane) {
    if constexpr (InOrder) {
      if (lane % 4 < tokens && token_of(lane) < left) scores[token_of(lane)] = sum[0];
    } else {
#pragma unroll
      for (int i = 0; i < tokens; ++i) {
        if constexpr (Maximum) {
#pragma unroll
          for (int step = 1; step < 4; step *= 2) sum[i] = join(sum[i], __shfl_xor_sync(~0u, sum[i], step));
        } else {
          sum[i] = lanes_sum<4>(sum[i]);
        }
        const int token = i * 8 + lane / 4;
        if (lane % 4 == 0 && token < left) scores[token] = accumulate ? join(scores[token], sum[i]) : sum[i];
      }
    }
  }

 private:
  /// 4x4 transpose over the four lanes that share tokens: lane l gets item l of every lane, in row order.
  __device__ static void transpose(float (&x)[4][2], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const bool upper = lane & step;
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        if (a & step) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float got = __shfl_xor_sync(~0u, upper ? x[a][j] : x[a + step][j], step);
          (upper ? x[a][j] : x[a + step][j]) = got;
        }
      }
    }
  }
  __device__ static float add_rows(float total, const float (&x)[4][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total = join(join(total, x[i][0]), x[i][1]);
    return total;
  }
};

/// Launch-time shape of the second pass.
struct sum_shape {
  const float* lse;  // [rows, query rows]; null: the engine gives all of them
  index_t query_rows, capacity;
  int chunks;  // chunks of query rows in shared memory: all of them, or a ring of two
  int stages;  // of keys that a warp stages ahead; its present keys are in registers
};

/// Where the log-sum-exp of a query row is stored.
template <class View>
__device__ const float* lse_of_row(const score_problem<View>& p, const sum_shape& shape, const scored_head& at,
                                   index_t row, index_t query) {
  if (shape.lse) return shape.lse + offset_t(row) * shape.query_rows + query;
  return p.lse.row(at.sequence, query / at.group, at.head * at.group + query % at.group);
}

/// Keys stay in registers and queries stream from shared memory. So a token's score is one warp's running sum: there
/// are no partial results, and the cost of a row of queries does not depend on how many rows there are.
template <class View, class Scorer>
struct sum_kernel {
  using T = typename View::element_type;
  using problem_type = score_problem<View>;
  static constexpr int D = View::k_dim, warps = 4, threads = warps * 32;
  static constexpr int key_tiles = D <= 128 ? 2 : 1, warp_tokens = key_tiles * 16, tile = warps * warp_tokens;
  static constexpr int chunk_rows = D <= 192 ? 64 : 32, row_bytes = score_rows_staged<D>().bytes();
  static constexpr int chunk_bytes = chunk_rows * (row_bytes + 8);  // queries, then log-sum-exps, then positions
  static constexpr int key_bytes = warp_tokens * row_bytes;
  /// A sum that later calls continue is added row by row, so that chunks of queries give the bits of one call.
  static constexpr bool in_order = Scorer::observed == observes::every_query;

  static std::size_t shared_bytes(const sum_shape& shape, index_t rows) {
    return std::size_t(shape.chunks) * chunk_bytes + std::size_t(shape.stages) * warps * key_bytes +
           std::size_t(rows) * 4;
  }

  /// With the chunks and stages of a launch over `rows` (sequence, kv_head) in `limit` bytes, where some fit.
  static sum_shape fitted(sum_shape shape, index_t rows, std::size_t limit) {
    const auto fits = [&] { return shared_bytes(shape, rows) <= limit; };
    const index_t chunks = ceil_div(shape.query_rows, index_t(chunk_rows));
    shape.chunks = int(chunks * chunk_rows <= 256 ? chunks : 2);
    shape.stages = shape.query_rows <= 64 ? 2 : 1;  // few rows: limited by memory
    if (!fits()) shape.stages = 1;
    if (!fits()) shape.chunks = (std::min)(shape.chunks, 2);
    return shape;
  }

  struct chunk_view {
    unsigned char* memory;
    __device__ float* lse() const { return reinterpret_cast<float*>(memory + chunk_rows * row_bytes); }
    /// INT_MIN where there is no query.
    __device__ index_t* positions() const { return reinterpret_cast<index_t*>(lse() + chunk_rows); }
  };

  __device__ static void load_chunk(const problem_type& p, const sum_shape& shape, const scored_head& at, index_t row,
                                    index_t chunk, chunk_view to) {
    const index_t first = chunk * chunk_rows;
    const std::uint32_t rows = shared_address(to.memory);
    constexpr int pieces = D / 8;
    for (int id = threadIdx.x; id < chunk_rows * pieces; id += threads) {
      const int r = id / pieces, piece = id % pieces;
      const bool valid = first + r < at.query_rows;
      copy_async16(rows + score_rows_staged<D>().offset(r, piece), at.query(p, valid ? first + r : 0) + piece * 8,
                   valid);
    }
    if (threadIdx.x < chunk_rows) {
      const index_t query = first + index_t(threadIdx.x);
      const bool valid = query < at.query_rows;
      to.positions()[threadIdx.x] = valid ? at.position_of(query) : INT_MIN;
      if (valid)
        copy_async4(shared_address(to.lse() + threadIdx.x), lse_of_row(p, shape, at, row, query));
      else
        to.lse()[threadIdx.x] = 0;
    }
  }

  using token_sums = score_sums<key_tiles, in_order, joins_rows_by<Scorer> == row_join::maximum>;

  /// Adds to the scores of a warp's tokens what a chunk's rows contribute.
  __device__ static void consume(const problem_type& p, const Scorer& scorer, const scored_head& at,
                                 const std::uint32_t (&k)[key_tiles][D / 16][4],
                                 const index_t (&key_position)[key_tiles * 2], const token_span& span, chunk_view chunk,
                                 int rows, int lane, token_sums& sums) {
    const float scale = p.rule.scale_for(D);
    const int matrix = lane / 8, in_matrix = lane % 8;
    const std::uint32_t queries = shared_address(chunk.memory);
    const float* lse = chunk.lse() + lane % 4 * 2;
    const index_t* positions = chunk.positions();
    const bool all_plain = p.rule.soft_cap <= 0 && span.seen_by_all(p.rule, positions[0], positions[rows - 1]);
    for (int group = 0; group < rows; group += 16) {
      bool plain = all_plain;
      if (!all_plain) {
        const index_t oldest = positions[group], newest = positions[(min)(group + 16, rows) - 1];
        if (!span.seen_by_any(p.rule, oldest, newest)) continue;
        plain = p.rule.soft_cap <= 0 && span.seen_by_all(p.rule, oldest, newest);
      }
      float s[key_tiles][2][4] = {};
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        std::uint32_t b[4];
        const int r = group + matrix / 2 * 8 + in_matrix;
        load_matrices(b, queries + score_rows_staged<D>().offset(r, step * 2 + matrix % 2));
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) {
          multiply<T>(s[m][0], k[m][step], b[0], b[1]);
          multiply<T>(s[m][1], k[m][step], b[2], b[3]);
        }
      }
      float row_lse[2][2];
      float check = 0;  // finite while all logits are: an addition a logit is cheaper than a comparison
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          row_lse[n][j] = lse[group + n * 8 + j];
          plain = plain && row_lse[n][j] > -infinity;
        }
        float part = 0;
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) part += (s[m][n][0] + s[m][n][1]) + (s[m][n][2] + s[m][n][3]);
        check += part;
      }
      plain = plain && check - check == 0;
      if (__all_sync(~0u, plain)) {
#pragma unroll
        for (int i = 0; i < key_tiles * 8; ++i) {
          float& x = s[i / 8][i / 4 % 2][i % 4];
          // Rounded before `weigh` gets it: if it were fused into the subtraction there, the bits would differ from the
          // branch below.
          x = scorer.weigh(__fmul_rn(x, scale), row_lse[i / 4 % 2][i % 2]);
        }
        if (group + 16 > rows) {
#pragma unroll
          for (int i = 0; i < key_tiles * 8; ++i) {
            if (group + i / 4 % 2 * 8 + lane % 4 * 2 + i % 2 >= rows) s[i / 8][i / 4 % 2][i % 4] = 0;
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < key_tiles * 8; ++i) {
          float& x = s[i / 8][i / 4 % 2][i % 4];
          const float of_row = row_lse[i / 4 % 2][i % 2];
          const index_t position = positions[group + i / 4 % 2 * 8 + lane % 4 * 2 + i % 2];
          x = p.rule.cap(__fmul_rn(x, scale));
          x = x < infinity ? x : nanf("");
          // A row that sees no token adds nothing, and neither does a token that the row does not see.
          const bool counts = p.rule.visible(position, key_position[i / 8 * 2 + i % 4 / 2]) && of_row != -infinity;
          x = counts ? scorer.weigh(x, of_row) : 0.0f;
        }
      }
      sums.add(s, lane);
    }
  }

  __device__ static void run(const problem_type& p, const Scorer& scorer, const sum_shape& shape) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ block_scan<threads, index_t> scan;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* key_memory = memory + shape.chunks * chunk_bytes;
    const std::uint32_t keys = shared_address(key_memory) + std::uint32_t(warp * shape.stages * key_bytes);
    const auto chunk_at = [&](index_t slot) { return chunk_view{memory + slot * chunk_bytes}; };
    const auto line = work_line::plan(
        reinterpret_cast<index_t*>(key_memory + shape.stages * warps * key_bytes), scan,
        p.view.sequences * p.view.kv_heads, index_t(blockIdx.x), index_t(gridDim.x), [&](index_t row) {
          return ceil_div((min)(p.view.length(row / p.view.kv_heads, row % p.view.kv_heads), shape.capacity), tile);
        });
    index_t begin = line.begin;
    for (index_t row = line.first_row; begin < line.end; ++row) {
      const index_t stop = (min)(line.end, line.ends[row]), row_begin = line.row_begin(row);
      if (stop <= begin) continue;
      const auto at = scored_head::find(p, row, shape.capacity);
      const index_t first_tile = begin - row_begin, last_tile = stop - row_begin;
      begin = stop;
      const index_t chunks = ceil_div(at.query_rows, chunk_rows);
      const bool resident = chunks <= shape.chunks;

      const auto put = [&](index_t t) {
        const index_t mine = t * tile + warp * warp_tokens;
        if (t < last_tile && mine < at.tokens && chunks > 0 &&
            token_span::read(p.view, at, mine, warp_tokens)
                .seen_by_any(p.rule, at.first_position, at.position_of(at.query_rows - 1))) {
          stage_keys<warp_tokens>(p.view, at, mine, keys + std::uint32_t(t % shape.stages * key_bytes), lane);
        }
        commit_copies();
      };
      __syncthreads();  // all warps have finished with the previous row's chunks
      if (resident) {
        for (index_t c = 0; c < chunks; ++c) load_chunk(p, shape, at, row, c, chunk_at(c));
        commit_copies();
      }
      for (int s = 0; s < shape.stages; ++s) put(first_tile + s);
      if (resident) {
        if (shape.stages > 1)
          wait_copies<2>();
        else
          wait_copies<1>();
        __syncthreads();
      }
      for (index_t t = first_tile; t < last_tile; ++t) {
        if (shape.stages > 1)
          wait_copies<1>();
        else
          wait_copies<0>();
        __syncwarp();
        const index_t mine = t * tile + warp * warp_tokens;
        std::uint32_t k[key_tiles][D / 16][4];
        const std::uint32_t from = keys + std::uint32_t(t % shape.stages * key_bytes);
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
          for (int step = 0; step < D / 16; ++step) {
            load_matrices(k[m][step], from + score_rows_staged<D>().offset(m * 16 + lane % 16, step * 2 + lane / 16));
          }
        }
        __syncwarp();
        put(t + shape.stages);

        index_t key_position[key_tiles * 2];
#pragma unroll
        for (int i = 0; i < key_tiles * 2; ++i) {
          const index_t token = mine + i / 2 * 16 + i % 2 * 8 + lane / 4;
          key_position[i] = token < at.tokens ? p.view.position(at.sequence, at.head, token) : INT_MAX;
        }
        float* scores = p.score_row(row) + mine;
        token_sums sums{};
        if (p.accumulate) sums.resume(scores, at.tokens - mine, lane);

        const bool any = mine < at.tokens;
        const token_span span = any ? token_span::read(p.view, at, mine, warp_tokens) : token_span{INT_MAX, INT_MAX};
        if (resident) {
          for (index_t c = 0; any && c < chunks; ++c) {
            consume(p, scorer, at, k, key_position, span, chunk_at(c),
                    (min)(chunk_rows, at.query_rows - c * chunk_rows), lane, sums);
          }
        } else {
          // Queries before the block's first token do not see it. Queries more than a window after its last token do
          // not either.
          const token_span all = token_span::read(p.view, at, t * tile, tile);
          index_t past = chunks;
          if (p.rule.sliding_window > 0) {
            const offset_t blind = offset_t(all.last) + p.rule.sliding_window - at.first_position;
            past =
                index_t((min)(offset_t(chunks), (max)(offset_t(0), (blind * at.group + chunk_rows - 1) / chunk_rows)));
          }
          const offset_t behind = (max)(offset_t(0), offset_t(all.first) - at.first_position) * at.group;
          index_t c = index_t((min)(offset_t(past), behind / chunk_rows));
          __syncthreads();
          if (c < past) load_chunk(p, shape, at, row, c, chunk_at(c % 2));
          commit_copies();
          for (; c < past; ++c) {
            wait_copies<0>();
            __syncthreads();
            if (c + 1 < past) load_chunk(p, shape, at, row, c + 1, chunk_at((c + 1) % 2));
            commit_copies();
            if (any) {
              consume(p, scorer, at, k, key_position, span, chunk_at(c % 2),
                      (min)(chunk_rows, at.query_rows - c * chunk_rows), lane, sums);
            }
          }
        }

        sums.write(scores, at.tokens - mine, p.accumulate, lane);
      }
      wait_copies<0>();
    }
  }
};

template <class View, class Scorer>
__global__ void __launch_bounds__(128, 3)
    sum_entry(const __grid_constant__ score_problem<View> problem, Scorer scorer, sum_shape shape) {
  sum_kernel<View, Scorer>::run(problem, scorer, shape);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
