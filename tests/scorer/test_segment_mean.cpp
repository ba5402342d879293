// SentenceKV: which segments a step reads, against the definition in double, over turns, chunks and steps of several tokens.
#include "catch.hpp"

#include <memory>
#include <vector>

#include <tessera/cache.hpp>
#include <tessera/methods/sentencekv.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::rng;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;
using method = sentencekv<fp32, dim>;

/// A text: its rows, and after which tokens a segment ends.
struct text {
  model_shape shape;
  std::vector<float> q, k, v;
  std::vector<std::uint8_t> flags;
  std::vector<index_t> segments;

  text(rng& random, const model_shape& of, index_t tokens, double ends) : shape(of) {
    q = support::normals(random, std::size_t(tokens * of.q_heads * dim));
    k = support::normals(random, std::size_t(tokens * of.kv_heads * dim));
    v = support::normals(random, k.size());
    index_t segment = 0, length = 0;
    for (index_t t = 0; t < tokens; ++t) {
      flags.push_back(random.chance(ends));
      segments.push_back(segment);
      if (++length == 256 || flags.back()) ++segment, length = 0;
    }
  }
  const float* query(index_t at, index_t head) const { return q.data() + (at * shape.q_heads + head) * dim; }
  const float* key(index_t at, index_t head) const { return k.data() + (at * shape.kv_heads + head) * dim; }
  const float* value(index_t at, index_t head) const { return v.data() + (at * shape.kv_heads + head) * dim; }
  rows_view<const float> queries(index_t first, index_t n) const {
    return nhd_rows(query(first, 0), n, shape.q_heads, dim);
  }
  rows_view<const float> keys(index_t first, index_t n) const {
    return nhd_rows(key(first, 0), n, shape.kv_heads, dim);
  }
  rows_view<const float> values(index_t first, index_t n) const {
    return nhd_rows(value(first, 0), n, shape.kv_heads, dim);
  }
  std::span<const std::uint8_t> ends(index_t first, index_t n) const { return std::span(flags).subspan(first, n); }
};

void prefill(cache<method>& kv, index_t id, const text& of, index_t first, index_t n) {
  for (index_t layer = 0; layer < of.shape.layers; ++layer)
    kv.prefill(layer, id, of.queries(first, n), of.keys(first, n), of.values(first, n), of.ends(first, n));
}

std::vector<float> step(cache<method>& kv, index_t id, const text& of, index_t first, index_t n) {
  std::vector<float> out(std::size_t(n * of.shape.q_heads * dim));
  const batch now = kv.prepare_step({id}, n, of.ends(first, n));
  for (index_t layer = 0; layer < of.shape.layers; ++layer) {
    kv.decode(layer, now, of.queries(first, n), of.keys(first, n), of.values(first, n),
              nhd_rows(out.data(), n, of.shape.q_heads, dim));
  }
  return out;
}

/// What a step at `first` of `n` tokens reads of a head that holds `held`; `close`: whether rounding may decide otherwise.
struct expected_read {
  std::vector<index_t> positions;
  bool whole = false, close = false;
};
expected_read read_by_definition(const text& of, const method& policies, index_t head, const std::vector<index_t>& held,
                                 index_t answer, index_t first, index_t n) {
  const auto& scorer = policies.retrieve.scorer;
  const index_t group = of.shape.q_heads / of.shape.kv_heads, own = of.segments[std::size_t(first + n - 1)];
  std::vector<double> query(dim, 0.0);
  index_t said = 0;
  for (index_t at = answer; at < first + n; ++at) {
    if (of.segments[std::size_t(at)] != own) continue;
    ++said;
    for (index_t g = 0; g < group; ++g) {
      for (int d = 0; d < dim; ++d) query[std::size_t(d)] += double(of.query(at, head * group + g)[d]);
    }
  }
  expected_read result;
  result.whole = said <= scorer.whole;
  const index_t keep = std::max(policies.budget(), n > 1 ? n : 0);
  if (result.whole || index_t(held.size()) <= keep) {
    result.positions = held;
    return result;
  }
  std::vector<double> scores, each;
  for (std::size_t a = 0; a < held.size();) {
    std::size_t b = a;
    std::vector<double> mean(dim, 0.0);
    for (; b < held.size() && of.segments[std::size_t(held[b])] == of.segments[std::size_t(held[a])]; ++b) {
      for (int d = 0; d < dim; ++d) mean[std::size_t(d)] += double(of.key(held[b], head)[d]);
    }
    double dot = 0;
    for (int d = 0; d < dim; ++d) dot += query[std::size_t(d)] * mean[std::size_t(d)] / double(b - a);
    each.push_back(dot / said);
    scores.insert(scores.end(), b - a, each.back());
    a = b;
  }
  std::sort(each.begin(), each.end());
  for (std::size_t i = 1; i < each.size(); ++i) result.close |= each[i] - each[i - 1] < 1e-4;
  std::fill_n(scores.begin(), std::min<std::size_t>(scores.size(), std::size_t(scorer.start)), HUGE_VAL);
  const index_t tail = std::max(scorer.recent, n > 1 ? n : 0);
  for (const index_t slot : oracle::top_tokens(scores, std::min(tail, keep), keep))
    result.positions.push_back(held[std::size_t(slot)]);
  return result;
}

}  // namespace

TEST_CASE("a step reads the segments whose mean key matches the mean query of the answer's segment, as defined") {
  rng random(6101);
  index_t compared = 0, close = 0, whole = 0;
  for (index_t round = 0; round < support::scaled(1000); ++round) {
    const index_t kv_heads = random.between(1, 3);
    const model_shape shape{random.between(1, 2), kv_heads * random.between(1, 3), kv_heads};
    const text of(random, shape, 420, random.pick({0.0, 0.05, 0.2, 1.0}));
    method policies;
    policies.set_budget(random.between(3, 60));
    policies.retain.budget.factor = random.between(1, 5);
    policies.retain.scorer.window = random.between(1, std::min(8, policies.budget()));
    policies.retrieve.scorer.start = random.pick({0, 1, 4, 20});
    policies.retrieve.scorer.recent = random.pick({0, 1, 6, 20});
    policies.retrieve.scorer.whole = random.pick({0, 1, 1, 3});
    cache<method> kv(shape, policies, std::make_shared<cpu::executor>(1));
    kv.trace_attended(true);
    const index_t id = kv.open();
    index_t next = 0;
    for (int turn = 0; turn < 2; ++turn) {
      for (index_t chunks = random.between(1, 2); chunks > 0; --chunks) {
        const index_t n = random.between(1, 80);
        prefill(kv, id, of, next, n);
        next += n;
      }
      kv.end_prefill(id);
      const index_t answer = next;
      CHECK(kv.length(0, id, 0) <= policies.budget() * policies.retain.budget.factor);
      for (index_t s = random.between(1, 8); s > 0; --s) {
        const index_t n = random.pick({1, 1, 1, 2, 8});
        const auto out = step(kv, id, of, next, n);
        for (index_t h = 0; h < kv_heads; ++h) {
          const index_t layer = shape.layers - 1;
          const auto expected = read_by_definition(of, policies, h, kv.positions(layer, id, h), answer, next, n);
          whole += expected.whole;
          close += expected.close;
          if (expected.close) continue;
          ++compared;
          CAPTURE(round, turn, next, n, h);
          const auto& attended = kv.attended(layer, id)[std::size_t(h)];
          REQUIRE(attended == expected.positions);
          std::vector<const float*> keys, values;
          for (const index_t at : attended) keys.push_back(of.key(at, h)), values.push_back(of.value(at, h));
          const index_t q_head = h * (shape.q_heads / kv_heads);
          const auto row = oracle::attend(of.query(next, q_head), next, keys, values, attended, dim, dim);
          REQUIRE(support::row_error(out.data() + q_head * dim, row.out) < 1e-5);
        }
        next += n;
      }
    }
  }
  CHECK(whole > compared / 20);
  CHECK(close < compared / 20);
}

TEST_CASE("of three segments the one that the answer asks for is read whole, and of the next best its first tokens") {
  const model_shape shape{1, 1, 1};
  rng random(6102);
  text of(random, shape, 20, 0.0);
  // Segments 0 to 5, 6 to 9 and 10 to 13 of the prompt; the answer from 14 on asks for channel 0.
  std::fill(of.flags.begin(), of.flags.end(), std::uint8_t(0));
  of.flags[5] = of.flags[9] = of.flags[13] = 1;
  for (index_t t = 0; t < 20; ++t) {
    for (int d = 0; d < dim; ++d) of.q[std::size_t(t * dim + d)] = of.k[std::size_t(t * dim + d)] = 0;
    of.q[std::size_t(t * dim)] = 1;
    of.k[std::size_t(t * dim)] = t < 6 ? 0.5f : t < 10 ? 2.0f : -1.0f;
  }
  method policies;
  policies.set_budget(8);
  policies.retain.budget.factor = 2;
  policies.retain.scorer.window = 1;
  policies.retrieve.scorer.start = 0;
  policies.retrieve.scorer.recent = 1;
  cache<method> kv(shape, policies, std::make_shared<cpu::executor>(1));
  kv.trace_attended(true);
  const index_t id = kv.open();
  prefill(kv, id, of, 0, 14);
  kv.end_prefill(id);
  (void)step(kv, id, of, 14, 1);  // the first token of the answer's segment reads everything
  CHECK(kv.attended(0, id)[0].size() == 15);
  (void)step(kv, id, of, 15, 1);
  CHECK(kv.attended(0, id)[0] == std::vector<index_t>{0, 1, 2, 6, 7, 8, 9, 15});
  // A segment ends with token 16: the one behind it is a first token again.
  of.flags[16] = 1;
  (void)step(kv, id, of, 16, 1);
  CHECK(kv.attended(0, id)[0].size() == 8);
  (void)step(kv, id, of, 17, 1);
  CHECK(kv.attended(0, id)[0].size() == 18);
  (void)step(kv, id, of, 18, 1);
  CHECK(kv.attended(0, id)[0].size() == 8);
}

TEST_CASE("boundaries of a step that are missing, short or no flags are refused before anything changes") {
  rng random(6103);
  const text of(random, {1, 2, 1}, 60, 0.1);
  cache<method> kv({1, 2, 1}, {}, std::make_shared<cpu::executor>(1));
  const index_t id = kv.open();
  prefill(kv, id, of, 0, 50);
  kv.end_prefill(id);
  const auto refused = [&](std::vector<std::uint8_t> flags, const std::string& words) {
    CHECK_THROWS_WITH(kv.prepare_step({id}, 2, flags), contains(words));
    CHECK(kv.next_position(id) == 50);
  };
  refused({}, "boundaries is 0; expected one flag for each new token, which are 2");
  refused({1}, "boundaries is 1; expected one flag");
  refused({0, 0, 0}, "boundaries is 3; expected one flag");
  refused({0, 2}, "boundaries[1] is 2; expected 0 or 1");
  CHECK_NOTHROW(kv.prepare_step({id}, 2, std::vector<std::uint8_t>{0, 1}));
}

TEST_CASE("a first stage that has no room for its window says so when the prompt ends") {
  rng random(6104);
  const text of(random, {1, 2, 1}, 60, 0.1);
  method policies;
  policies.set_budget(8);
  cache<method> kv({1, 2, 1}, policies, std::make_shared<cpu::executor>(1));
  const index_t id = kv.open();
  prefill(kv, id, of, 0, 50);
  CHECK_THROWS_WITH(kv.end_prefill(id), contains("budget is 8; expected a number that leaves room for the window of 32 "
                                                 "tokens: the first stage keeps 24; raise the budget or factor"));
}
