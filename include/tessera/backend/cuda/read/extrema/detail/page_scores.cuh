// Logits of pages on the GPU, and, for every tile of pages, what a softmax over the slots visible to a row needs.
#pragma once

#include "../../../../../concepts/scorer.hpp"
#include "../../../../../math/exp.hpp"
#include "../../../../../math/ordered.hpp"
#include "../../../device/mma.cuh"
#include "../../../device/warp.cuh"
#include "../page_index.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// What an estimate needs from the queries of a kv_head's group: channels, sides and scales. Every thread block computes
// it.

namespace detail {

template <int D>
struct page_query_storage {
  alignas(16) unsigned weight[D];  // ordered bits of the sum of |q| over the usable rows
  float total[D];                  // sum of q over them
  index_t rank[D];                 // of a chosen channel, from 0; of others at least the number of chosen ones
  float scale[max_query_rows];
  bool usable[max_query_rows];  // whether every element of the row is finite; other rows are left out
  slot_run runs[max_step_tokens];
};

/// Reads the rows of one group into `q` [rows, D] and fills the storage. Channels are chosen as on the CPU, whose sums
/// are made in the order of the rows. Ends with a barrier of the block. `Problem`: a page_problem, or another one with
/// its view, queries, first positions and rule.
template <int Threads, class T, int D, class Problem, class Scorer>
__device__ void read_page_query(page_query_storage<D>& s, T* q, const Problem& p, const Scorer& scorer,
                                index_t channels, index_t sequence, index_t head, index_t n) {
  constexpr int chunk_elements = 16 / int(sizeof(T)), chunks = D / chunk_elements, warps = Threads / 32;
  constexpr int parts = 2 * D <= Threads ? 2 : 1;  // threads that rank one channel
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const index_t group = p.q.heads / p.view.kv_heads, rows = p.q.tokens * group;
  // All loads from memory are issued before the first result is used.
  const auto chunk_of = [&](int i) {
    const index_t r = i / chunks;
    const auto* from = p.q.row(sequence, r / group, head * group + r % group) + i % chunks * chunk_elements;
    return __ldg(reinterpret_cast<const uint4*>(from));
  };
  const uint4 mine = thread < rows * chunks ? chunk_of(thread) : make_uint4(0, 0, 0, 0);
  const index_t position = p.first_position[sequence];
  const index_t last = p.view.positions && n > 0 ? p.view.position(sequence, head, n - 1) : n - 1;
  if (thread < rows * chunks) reinterpret_cast<uint4*>(q)[thread] = mine;
  for (int i = thread + Threads; i < rows * chunks; i += Threads) reinterpret_cast<uint4*>(q)[i] = chunk_of(i);
  __syncthreads();
  const auto sum_rows = [&](bool all) {
    for (int d = thread; d < D; d += Threads) {
      float weight = 0, total = 0;
      for (index_t r = 0; r < rows; ++r) {
        const float x = float(q[r * D + d]);
        if (all || s.usable[r]) weight += std::abs(x), total += x;
      }
      s.weight[d] = ordered_bits(weight);
      s.total[d] = total;
    }
  };
  sum_rows(true);
  bool bad = false;
  for (index_t r = warp; r < rows; r += warps) {
    bool finite = true;
    for (int d = lane; d < D; d += 32) finite &= is_finite(float(q[r * D + d]));
    finite = __all_sync(~0u, finite);
    bad |= !finite;
    if (lane == 0) s.usable[r] = finite;
  }
  if (__syncthreads_or(bad)) {  // again without the rows that are not finite
    sum_rows(false);
    __syncthreads();
  }
  if (channels == D) {
    for (int d = thread; d < D; d += Threads) s.rank[d] = d;
  } else {
    // A channel's rank is the number of channels before it. Ranks need not ascend by channel.
    const int part = thread % parts;
    for (int d = thread / parts; d < (D + 31) / 32 * 32; d += Threads / parts) {
      int earlier = 0;
      if (d < D) {
        // Of equal weights the lower channel comes first: channels below d count from `own` on, the others from own +
        // 1.
        const unsigned own = s.weight[d];
        const int begin = part * (D / parts);
        for (int j = begin; j < begin + D / parts; j += 4) {
          const uint4 others = *reinterpret_cast<const uint4*>(s.weight + j);
          if (j / 4 == d / 4) {
            earlier +=
                (others.x > own || (others.x == own && j < d)) + (others.y > own || (others.y == own && j + 1 < d)) +
                (others.z > own || (others.z == own && j + 2 < d)) + (others.w > own || (others.w == own && j + 3 < d));
          } else {
            const unsigned least = own + (j > d);
            earlier += (others.x >= least) + (others.y >= least) + (others.z >= least) + (others.w >= least);
          }
        }
      }
      if (parts == 2) earlier = lanes_sum<2>(earlier);
      if (d < D && part == 0) s.rank[d] = earlier;
    }
  }
  __syncthreads();
  for (index_t r = warp; r < rows; r += warps) {
    float chosen = 0, whole = 0;  // summed alike: equal to the bit where all channels are chosen
    for (int d = lane; d < D; d += 32) {
      const float x = std::abs(float(q[r * D + d]));
      whole += x;
      chosen += s.rank[d] < channels ? x : 0.0f;
    }
    const float scale = scorer.row_scale(p.rule.scale_for(D), warp_sum(chosen), warp_sum(whole));
    if (lane == 0) s.scale[r] = scale;
  }
  for (index_t t = warps - 1 - warp; t < p.q.tokens; t += warps) {
    const slot_run run = visible_run(p.view, sequence, head, p.rule, n, last, position + t, lane);
    if (lane == 0) s.runs[t] = run;
  }
  __syncthreads();
}

inline constexpr int page_threads = 256, page_warps = page_threads / 32;
inline constexpr int tile_pages = 128;  // four of a lane
inline constexpr int chunk_rows = 8;    // query rows whose products a thread holds

/// Results of one kernel for the next; row = sequence * kv_heads + head.
struct page_scratch {
  float* logits;     // [rows, query_rows, stride], scaled and capped; NaN where not below infinity
  float2* partials;  // [rows, tiles, query_rows]: largest logit seen, sum over seen slots of exp(logit - largest)
  slot_run* runs;    // [rows, max_step_tokens]
  index_t stride;    // a multiple of tile_pages
  index_t query_rows;
  index_t tiles_each;  // that a block makes at a time

  __device__ float* logits_of(index_t row, index_t r) const {
    return logits + (offset_t(row) * query_rows + r) * stride;
  }
  __device__ float2& partial(index_t row, index_t tile, index_t r) const {
    return partials[(offset_t(row) * (stride / tile_pages) + tile) * query_rows + r];
  }
};

/// A product's logit; NaN if it is not below infinity.
template <class Scorer>
__device__ float page_logit(const logit_rule& rule, float scale, float product) {
  const float logit = Scorer::normalised ? quick_cap(rule, scale * product) : scale * product;
  return logit < infinity ? logit : not_a_number;
}

/// Turns four products of one row into logits. One warp processes a tile.
template <class Scorer>
__device__ void finish_tile(float4 products, const logit_rule& rule, float scale, bool usable, const slot_run& run,
                            index_t n, index_t page, index_t pages, index_t tile, index_t row, index_t r,
                            const page_scratch& to) {
  const int lane = int(threadIdx.x) % 32;
  const index_t first = tile * tile_pages + lane * 4;
  float x[4] = {products.x, products.y, products.z, products.w};
  float top = -infinity;
  index_t seen[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const index_t p = first + j;
    x[j] = page_logit<Scorer>(rule, scale, x[j]);
    seen[j] = p < pages ? (min)(run.end, p + 1 == pages ? n : (p + 1) * page) - (max)(run.begin, p * page) : 0;
    if (seen[j] > 0) top = fmaxf(top, x[j]);  // not NaN
  }
  *reinterpret_cast<float4*>(to.logits_of(row, r) + first) = make_float4(x[0], x[1], x[2], x[3]);
  top = warp_max(top);
  float sum = 0;
  if constexpr (Scorer::normalised) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (seen[j] > 0 && x[j] == x[j] && top > -infinity) sum += float(seen[j]) * fast_exp(x[j] - top);
    }
    sum = warp_sum(sum);
  }
  if (lane == 0) to.partial(row, tile, r) = usable ? make_float2(top, sum) : make_float2(-infinity, 0);
}

template <class View>
__device__ void publish_runs(const page_query_storage<View::k_dim>& s, index_t tokens, index_t row,
                             const page_scratch& to) {
  if (blockIdx.x == 0 && threadIdx.x < unsigned(tokens))
    to.runs[row * max_step_tokens + threadIdx.x] = s.runs[threadIdx.x];
}

template <class T>
__device__ float float_of(std::uint16_t bits) {
  if constexpr (std::is_same_v<T, fp16>) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  } else {
    return float(bits_as<T>(bits));
  }
}
template <class T>
__device__ void four_floats(uint2 raw, float* x) {
  x[0] = float_of<T>(std::uint16_t(raw.x));
  x[1] = float_of<T>(std::uint16_t(raw.x >> 16));
  x[2] = float_of<T>(std::uint16_t(raw.y));
  x[3] = float_of<T>(std::uint16_t(raw.y >> 16));
}

/// Where channel d is read for the chunk's rows, and each row's weight for it. The first column is the side that some
/// row reads. The other side follows if rows differ (then it is returned; otherwise null). Pages of one slot have one
/// side: `single`.
template <class T, int D, class Scorer, class Weights>
__device__ bool lay_out_column(const page_query_storage<D>& s, const T* q, const page_extrema_view<T, D>& index,
                               const Scorer& scorer, bool single, index_t row, index_t rows, index_t chunk,
                               index_t held, int d, const T*& first_column, const T*& other_column,
                               Weights& first_weights, Weights& other_weights) {
  bool lower = false, upper = false;
  for (index_t r = 0; r < rows; ++r) {
    const bool takes_upper = !single && scorer.takes_upper(float(q[r * D + d]), s.total[d]);
    lower |= s.usable[r] && !takes_upper;
    upper |= s.usable[r] && takes_upper;
  }
  first_column = lower || single ? index.lower(row, d) : index.upper(row, d);
  other_column = lower && upper ? index.upper(row, d) : nullptr;
  for (index_t r = 0; r < index_t(sizeof(Weights) / sizeof(float)); ++r) {
    const float x = r < held && s.usable[chunk + r] ? float(q[(chunk + r) * D + d]) : 0.0f;
    const bool first = !single && scorer.takes_upper(x, s.total[d]) ? !lower : lower;
    reinterpret_cast<float*>(&first_weights)[r] = first ? x : 0.0f;
    reinterpret_cast<float*>(&other_weights)[r] = first ? 0.0f : x;
  }
  return lower && upper;
}

/// Shared memory of a block behind the storage: the queries, the columns with their rows of q, and the warps' products.
template <class T, int D>
struct page_shared {
  // At most two columns a channel. Padding: `rows` of q begin on 16 bytes.
  TESSERA_HD static constexpr std::size_t columns_at(index_t rows) { return std::size_t(rows) * D * sizeof(T); }
  TESSERA_HD static constexpr std::size_t q_at(index_t rows) { return columns_at(rows) + 2 * D * sizeof(T*); }
  TESSERA_HD static constexpr std::size_t sums_at(index_t rows) {
    return q_at(rows) + 2 * D * chunk_rows * sizeof(float);
  }
  TESSERA_HD static constexpr std::size_t bytes(index_t rows) {
    return sums_at(rows) + page_warps * tile_pages * sizeof(float) * std::size_t(rows < chunk_rows ? rows : chunk_rows);
  }
};

/// The columns' products with a chunk of rows: a lane has four pages from `at` on, a warp every eighth column.
template <class T>
__device__ void multiply_columns(const T* const* columns, const float4 (*weights)[chunk_rows / 4], int count,
                                 bool there, index_t at, index_t held, int warp, float (&acc)[chunk_rows][4]) {
  constexpr int in_flight = 8;
  for (int base = warp; base < count; base += page_warps * in_flight) {
    uint2 raw[in_flight];
#pragma unroll
    for (int u = 0; u < in_flight; ++u) {
      const int e = base + u * page_warps;
      const T* column = e < count ? columns[e] : nullptr;
      raw[u] = column && there ? *reinterpret_cast<const uint2*>(column + at) : make_uint2(0, 0);
    }
#pragma unroll
    for (int u = 0; u < in_flight; ++u) {
      const int e = base + u * page_warps;
      if (e >= count) break;
      float x[4];
      four_floats<T>(raw[u], x);
      const auto add = [&](const float4& w, int r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          acc[r][j] += w.x * x[j];
          acc[r + 1][j] += w.y * x[j];
          acc[r + 2][j] += w.z * x[j];
          acc[r + 3][j] += w.w * x[j];
        }
      };
      add(weights[e][0], 0);
      if (held > 4) add(weights[e][1], 4);
    }
  }
}

/// Logits of pages from their extrema. A block has every gridDim.x-th run of `tiles_each` tiles of one (sequence,
/// kv_head); its warps share the columns of a tile.
template <class View, class Scorer>
__global__ void __launch_bounds__(page_threads, 3)
    page_logits_entry(const __grid_constant__ page_problem<View> p, Scorer scorer,
                      const __grid_constant__ page_scratch to) {
  using T = typename View::element_type;
  constexpr int D = View::k_dim;
  using shared = page_shared<T, D>;
  extern __shared__ uint4 page_memory[];
  __shared__ page_query_storage<D> s;
  auto* bytes = reinterpret_cast<unsigned char*>(page_memory);
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const index_t row = index_t(blockIdx.y), sequence = row / p.view.kv_heads, head = row % p.view.kv_heads;
  const read_plan plan = load_plan(p.plans + sequence);
  const index_t n = p.view.length(sequence, head), pages = plan.pages_of(n);
  const index_t run_pages = to.tiles_each * tile_pages, next_run = index_t(gridDim.x) * run_pages;
  const index_t first_run = index_t(blockIdx.x) * run_pages;
  if (first_run >= pages) return;
  for (index_t first = first_run; first < pages && p.unfolded > 0 && thread < D; first += next_run) {
    const index_t end = (min)(pages, first + run_pages);
    if (offset_t(end) * plan.page <= n - p.unfolded) continue;
    fold_slots(p.view, sequence, head, p.index, p.plans[sequence], (max)(0, n - p.unfolded), n, first, end, thread);
  }
  if (n <= plan.read) return;

  const index_t group = p.q.heads / p.view.kv_heads, rows = p.q.tokens * group;
  T* q = reinterpret_cast<T*>(bytes);
  const int channels = (min)(plan.channels, index_t(D));
  read_page_query<page_threads>(s, q, p, scorer, channels, sequence, head, n);
  publish_runs<View>(s, p.q.tokens, row, to);
  const auto columns = reinterpret_cast<const T**>(bytes + shared::columns_at(rows));
  const auto weights = reinterpret_cast<float4(*)[chunk_rows / 4]>(bytes + shared::q_at(rows));
  const auto sums = reinterpret_cast<float4*>(bytes + shared::sums_at(rows));  // [warps, rows, tile_pages]
  for (index_t chunk = 0; chunk < rows; chunk += chunk_rows) {
    const index_t held = (min)(index_t(chunk_rows), rows - chunk);
    // A channel's column is the first side that some row reads. If rows differ, the other side lies `channels` columns
    // further.
    bool both = false;
    for (int d = thread; d < D; d += page_threads) {
      const int rank = s.rank[d];
      if (rank >= channels) continue;
      both |= lay_out_column(s, q, p.index, scorer, plan.page == 1, row, rows, chunk, held, d, columns[rank],
                             columns[channels + rank], weights[rank], weights[channels + rank]);
    }
    const int count = __syncthreads_or(both) ? 2 * channels : channels;
    const auto make_tile = [&](index_t tile) {
      const index_t at = tile * tile_pages + lane * 4;
      float acc[chunk_rows][4] = {};
      multiply_columns<T>(columns, weights, count, at < pages, at, held, warp, acc);
#pragma unroll
      for (int r = 0; r < chunk_rows; ++r) {
        if (r < held) sums[(warp * held + r) * 32 + lane] = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      }
      __syncthreads();
      for (index_t r = warp; r < held; r += page_warps) {
        float4 sum = sums[r * 32 + lane];
#pragma unroll
        for (int w = 1; w < page_warps; ++w) {
          const float4 more = sums[(w * held + r) * 32 + lane];
          sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        finish_tile<Scorer>(sum, p.rule, s.scale[chunk + r], s.usable[chunk + r], s.runs[(chunk + r) / group], n,
                            plan.page, pages, tile, row, chunk + r, to);
      }
      __syncthreads();  // before the next tile's sums, or the next chunk's columns, overwrite these
    };
    for (index_t first = first_run; first < pages; first += next_run) {
      for (index_t tile = first / tile_pages; tile * tile_pages < (min)(pages, first + run_pages); ++tile)
        make_tile(tile);
    }
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
