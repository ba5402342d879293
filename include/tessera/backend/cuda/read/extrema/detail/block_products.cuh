// Products of queries with the extrema of an engine's pages: an index by block has the channels of a page side by side.
#pragma once

#include "../../../../../core/engine/read_problem.hpp"
#include "page_scores.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Elements in 16 bytes.
template <class T>
inline constexpr int elements_of_16_bytes = 16 / int(sizeof(T));

template <class T>
__device__ void floats_of(const uint4& raw, float (&x)[elements_of_16_bytes<T>]) {
  T elements[elements_of_16_bytes<T>];
  __builtin_memcpy(elements, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < elements_of_16_bytes<T>; ++i) x[i] = float(elements[i]);
}

/// One row's queries and pages, as both kinds of products need them. Four neighbouring lanes have two pages, eight
/// pages apart, and each of the four every fourth chunk of 16 bytes of their rows.
template <class View, class Scorer>
struct block_rows {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, chunk = elements_of_16_bytes<T>, chunks = D / chunk, lane_pages = 2;
  static constexpr int warp_pages = tile_pages / page_warps;
  static_assert(warp_pages == 8 * lane_pages);
  /// Sums [chunk_rows, pitch] in shared memory: the rows of four neighbouring lanes begin in different banks.
  static constexpr int pitch = tile_pages + 4;

  const choose_by_blocks_problem<View>& p;
  const Scorer& scorer;
  const read_plan& plan;
  const page_query_storage<D>& s;
  const T* const q;             // [rows, D], in shared memory
  const unsigned* const masks;  // of each chunk, which of its channels are read
  const index_t sequence, head;
  const int lane, warp;
  const bool partial;  // some channels are not read; they may hold NaN

  /// The smaller values of a lane's two pages of a tile; null behind the last page.
  struct pages {
    const T* row[lane_pages];
  };
  __device__ pages find(index_t tile, index_t end) const {
    pages found;
#pragma unroll
    for (int i = 0; i < lane_pages; ++i) {
      const index_t page = tile * tile_pages + warp * warp_pages + lane / 4 + i * 8;
      found.row[i] = nullptr;
      if (page < end) {
        const slot_address address = p.view.table.locate(sequence, head, page * plan.page);
        found.row[i] = p.index.lower(address.outer, plan.page_of(index_t(address.row)), head);
      }
    }
    return found;
  }
  /// Sixteen bytes of either side; pages of one slot have one side.
  __device__ void load(const T* row, int c, uint4& lower, uint4& upper) const {
    const bool there = row != nullptr && c < chunks && (!partial || masks[c] != 0);
    const T* const begin = row + c * chunk;
    lower = there ? __ldg(reinterpret_cast<const uint4*>(begin)) : make_uint4(0, 0, 0, 0);
    upper =
        there && plan.page > 1 ? __ldg(reinterpret_cast<const uint4*>(begin + p.index.side)) : make_uint4(0, 0, 0, 0);
  }
  /// What a query row multiplies a channel's sides with.
  __device__ void weigh(index_t r, index_t rows, int d, float& lower, float& upper) const {
    lower = upper = 0;
    if (r >= rows || !s.usable[r] || (masks[d / chunk] >> d % chunk & 1) == 0) return;
    const float x = float(q[r * D + d]);
    (plan.page > 1 && scorer.takes_upper(x, s.total[d]) ? upper : lower) = x;
  }
};

/// Products by fused multiply-adds, for elements of any size. Weights lie in shared memory.
template <class View, class Scorer>
struct block_products : block_rows<View, Scorer> {
  using base = block_rows<View, Scorer>;
  using base::D, base::chunk, base::chunks, base::lane_pages, base::lane, base::warp;
  using typename base::T, typename base::pages;
  // A row of padding behind a chunk: neighbouring lanes read from different banks.
  static constexpr int side_rows = D + chunks, halves = chunk_rows / 4;
  static constexpr std::size_t shared_bytes = 2 * std::size_t(side_rows) * chunk_rows * sizeof(float);

  float* const weights;  // [2, side_rows, chunk_rows]

  __device__ block_products(const base& rows, void* memory) : base(rows), weights(static_cast<float*>(memory)) {}

  /// All threads of the block call it; a barrier follows.
  __device__ void prepare(index_t first, index_t rows) {
    for (int i = threadIdx.x; i < D * chunk_rows; i += page_threads) {
      const int d = i / chunk_rows, r = i % chunk_rows;
      float* const weight = weights + (d + d / chunk) * chunk_rows + r;
      base::weigh(first + r, rows, d, weight[0], weight[side_rows * chunk_rows]);
    }
  }
  /// Writes a tile's products with `held` rows to `sums`.
  __device__ void run(const pages& tile, index_t held, float* sums) const {
    float acc[lane_pages][chunk_rows] = {};
#pragma unroll 2
    for (int c = lane % 4; c < chunks; c += 4) {
      float low[lane_pages][chunk], high[lane_pages][chunk];
#pragma unroll
      for (int i = 0; i < lane_pages; ++i) {
        uint4 raw[2];
        base::load(tile.row[i], c, raw[0], raw[1]);
        floats_of<T>(raw[0], low[i]), floats_of<T>(raw[1], high[i]);
      }
#pragma unroll
      for (int e = 0; e < chunk; ++e) {
        if (base::partial && (base::masks[c] >> e & 1) == 0) continue;
        const auto* channel_weights = reinterpret_cast<const float4*>(weights) + (c * (chunk + 1) + e) * halves;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          if (half > 0 && held <= 4) continue;
          const float4 lower = channel_weights[half], upper = channel_weights[side_rows * halves + half];
#pragma unroll
          for (int i = 0; i < lane_pages; ++i) {
            acc[i][half * 4] += lower.x * low[i][e] + upper.x * high[i][e];
            acc[i][half * 4 + 1] += lower.y * low[i][e] + upper.y * high[i][e];
            acc[i][half * 4 + 2] += lower.z * low[i][e] + upper.z * high[i][e];
            acc[i][half * 4 + 3] += lower.w * low[i][e] + upper.w * high[i][e];
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < chunk_rows; ++r) {
#pragma unroll
      for (int i = 0; i < lane_pages; ++i) {
        const float sum = lanes_sum<4>(acc[i][r]);
        if (r % 4 == lane % 4) sums[r * base::pitch + warp * base::warp_pages + i * 8 + lane / 4] = sum;
      }
    }
  }
};

/// Products by matrices, for elements of 16 bits: sixteen pages are the rows of a product, and eight queries its
/// columns. A lane's chunk has four of the sixteen channels of two products, in an order that its weights have too;
/// these stay in registers from tile to tile.
template <class View, class Scorer>
struct block_matrices : block_rows<View, Scorer> {
  using base = block_rows<View, Scorer>;
  using base::D, base::chunk, base::chunks, base::lane_pages, base::lane, base::warp;
  using typename base::T, typename base::pages;
  static constexpr int turns = (chunks + 3) / 4, at_once = turns <= 4 ? turns : 2;
  static_assert(chunk == 8 && chunk_rows == 8 && turns % at_once == 0);
  static constexpr std::size_t shared_bytes = 0;

  std::uint32_t weights[turns][2][4];  // of a lane's query, by chunk and side: pairs of channels

  __device__ block_matrices(const base& rows, void*) : base(rows) {}

  __device__ void prepare(index_t first, index_t rows) {
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
      const int c = turn * 4 + lane % 4;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float lower[2] = {}, upper[2] = {};
        if (c < chunks) {
          base::weigh(first + lane / 4, rows, c * 8 + pair * 2, lower[0], upper[0]);
          base::weigh(first + lane / 4, rows, c * 8 + pair * 2 + 1, lower[1], upper[1]);
        }
        weights[turn][0][pair] = pack_pair<T>(lower[0], lower[1]);
        weights[turn][1][pair] = pack_pair<T>(upper[0], upper[1]);
      }
    }
  }
  __device__ void run(const pages& tile, index_t held, float* sums) const {
    float acc[4] = {};
#pragma unroll
    for (int first = 0; first < turns; first += at_once) {
      uint4 raw[at_once][2][lane_pages];
#pragma unroll
      for (int u = 0; u < at_once; ++u) {
#pragma unroll
        for (int i = 0; i < lane_pages; ++i)
          base::load(tile.row[i], (first + u) * 4 + lane % 4, raw[u][0][i], raw[u][1][i]);
      }
#pragma unroll
      for (int u = 0; u < at_once; ++u) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          uint4(&x)[lane_pages] = raw[u][side];
          if (base::partial) {
            clear(x[0], (first + u) * 4 + lane % 4), clear(x[1], (first + u) * 4 + lane % 4);
          }
          const std::uint32_t(&w)[4] = weights[first + u][side];
          multiply<T>(acc, {x[0].x, x[1].x, x[0].y, x[1].y}, w[0], w[1]);
          multiply<T>(acc, {x[0].z, x[1].z, x[0].w, x[1].w}, w[2], w[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = lane % 4 * 2 + i % 2;
      if (r < held) sums[r * base::pitch + warp * base::warp_pages + i / 2 * 8 + lane / 4] = acc[i];
    }
  }

 private:
  /// Zeros in place of channels that are not read.
  __device__ void clear(uint4& x, int c) const {
    const unsigned mask = c < chunks ? base::masks[c] : 0u;
    const auto both = [&](int pair) {
      return (mask >> pair * 2 & 1) * 0xffffu | (mask >> (pair * 2 + 1) & 1) * 0xffff0000u;
    };
    x.x &= both(0), x.y &= both(1), x.z &= both(2), x.w &= both(3);
  }
};

template <class View, class Scorer>
using products_of = std::conditional_t<sizeof(typename View::element_type) == 2, block_matrices<View, Scorer>,
                                       block_products<View, Scorer>>;

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
