// Tiles of 16 packed rows: copied from memory by one warp, and spread out as dense rows for matrix instructions.
#pragma once

#include "../../device/mma.cuh"
#include "../../store/packed/walk_row.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int tile_tokens = 16;

/// How packed rows lie in shared memory: values, bits, scale, padded to an odd number of 16 bytes so that rows begin in other banks.
struct raw_rows_shape {
  int values, bits, scale, stride;  // in bytes; where each begins (values at 0)
  TESSERA_HD explicit raw_rows_shape(const packed_format& format)
      : values(value_stride(format.value_bytes())),
        bits(values),
        scale(bits + int(bit_words(format)) * 4),
        stride(((scale + 4 + 15) / 16 | 1) * 16) {}
};

/// Begins to copy rows `row` of a head, lane l that of tile row l % 16; a row below 0 becomes bits and a scale of 0. By one warp.
__device__ __forceinline__ void copy_raw_rows(const packed_vectors& from, index_t head, index_t row, std::uint32_t to) {
  const int lane = int(threadIdx.x) % 32, half = lane / tile_tokens;
  const raw_rows_shape shape(from.format);
  const bool valid = row >= 0;
  const index_t i = valid ? row : 0;
  to += std::uint32_t(lane % tile_tokens * shape.stride);
  const std::byte* values = from.values_of(head, i);
  for (int c = half; c * 16 < shape.values; c += 2) copy_async16(to + c * 16, values + c * 16, valid);
  const std::uint32_t* bits = from.bits_of(head, i);
  for (int w = half; w < bit_words(from.format); w += 2) copy_async4(to + shape.bits + w * 4, bits + w, valid);
  if (from.scales && half == 0) copy_async4(to + shape.scale, from.scales + from.row(head, i), valid);
}

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

/// What a lane spreads out: one raw row, and where it goes.
struct spread_row {
  packed_format format;
  const unsigned char* raw;
  unsigned char* to;       // the dense row
  std::uint32_t exchange;  // of 16-byte chunks within 128 bytes: see staged_rows
};

template <class Tile, packed_element Element, int Words>
__device__ __forceinline__ void spread_values(const spread_row& row, int count) {
  const raw_rows_shape shape(row.format);
  bit_walk<Words> walk(reinterpret_cast<const std::uint32_t*>(row.raw + shape.bits), row.format);
  walk_row<Element>(walk, count, row.raw, [&](int channel, std::uint32_t word, int j) {
    *reinterpret_cast<std::uint16_t*>(row.to + ((std::uint32_t(channel) * 2) ^ row.exchange)) =
        tile_bits<Tile, Element>(word, j);
  });
}

/// Spreads 16 raw rows of keys and as many of values out, to [16, whole_channels] of 16 bits each, 0 for what did not stay: lanes below
/// 16 a row of keys each, the others one of values. `valid`: the row of lane % 16 is there. By one warp; the caller synchronises it.
template <class Tile, int D, int Dv>
__device__ __forceinline__ void spread_tile(const packed_vectors& keys, const packed_vectors& values,
                                            const unsigned char* k_raw, const unsigned char* v_raw, bool valid,
                                            unsigned char* k_tile, unsigned char* v_tile) {
  constexpr int words = (D > Dv ? D : Dv) / 32 + ((D > Dv ? D : Dv) % 32 != 0);
  const int lane = int(threadIdx.x) % 32, i = lane % tile_tokens;
  const bool of_keys = lane < tile_tokens;
  // Chosen member by member: two structs of which one is taken would lie in memory.
  const packed_format k = keys.format, v = values.format;
  const packed_format format{of_keys ? k.element : v.element, of_keys ? k.channels : v.channels,
                             of_keys ? k.group : v.group, of_keys ? k.kept : v.kept, true};
  const raw_rows_shape k_shape(k), v_shape(v);
  const int stride = of_keys ? k_shape.stride : v_shape.stride;
  const staged_rows staged{of_keys ? D / 8 : Dv / 8};
  unsigned char* to = (of_keys ? k_tile : v_tile) + i * staged.bytes();
  const spread_row row{format, (of_keys ? k_raw : v_raw) + i * stride, to,
                       staged.swizzled() ? std::uint32_t(i % 8) * 16 : 0u};
  for (int c = 0; c < int(whole_channels(format.channels)) / 8; ++c) {
    *reinterpret_cast<uint4*>(to + ((std::uint32_t(c) * 16) ^ row.exchange)) = make_uint4(0, 0, 0, 0);
  }
  const int count = valid ? int(format.kept) : 0;
  switch (format.element) {
    case packed_element::fp8:
      return spread_values<Tile, packed_element::fp8, words>(row, count);
    case packed_element::int4:
      return spread_values<Tile, packed_element::int4, words>(row, count);
    default:
      return spread_values<Tile, packed_element::bf16, words>(row, count);
  }
}

/// The scale of a tile row.
__device__ __forceinline__ float raw_scale(const packed_format& format, const unsigned char* raw, int row) {
  if (!format.scaled()) return 1;
  const raw_rows_shape shape(format);
  return *reinterpret_cast<const float*>(raw + row * shape.stride + shape.scale);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
