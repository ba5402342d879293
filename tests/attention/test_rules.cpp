// What the rule and a selection let a query see. One head dim: the masks do not depend on it.
#include "catch.hpp"

#include <limits>
#include <numeric>

#include "attention/decode_case.hpp"

using namespace tessera;
using support::kv_tensor;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

std::vector<index_t> random_lengths(support::rng& random, index_t rows) {
  std::vector<index_t> lengths;
  for (index_t r = 0; r < rows; ++r) lengths.push_back(random.pick({random.between(0, 5), random.between(1, 200)}));
  return lengths;
}

selection random_selection(support::rng& random, const std::vector<index_t>& lengths) {
  selection chosen;
  chosen.reset(lengths);
  for (index_t r = 0; r < index_t(lengths.size()); ++r) {
    const double share = random.pick({0.0, 0.1, 0.7, 1.0});
    index_t& count = chosen.counts[std::size_t(r)];
    for (index_t slot = 0; slot < lengths[std::size_t(r)]; ++slot) {
      if (random.chance(share)) chosen.row(r)[count++] = slot;
    }
  }
  return chosen;
}

}  // namespace

TEST_CASE("scale, soft cap, sliding window by position, sinks and selections follow the oracle in every mixture") {
  support::rng random(91);
  cpu::executor workers(1);
  for (index_t i = 0; i < support::scaled(600); ++i) {
    const index_t sequences = random.between(1, 3), kv_heads = random.between(1, 3), group = random.between(1, 4);
    const auto lengths = random_lengths(random, sequences * kv_heads);
    kv_tensor<float, 64> kv(random, sequences, kv_heads, lengths);
    if (random.chance(0.7)) kv.scatter_positions(random);
    const auto sinks = support::normals(random, std::size_t(kv_heads * group), 3);
    logit_rule rule;
    if (random.chance(0.3)) rule.scale = 0.3f;
    if (random.chance(0.4)) rule.soft_cap = random.pick({0.5f, 5.0f, 30.0f});
    if (random.chance(0.5)) rule.sliding_window = random.pick({1, 2, 50, 500});
    if (random.chance(0.4)) rule.sink_logits = sinks.data();
    const auto chosen = random_selection(random, lengths);
    const selection* read = random.chance(0.5) ? &chosen : nullptr;
    const support::step_queries step(random, kv, random.between(1, 8), group, 64);
    CAPTURE(i, rule.soft_cap, rule.sliding_window, rule.scale);
    REQUIRE(support::worst_error(support::decode(kv, step, rule, workers, read), kv, step, rule, read) < 1e-5);
  }
}

TEST_CASE("a sliding window counts positions, not slots: what eviction left behind the window is not seen") {
  support::rng random(92);
  cpu::executor workers(1);
  kv_tensor<float, 64> kv(random, 1, 1, {4});
  kv.positions = {0, 1, 90, 100};
  const support::step_queries step(random, kv, 1, 1, 64);
  REQUIRE(step.first[0] == 100);
  const auto only_newest = support::decode(kv, step, logit_rule{.sliding_window = 10}, workers);
  CHECK(std::equal(only_newest.out.begin(), only_newest.out.end(), kv.v.begin() + 3 * 64));
  const auto two = support::decode(kv, step, logit_rule{.sliding_window = 11}, workers);
  CHECK(!support::same_bits(two.out, only_newest.out));
}

TEST_CASE("a query that sees nothing gets zeros and -infinity, or its sink logit") {
  support::rng random(93);
  cpu::executor workers(1);
  const kv_tensor<float, 64> kv(random, 1, 2, {0, 5});
  support::step_queries step(random, kv, 1, 1, 64);
  selection nothing;
  nothing.reset({3, 3});
  const std::vector<float> zeros(128, 0.0f), sinks{1.5f, -2.0f};
  const auto empty = support::decode(kv, step, {}, workers, &nothing);
  CHECK(support::same_bits(empty.out, zeros));
  CHECK(empty.lse == std::vector<float>{-infinity, -infinity});
  const auto sink_only = support::decode(kv, step, logit_rule{.sink_logits = sinks.data()}, workers, &nothing);
  CHECK(support::same_bits(sink_only.out, zeros));
  CHECK(sink_only.lse == sinks);
  // Every key is in the query's future.
  kv_tensor<float, 64> later = kv;
  later.positions.resize(10);
  std::iota(later.positions.begin(), later.positions.end(), 50);
  step.first = {3};
  CHECK(support::same_bits(support::decode(later, step, {}, workers).out, zeros));
}

TEST_CASE("NaN in a key or a value reaches the queries that see it, and no other") {
  support::rng random(94);
  cpu::executor workers(1);
  for (index_t i = 0; i < support::scaled(300); ++i) {
    const index_t kv_heads = random.between(1, 2), group = random.pick({1, 2, 4});
    const index_t n = random.pick({random.between(1, 10), random.between(1, 200), random.between(1020, 1100)});
    kv_tensor<float, 64> kv(random, 1, kv_heads, std::vector<index_t>(std::size_t(kv_heads), n));
    const index_t head = random.between(0, kv_heads - 1), slot = std::max(0, n - random.between(1, 12));
    auto& poisoned = random.chance(0.5) ? kv.k : kv.v;
    const bool whole_row = &poisoned == &kv.k || random.chance(0.5);
    for (std::size_t d = 0; d < 64; ++d) {
      if (whole_row || d == 7) poisoned[kv.row(0, head, slot) * 64 + d] = not_a_number;
    }
    kv.remember();
    const auto sinks = support::normals(random, std::size_t(kv_heads * group));
    logit_rule rule;
    if (random.chance(0.5)) rule.sliding_window = random.between(1, 12);
    if (random.chance(0.3)) rule.sink_logits = sinks.data();
    const support::step_queries step(random, kv, std::min(n, random.between(1, 8)), group, 64);
    CAPTURE(i, n, slot, head, rule.sliding_window, whole_row, step.q_len, group, &poisoned == &kv.v);
    REQUIRE(support::worst_error(support::decode(kv, step, rule, workers), kv, step, rule) < 1e-5);
  }
}

TEST_CASE("a sink does not hide that a query saw nothing but NaN") {
  support::rng random(96);
  cpu::executor workers(1);
  kv_tensor<float, 64> kv(random, 1, 1, {1});
  kv.k[5] = not_a_number;
  const support::step_queries step(random, kv, 1, 1, 64);
  const float sink = 2;
  const auto result = support::decode(kv, step, logit_rule{.sink_logits = &sink}, workers);
  CHECK(std::isnan(result.out[0]));
  CHECK(std::isnan(result.lse[0]));
}

TEST_CASE("a NaN query poisons its own row only") {
  support::rng random(95);
  cpu::executor workers(1);
  const kv_tensor<float, 64> kv(random, 1, 1, {70});
  support::step_queries step(random, kv, 4, 2, 64);
  step.q[3 * 64 + 5] = not_a_number;
  const auto result = support::decode(kv, step, {}, workers);
  CHECK(support::worst_error(result, kv, step, {}) < 1e-5);
  CHECK(std::isnan(result.lse[3]));
}
