// Tiles of 32 packed rows: copied from memory by one warp, multiplied with queries as they are, or spread out for
// matrix instructions.
#pragma once

#include "../../device/mma.cuh"
#include "../../store/packed/walk_row.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A row of a tile is a lane's. `queries_at_once`: rows of queries that a walk along a row's values multiplies it with.
inline constexpr int tile_tokens = 32, queries_at_once = 4;

/// The packed rows of one head in memory, which `Places` puts into shared memory.
template <class Places>
struct raw_rows {
  const std::byte* values;
  unsigned chunks;  // of 16 bytes that a row has
  bit_rows bits;
  const float* scales;

  __device__ __forceinline__ raw_rows(const packed_vectors& from, index_t head)
      : values(from.values_of(head, 0)),
        chunks(unsigned(value_stride(from.format.value_bytes())) / 16),
        bits(from, head),
        scales(from.scales ? from.scales + from.row(head, 0) : nullptr) {}

  __device__ __forceinline__ float scale(index_t row) const { return scales ? scales[(max)(row, 0)] : 1.0f; }

  /// Bytes from one row to the next one in shared memory.
  __device__ __forceinline__ unsigned stride() const { return Places::stride(chunks); }
  /// Where this lane copies to in `copy`, of 32 rows.
  __device__ __forceinline__ unsigned own_place() const {
    const unsigned lane = threadIdx.x % 32;
    if (chunks == 4) return Places::byte(Places::row(lane / 4, Places::stride(4)), lane % 4 * 16);
    if (chunks == 2) return Places::byte(Places::row(lane / 2, Places::stride(2)), lane % 2 * 16);
    return Places::row(lane, stride());
  }
  /// Begins to copy the values of 32 rows; lane l says which row is the tile's l-th, and one below 0 becomes 0. By one
  /// warp, of which neighbouring lanes copy a row's chunks together; `to`, from `shared` on, has the lane's own place
  /// in it.
  __device__ __forceinline__ void copy(index_t row, std::uint32_t shared, unsigned to) const {
    const unsigned first = row >= 0 ? unsigned(row) * chunks : none;
    const std::uint32_t own = own_address(shared + to);
    if (chunks == 4) return copy_rows<4>(first, own);
    if (chunks == 2) return copy_rows<2>(first, own);
#pragma unroll 1
    for (unsigned c = 0; c < chunks; ++c) {
      copy_async16(shared + Places::byte(to, c * 16), values + (row >= 0 ? first + c : 0u) * std::uint64_t(16),
                   row >= 0);
    }
  }

 private:
  static constexpr unsigned none = ~0u;  // no row has so many chunks before it

  template <int Chunks>
  __device__ __forceinline__ void copy_rows(unsigned first, std::uint32_t to) const {
    const int lane = lane_here();
    const std::byte* from = values + lane % Chunks * 16;
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
      const unsigned chunk = __shfl_sync(~0u, first, i * (32 / Chunks) + lane / Chunks);
      copy_async16(to + unsigned(i * (32 / Chunks)) * Places::stride(Chunks),
                   from + (chunk == none ? 0u : chunk) * std::uint64_t(16), chunk != none, evict_first_policy());
    }
  }
};

/// A packed value as one of 16 bits; fp8 and int4 without their scale, which is exact.
template <class Tile, packed_element Element>
__device__ __forceinline__ std::uint16_t tile_bits(std::uint32_t word, int i) {
  if constexpr (Element != packed_element::fp8 && Element != packed_element::int4) {
    return std::uint16_t(word >> (i * 16));
  } else if constexpr (std::is_same_v<Tile, bf16>) {
    return std::uint16_t(bits_as<std::uint32_t>(value_of<Element>(word, i)) >> 16);  // nothing is cut off
  } else {
    return Tile(value_of<Element>(word, i)).bits;
  }
}

/// Adds the products of a row's values and 4 rows of queries up. Queries lie in shared memory as [channels, 8, 4] fp32:
/// eight copies, one for every lane of a quarter of a warp, so that lanes read other channels in each step and none
/// waits for another's bank.
template <packed_element Element, int Group>
struct query_products {
  static constexpr int stride = 128;  // bytes, of a channel
  const unsigned char* shared;
  float (&sums)[queries_at_once];

  __device__ __forceinline__ void operator()(std::uint32_t at, const std::uint32_t* words, int j) const {
#pragma unroll
    for (int i = 0; i < Group; ++i) {
      const float4 q = *reinterpret_cast<const float4*>(shared + at + i * stride);
      const float x = value_of<Element>(words[(j + i) / values_in_word<Element>], (j + i) % values_in_word<Element>);
      sums[0] += q.x * x, sums[1] += q.y * x, sums[2] += q.z * x, sums[3] += q.w * x;
    }
  }
};

/// Spreads a row of values out in a tile of [channels, 16] pairs of two numbers of 16 bits: those of rows r and r + 16.
/// Matrix instructions take such pairs as they are. At most two lanes write to a bank at a time, wherever their values
/// belong.
template <class Tile, packed_element Element, int Group>
struct spread_values {
  static constexpr int stride = 64;  // bytes, of a channel
  unsigned char* shared;

  __device__ __forceinline__ void operator()(std::uint32_t at, const std::uint32_t* words, int j) const {
    constexpr int in_word = values_in_word<Element>;
#pragma unroll
    for (int i = 0; i < Group; ++i) {
      *reinterpret_cast<std::uint16_t*>(shared + at + i * stride) =
          tile_bits<Tile, Element>(words[(j + i) / in_word], (j + i) % in_word);
    }
  }
};

/// sums [4] = the lane's row of keys, whose values lie at `row` of a block's shared memory, times 4 rows of queries,
/// which lie at `queries`.
template <class Tile, int D, int Most>
__device__ __forceinline__ void multiply_row(int way, int kept, const std::uint32_t (&bits)[Most], unsigned row,
                                             const unsigned char* shared, int queries, float (&sums)[queries_at_once]) {
#pragma unroll
  for (float& sum : sums) sum = 0;
  const auto first = std::uint32_t(queries + lane_here() % 8 * 16);
  with_way<Tile, D>(
      way, [&]<class Way>() __attribute__((always_inline)) {
        using products = query_products<Way::element, Way::group>;
        row_walk<row_places<D>, Way, Way::group * products::stride> along(bits, first);
        along.walk(kept, shared, row, products{shared, sums});
      });
}

/// Spreads the lane's row of values out in the tile that lies at `tile` of a block's shared memory.
template <class Tile, int Dv, int Most>
__device__ __forceinline__ void spread_row(int way, int kept, const std::uint32_t (&bits)[Most], unsigned row,
                                           unsigned char* shared, int tile) {
  const int lane = lane_here();
  const auto first = std::uint32_t(tile + lane % 16 * 4 + lane / 16 * 2);
  with_way<Tile, Dv>(
      way, [&]<class Way>() __attribute__((always_inline)) {
        using spread = spread_values<Tile, Way::element, Way::group>;
        row_walk<row_places<Dv>, Way, Way::group * spread::stride> along(bits, first);
        along.walk(kept, shared, row, spread{shared});
      });
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
