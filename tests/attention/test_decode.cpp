#include "catch.hpp"

#include "attention/decode_case.hpp"

using namespace tessera;
using support::kv_tensor;

namespace {

/// Runs a step and returns its error against the oracle.
template <class T, int D, int Dv = D>
double error_of(support::rng& random, std::vector<index_t> lengths, index_t sequences, index_t q_len, index_t group,
                const logit_rule& rule = {}) {
  cpu::executor workers(1);
  const kv_tensor<T, D, Dv> kv(random, sequences, index_t(lengths.size()) / sequences, lengths);
  const support::step_queries step(random, kv, q_len, group, D);
  return support::worst_error(support::decode(kv, step, rule, workers), kv, step, rule);
}

}  // namespace

TEST_CASE("decode attention equals the oracle for every number of step tokens and group size") {
  support::rng random(81);
  for (const index_t group : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
    for (index_t q_len = 1; q_len <= 8; ++q_len) {
      const index_t n = random.between(q_len, 150);
      CAPTURE(group, q_len, n);
      REQUIRE(error_of<float, 64>(random, {n, n}, 1, q_len, group) < 1e-5);
    }
  }
}

TEST_CASE("decode attention equals the oracle at lengths around tiles and splits") {
  support::rng random(82);
  for (const index_t n : {0, 1, 2, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2048, 2049, 3000}) {
    for (const index_t q_len : {1, 4}) {
      for (const index_t group : {1, 8}) {
        CAPTURE(n, q_len, group);
        REQUIRE(error_of<float, 64>(random, {n}, 1, q_len, group) < 1e-5);
      }
    }
  }
}

TEST_CASE("decode attention takes a length of its own for every sequence and head") {
  support::rng random(83);
  REQUIRE(error_of<float, 64>(random, {0, 1, 65, 1500, 64, 7}, 3, 1, 2) < 1e-5);
  for (index_t i = 0; i < support::scaled(100); ++i) {
    std::vector<index_t> lengths;
    const index_t sequences = random.between(1, 4), kv_heads = random.between(1, 4);
    for (index_t row = 0; row < sequences * kv_heads; ++row) lengths.push_back(random.between(0, 200));
    REQUIRE(error_of<float, 64>(random, lengths, sequences, random.between(1, 8), random.between(1, 4)) < 1e-5);
  }
}

TEST_CASE("decode attention equals the oracle for every head dim, and for K and V dims that differ") {
  support::rng random(84);
  for (const index_t group : {1, 5}) {
    for (const index_t q_len : {1, 4}) {
      CAPTURE(group, q_len);
      CHECK(error_of<float, 80>(random, {70}, 1, q_len, group) < 1e-5);
      CHECK(error_of<float, 96>(random, {70}, 1, q_len, group) < 1e-5);
      CHECK(error_of<float, 128>(random, {70}, 1, q_len, group) < 1e-5);
      CHECK(error_of<float, 256>(random, {70}, 1, q_len, group) < 1e-5);
      CHECK(error_of<float, 192, 128>(random, {70}, 1, q_len, group) < 1e-5);
      CHECK(error_of<float, 64, 192>(random, {70}, 1, q_len, group) < 1e-5);
    }
  }
}

TEST_CASE("decode attention reads fp16 and bf16 as what is stored: no more error than with fp32") {
  support::rng random(85);
  for (const index_t group : {1, 8}) {
    for (const index_t q_len : {1, 3}) {
      CAPTURE(group, q_len);
      CHECK(error_of<fp16, 128>(random, {300}, 1, q_len, group) < 1e-5);
      CHECK(error_of<bf16, 128>(random, {300}, 1, q_len, group) < 1e-5);
      CHECK(error_of<bf16, 80>(random, {300}, 1, q_len, group) < 1e-5);
    }
  }
}

TEST_CASE("decode attention gives the same bits with 1, 2 and 3 threads") {
  support::rng random(86);
  const kv_tensor<float, 64> kv(random, 2, 2, {3000, 1, 1025, 700});
  cpu::executor one(1), two(2), three(3);
  for (const index_t q_len : {1, 5}) {
    const support::step_queries step(random, kv, q_len, 4, 64);
    const auto expected = support::decode(kv, step, {}, one);
    for (index_t i = 0; i < support::scaled(20); ++i) {
      for (cpu::executor* workers : {&two, &three}) {
        const auto result = support::decode(kv, step, {}, *workers);
        REQUIRE(support::same_bits(result.out, expected.out));
        REQUIRE(support::same_bits(result.lse, expected.lse));
      }
    }
  }
}

TEST_CASE("decode attention by hand: one token gives its value, two equal keys give the mean") {
  support::rng random(87);
  cpu::executor workers(1);
  kv_tensor<float, 64> kv(random, 1, 1, {2});
  std::copy_n(kv.k.begin(), 64, kv.k.begin() + 64);
  const support::step_queries step(random, kv, 1, 1, 64);
  const auto mean = support::decode(kv, step, {}, workers);
  for (std::size_t d = 0; d < 64; ++d) CHECK(mean.out[d] == Approx(0.5f * (kv.v[d] + kv.v[64 + d])).margin(1e-6));
  kv.lengths = {1};
  const auto only = support::decode(kv, step, {}, workers);
  CHECK(std::equal(only.out.begin(), only.out.end(), kv.v.begin()));
}

TEST_CASE("log-sum-exps of two halves merge into attention over the whole") {
  support::rng random(88);
  cpu::executor workers(1);
  const kv_tensor<float, 64> kv(random, 1, 1, {200});
  const support::step_queries step(random, kv, 1, 2, 64);
  const auto part = [&](index_t first, index_t last) {
    selection chosen;
    chosen.reset({last - first});
    for (index_t slot = first; slot < last; ++slot) chosen.row(0)[slot - first] = slot;
    chosen.counts = {last - first};
    return support::decode(kv, step, {}, workers, &chosen);
  };
  auto merged = part(0, 90);
  const auto rest = part(90, 200);
  for (int h = 0; h < 2; ++h) {
    merge_attention(merged.out.data() + 64 * h, merged.lse[std::size_t(h)], rest.out.data() + 64 * h,
                    rest.lse[std::size_t(h)], 64);
  }
  CHECK(support::worst_error(merged, kv, step, {}) < 1e-5);
}
