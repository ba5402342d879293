// Row formats that exist only in the tests: each says what it does once, and every backend stores by it.
#pragma once

#include <cstdint>

#include <tessera/core/encoding.hpp>

namespace support {

/// 8-bit integers with a scale. What is not a number becomes 0.
template <tessera::element T>
struct integer_elements {
  struct stored_type {
    std::int8_t value;
    stored_type() = default;
    TESSERA_HD explicit stored_type(float x) {
      const float clamped = x < -127 ? -127.0f : (x > 127 ? 127.0f : (x == x ? x : 0.0f));
      value = std::int8_t(clamped < 0 ? clamped - 0.5f : clamped + 0.5f);
    }
    TESSERA_HD operator float() const { return float(value); }
  };
  using element_type = T;
  static constexpr bool scaled = true;
  TESSERA_HD static float scale_of(float largest) { return largest > 0 ? largest / 127 : 1; }
};

/// fp16 without a scale, whatever is handed over.
template <tessera::element T>
struct half_elements {
  using element_type = T;
  using stored_type = tessera::fp16;
  static constexpr bool scaled = false;
};

/// e4m3 without scales.
template <tessera::element T>
struct plain_fp8_elements {
  using element_type = T;
  using stored_type = tessera::fp8;
  static constexpr bool scaled = false;
};

template <tessera::element T, int D, int Dv = D>
struct integer_rows {
  static constexpr const char* name = "integer_rows";
  using encoding_type = integer_elements<T>;
  static constexpr int k_dim = D, v_dim = Dv;
};

}  // namespace support
