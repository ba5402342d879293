// An engine's fp8 rows with scales that it has fixed: memory and views, for the tests of both backends.
#pragma once

#include <cmath>
#include <vector>

#include <tessera/core/views.hpp>

#include "support/random.hpp"

namespace support {

enum class scale_of { tensor, head };

/// The e4m3 nearest to x, by looking at all of them; ties go to the even code, what is larger saturates.
inline tessera::fp8 nearest_fp8(double x) {
  tessera::fp8 best, one;
  best.bits = 0x7f;
  if (std::isnan(x)) {
    best.bits = std::uint8_t(std::signbit(x) ? 0xff : 0x7f);
    return best;
  }
  double nearest = 1e300;
  for (int code = 0; code < 256; ++code) {
    one.bits = std::uint8_t(code);
    if (std::isnan(float(one)) || std::signbit(float(one)) != std::signbit(x)) continue;
    const double away = std::isinf(x) ? -std::abs(double(float(one))) : std::abs(double(float(one)) - x);
    if (away < nearest || (away == nearest && code % 2 == 0)) nearest = away, best = one;
  }
  return best;
}

/// Pages of 16 tokens of all heads, K and V, and one scale for each tensor, or one a head.
template <int D>
struct static_pages {
  using view_type = tessera::kv_view<tessera::static_fp8_elements<tessera::bf16>, D, tessera::block_table>;
  static constexpr tessera::index_t page = 16, sequences = 3, heads = 2, blocks = 5, pages = 20;
  std::vector<tessera::fp8> k, v;
  std::vector<float> k_scales, v_scales;
  std::vector<tessera::index_t> table, lengths;
  scale_of kind;

  static_pages(rng& random, scale_of kind_)
      : k(std::size_t(pages * page * heads * D)), v(k), lengths{17, 0, 33}, kind(kind_) {
    for (auto* scales : {&k_scales, &v_scales}) {
      for (int i = 0; i < (kind == scale_of::head ? heads : 1); ++i)
        scales->push_back(std::exp2(float(random.between(-12, 3))) * 1.3f);
    }
    for (tessera::index_t i = 0; i < sequences * blocks; ++i) table.push_back(i * 7 % pages);
    for (auto* rows : {&k, &v}) {
      for (auto& x : *rows) x = tessera::fp8(float(random.between(-300, 300)));
    }
  }
  /// A view of memory here, or of its copy elsewhere.
  view_type view(tessera::fp8* own_k, tessera::fp8* own_v, float* own_k_scales, float* own_v_scales,
                 const tessera::index_t* own_table, const tessera::index_t* own_lengths) const {
    view_type made;
    made.k = own_k, made.v = own_v;
    made.k_strides = made.v_strides = {page * heads * D, D, heads * D, 1};
    made.sequences = sequences, made.kv_heads = heads;
    made.lengths = own_lengths, made.length_strides = {1, 0};
    made.table = {own_table, page, blocks, 0};
    made.scales = {own_k_scales, own_v_scales, 0, kind == scale_of::head ? 1 : 0, 0};
    return made;
  }
  view_type view() { return view(k.data(), v.data(), k_scales.data(), v_scales.data(), table.data(), lengths.data()); }
};

/// Rows of every size, with NaN, infinities, zeros and numbers that saturate.
inline std::vector<tessera::bf16> rows_of_any_size(rng& random, std::size_t count) {
  std::vector<tessera::bf16> made;
  for (std::size_t i = 0; i < count; ++i) {
    const float size = random.pick({1e-4f, 1.0f, 1e4f, 1e30f});
    float x = float(random.uniform() * 2 - 1) * size;
    if (random.between(0, 60) == 0)
      x = random.pick({std::nanf(""), tessera::infinity, -tessera::infinity, 0.0f, -0.0f, 3.3e38f});
    made.push_back(tessera::bf16(x));
  }
  return made;
}

}  // namespace support
