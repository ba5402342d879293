// One vector of which only some elements are stored: a bit for every group of channels, and the values that stay.
#pragma once

#include <cstddef>
#include <cstring>

#include "../encoding.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// How a value that stays lies in memory. `same` is the cache's own type, which may be fp32 (`single`); fp8 and int4
/// have one scale for each vector.
enum class packed_element { same, bf16, fp16, fp8, int4, single };

/// The element that `same` stands for in a cache of `T`.
template <element T>
constexpr packed_element resolved(packed_element given) {
  if (given != packed_element::same) return given;
  if (std::is_same_v<T, fp32>) return packed_element::single;
  return std::is_same_v<T, fp16> ? packed_element::fp16 : packed_element::bf16;
}

/// What all vectors of one kind in a segment have in common. A row takes `value_bytes` and, apart from them,
/// `bit_bytes` and `scale_bytes`; they lie in planes of their own, so that values are aligned.
struct packed_format {
  packed_element element = packed_element::single;
  index_t channels = 0;  ///< that a vector has here: those that truncation leaves
  index_t group = 1;     ///< neighbours that stay or go together; divides `channels` and `kept`
  index_t kept = 0;      ///< of `channels`
  bool own_bits = true;  ///< every row has bits; else the rows of a head share them

  /// `group` is 1, 2 or 4: a shift. Every kernel over packed rows begins with this number, and would wait for a
  /// division.
  TESSERA_HD index_t groups() const { return channels >> (group / 2); }
  TESSERA_HD index_t set_bytes() const { return ceil_div(groups(), 8); }
  TESSERA_HD bool scaled() const { return element == packed_element::fp8 || element == packed_element::int4; }
  TESSERA_HD index_t value_bytes() const {
    switch (element) {
      case packed_element::single:
        return kept * 4;
      case packed_element::fp8:
        return kept;
      case packed_element::int4:
        return ceil_div(kept, 2);
      default:
        return kept * 2;
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

/// Calls visit(channel, place among the values) for every element that stays, ascending.
template <class Visit>
void for_each_kept(const packed_format& format, const std::uint8_t* bits, const Visit& visit) {
  index_t place = 0;
  for (index_t g = 0; g < format.groups(); ++g) {
    if (!has_bit(bits, g)) continue;
    for (index_t c = g * format.group; c < (g + 1) * format.group; ++c) visit(c, place++);
  }
}

template <class Stored>
TESSERA_HD void put(std::byte* values, index_t place, float x) {
  const Stored stored(x);
  std::memcpy(values + std::size_t(place) * sizeof(Stored), &stored, sizeof(Stored));
}
template <class Stored>
TESSERA_HD float get(const std::byte* values, index_t place) {
  Stored stored;
  std::memcpy(&stored, values + std::size_t(place) * sizeof(Stored), sizeof(Stored));
  return float(stored);
}

/// Finite numbers stay finite: a rotation may gather a vector in one channel.
TESSERA_HD inline float held_by_fp16(float x) {
  constexpr float most = 65504;
  if (x > most && x < infinity) return most;
  return x < -most && x > -infinity ? -most : x;
}

/// -7 to 7; NaN becomes -8, which means NaN.
TESSERA_HD inline void put_int4(std::byte* values, index_t place, float x) {
  const float held = x < -7 ? -7.0f : (x > 7 ? 7.0f : x);
  const int whole = x == x ? int(held < 0 ? held - 0.5f : held + 0.5f) : -8;
  const auto nibble = unsigned(whole) & 15u;
  const auto before = unsigned(values[place / 2]);
  values[place / 2] = std::byte(place % 2 == 0 ? (before & 0xf0u) | nibble : (before & 0x0fu) | (nibble << 4));
}
TESSERA_HD inline float get_int4(const std::byte* values, index_t place) {
  const unsigned nibble = (unsigned(values[place / 2]) >> (place % 2 == 0 ? 0 : 4)) & 15u;
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
    detail::for_each_kept(format, bits, [&](index_t c, index_t) {
      const float size = row[c] < 0 ? -row[c] : row[c];
      if (size < infinity && size > largest) largest = size;
    });
    const float fitted = largest / (format.element == packed_element::fp8 ? 448.0f : 7.0f);
    scale = fitted > 1e-30f ? fitted : 1.0f;  // a row of zeros; smaller than any element that matters
  }
  detail::for_each_kept(format, bits, [&](index_t c, index_t place) {
    switch (format.element) {
      case packed_element::single:
        return detail::put<float>(values, place, row[c]);
      case packed_element::fp16:
        return detail::put<fp16>(values, place, detail::held_by_fp16(row[c]));
      case packed_element::fp8:
        return detail::put<fp8>(values, place, row[c] / scale);
      case packed_element::int4:
        return detail::put_int4(values, place, row[c] / scale);
      default:
        return detail::put<bf16>(values, place, row[c]);
    }
  });
  return scale;
}

/// to [format.channels] = the row, with 0 for what did not stay.
inline void unpack_row(const packed_format& format, const std::uint8_t* bits, const std::byte* values, float scale,
                       float* to) {
  for (index_t c = 0; c < format.channels; ++c) to[c] = 0;
  detail::for_each_kept(format, bits, [&](index_t c, index_t place) {
    switch (format.element) {
      case packed_element::single:
        to[c] = detail::get<float>(values, place);
        break;
      case packed_element::fp16:
        to[c] = detail::get<fp16>(values, place);
        break;
      case packed_element::fp8:
        to[c] = detail::get<fp8>(values, place) * scale;
        break;
      case packed_element::int4:
        to[c] = detail::get_int4(values, place) * scale;
        break;
      default:
        to[c] = detail::get<bf16>(values, place);
        break;
    }
  });
}

/// q . row, of the values alone: what unpacking and a dot product over all channels give, but for the order of the sum.
inline float packed_dot(const packed_format& format, const float* q, const std::uint8_t* bits, const std::byte* values,
                        float scale) {
  float sum = 0;
  const auto add = [&](auto read) {
    detail::for_each_kept(format, bits, [&](index_t c, index_t place) { sum += q[c] * read(values, place); });
  };
  switch (format.element) {
    case packed_element::single:
      add([](const std::byte* at, index_t place) { return detail::get<float>(at, place); });
      break;
    case packed_element::fp16:
      add([](const std::byte* at, index_t place) { return detail::get<fp16>(at, place); });
      break;
    case packed_element::fp8:
      add([](const std::byte* at, index_t place) { return detail::get<fp8>(at, place); });
      break;
    case packed_element::int4:
      add([](const std::byte* at, index_t place) { return detail::get_int4(at, place); });
      break;
    default:
      add([](const std::byte* at, index_t place) { return detail::get<bf16>(at, place); });
      break;
  }
  return sum * scale;
}

TESSERA_NAMESPACE_END
