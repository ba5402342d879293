// Sums over a prompt's queries on the GPU, chunk by chunk; mean and covariance are computed from them.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/prompt/query_statistics.hpp"
#include "../../../../core/views.hpp"
#include "../../device/check.cuh"
#include "../../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int sums_threads = 256, sums_tile = 64;  // of the products that a block holds, four by four a thread
inline constexpr index_t sums_at_once = 2048;             // queries of a launch: bounds the table of turns

/// Cosine and sine of what element pair d turns at each position, [tokens, pairs]. Positions count from `first`, and
/// from `*begin` where it is given.
template <int Threads>
__global__ void __launch_bounds__(Threads) turns_entry(const float* frequencies, index_t first, const index_t* begin,
                                                       index_t tokens, int pairs, double2* turns) {
  const index_t i = index_t(blockIdx.x * Threads + threadIdx.x);
  if (i >= tokens * pairs) return;
  if (begin) first += *begin;
  // In fp32, as engines turn their queries.
  const double angle = double(__fmul_rn(float(first + i / pairs), frequencies[i % pairs]));
  double2 turn;
  sincos(angle, &turn.y, &turn.x);
  turns[i] = turn;
}

/// blockIdx: x a tile of the lower triangle, y a query head. Queries are rotated back to position 0 and added one after
/// another, so chunks of any size give the same bits. Queries that are not finite are left out.
template <class T, int D>
__global__ void __launch_bounds__(sums_threads)
    sum_queries_entry(rows_view<const T> q, const double2* turns, offset_t* counts, double* sums, double* products) {
  constexpr int pairs = D / 2, at_once = sums_threads / 32;
  __shared__ __align__(16) double rows[at_once][D];
  __shared__ bool finite[at_once];
  int tile_row = 0, tile_column = int(blockIdx.x);
  while (tile_column > tile_row) tile_column -= ++tile_row;
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = tile_row * sums_tile + int(threadIdx.x) / 16 * 4;
  const int column = tile_column * sums_tile + int(threadIdx.x) % 16 * 4;
  const bool inside = row < D && column < D, adds_rows = blockIdx.x == 0 && threadIdx.x < D;
  double* own = products + offset_t(head) * D * D + row * D + column;
  double added[4][4] = {}, total = adds_rows ? sums[head * D + int(threadIdx.x)] : 0;
  offset_t counted = 0;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < 4; ++b) added[a][b] = inside ? own[a * D + b] : 0;
  }
  for (index_t first = 0; first < q.tokens; first += at_once) {
    const index_t t = first + warp;
    bool good = t < q.tokens;
    if (good) {
      const T* from = q.row(0, t, head);
      for (int d = lane; d < pairs; d += 32) {
        const double a = double(float(from[d])), b = double(float(from[d + pairs]));
        const double2 turn = turns[t * pairs + d];
        good = good && a - a == 0 && b - b == 0;
        rows[warp][d] = a * turn.x + b * turn.y;
        rows[warp][d + pairs] = b * turn.x - a * turn.y;
      }
    }
    good = __all_sync(~0u, good);
    if (lane == 0) finite[warp] = good;
    __syncthreads();
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
      if (!finite[u]) continue;
      ++counted;
      if (adds_rows) total += rows[u][threadIdx.x];
      if (!inside) continue;
#pragma unroll
      for (int a = 0; a < 4; ++a) {
#pragma unroll
        for (int b = 0; b < 4; ++b) added[a][b] += rows[u][row + a] * rows[u][column + b];
      }
    }
    __syncthreads();
  }
  if (adds_rows) sums[head * D + int(threadIdx.x)] = total;
  if (blockIdx.x == 0 && threadIdx.x == 0) counts[head] += counted;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (inside) own[a * D + b] = added[a][b];
    }
  }
}

}  // namespace detail

/// Doubles of scratch that `add_queries` needs.
template <int D>
constexpr std::size_t query_turns = std::size_t(detail::sums_at_once) * D;

/// Adds the queries of positions `first`, `first` + 1, ..., on from `*begin` on the device where it is given, to sums
/// in the caller's memory: the device's cpu::add_queries. Queries that are not finite are left out.
/// Shapes   q [tokens, heads, D] of one sequence, frequencies [D / 2], turns [query_turns<D>], on the device.
template <int D, class T>
void add_queries(const rows_view<const T>& q, index_t first, const index_t* begin, const float* frequencies,
                 const summed_queries& to, double* turns, cudaStream_t stream) {
  static_assert(D % 4 == 0 && D <= detail::sums_threads, "tessera: sums over queries take head dims up to 256");
  constexpr int tiles = (D + detail::sums_tile - 1) / detail::sums_tile;
  auto* const pairs = reinterpret_cast<double2*>(turns);
  for (index_t done = 0; done < q.tokens; done += detail::sums_at_once) {
    rows_view<const T> some = q;
    some.data += done * q.token_stride;
    some.tokens = (std::min)(detail::sums_at_once, q.tokens - done);
    detail::turns_entry<256><<<unsigned(ceil_div(some.tokens * (D / 2), 256)), 256, 0, stream>>>(
        frequencies, first + done, begin, some.tokens, D / 2, pairs);
    detail::sum_queries_entry<T, D>
        <<<dim3(tiles * (tiles + 1) / 2, unsigned(q.heads)), detail::sums_threads, 0, stream>>>(some, pairs, to.counts,
                                                                                                to.sums, to.products);
    check(cudaGetLastError(), "launch of sum_queries");
  }
}

/// The device's cpu::query_sums of every entry, a (layer, sequence).
/// Memory   entries * q_heads * (k_dim squared + k_dim + 1) doubles.   Cost  k_dim squared / 2 products in double a
///          query.
template <class T, int D>
class query_sums {
 public:
  query_sums() = default;
  query_sums(index_t entries, index_t q_heads, const host_vector<float>& frequencies)
      : heads_(q_heads),
        empty_(std::size_t(entries), 1),
        memory_(std::size_t(entries) * entry_doubles()),
        frequencies_(frequencies.size()),
        turns_(query_turns<D>) {
    check(cudaMemcpy(frequencies_.data(), frequencies.data(), frequencies_.bytes(), cudaMemcpyHostToDevice),
          "cudaMemcpy");
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // streams of the caller's do not wait for it
  }

  /// Adds the queries of positions `first`, `first` + 1, ..., but only those at position `least` or later.
  void add(std::size_t entry, const rows_view<const T>& q, index_t first, index_t least, cudaStream_t stream) {
    const query_statistics to = statistics(entry, stream);
    const index_t skipped = (std::clamp)(least - first, 0, q.tokens);
    rows_view<const T> some = q;
    some.data += skipped * q.token_stride;
    some.tokens -= skipped;
    add_queries<D>(some, first + skipped, nullptr, frequencies_.data(),
                   {const_cast<offset_t*>(to.counts), const_cast<double*>(to.sums), const_cast<double*>(to.products)},
                   turns_.data(), stream);
  }

  /// The statistics of all queries added since the entry was last forgotten.
  query_statistics statistics(std::size_t entry, cudaStream_t stream) {
    double* data = memory_.data() + std::size_t(entry) * entry_doubles();
    if (empty_[entry]) {
      check(cudaMemsetAsync(data, 0, entry_doubles() * sizeof(double), stream), "cudaMemsetAsync");
      empty_[entry] = 0;
    }
    const std::size_t heads = std::size_t(heads_);
    return {reinterpret_cast<const offset_t*>(data), data + heads, data + heads * (1 + D)};
  }
  void forget(std::size_t entry) { empty_[entry] = 1; }
  void copy(std::size_t from, std::size_t to, cudaStream_t stream) {
    empty_[to] = empty_[from];
    if (!empty_[from])
      copy_on_device(memory_.data() + to * entry_doubles(), memory_.data() + from * entry_doubles(), entry_doubles(),
                     stream);
  }

  const float* frequencies() const { return frequencies_.data(); }
  offset_t bytes_per_entry() const { return offset_t(entry_doubles() * sizeof(double)); }

 private:
  static_assert(sizeof(offset_t) == sizeof(double));
  std::size_t entry_doubles() const { return std::size_t(heads_) * (1 + D + std::size_t(D) * D); }

  index_t heads_ = 0;
  host_vector<char> empty_;  // by entry
  device_buffer<double> memory_;
  device_buffer<float> frequencies_;
  device_buffer<double> turns_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
