// Tiles of packed rows, and a warp's part of the softmax over them.
#pragma once

#include "../../../device/mma.cuh"
#include "../../../device/softmax.cuh"
#include "../../../device/warp.cuh"
#include "../../../store/packed/packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Query rows that a block attends together, and tokens of whole rows that a warp takes at a time.
inline constexpr int query_rows_together = 8, whole_tokens = 16;

/// Softmax state and summed values of 8 query rows. Lane l holds the softmax state of row l / 4. Of rows l % 4 * 2 and
/// l % 4 * 2 + 1 it holds the values of channel l / 4 of every 8. Each lane has its own partial sums until `write`.
template <class Tile, int D, int Dv>
struct packed_state {
  TESSERA_HD static constexpr staged_rows k_rows() { return {D / 8}; }
  TESSERA_HD static constexpr staged_rows v_rows() { return {Dv / 8}; }
  std::uint32_t q[D / 16][4];
  float largest = -infinity, sum = 0;
  float acc[Dv / 16][4] = {};

  /// `queries`: the address of 16 staged rows: the high parts of 8 rows, then their low parts.
  __device__ __forceinline__ packed_state(std::uint32_t queries, int channels) {
    const int lane = int(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      if (step * 16 >= channels) break;
      load_matrices(q[step], queries + k_rows().offset(in_matrix + matrix % 2 * 8, step * 2 + matrix / 2));
    }
  }

  /// The logits of 16 keys. Lane l has those of row l / 4 with keys l % 4 * 2 and l % 4 * 2 + 1, and with both keys 8
  /// further on. `channels`: a multiple of 16.
  __device__ __forceinline__ void dot(std::uint32_t keys, int channels, float (&logits)[4]) const {
    const int lane = int(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
    float parts[2][4] = {};
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      if (step * 16 >= channels) break;
      std::uint32_t b[4];
      load_matrices(b, keys + k_rows().offset(in_matrix + matrix / 2 * 8, step * 2 + matrix % 2));
      multiply<Tile>(parts[0], q[step], b[0], b[1]);
      multiply<Tile>(parts[1], q[step], b[2], b[3]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) logits[j] = parts[j / 2][j % 2] + parts[j / 2][j % 2 + 2];
  }

  /// Adds 16 tokens. logit(x, j): the logit of a dot product, in base 2; sees(j): whether the lane's row sees token j
  /// of those that `dot` names; weight(j) multiplies the token's value.
  template <class Logit, class Sees, class Weight>
  __device__ __forceinline__ void add_tokens(const float (&logits)[4], std::uint32_t values, int channels,
                                             const Logit& logit, const Sees& sees, const Weight& weight) {
    const int lane = int(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
    float x[4], top = largest;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = sees(j) ? logit(logits[j], j) : -infinity;
      top = fmaxf(top, x[j]);
    }
    top = lanes_max<4>(top);
    const float reference = softmax_reference(top), shrink = exp2f(largest - reference);
    largest = top;
    sum *= shrink;
    const float of_rows[2] = {__shfl_sync(~0u, shrink, lane % 4 * 8), __shfl_sync(~0u, shrink, lane % 4 * 8 + 4)};
#pragma unroll
    for (int m = 0; m < Dv / 16; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][i] *= of_rows[i % 2];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = exp2f(x[j] - reference);
      sum += x[j];
      x[j] *= weight(j);
    }
    const std::uint32_t p[2] = {pack_pair<Tile>(x[0], x[1]), pack_pair<Tile>(x[2], x[3])};
#pragma unroll
    for (int m = 0; m < Dv / 16; ++m) {  // channels are rows of the product
      if (m * 16 >= channels) break;
      std::uint32_t a[4];
      load_matrices_transposed(a, values + v_rows().offset(in_matrix + matrix / 2 * 8, m * 2 + matrix % 2));
      multiply<Tile>(acc[m], a, p[0], p[1]);
    }
  }

  /// Sums over the lanes, then writes the largest logit and the sum [8, 2] and the summed values [8, Dv]. One warp
  /// calls it.
  __device__ __forceinline__ void write(int, float* states, float* to, int channels) const {
    const int lane = int(threadIdx.x) % 32;
    const float whole = lanes_sum<4>(sum);
    if (lane % 4 == 0) states[lane / 4 * 2] = largest, states[lane / 4 * 2 + 1] = whole;
#pragma unroll
    for (int m = 0; m < Dv / 16; ++m) {
      if (m * 16 >= channels) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(lane % 4 * 2 + i % 2) * Dv + m * 16 + lane / 4 + i / 2 * 8] = acc[m][i];
    }
  }
};

// Tiles of 32 packed rows: copied from memory by one warp, multiplied with queries as they are, or spread out for
// matrix instructions.

/// Each lane has one row of a tile. `queries_at_once`: the number of query rows that one pass over a row's values
/// multiplies.
inline constexpr int tile_tokens = 32, queries_at_once = 4;

/// The packed rows of one head in memory, which `Places` puts into shared memory.
template <class Places, packed_rows_in Memory>
struct raw_rows {
  using address_type = typename bit_rows<Memory>::address_type;
  const std::byte* values;
  unsigned chunks;  // of 16 bytes that a row has
  bit_rows<Memory> bits;
  const float* scales;

  __device__ __forceinline__ raw_rows(const packed_vectors& from, index_t head)
      : values(from.values_of(head)),
        chunks(unsigned(value_stride(from.format.value_bytes())) / 16),
        bits(from, head),
        scales(from.scales ? from.scales_of(head) : nullptr) {}

  __device__ __forceinline__ float scale(const address_type& at) const {
    return scales ? scales[bits.page_bytes(at) / 4 + unsigned((max)(bits.in_page(at), 0))] : 1.0f;
  }

  /// Bytes from one row to the next one in shared memory.
  __device__ __forceinline__ unsigned stride() const { return Places::stride(chunks); }
  /// Where this lane copies to in `copy`, of 32 rows.
  __device__ __forceinline__ unsigned own_place() const {
    const unsigned lane = threadIdx.x % 32;
    if (chunks == 4) return Places::byte(Places::row(lane / 4, Places::stride(4)), lane % 4 * 16);
    if (chunks == 2) return Places::byte(Places::row(lane / 2, Places::stride(2)), lane % 2 * 16);
    return Places::row(lane, stride());
  }
  /// Begins to copy the values of 32 rows. Lane l gives the address of the tile's l-th row; a negative row is filled
  /// with zeros. One warp calls it, and neighbouring lanes copy a row's chunks together. `to` is the lane's own address
  /// in the tile that begins at `shared`.
  __device__ __forceinline__ void copy(const address_type& at, std::uint32_t shared, unsigned to) const {
    const index_t row = bits.in_page(at);
    const unsigned first = row >= 0 ? bits.page_chunks(at) + unsigned(row) * chunks : none;
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

/// A packed value as a 16-bit element. fp8 and int4 are converted without their scale, which is exact.
template <class Tile, packed_element Element>
__device__ __forceinline__ std::uint16_t tile_bits(std::uint32_t word, int i) {
  if constexpr (Element != packed_element::fp8 && Element != packed_element::int4) {
    return std::uint16_t(word >> (i * 16));
  } else if constexpr (std::is_same_v<Tile, bf16>) {
    return std::uint16_t(bits_as<std::uint32_t>(value_of<Element>(word, i)) >> 16);  // no bits are lost
  } else {
    return Tile(value_of<Element>(word, i)).bits;
  }
}

/// Sums the products of a row's values and 4 rows of queries. Queries lie in shared memory as [channels, 8, 4] fp32.
/// There are eight copies, one for every lane of a quarter warp: lanes read different channels in each step, and the
/// copies avoid bank conflicts.
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

/// Writes a row's values into a tile of [channels, 16] pairs of 16-bit elements. A pair has those of rows r and r + 16,
/// as matrix instructions take them. At most two lanes write to a bank at a time, whatever channels their values belong
/// to.
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

/// sums [4] = the products of the lane's row of keys with 4 rows of queries. The keys' values lie at `row` of a block's
/// shared memory, the queries at `queries`.
template <class Tile, int D, int Most>
__device__ __forceinline__ void multiply_row(int way, int kept, const std::uint32_t (&bits)[Most], unsigned row,
                                             const unsigned char* shared, int queries, float (&sums)[queries_at_once]) {
#pragma unroll
  for (float& sum : sums) sum = 0;
  const auto first = std::uint32_t(queries + lane_here() % 8 * 16);
  with_way<Tile, D>(way, [&]<class Way>() __attribute__((always_inline)) {
    using products = query_products<Way::element, Way::group>;
    row_walk<row_layout<D>, Way, Way::group * products::stride> along(bits, first);
    along.walk(kept, shared, row, products{shared, sums});
  });
}

/// Writes the lane's row of values into the tile at `tile` of a block's shared memory.
template <class Tile, int Dv, int Most>
__device__ __forceinline__ void spread_row(int way, int kept, const std::uint32_t (&bits)[Most], unsigned row,
                                           unsigned char* shared, int tile) {
  const int lane = lane_here();
  const auto first = std::uint32_t(tile + lane % 16 * 4 + lane / 16 * 2);
  with_way<Tile, Dv>(way, [&]<class Way>() __attribute__((always_inline)) {
    using spread = spread_values<Tile, Way::element, Way::group>;
    row_walk<row_layout<Dv>, Way, Way::group * spread::stride> along(bits, first);
    along.walk(kept, shared, row, spread{shared});
  });
}

// The softmax state of a warp over 8 query rows while it attends tiles of 32 packed rows.

/// Calls run(m) for every 16 of `channels`, a multiple of 16. Usually a quarter of the channels is left out, so the
/// first three quarters need no branch.
template <int Dv, class Run>
__device__ __forceinline__ void with_matrices(int channels, const Run& run) {
  constexpr int usual = int(whole_channels(Dv * 3 / 4)) / 16;
  if (channels == usual * 16) {
#pragma unroll
    for (int m = 0; m < usual; ++m) run(m);
    return;
  }
#pragma unroll
  for (int m = 0; m < Dv / 16; ++m) {
    if (m * 16 >= channels) break;
    run(m);
  }
}

/// Softmax state and summed values of 8 query rows, in parts of 4. `multiply_row` gives a lane the logits of its own
/// token. Lane l holds the values of channel l / 4 of every 8 for rows l % 4 * 2 and l % 4 * 2 + 1. Each lane has its
/// own partial sums until `write`. State of which a row has only one lies in shared memory, because registers limit the
/// number of warps.
template <class Tile, int Dv>
struct spread_state {
  /// How far base-2 logits may rise above the reference of the sums before all sums are rescaled. Weights stay finite,
  /// and after some tiles rescaling is rare.
  static constexpr float slack = std::is_same_v<Tile, bf16> ? 8 : 0;  // fp16 ends at 65,504, and scales may be large
  static constexpr float lowest = -3e38f;  // below every logit, and still finite: no token was seen
  float acc[Dv / 16][4] = {};
  float4* const shared;  // [parts], the references of the sums, and behind it [parts, 32] sums of lanes

  /// Bytes of shared memory for one warp.
  TESSERA_HD static constexpr int bytes(int parts) { return parts * (tile_tokens + 1) * int(sizeof(float4)); }

  /// By one warp; the caller synchronises it.
  __device__ __forceinline__ spread_state(unsigned char* from, int parts) : shared(reinterpret_cast<float4*>(from)) {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll 1
    for (int i = 0; i < parts; ++i) {
      if (lane == 0) largest(i) = make_float4(lowest, lowest, lowest, lowest);
      sums(parts, i, lane) = make_float4(0, 0, 0, 0);
    }
  }

  /// Adds the logits of 32 tokens, in base 2, for rows part * 4 and on; -infinity: not visible. `weight` multiplies the
  /// token's value. The factors of the values are written to weights [8, 32].
  __device__ __forceinline__ void take_logits(int parts, int part, const float (&x)[queries_at_once], float weight,
                                              unsigned char* weights) {
    const int lane = lane_here();
    const float4 before = largest(part), added = sums(parts, part, lane);
    float top[queries_at_once] = {before.x, before.y, before.z, before.w};
    float sum[queries_at_once] = {added.x, added.y, added.z, added.w};
    bool rises = false;
#pragma unroll
    for (int i = 0; i < queries_at_once; ++i) rises = rises || x[i] > top[i] + slack;
    if (__any_sync(~0u, rises)) {
      float shrink[queries_at_once];
#pragma unroll
      for (int i = 0; i < queries_at_once; ++i) {
        const float old = top[i];
        top[i] = fmaxf(old, warp_max(fmaxf(x[i], -infinity)));
        shrink[i] = exp2f(old - top[i]);
        sum[i] *= shrink[i];
      }
      __syncwarp();
      if (lane == 0) largest(part) = make_float4(top[0], top[1], top[2], top[3]);
      const bool own = lane % 4 / 2 == part, odd = lane % 2;
      const float of_rows[2] = {own ? (odd ? shrink[2] : shrink[0]) : 1.0f, own ? (odd ? shrink[3] : shrink[1]) : 1.0f};
#pragma unroll
      for (int m = 0; m < Dv / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][i] *= of_rows[i % 2];
      }
    }
    float p[queries_at_once];
#pragma unroll
    for (int i = 0; i < queries_at_once; ++i) {
      p[i] = power_of_two(x[i] - top[i]);
      sum[i] += p[i];
    }
    sums(parts, part, lane) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    auto* to = reinterpret_cast<std::uint16_t*>(weights) + part * queries_at_once * tile_tokens + paired(lane);
#pragma unroll
    for (int i = 0; i < queries_at_once; i += 2) {
      const std::uint32_t two = pack_pair<Tile>(p[i] * weight, p[i + 1] * weight);
      to[i * tile_tokens] = std::uint16_t(two), to[(i + 1) * tile_tokens] = std::uint16_t(two >> 16);
    }
  }

  /// Adds the tile's values times their weights. `channels`, a multiple of 16, is how many channels they have.
  __device__ __forceinline__ void take_values(const unsigned char* tile, const unsigned char* weights, int parts,
                                              int channels) {
    const values_taken from(tile, weights, parts);
    with_matrices<Dv>(channels, [&](int m) __attribute__((always_inline)) { take_matrix(from, m); });
  }

  /// Sums over the lanes, then writes the largest logit and the sum [8, 2] and the summed values [8, Dv]. One warp
  /// calls it.
  __device__ __forceinline__ void write(int parts, float* states, float* to, int channels) const {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const float4 reference = largest(part), added = sums(parts, part, lane);
      const float top[queries_at_once] = {reference.x, reference.y, reference.z, reference.w};
      const float sum[queries_at_once] = {added.x, added.y, added.z, added.w};
#pragma unroll
      for (int i = 0; i < queries_at_once; ++i) {
        const float whole = warp_sum(sum[i]);
        if (lane != 0) continue;
        states[(part * queries_at_once + i) * 2] = top[i] == lowest ? -infinity : top[i];
        states[(part * queries_at_once + i) * 2 + 1] = whole;
      }
    }
#pragma unroll
    for (int m = 0; m < Dv / 16; ++m) {
      if (m * 16 >= channels) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* row = to + (lane % 4 * 2 + i) * Dv + m * 16 + lane / 4;
        row[0] = acc[m][i], row[8] = acc[m][i + 2];
      }
    }
  }

 private:
  __device__ __forceinline__ float4& largest(int part) const { return shared[part]; }
  __device__ __forceinline__ float4& sums(int parts, int part, int lane) const {
    return shared[parts + part * tile_tokens + lane];
  }
  /// Where a token's 16-bit element lies in a row of 32: tokens t and t + 16 are neighbours.
  __device__ static __forceinline__ int paired(int token) { return token % 16 * 2 + token / 16; }

  /// A lane's operands: four pairs of tokens from lane % 4 * 4 on, two for each of two products.
  struct values_taken {
    uint4 p = {};  // 0 for rows that do not exist
    const unsigned char* values;
    __device__ __forceinline__ values_taken(const unsigned char* tile, const unsigned char* weights, int parts) {
      const int lane = lane_here(), row = lane / 4, place = row * tile_tokens * 2 + lane % 4 * 16;
      if (row < parts * queries_at_once) p = *reinterpret_cast<const uint4*>(weights + place);
      values = tile + place;
    }
  };
  __device__ __forceinline__ void take_matrix(const values_taken& from, int m) {
    constexpr int channel = tile_tokens * 2;  // bytes
    const uint4 x = *reinterpret_cast<const uint4*>(from.values + m * 16 * channel);
    const uint4 y = *reinterpret_cast<const uint4*>(from.values + (m * 16 + 8) * channel);
    const std::uint32_t first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
    multiply<Tile>(acc[m], first, from.p.x, from.p.y);
    multiply<Tile>(acc[m], second, from.p.z, from.p.w);
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
