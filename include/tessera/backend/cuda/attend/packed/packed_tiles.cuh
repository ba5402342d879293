// Tiles of 16 packed rows: copied from memory by one warp, and spread out as dense rows for matrix instructions.
#pragma once

#include "../../device/mma.cuh"
#include "../../store/packed/packed_view.cuh"

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
__device__ __forceinline__ std::uint32_t tile_bits(const unsigned char* values, int place) {
  if constexpr (Element == packed_element::fp8) {
    fp8 value;
    value.bits = values[place];
    return Tile(float(value)).bits;
  } else if constexpr (Element == packed_element::int4) {
    const unsigned nibble = (unsigned(values[place / 2]) >> (place % 2 * 4)) & 15u;
    const int whole = nibble < 8 ? int(nibble) : int(nibble) - 16;
    return Tile(whole == -8 ? __uint_as_float(0x7fc00000u) : float(whole)).bits;
  } else {
    return reinterpret_cast<const std::uint16_t*>(values)[place];
  }
}

template <class Tile, packed_element Element>
__device__ void spread_rows_of(const packed_format& format, const unsigned char* raw, const staged_rows& staged,
                               unsigned char* to) {
  const int lane = int(threadIdx.x) % 32, row = lane % tile_tokens, half = lane / tile_tokens;
  const raw_rows_shape shape(format);
  const unsigned char* values = raw + row * shape.stride;
  const auto* words = reinterpret_cast<const std::uint32_t*>(values + shape.bits);
  const int shift = format.group == 4 ? 2 : format.group == 2 ? 1 : 0, chunk_bits = 8 >> shift;
  const int chunks = int(whole_channels(format.channels)) / 8, groups = int(format.groups());
  int word = 0, before = 0;  // groups that stay in the words before
  for (int chunk = half; chunk < chunks; chunk += 2) {
    const int first = chunk * chunk_bits;
    std::uint32_t packed[4] = {};
    if (first < groups) {
      for (; word < first / 32; ++word) before += __popc(words[word]);
      const std::uint32_t here = words[word];
      const std::uint32_t bits = here >> (first % 32);
      int place = (before + __popc(here & ((1u << (first % 32)) - 1u))) << shift;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (!((bits >> (j >> shift)) & 1u)) continue;
        packed[j / 2] |= tile_bits<Tile, Element>(values, place) << (j % 2 * 16);
        ++place;
      }
    }
    *reinterpret_cast<uint4*>(to + staged.place(row, chunk)) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
}

/// Spreads 16 raw rows out: to [16, whole_channels] of 16 bits, 0 for what did not stay. By one warp; the caller synchronises it.
template <class Tile>
__device__ __forceinline__ void spread_rows(const packed_format& format, const unsigned char* raw,
                                            const staged_rows& staged, unsigned char* to) {
  switch (format.element) {
    case packed_element::fp8:
      return spread_rows_of<Tile, packed_element::fp8>(format, raw, staged, to);
    case packed_element::int4:
      return spread_rows_of<Tile, packed_element::int4>(format, raw, staged, to);
    default:
      return spread_rows_of<Tile, packed_element::bf16>(format, raw, staged, to);
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
