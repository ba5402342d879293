// Vectors of stored elements and of exponentials against one element at a time.
#include "catch.hpp"

#include <cstring>
#include <limits>

#include <tessera/backend/cpu/kernel/lanes.hpp>
#include <tessera/math/exp.hpp>

#include "encoded_rows.hpp"
#include "support/random.hpp"

using namespace tessera;

namespace {

bool same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

/// Rows of every bit pattern that 8 or 16 bits have: each element stands where order_in_row says, as it converts alone.
template <class Stored, int Dim>
void loads_what_is_stored() {
  support::rng random(331);
  for (int pattern = 0; pattern < (sizeof(Stored) == 1 ? 256 : 65536); pattern += Dim) {
    Stored stored[Dim];
    for (int d = 0; d < Dim; ++d) {
      const auto bits =
          sizeof(Stored) == 4 ? std::uint32_t(random.between(0, 1 << 30)) * 4u : std::uint32_t(pattern + d);
      std::memcpy(stored + d, &bits, sizeof(Stored));
    }
    float rows[Dim], natural[Dim];
    constexpr int two = 2 * cpu::lane_count;
    for (int d = 0; d + two <= Dim; d += two) {
      cpu::lanes first, second;
      cpu::load_two(stored + d, first, second);
      cpu::store(rows + d, first);
      cpu::store(rows + d + cpu::lane_count, second);
    }
    if (Dim % two > 0) cpu::store(rows + Dim - cpu::lane_count, cpu::load(stored + Dim - cpu::lane_count));
    cpu::load_row<Dim>(stored, 1, natural);
    std::vector<bool> taken(Dim);
    for (int d = 0; d < Dim; ++d) {
      const int at = cpu::order_in_row<Dim, Stored>(d);
      REQUIRE((at >= 0 && at < Dim && !taken[std::size_t(at)]));
      taken[std::size_t(at)] = true;
      REQUIRE(same(rows[at], float(stored[d])));
      REQUIRE(same(natural[d], float(stored[d])));
    }
  }
}

}  // namespace

TEST_CASE("a row loaded two vectors at a time holds every element once, in the order that its type says") {
  loads_what_is_stored<bf16, 128>();
  loads_what_is_stored<bf16, 80>();
  loads_what_is_stored<fp16, 128>();
  loads_what_is_stored<fp16, 80>();
  loads_what_is_stored<fp8, 128>();
  loads_what_is_stored<fp8, 80>();
  loads_what_is_stored<fp32, 96>();
  loads_what_is_stored<int8, 128>();
  loads_what_is_stored<int8, 80>();
  loads_what_is_stored<support::integer_elements<fp32>::stored_type, 80>();
}

TEST_CASE("vectors of exponentials are as exact as single ones, at the ends of the range too") {
  support::rng random(332);
  const auto exp_of = [](float x) {
    float all[cpu::lane_count];
    cpu::store(all, cpu::exp_lanes(cpu::splat(x)));
    for (const float one : all) REQUIRE(same(one, all[0]));
    return all[0];
  };
  for (index_t i = 0; i < support::scaled(200'000); ++i) {
    const float x = float(random.uniform() * 175 - 87);
    const double expected = std::exp(double(x));
    REQUIRE(std::abs(double(exp_of(x)) - expected) < 3e-7 * expected);
  }
  CHECK(exp_of(0) == 1);
  CHECK(exp_of(-infinity) == 0);
  CHECK(exp_of(-87.4f) == 0);
  CHECK(exp_of(-87.3f) > 0);
  CHECK(exp_of(infinity) == infinity);
  CHECK(exp_of(89) == infinity);
  CHECK(exp_of(88.7f) < infinity);
  CHECK(std::isnan(exp_of(std::numeric_limits<float>::quiet_NaN())));
}
