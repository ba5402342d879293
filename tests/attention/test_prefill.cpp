#include "catch.hpp"

#include <limits>

#include "attention/decode_case.hpp"

using namespace tessera;
using support::kv_tensor;

namespace {

/// Prompt attention of the last `rows` tokens of what is stored, in chunks; the store grows by each chunk as it comes.
template <class T, int D, int Dv>
support::attention_result prefill(kv_tensor<T, D, Dv> kv, const support::step_queries& step, const logit_rule& rule,
                                  cpu::executor& workers, const std::vector<index_t>& chunks) {
  support::attention_result result;
  result.out.assign(std::size_t(step.q_len * step.q_heads * Dv), 1e9f);
  result.lse.assign(std::size_t(step.q_len * step.q_heads), 1e9f);
  const auto full = kv.lengths;
  index_t done = 0;
  for (const index_t chunk : chunks) {
    for (std::size_t h = 0; h < full.size(); ++h) kv.lengths[h] = full[h] - (step.q_len - done - chunk);
    const index_t first = step.first[0] + done;
    const auto queries = nhd_rows(step.q.data() + done * step.q_heads * D, chunk, step.q_heads, D);
    cpu::prefill_attention(
        kv.view(), cpu::query_rows<float>{queries, &first}, rule,
        cpu::attention_output{nhd_rows(result.out.data() + done * step.q_heads * Dv, chunk, step.q_heads, Dv),
                              nhd_rows(result.lse.data() + done * step.q_heads, chunk, step.q_heads, 1)},
        workers);
    done += chunk;
  }
  return result;
}

std::vector<index_t> random_chunks(support::rng& random, index_t tokens) {
  std::vector<index_t> chunks;
  for (index_t left = tokens; left > 0; left -= chunks.back())
    chunks.push_back(random.between(1, std::min<index_t>(left, 90)));
  return chunks;
}

}  // namespace

TEST_CASE("prompt attention equals the oracle, and chunks give the bits of one shot") {
  support::rng random(101);
  cpu::executor one(1), two(2), three(3);
  for (index_t i = 0; i < support::scaled(60); ++i) {
    const index_t kv_heads = random.between(1, 3), group = random.pick({1, 2, 3, 4, 8});
    const index_t n = random.pick({1, 2, 63, 64, 65, random.between(1, 200)});
    const kv_tensor<float, 64> kv(random, 1, kv_heads, std::vector<index_t>(std::size_t(kv_heads), n));
    // A later turn's prompt: only the last rows are new.
    const index_t rows = random.chance(0.6) ? n : random.between(1, n);
    const support::step_queries step(random, kv, rows, group, 64);
    const auto sinks = support::normals(random, std::size_t(kv_heads * group));
    logit_rule rule;
    if (random.chance(0.3)) rule.soft_cap = 5;
    if (random.chance(0.3)) rule.sliding_window = random.between(1, 80);
    if (random.chance(0.3)) rule.sink_logits = sinks.data();
    CAPTURE(i, n, rows, group, rule.soft_cap, rule.sliding_window);
    const auto whole = prefill(kv, step, rule, one, {rows});
    REQUIRE(support::worst_error(whole, kv, step, rule) < 1e-5);
    for (cpu::executor* workers : {&one, &two, &three}) {
      const auto chunked = prefill(kv, step, rule, *workers, random_chunks(random, rows));
      REQUIRE(support::same_bits(chunked.out, whole.out));
      REQUIRE(support::same_bits(chunked.lse, whole.lse));
    }
  }
}

TEST_CASE("prompt attention over fp16 with K and V dims that differ equals the oracle") {
  support::rng random(102);
  cpu::executor workers(2);
  const kv_tensor<fp16, 192, 128> kv(random, 1, 2, {100, 100});
  const support::step_queries step(random, kv, 100, 3, 192);
  CHECK(support::worst_error(prefill(kv, step, {}, workers, {100}), kv, step, {}) < 1e-5);
}

TEST_CASE("prompt attention goes by positions after an eviction, a length for each head") {
  support::rng random(103);
  cpu::executor workers(1);
  for (index_t i = 0; i < support::scaled(40); ++i) {
    const index_t fresh = random.between(1, 70);
    // Heads hold different numbers of old tokens at scattered positions; the new ones are the same for all.
    kv_tensor<float, 64> kv(random, 1, 2, {fresh + random.between(0, 100), fresh + random.between(0, 100)});
    kv.scatter_positions(random);
    const index_t first = *std::max_element(kv.positions.begin(), kv.positions.end()) + 1;
    for (index_t h = 0; h < 2; ++h) {
      for (index_t t = 0; t < fresh; ++t) kv.positions[kv.row(0, h, kv.length(0, h) - fresh + t)] = first + t;
    }
    const support::step_queries step(random, kv, fresh, 2, 64);
    REQUIRE(step.first[0] == first);
    const logit_rule rule{.sliding_window = random.pick({0, 5, 100})};
    REQUIRE(support::worst_error(prefill(kv, step, rule, workers, random_chunks(random, fresh)), kv, step, rule) <
            1e-5);
  }
}

TEST_CASE("a NaN or infinite value in a prompt reaches later queries only") {
  support::rng random(104);
  cpu::executor workers(1);
  for (index_t i = 0; i < support::scaled(60); ++i) {
    const index_t n = random.between(2, 150), slot = random.between(0, n - 1), window = random.pick({0, 3, 40});
    kv_tensor<float, 64> kv(random, 1, 1, {n});
    auto& poisoned = random.chance(0.5) ? kv.k : kv.v;
    poisoned[std::size_t(slot * 64 + 3)] = std::numeric_limits<float>::quiet_NaN();
    kv.remember();
    const support::step_queries step(random, kv, n, 2, 64);
    const logit_rule rule{.sliding_window = window};
    CAPTURE(i, n, slot, window);
    const auto whole = prefill(kv, step, rule, workers, {n});
    REQUIRE(support::worst_error(whole, kv, step, rule) < 1e-5);
    const auto chunked = prefill(kv, step, rule, workers, random_chunks(random, n));
    for (std::size_t x = 0; x < whole.out.size(); ++x) {
      REQUIRE((whole.out[x] == chunked.out[x] || (std::isnan(whole.out[x]) && std::isnan(chunked.out[x]))));
    }
  }
}

TEST_CASE("an infinite value that no query sees leaves no trace") {
  support::rng random(105);
  cpu::executor workers(1);
  kv_tensor<float, 64> kv(random, 1, 1, {100});
  kv.v[99 * 64] = infinity;
  kv.remember();
  support::step_queries step(random, kv, 50, 1, 64);
  step.first = {40};  // the queries of tokens 40 to 89
  const auto result = prefill(kv, step, {}, workers, {50});
  CHECK(support::worst_error(result, kv, step, {}) < 1e-5);
}
