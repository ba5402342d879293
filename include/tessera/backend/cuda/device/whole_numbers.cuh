// Integers on the device: quotients without the twenty instructions of a division, searches, and rows of uneven length
// that are laid end to end and cut into even pieces.
#pragma once

#include "warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// floor(a / b) for 0 <= a < 2^20 and b > 0, as the product of a + 0.5 and 1 / b: the exact quotient of a + 0.5 is at
/// least 1 / (2b) away from an integer, and the rounding error of the product is smaller.
__device__ __forceinline__ index_t small_quotient(index_t a, index_t b) {
  return index_t((float(a) + 0.5f) * __fdividef(1.0f, float(b)));
}

/// floor(x / by) for 0 <= x < 2^31 and by >= 1, by a multiplication with a factor that the host prepares.
struct quick_divisor {
  std::uint32_t factor = 1;  // ceil(2^(31 + log) / by), log = ceil(log2(by))
  int shift = 0;
  quick_divisor() = default;
  explicit quick_divisor(index_t by) {
    int log = 0;
    while ((std::int64_t(1) << log) < by) ++log;
    shift = 31 + log;
    factor = std::uint32_t(((std::uint64_t(1) << shift) + std::uint64_t(by) - 1) / std::uint64_t(by));
  }
  TESSERA_HD index_t quotient(index_t x) const { return index_t((std::uint64_t(x) * factor) >> shift); }
};

/// The first i in [0, count) for which `holds(i)`, or `count`. If it holds for an index, it must hold for all later
/// ones. One thread calls it.
template <class Holds>
__device__ __forceinline__ index_t first_where(index_t count, const Holds& holds) {
  index_t low = 0;
  while (low < count) {
    const index_t middle = low + (count - low) / 2;
    if (holds(middle))
      count = middle;
    else
      low = middle + 1;
  }
  return low;
}

/// The same by one warp, with 32 probes a round: one access to memory for 32 items, two for 1,024, three for 32,768.
template <class Holds>
__device__ __forceinline__ index_t first_where_in_warp(index_t count, int lane, const Holds& holds) {
  index_t low = 0, size = count;  // the answer lies in [low, low + size]
  while (size > 0) {
    const index_t step = (size + 31) / 32, probe = low + (min)((lane + 1) * step, size) - 1;
    const unsigned before = __ballot_sync(~0u, !holds(probe));
    if (before == ~0u) return low + size;
    const index_t skip = index_t(__popc(before)) * step;  // probes ascend, so `before` is a run of low bits
    low += skip;
    size = (min)(step - 1, size - skip);
  }
  return low;
}

/// Writes the inclusive prefix sums of `units_of(row)` to `ends [rows]` in shared memory. All threads of a block call
/// it; it ends with a barrier. Every block computes them for itself, because lengths change from launch to launch of a
/// graph and the host does not know them.
template <int Threads, class UnitsOf>
__device__ void scan_units(index_t rows, index_t* ends, block_scan<Threads, index_t>& scan, const UnitsOf& units_of) {
  const index_t share = (rows + Threads - 1) / Threads, first = (min)(index_t(threadIdx.x) * share, rows);
  const index_t last = (min)(first + share, rows);
  index_t sum = 0;
#pragma unroll 4
  for (index_t row = first; row < last; ++row) ends[row] = sum += units_of(row);
  const index_t earlier = scan.exclusive_sum(sum);
  for (index_t row = first; row < last; ++row) ends[row] += earlier;
  __syncthreads();
}

/// The row that holds `unit`: the number of rows that end at or before it. One thread calls it.
__device__ inline index_t row_of_unit(const index_t* ends, index_t rows, index_t unit) {
  return first_where(rows, [&](index_t row) { return ends[row] > unit; });
}
/// The same by one warp, for up to 1,024 rows, with two loads per lane.
__device__ inline index_t row_of_unit_in_warp(const index_t* ends, index_t rows, index_t unit, index_t lane) {
  const index_t each = (rows + 31) / 32;
  const bool group_before = (lane + 1) * each <= rows && ends[(lane + 1) * each - 1] <= unit;
  const index_t first = index_t(__popc(__ballot_sync(~0u, group_before))) * each;
  const bool before = lane < each && first + lane < rows && ends[first + lane] <= unit;
  return first + index_t(__popc(__ballot_sync(~0u, before)));
}

inline constexpr index_t max_pieces = 1024;  // so that products of two piece numbers stay below 2^20

/// `units` cut into `count` pieces. Piece i begins at floor(i * units / count). If rows are equal and their number
/// divides `count`, each row ends where a piece ends.
struct even_pieces {
  index_t units, count, size, rest;

  /// 1 <= count <= max_pieces
  __device__ even_pieces(index_t units_, index_t count_)
      : units(units_),
        count(count_),
        size(index_t(unsigned(units_) / unsigned(count_))),
        rest(units_ - size * count_) {}
  __device__ index_t begin(index_t piece) const { return piece * size + small_quotient(piece * rest, count); }
  __device__ index_t piece_of(index_t unit) const {
    index_t piece = (min)(count - 1, index_t(float(unit) * __fdividef(float(count), float(units))));
    while (begin(piece) > unit) --piece;
    while (begin(piece + 1) <= unit) ++piece;
    return piece;
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
