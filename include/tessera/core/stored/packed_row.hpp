// One vector of which only some elements are stored: a bit for every group of channels, and the values that stay.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../encoding.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The type of stored values. `same` is the cache's element type, which may be fp32 (`single`). A vector of fp8 or int4
/// has one scale.
enum class packed_element { same, bf16, fp16, fp8, int4, single };

/// The element that `same` stands for in a cache of `T`.
template <element T>
constexpr packed_element resolved(packed_element given) {
  if (given != packed_element::same) return given;
  if (std::is_same_v<T, fp32>) return packed_element::single;
  return std::is_same_v<T, fp16> ? packed_element::fp16 : packed_element::bf16;
}

/// What all vectors of one kind in a segment have in common. A row has `value_bytes`, `bit_bytes` and `scale_bytes`.
/// Each lies in a plane of its own, so that values are aligned.
struct packed_format {
  packed_element element = packed_element::single;
  index_t channels = 0;         ///< of a vector, after truncation
  index_t group = 1;            ///< neighbouring channels that are stored or dropped together; divides both counts
  index_t stored_channels = 0;  ///< of `channels`
  bool own_bits = true;         ///< every row has bits; else the rows of a head share them

  /// `group` is 1, 2 or 4: a shift. Every kernel over packed rows begins with this number, and would wait for a
  /// division.
  TESSERA_HD index_t groups() const { return channels >> (group / 2); }
  TESSERA_HD index_t set_bytes() const { return ceil_div(groups(), 8); }
  TESSERA_HD bool scaled() const { return element == packed_element::fp8 || element == packed_element::int4; }
  TESSERA_HD index_t value_bytes() const {
    switch (element) {
      case packed_element::single:
        return stored_channels * 4;
      case packed_element::fp8:
        return stored_channels;
      case packed_element::int4:
        return ceil_div(stored_channels, 2);
      default:
        return stored_channels * 2;
    }
  }
  TESSERA_HD index_t bit_bytes() const { return own_bits ? set_bytes() : 0; }
  TESSERA_HD index_t scale_bytes() const { return scaled() ? index_t(sizeof(float)) : 0; }
  TESSERA_HD index_t row_bytes() const { return value_bytes() + bit_bytes() + scale_bytes(); }

  bool operator==(const packed_format&) const = default;
};

/// Bit i of a set.
TESSERA_HD inline bool has_bit(const std::uint8_t* bits, index_t i) { return (bits[i / 8] >> (i % 8)) & 1; }
/// Sets bit i of a set.
TESSERA_HD inline void set_bit(std::uint8_t* bits, index_t i) { bits[i / 8] |= std::uint8_t(1u << (i % 8)); }

namespace detail {

/// Calls visit(channel, index among the values) for every stored channel, ascending.
template <class Visit>
void for_each_stored(const packed_format& format, const std::uint8_t* bits, const Visit& visit) {
  index_t index = 0;
  for (index_t first = 0; first < format.groups(); first += 64) {
    const index_t groups = (std::min)(index_t(64), format.groups() - first);
    std::uint64_t word = 0;
    for (index_t i = 0; i < groups; i += 8) word |= std::uint64_t(bits[(first + i) / 8]) << i;
    if (groups < 64) word &= (std::uint64_t(1) << groups) - 1;
    for (; word != 0; word &= word - 1) {
      const index_t g = first + std::countr_zero(word);
      for (index_t c = g * format.group; c < (g + 1) * format.group; ++c) visit(c, index++);
    }
  }
}

template <class Stored>
TESSERA_HD void store_value(std::byte* values, index_t index, float x) {
  const Stored stored(x);
  std::memcpy(values + std::size_t(index) * sizeof(Stored), &stored, sizeof(Stored));
}
template <class Stored>
TESSERA_HD float load_value(const std::byte* values, index_t index) {
  Stored stored;
  std::memcpy(&stored, values + std::size_t(index) * sizeof(Stored), sizeof(Stored));
  return float(stored);
}

/// The nearest finite fp16 of a finite number. Clamping is needed because a rotation may concentrate a vector's whole
/// norm in one channel.
TESSERA_HD inline float clamped_to_fp16(float x) {
  constexpr float largest = 65504;
  if (x > largest && x < infinity) return largest;
  return x < -largest && x > -infinity ? -largest : x;
}

/// -7 to 7; NaN becomes -8, which means NaN.
TESSERA_HD inline void store_int4(std::byte* values, index_t index, float x) {
  const float clamped = x < -7 ? -7.0f : (x > 7 ? 7.0f : x);
  const int whole = x == x ? int(clamped < 0 ? clamped - 0.5f : clamped + 0.5f) : -8;
  const auto nibble = unsigned(whole) & 15u;
  const auto old = unsigned(values[index / 2]);
  values[index / 2] = std::byte(index % 2 == 0 ? (old & 0xf0u) | nibble : (old & 0x0fu) | (nibble << 4));
}
TESSERA_HD inline float load_int4(const std::byte* values, index_t index) {
  const unsigned nibble = (unsigned(values[index / 2]) >> (index % 2 == 0 ? 0 : 4)) & 15u;
  const int whole = nibble < 8 ? int(nibble) : int(nibble) - 16;
  return whole == -8 ? bits_as<float>(std::uint32_t(0x7fc00000u)) : float(whole);
}

}  // namespace detail

/// Packs the elements of row [format.channels] whose bits are set. Returns the row's scale, 1 where rows have none.
/// Elements are rounded to nearest, and finite ones stay finite in fp16; with a scale the largest finite one becomes
/// 448 (fp8) or 7 (int4), and an infinity NaN (fp8) or the largest (int4).
inline float pack_row(const packed_format& format, const float* row, const std::uint8_t* bits, std::byte* values) {
  float scale = 1;
  if (format.scaled()) {
    float largest = 0;
    detail::for_each_stored(format, bits, [&](index_t c, index_t) {
      const float size = row[c] < 0 ? -row[c] : row[c];
      if (size < infinity && size > largest) largest = size;
    });
    const float fitted = largest / (format.element == packed_element::fp8 ? 448.0f : 7.0f);
    scale = fitted > 1e-30f ? fitted : 1.0f;  // a row of zeros; smaller than any element that matters
  }
  detail::for_each_stored(format, bits, [&](index_t c, index_t index) {
    switch (format.element) {
      case packed_element::single:
        return detail::store_value<float>(values, index, row[c]);
      case packed_element::fp16:
        return detail::store_value<fp16>(values, index, detail::clamped_to_fp16(row[c]));
      case packed_element::fp8:
        return detail::store_value<fp8>(values, index, row[c] / scale);
      case packed_element::int4:
        return detail::store_int4(values, index, row[c] / scale);
      default:
        return detail::store_value<bf16>(values, index, row[c]);
    }
  });
  return scale;
}

/// Writes the row to `output` [format.channels], with 0 for channels that are not stored.
inline void unpack_row(const packed_format& format, const std::uint8_t* bits, const std::byte* values, float scale,
                       float* output) {
  for (index_t c = 0; c < format.channels; ++c) output[c] = 0;
  detail::for_each_stored(format, bits, [&](index_t c, index_t index) {
    switch (format.element) {
      case packed_element::single:
        output[c] = detail::load_value<float>(values, index);
        break;
      case packed_element::fp16:
        output[c] = detail::load_value<fp16>(values, index);
        break;
      case packed_element::fp8:
        output[c] = detail::load_value<fp8>(values, index) * scale;
        break;
      case packed_element::int4:
        output[c] = detail::load_int4(values, index) * scale;
        break;
      default:
        output[c] = detail::load_value<bf16>(values, index);
        break;
    }
  });
}

/// q . row over the stored values. A dot product of q and the unpacked row is the same but for the order of the sum.
inline float packed_dot(const packed_format& format, const float* q, const std::uint8_t* bits, const std::byte* values,
                        float scale) {
  float sum = 0;
  const auto add = [&](auto read) {
    detail::for_each_stored(format, bits, [&](index_t c, index_t index) { sum += q[c] * read(values, index); });
  };
  switch (format.element) {
    case packed_element::single:
      add([](const std::byte* row, index_t index) { return detail::load_value<float>(row, index); });
      break;
    case packed_element::fp16:
      add([](const std::byte* row, index_t index) { return detail::load_value<fp16>(row, index); });
      break;
    case packed_element::fp8:
      add([](const std::byte* row, index_t index) { return detail::load_value<fp8>(row, index); });
      break;
    case packed_element::int4:
      add([](const std::byte* row, index_t index) { return detail::load_int4(row, index); });
      break;
    default:
      add([](const std::byte* row, index_t index) { return detail::load_value<bf16>(row, index); });
      break;
  }
  return sum * scale;
}

TESSERA_NAMESPACE_END
