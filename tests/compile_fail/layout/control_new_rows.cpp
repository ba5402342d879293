// Compiles: the row format of docs/how_to/add_a_layout.md, at both placements.
#include <cstdint>

#include <tessera/cache.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/runs.hpp>
#include <tessera/layout/stored.hpp>
#include <tessera/methods/snapkv.hpp>

using namespace tessera;

// [rows]
/// 8-bit integers: an element is the integer times the row's scale. NaN becomes 0, an infinity the largest integer.
template <element T>
struct byte_elements {
  struct stored_type {
    std::int8_t value;
    stored_type() = default;
    TESSERA_HD explicit stored_type(float x) {
      const float held = x < -127 ? -127.0f : (x > 127 ? 127.0f : (x == x ? x : 0.0f));
      value = std::int8_t(held < 0 ? held - 0.5f : held + 0.5f);
    }
    TESSERA_HD operator float() const { return float(value); }
  };
  using element_type = T;  // what engines hand over and kernels compute with
  static constexpr bool scaled = true;
  /// The scale of a row whose largest finite magnitude is `largest`; never 0.
  TESSERA_HD static float scale_of(float largest) { return largest > 0 ? largest / 127 : 1; }
};

/// K and V as 8-bit integers, each row with one fp32 scale.
/// Bytes    k_dim + v_dim + 8 per token and kv_head.
template <element T, int D, int Dv = D>
struct byte_rows {
  static constexpr const char* name = "byte_rows";
  using encoding_type = byte_elements<T>;
  static constexpr int k_dim = D;
  static constexpr int v_dim = Dv;
};

static_assert(check_row_format<byte_rows<bf16, 128>>());

template <class T, int D>
using snapkv_in_bytes = snapkv<T, D, D, stored<byte_rows<T, D>, fixed_pages<16>>>;
// [rows]

tessera::cache<snapkv_in_bytes<bf16, 64>> paged({.layers = 4, .q_heads = 4, .kv_heads = 2}, {},
                                                std::make_shared<cpu::executor>(1));
tessera::cache<snapkv<bf16, 64, 64, stored<byte_rows<bf16, 64>, runs>>> kv({.layers = 4, .q_heads = 4, .kv_heads = 2},
                                                                           {}, std::make_shared<cpu::executor>(1));
