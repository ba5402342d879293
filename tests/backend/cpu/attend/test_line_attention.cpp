// Lines of whole chunks: chosen from queries and keys, attended, both against double.
#include "catch.hpp"

#include <limits>
#include <numeric>

#include <tessera/backend/cpu/attend/line_attention.hpp>
#include <tessera/backend/cpu/choose/lines.hpp>
#include <tessera/prefill/covering_lines.hpp>
#include <tessera/prefill/sinks_and_band.hpp>
#include <tessera/prefill/vertical_slash.hpp>

#include "attention/decode_case.hpp"
#include "prefill/line_case.hpp"

using namespace tessera;
using tensor = support::kv_tensor<float, 64>;

namespace {

/// A store and the queries of its newest tokens; after an eviction, or with all of its history.
struct chunk {
  tensor kv;
  support::step_queries step;
  index_t group;

  static tensor stored(support::rng& random, index_t kv_heads, index_t n, index_t fresh, bool evicted) {
    if (!evicted) return {random, 1, kv_heads, std::vector<index_t>(std::size_t(kv_heads), n)};
    std::vector<index_t> lengths;
    for (index_t h = 0; h < kv_heads; ++h) lengths.push_back(fresh + random.between(0, n - fresh));
    tensor kv(random, 1, kv_heads, lengths);
    kv.scatter_positions(random);
    const index_t first = kv.newest(0) + 1;
    for (index_t h = 0; h < kv_heads; ++h) {
      for (index_t t = 0; t < fresh; ++t) kv.positions[kv.row(0, h, kv.length(0, h) - fresh + t)] = first + t;
    }
    return kv;
  }
  chunk(support::rng& random, index_t kv_heads, index_t group_, index_t n, index_t fresh, bool evicted)
      : kv(stored(random, kv_heads, n, fresh, evicted)), step(random, kv, fresh, group_, 64), group(group_) {}

  cpu::query_rows<float> queries() const {
    return {nhd_rows(step.q.data(), step.q_len, step.q_heads, 64), step.first.data()};
  }
  /// Slots that a row attends.
  std::vector<index_t> attended(const prompt_lines& lines, index_t token, index_t q_head) const {
    const line_set& head = lines.heads[std::size_t(q_head)];
    const index_t row = step.first[0] + token;
    std::vector<index_t> slots;
    for (index_t slot = 0; slot < kv.length(0, q_head / group); ++slot) {
      const index_t at = kv.position(0, q_head / group, slot);
      const bool on = std::binary_search(head.vertical.begin(), head.vertical.end(), at) ||
                      std::binary_search(head.slash.begin(), head.slash.end(), row - at);
      if (row >= lines.dense_from || on) slots.push_back(slot);
    }
    return slots;
  }
  /// The attention of sampled rows in double.
  support::sampled_rows sampled(const prompt_lines& lines, index_t q_head, const logit_rule& rule) const {
    support::sampled_rows seen{lines.first, lines.next, lines.rows, {}, {}};
    const index_t head = q_head / group;
    for (index_t slot = 0; slot < kv.length(0, head); ++slot) seen.positions.push_back(kv.position(0, head, slot));
    for (const index_t row : lines.rows) {
      const float* q = step.q.data() + ((row - step.first[0]) * step.q_heads + q_head) * 64;
      const auto expected = kv.attend(q, row, 0, q_head, group, rule);
      seen.weights.insert(seen.weights.end(), expected.probabilities.begin(), expected.probabilities.end());
    }
    return seen;
  }
};

support::attention_result attend(const chunk& given, const prompt_lines& lines, const logit_rule& rule,
                                 cpu::executor& workers) {
  support::attention_result result;
  result.out.assign(given.step.q.size(), 1e9f);
  result.lse.assign(given.step.q.size() / 64, 1e9f);
  cpu::line_attention(given.kv.view(), given.queries(), rule, lines,
                      cpu::attention_output{nhd_rows(result.out.data(), given.step.q_len, given.step.q_heads, 64),
                                            nhd_rows(result.lse.data(), given.step.q_len, given.step.q_heads, 1)},
                      workers);
  return result;
}

double worst_error(const chunk& given, const prompt_lines& lines, const logit_rule& rule,
                   const support::attention_result& result) {
  double worst = 0;
  for (index_t t = 0; t < given.step.q_len; ++t) {
    for (index_t h = 0; h < given.step.q_heads; ++h) {
      const std::size_t row = std::size_t(t * given.step.q_heads + h);
      const auto slots = given.attended(lines, t, h);
      const auto expected =
          given.kv.attend(given.step.q.data() + row * 64, given.step.first[0] + t, 0, h, given.group, rule, &slots);
      worst = std::max({worst, support::row_error(result.out.data() + row * 64, expected.out),
                        support::number_error(result.lse[row], expected.lse)});
    }
  }
  return worst;
}

logit_rule random_rule(support::rng& random, const std::vector<float>& sinks) {
  logit_rule rule;
  if (random.chance(0.3)) rule.soft_cap = 5;
  if (random.chance(0.3)) rule.sliding_window = random.between(1, 80);
  if (random.chance(0.3)) rule.sink_logits = sinks.data();
  rule.scale = random.pick({0.0f, 0.4f});  // sharp attention, of which few lines carry much
  return rule;
}

}  // namespace

TEST_CASE("a chunk's lines carry alpha of its sampled rows, and its rows attend them and nothing else") {
  support::rng random(321);
  cpu::executor one(1), three(3);
  cpu::line_workspace<64> workspace;
  for (index_t i = 0; i < support::scaled(250); ++i) {
    const index_t kv_heads = random.between(1, 2), group = random.pick({1, 2, 4});
    const index_t n = random.pick({1, 2, 63, 65, random.between(1, 260)});
    const index_t fresh = random.chance(0.4) ? n : random.chance(0.2) ? 1 : random.between(1, n);
    const chunk given(random, kv_heads, group, n, fresh, random.chance(0.4));
    const auto sinks = support::normals(random, std::size_t(given.step.q_heads));
    const logit_rule rule = random_rule(random, sinks);
    const covering_lines policy{.alpha = random.pick({0.5f, 0.9f, 0.955f, 1.0f}),
                                .sampled_rows = random.pick({1, 7, 48, 90}),
                                .seed = i,
                                .algorithm = random.chance(0.3) ? line_search::paper : line_search::coverage};
    CAPTURE(i, n, fresh, group, policy.alpha, policy.sampled_rows, rule.sliding_window, rule.soft_cap);
    prompt_lines lines, again;
    cpu::choose_lines(policy, given.kv.view(), given.queries(), rule, lines, workspace, one);
    cpu::choose_lines(policy, given.kv.view(), given.queries(), rule, again, workspace, three);
    REQUIRE(index_t(lines.rows.size()) == std::min(policy.sampled_rows, fresh));
    for (index_t h = 0; h < given.step.q_heads; ++h) {
      REQUIRE(lines.heads[std::size_t(h)].vertical == again.heads[std::size_t(h)].vertical);
      REQUIRE(lines.heads[std::size_t(h)].slash == again.heads[std::size_t(h)].slash);
      const auto seen = given.sampled(lines, h, rule);
      REQUIRE(seen.covered(lines.heads[std::size_t(h)]) >= double(policy.alpha) * seen.total() * (1 - 1e-9));
      if (policy.algorithm == line_search::paper || policy.alpha == 1) continue;
      const auto needed = support::greedy_lines(seen, policy.alpha, 64, 4);
      REQUIRE(double(seen.length(lines.heads[std::size_t(h)])) <= 1.1 * double(seen.length(needed)));
    }
    const auto result = attend(given, lines, rule, one);
    REQUIRE(worst_error(given, lines, rule, result) < 1e-5);
    if (policy.alpha == 1) REQUIRE(support::worst_error(result, given.kv, given.step, rule) < 1e-5);
    const auto with_three = attend(given, lines, rule, three);
    REQUIRE((support::same_bits(result.out, with_three.out) && support::same_bits(result.lse, with_three.lse)));
  }
}

TEST_CASE("last rows of a chunk are dense where a pattern says so") {
  support::rng random(322);
  cpu::executor workers(1);
  cpu::line_workspace<64> workspace;
  for (const index_t dense : {0, 1, 70, 500}) {
    const chunk given(random, 1, 2, 300, 150, false);
    prompt_lines lines;
    cpu::choose_lines(sinks_and_band{.init = 3, .local = 20, .dense_rows = dense}, given.kv.view(), given.queries(), {},
                      lines, workspace, workers);
    CHECK(lines.dense_from == 300 - std::min(dense, 150));
    CHECK(worst_error(given, lines, {}, attend(given, lines, {}, workers)) < 1e-5);
    CHECK(given.attended(lines, 149, 0).size() == (dense ? 300u : 23u));
  }
}

TEST_CASE("vertical_slash is attended by its lines alone") {
  support::rng random(323);
  cpu::executor workers(2);
  cpu::line_workspace<64> workspace;
  const chunk given(random, 2, 2, 400, 230, false);
  prompt_lines lines;
  cpu::choose_lines(vertical_slash{.vertical = 40, .slash = 120}, given.kv.view(), given.queries(), {}, lines,
                    workspace, workers);
  for (const line_set& head : lines.heads) {
    CHECK(head.vertical.size() == 40);
    CHECK(head.slash.size() == 120);
  }
  CHECK(worst_error(given, lines, {}, attend(given, lines, {}, workers)) < 1e-5);
}

TEST_CASE("a row that sees no key of its lines gives zeros") {
  support::rng random(324);
  cpu::executor workers(1);
  const chunk given(random, 1, 1, 100, 100, false);
  prompt_lines lines{0, 100, 100, {}, {line_set{{40}, {}}}};
  const auto result = attend(given, lines, {}, workers);
  CHECK(worst_error(given, lines, {}, result) < 1e-5);
  CHECK((result.out[0] == 0 && result.lse[0] == -infinity));
  CHECK(result.lse[40] > -infinity);
}

TEST_CASE("keys and values that are not numbers take no lines and reach the rows that see them only") {
  support::rng random(325);
  cpu::executor workers(1);
  cpu::line_workspace<64> workspace;
  for (index_t i = 0; i < support::scaled(40); ++i) {
    chunk given(random, 1, 2, 200, random.between(20, 200), false);
    const std::size_t slot = std::size_t(random.between(0, 199));
    const bool in_key = random.chance(0.5);
    (in_key ? given.kv.k : given.kv.v)[slot * 64 + 5] = std::numeric_limits<float>::quiet_NaN();
    given.kv.remember();
    prompt_lines lines;
    cpu::choose_lines(covering_lines{.alpha = 0.9f}, given.kv.view(), given.queries(), {}, lines, workspace, workers);
    for (const line_set& head : lines.heads) {
      const bool taken = std::binary_search(head.vertical.begin(), head.vertical.end(), index_t(slot));
      if (in_key) REQUIRE(taken == (slot < 4));
    }
    REQUIRE(worst_error(given, lines, {}, attend(given, lines, {}, workers)) < 1e-5);
  }
}

TEST_CASE("lines of other rows than the chunk's are refused") {
  support::rng random(326);
  cpu::executor workers(1);
  const chunk given(random, 1, 1, 20, 10, false);
  prompt_lines lines{10, 20, 20, {}, {line_set{{}, {0}}}};
  CHECK_NOTHROW(attend(given, lines, {}, workers));
  lines.first = 9;
  CHECK_THROWS_WITH(attend(given, lines, {}, workers), contains("lines is of other heads or rows; expected "));
  lines = {10, 20, 20, {}, {}};
  CHECK_THROWS_WITH(attend(given, lines, {}, workers), contains("lines is of other heads or rows; expected "));
}
