// What any layout must keep to: what its row format makes of a row, what its store holds, what attention reads of it.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include <tessera/attention/dense_decode.hpp>
#include <tessera/attention/gathered_decode.hpp>

#include "laws/attention.hpp"
#include "laws/stores.hpp"

namespace support {

/// Rows come back the same when they are stored twice, and keep their order; rows of single elements keep signs. What one
/// element is (NaN, an infinity) does not change how the others are stored, or makes all that share its scale NaN.
template <class Layout>
void obeys_the_laws_of_row_formats(std::uint64_t seed) {
  using encoding = typename Layout::encoding_type;
  constexpr int elements = tessera::elements_of_unit<typename encoding::stored_type>;
  constexpr bool blocks = elements > 1;
  const std::size_t unit = blocks ? std::size_t(elements) : std::size_t(Layout::k_dim + Layout::v_dim);  // one scale
  const auto spoils = [&](std::size_t d, std::size_t at) {
    return blocks ? d / unit == at / unit : tessera::finite_only<encoding>;
  };
  rng random(seed);
  for (const int dim : {Layout::k_dim, Layout::v_dim}) {
    const std::vector<float> zeros(std::size_t(dim), 0.0f);
    REQUIRE(decoded_row<encoding>(zeros.data(), dim) == zeros);
    for (index_t i = 0; i < scaled(200); ++i) {
      auto row = normals(random, std::size_t(dim), random.pick({1e-3f, 1.0f, 50.0f}));
      const auto once = decoded_row<encoding>(row.data(), dim), twice = decoded_row<encoding>(once.data(), dim);
      auto negated = row;
      for (float& x : negated) x = -x;
      const auto other = decoded_row<encoding>(negated.data(), dim);
      for (std::size_t d = 0; d < row.size(); ++d) {
        REQUIRE(twice[d] == Approx(once[d]).epsilon(1e-6));
        if (!blocks) REQUIRE(other[d] == -once[d]);
        for (std::size_t e = 0; e < row.size(); e += 7)
          REQUIRE((d / unit != e / unit || row[d] > row[e] || once[d] <= once[e]));
      }
      const auto at = std::size_t(random.between(0, dim - 1));
      row[at] = 0;
      const auto without = decoded_row<encoding>(row.data(), dim);
      for (const float special : {std::nanf(""), tessera::infinity, -tessera::infinity}) {
        row[at] = special;
        const auto with = decoded_row<encoding>(row.data(), dim);
        for (std::size_t d = 0; d < row.size(); ++d)
          REQUIRE((spoils(d, at) ? std::isnan(with[d]) : d == at || with[d] == without[d]));
      }
    }
  }
}

template <class Layout>
void obeys_the_laws_of_layouts(std::uint64_t seed) {
  static_assert(tessera::check_layout<Layout>());
  CHECK(std::strlen(Layout::rows_type::name) > 0);
  CHECK(std::strlen(Layout::placement_type::name) > 0);
  obeys_the_laws_of_row_formats<Layout>(seed);
  obeys_the_laws_of_stores<Layout>(seed + 1);
  obeys_the_laws_of_attention<tessera::dense_decode, Layout>(seed + 2);
  obeys_the_laws_of_attention<tessera::gathered_decode, Layout>(seed + 3);
}

}  // namespace support
