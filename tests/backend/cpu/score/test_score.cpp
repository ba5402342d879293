#include "catch.hpp"

#include <limits>

#include <tessera/backend/cpu/score/score.hpp>
#include <tessera/scorer/exact_score.hpp>

#include "support/kv_tensor.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::kv_tensor;

namespace {

struct rows {
  std::vector<float> q;
  index_t count, q_heads;
  std::vector<index_t> first;
};

template <class T, int D>
rows last_rows(support::rng& random, const kv_tensor<T, D>& kv, index_t count, index_t group) {
  rows result{support::normals(random, std::size_t(kv.sequences * count * kv.kv_heads * group * D), 2),
              count,
              kv.kv_heads * group,
              {}};
  for (index_t b = 0; b < kv.sequences; ++b) result.first.push_back(kv.newest(b) - count + 1);
  return result;
}

/// Scores [sequences, kv_heads, slots] of rows fed in chunks.
template <class T, int D>
std::vector<float> scores_of(const kv_tensor<T, D>& kv, const rows& queries, const logit_rule& rule,
                             cpu::executor& workers, index_t chunk) {
  std::vector<float> scores(std::size_t(kv.sequences * kv.kv_heads * kv.slots), 0.0f);
  std::vector<offset_t> offsets;
  for (index_t r = 0; r < kv.sequences * kv.kv_heads; ++r) offsets.push_back(offset_t(r) * kv.slots);
  cpu::score_workspace<D> workspace;
  for (index_t done = 0; done < queries.count; done += chunk) {
    auto view = nhd_rows(queries.q.data() + done * queries.q_heads * D, std::min(chunk, queries.count - done),
                         queries.q_heads, D, kv.sequences);
    view.sequence_stride = offset_t(queries.count) * queries.q_heads * D;
    std::vector<index_t> first = queries.first;
    for (auto& position : first) position += done;
    const cpu::query_rows<float> fed{view, first.data()};
    std::vector<float> lse(std::size_t(kv.sequences * view.tokens * queries.q_heads));
    cpu::row_log_sum_exp(kv.view(), fed, rule, lse.data(), workspace, workers);
    cpu::accumulate_scores(kv.view(), fed, rule, exact_score{}, lse.data(), scores.data(), offsets.data(), workspace,
                           workers);
  }
  return scores;
}

template <class T, int D>
double worst_error(const kv_tensor<T, D>& kv, const rows& queries, const logit_rule& rule,
                   const std::vector<float>& scores) {
  const index_t group = queries.q_heads / kv.kv_heads;
  double worst = 0;
  for (index_t b = 0; b < kv.sequences; ++b) {
    for (index_t h = 0; h < kv.kv_heads; ++h) {
      std::vector<double> expected(std::size_t(kv.length(b, h)), 0.0);
      for (index_t t = 0; t < queries.count; ++t) {
        for (index_t g = 0; g < group; ++g) {
          const float* q = queries.q.data() + ((offset_t(b) * queries.count + t) * queries.q_heads + h * group + g) * D;
          const auto row = kv.attend(q, queries.first[std::size_t(b)] + t, b, h * group + g, group, rule);
          for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += row.probabilities[i];
        }
      }
      worst = std::max(worst, support::row_error(scores.data() + kv.row(b, h, 0), expected));
    }
  }
  return worst;
}

}  // namespace

TEST_CASE("scores are the column sums of the attention matrix, in every mixture of rules, lengths and groups") {
  support::rng random(131);
  cpu::executor workers(1);
  for (index_t i = 0; i < support::scaled(250); ++i) {
    const index_t sequences = random.between(1, 2), kv_heads = random.between(1, 3), group = random.pick({1, 2, 3, 8});
    std::vector<index_t> lengths;
    for (index_t r = 0; r < sequences * kv_heads; ++r)
      lengths.push_back(random.pick({random.between(1, 8), random.between(1, 150), 64, 65}));
    kv_tensor<float, 64> kv(random, sequences, kv_heads, lengths);
    if (random.chance(0.5)) kv.scatter_positions(random);
    const auto sinks = support::normals(random, std::size_t(kv_heads * group), 2);
    logit_rule rule;
    if (random.chance(0.3)) rule.soft_cap = 4;
    if (random.chance(0.4)) rule.sliding_window = random.between(1, 90);
    if (random.chance(0.3)) rule.sink_logits = sinks.data();
    const auto queries = last_rows(random, kv, random.pick({1, 8, 33}), group);
    CAPTURE(i, rule.sliding_window, rule.soft_cap, queries.count, group);
    REQUIRE(worst_error(kv, queries, rule, scores_of(kv, queries, rule, workers, queries.count)) < 1e-5);
  }
}

TEST_CASE("scores over long prompts and 16-bit keys equal the oracle") {
  support::rng random(132);
  cpu::executor workers(2);
  const kv_tensor<bf16, 128> kv(random, 1, 1, {1500});
  const auto queries = last_rows(random, kv, 32, 2);
  CHECK(worst_error(kv, queries, {}, scores_of(kv, queries, {}, workers, 32)) < 1e-5);
}

TEST_CASE("scores have the same bits with any number of threads and in any chunks") {
  support::rng random(133);
  cpu::executor one(1), two(2), three(3);
  for (const index_t n : {40, 513, 1100}) {
    const kv_tensor<float, 64> kv(random, 1, 2, {n, n - 30});
    const auto queries = last_rows(random, kv, 40, 3);
    const auto expected = scores_of(kv, queries, {}, one, 40);
    for (const index_t chunk : {1, 7, 22, 40}) {
      REQUIRE(support::same_bits(scores_of(kv, queries, {}, one, chunk), expected));
      REQUIRE(support::same_bits(scores_of(kv, queries, {}, two, chunk), expected));
      REQUIRE(support::same_bits(scores_of(kv, queries, {}, three, chunk), expected));
    }
  }
}

TEST_CASE("a key that is not a number ranks its own token last and is left out of every other score") {
  support::rng random(134);
  cpu::executor workers(1);
  for (const float poison : {std::numeric_limits<float>::quiet_NaN(), infinity}) {
    kv_tensor<float, 64> kv(random, 1, 1, {90}), without = kv;
    // In `without`, the token stands at a position that no query sees.
    kv.k[89 * 64 + 1] = without.k[89 * 64 + 1] = poison;
    auto queries = last_rows(random, kv, 5, 2);
    for (std::size_t at = 1; at < queries.q.size(); at += 64) queries.q[at] = 1;
    without.lengths = {89};
    queries.first = {89};
    const auto scores = scores_of(kv, queries, {}, workers, 5);
    const auto expected = scores_of(without, queries, {}, workers, 5);
    CHECK(std::isnan(scores[89]));
    for (std::size_t t = 0; t < 89; ++t) REQUIRE(scores[t] == Approx(expected[t]).epsilon(1e-6));
  }
}

TEST_CASE("a query that is not a number says nothing, with sinks and without") {
  support::rng random(135);
  cpu::executor workers(1);
  const kv_tensor<float, 64> kv(random, 1, 1, {70});
  auto queries = last_rows(random, kv, 3, 1);
  auto without = queries;
  queries.q[64] = std::numeric_limits<float>::quiet_NaN();  // the second row
  const float sink = 0.5f;
  for (const logit_rule& rule : {logit_rule{}, logit_rule{.sink_logits = &sink}}) {
    std::vector<float> expected(70, 0.0f);
    for (const std::size_t row : {std::size_t(0), std::size_t(2)}) {
      rows one{{without.q.begin() + offset_t(row * 64), without.q.begin() + offset_t(row * 64) + 64},
               1,
               1,
               {without.first[0] + index_t(row)}};
      const auto part = scores_of(kv, one, rule, workers, 1);
      for (std::size_t t = 0; t < 70; ++t) expected[t] += part[t];
    }
    REQUIRE(support::same_bits(scores_of(kv, queries, rule, workers, 3), expected));
  }
}

TEST_CASE("log-sum-exps that the engine gives are taken, and those that it does not have are computed") {
  support::rng random(134);
  cpu::executor workers(1);
  for (index_t i = 0; i < support::scaled(40); ++i) {
    const index_t sequences = random.between(1, 2), kv_heads = random.between(1, 3), group = random.pick({1, 2, 5});
    std::vector<index_t> lengths;
    for (index_t r = 0; r < sequences * kv_heads; ++r) lengths.push_back(random.between(1, 150));
    const kv_tensor<float, 64> kv(random, sequences, kv_heads, lengths);
    const auto queries = last_rows(random, kv, random.pick({1, 8, 33}), group);
    const index_t rows = queries.count * group;
    const cpu::query_rows<float> fed{nhd_rows(queries.q.data(), queries.count, queries.q_heads, index_t(64), sequences),
                                     queries.first.data()};
    std::vector<offset_t> offsets;
    for (index_t r = 0; r < sequences * kv_heads; ++r) offsets.push_back(offset_t(r) * kv.slots);
    cpu::score_workspace<64> workspace;
    const std::size_t count = std::size_t(sequences * kv_heads * rows);
    std::vector<float> taken(count), given(count), expected(std::size_t(sequences * kv_heads * kv.slots), 0.0f);
    cpu::row_log_sum_exp(kv.view(), fed, {}, taken.data(), workspace, workers);
    for (std::size_t at = 0; at < count; ++at) {
      const index_t row = index_t(at) / rows, r = index_t(at) % rows, b = row / kv_heads, h = row % kv_heads;
      float& theirs = given[std::size_t(((b * queries.count + r / group) * kv_heads + h) * group + r % group)];
      if (i % 3 == 0 || random.chance(0.7)) {
        theirs = taken[at] += 0.5f;  // not what these keys come to: it is taken all the same
      } else {
        theirs = random.chance(0.5) ? infinity : std::numeric_limits<float>::quiet_NaN();
      }
    }
    cpu::accumulate_scores(kv.view(), fed, {}, exact_score{}, taken.data(), expected.data(), offsets.data(), workspace,
                           workers);
    std::vector<float> got(expected.size(), 0.0f);
    cpu::score_rows(kv.view(), fed, {}, exact_score{}, got.data(), offsets.data(), workspace, workers,
                    nhd_rows<const float>(given.data(), queries.count, queries.q_heads, 1, sequences));
    REQUIRE(support::same_bits(got, expected));
  }
}

TEMPLATE_TEST_CASE("pages whose keys lie as columns give the bits of rows", "", float, bf16) {
  support::rng random(922);
  cpu::executor workers(1);
  for (index_t i = 0; i < support::scaled(40); ++i) {
    const index_t sequences = random.between(1, 2), heads = random.between(1, 3),
                  page = random.pick({1, 7, 16, 32, 96});
    std::vector<index_t> lengths;
    for (index_t r = 0; r < sequences * heads; ++r) lengths.push_back(random.between(1, 200));
    kv_tensor<TestType, 64> kv(random, sequences, heads, lengths);
    if (random.chance(0.5)) kv.scatter_positions(random);
    const auto queries = last_rows(random, kv, random.pick({1, 33}), 2);
    const index_t blocks = ceil_div(kv.slots, page);
    std::vector<index_t> table;  // the last page comes first
    for (index_t b = 0; b < sequences * blocks; ++b) table.push_back(sequences * blocks - 1 - b);
    std::vector<TestType> columns(std::size_t(sequences * blocks * heads * 64 * page));
    kv_view<const TestType, 64, block_table> view;
    view.k = view.v = columns.data();
    view.k_strides = {heads * 64 * page, 64 * page, 1, page};
    view.table = {table.data(), page, blocks};
    view.sequences = sequences;
    view.kv_heads = heads;
    view.lengths = kv.lengths.data();
    view.length_strides = {heads, 1};
    view.positions = kv.view().positions;
    view.position_strides = {offset_t(heads) * kv.slots, kv.slots};
    std::vector<offset_t> offsets;
    for (index_t r = 0; r < sequences * heads; ++r) {
      offsets.push_back(offset_t(r) * kv.slots);
      for (index_t slot = 0; slot < lengths[std::size_t(r)]; ++slot) {
        TestType* to = columns.data() + (view.key(r / heads, r % heads, slot) - columns.data());
        for (int d = 0; d < 64; ++d) to[d * page] = kv.k[kv.row(r / heads, r % heads, slot) * 64 + std::size_t(d)];
      }
    }
    const cpu::query_rows<float> fed{nhd_rows(queries.q.data(), queries.count, queries.q_heads, index_t(64), sequences),
                                     queries.first.data()};
    const auto scores = [&](const auto& keys) {
      std::vector<float> result(std::size_t(sequences * heads * kv.slots), 0.0f);
      cpu::score_workspace<64> workspace;
      cpu::score_rows(keys, fed, {}, exact_score{}, result.data(), offsets.data(), workspace, workers);
      return result;
    };
    REQUIRE(support::same_bits(scores(view), scores(kv.view())));
  }
}

TEST_CASE("queries without memory are refused where there are any") {
  support::rng random(921);
  const kv_tensor<float, 64> kv(random, 1, 2, {5, 5});
  cpu::executor workers(1);
  cpu::score_workspace<64> workspace;
  const index_t first = 0;
  float lse[16] = {};
  const auto look = [&](index_t tokens) {
    cpu::row_log_sum_exp(kv.view(), cpu::query_rows<float>{nhd_rows<const float>(nullptr, tokens, 8, 64), &first}, {},
                         lse, workspace, workers);
  };
  look(0);
  CHECK_THROWS_WITH(look(2), contains("memory of q is null"));
}
