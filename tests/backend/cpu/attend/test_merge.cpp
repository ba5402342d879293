// Attention over parts of the stored tokens, merged: what attention over all of them gives, sinks counted once.
#include "catch.hpp"

#include <limits>
#include <numeric>

#include <tessera/backend/cpu/score/score.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/scorer/exact_score.hpp>

#include "attention/decode_case.hpp"

using namespace tessera;
using support::kv_tensor;

namespace {

constexpr int dim = 64;
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
using tensor = kv_tensor<float, dim>;

/// Partial results with the memory that they point to.
struct owned_part {
  support::attention_result rows;
  index_t tokens, q_heads;

  attention_part view() const {
    return {nhd_rows<const float>(rows.out.data(), tokens, q_heads, dim),
            nhd_rows<const float>(rows.lse.data(), tokens, q_heads, 1)};
  }
};

owned_part empty_part(const support::step_queries& step) {
  owned_part made{{}, step.q_len, step.q_heads};
  made.rows.out.assign(std::size_t(step.q_len * step.q_heads * dim), 1e9f);
  made.rows.lse.assign(std::size_t(step.q_len * step.q_heads), 1e9f);
  return made;
}

/// A part's attention over the slots that it holds of every kv_head.
owned_part attend_part(const tensor& kv, const support::step_queries& step, const logit_rule& rule,
                       const selection& slots) {
  owned_part made = empty_part(step);
  cpu::decode_workspace workspace;
  cpu::executor workers(1);
  const selection_view read = slots.view();
  cpu::decode_attention_part(
      kv.view(), cpu::query_rows<float>{nhd_rows(step.q.data(), step.q_len, step.q_heads, dim), step.first.data()},
      rule, &read,
      {nhd_rows(made.rows.out.data(), step.q_len, step.q_heads, dim),
       nhd_rows(made.rows.lse.data(), step.q_len, step.q_heads, 1)},
      workspace, workers);
  return made;
}

support::attention_result merge(const std::vector<owned_part>& parts, const support::step_queries& step,
                                const float* sinks) {
  std::vector<attention_part> views;
  for (const auto& part : parts) views.push_back(part.view());
  owned_part made = empty_part(step);
  cpu::merge_parts<dim>(views, sinks, nhd_rows(made.rows.out.data(), step.q_len, step.q_heads, dim),
                        nhd_rows(made.rows.lse.data(), step.q_len, step.q_heads, 1));
  return made.rows;
}

/// Deals the slots of every head out to parts; some parts get nothing.
std::vector<selection> deal(support::rng& random, const std::vector<index_t>& lengths, index_t parts) {
  std::vector<selection> dealt(static_cast<std::size_t>(parts));
  for (auto& part : dealt) part.reset(lengths);
  const bool in_runs = random.chance(0.5);
  for (index_t r = 0; r < index_t(lengths.size()); ++r) {
    for (index_t slot = 0, to = 0; slot < lengths[std::size_t(r)]; ++slot) {
      if (!in_runs || random.chance(0.1)) to = random.between(0, parts - 1);
      auto& part = dealt[std::size_t(to)];
      part.row(r)[part.counts[std::size_t(r)]++] = slot;
    }
  }
  return dealt;
}

}  // namespace

TEST_CASE("any number of parts merge into attention over all of them, with the sink counted once") {
  support::rng random(321);
  for (index_t i = 0; i < support::scaled(400); ++i) {
    const index_t kv_heads = random.between(1, 2), group = random.pick({1, 2, 4});
    std::vector<index_t> lengths;
    for (index_t h = 0; h < kv_heads; ++h) lengths.push_back(random.pick({0, 1, random.between(1, 200)}));
    lengths[0] = std::max(1, lengths[0]);
    tensor kv(random, 1, kv_heads, lengths);
    if (random.chance(0.5)) kv.scatter_positions(random);
    const auto parts = deal(random, lengths, random.pick({1, 2, 3, 7, 40}));
    if (random.chance(0.3)) {  // a part of nothing but NaN
      for (index_t r = 0; r < kv_heads; ++r) {
        for (index_t s = 0; s < parts[0].counts[std::size_t(r)]; ++s) {
          kv.k[kv.row(0, r, parts[0].row(r)[s]) * dim + 3] = not_a_number;
        }
      }
      kv.remember();
    }
    const auto sinks = support::normals(random, std::size_t(kv_heads * group), 3);
    logit_rule rule;
    if (random.chance(0.3)) rule.sliding_window = random.between(1, 90);
    if (random.chance(0.3)) rule.soft_cap = 5;
    if (random.chance(0.6)) rule.sink_logits = sinks.data();
    const support::step_queries step(random, kv, random.between(1, 6), group, dim);
    std::vector<owned_part> results;
    for (const auto& slots : parts) results.push_back(attend_part(kv, step, rule, slots));
    CAPTURE(i, parts.size(), rule.sliding_window);
    const auto merged = merge(results, step, rule.sink_logits);
    REQUIRE(support::worst_error(merged, kv, step, rule) < 1e-5);
    // What a merge without sinks gives is a part again.
    const owned_part first{merge({results.begin(), results.begin() + 1}, step, nullptr), step.q_len, step.q_heads};
    const owned_part rest{merge({results.begin() + 1, results.end()}, step, nullptr), step.q_len, step.q_heads};
    REQUIRE(support::worst_error(merge({first, rest}, step, rule.sink_logits), kv, step, rule) < 1e-5);
  }
}

TEST_CASE("no parts, or parts that saw nothing, give zeros and the sink's logit; their rows are not read") {
  support::rng random(322);
  const tensor kv(random, 1, 1, {3});
  const support::step_queries step(random, kv, 1, 2, dim);
  const std::vector<float> sinks{0.5f, -1.0f}, zeros(2 * dim, 0.0f);
  owned_part unread = empty_part(step);
  unread.rows.lse = {-infinity, -infinity};
  unread.rows.out.assign(unread.rows.out.size(), not_a_number);
  for (const std::vector<owned_part>& parts : {std::vector<owned_part>{}, {unread}, {unread, unread}}) {
    const auto bare = merge(parts, step, nullptr), sunk = merge(parts, step, sinks.data());
    CHECK(support::same_bits(bare.out, zeros));
    CHECK(bare.lse == std::vector<float>{-infinity, -infinity});
    CHECK(support::same_bits(sunk.out, zeros));
    CHECK(sunk.lse == sinks);
  }
  // NaN shows whatever else there is, and in its own row only.
  owned_part poisoned = unread;
  poisoned.rows.lse[1] = not_a_number;
  const auto merged = merge({unread, poisoned, unread}, step, sinks.data());
  CHECK(merged.lse[0] == sinks[0]);
  CHECK((std::isnan(merged.lse[1]) && std::isnan(merged.out[dim]) && std::isnan(merged.out[2 * dim - 1])));
  CHECK(merged.out[0] == 0);
}

TEST_CASE("one part and a sink give the bits of attention with the sink, and the output may be a part") {
  support::rng random(323);
  cpu::executor workers(1);
  const tensor kv(random, 1, 2, {90, 90});
  const support::step_queries step(random, kv, 2, 3, dim);
  const auto sinks = support::normals(random, 6);
  selection everything;
  everything.reset({90, 90});
  everything.counts = {90, 90};
  for (index_t r = 0; r < 2; ++r) std::iota(everything.row(r), everything.row(r) + 90, 0);
  auto part = attend_part(kv, step, {.sink_logits = sinks.data()}, everything);
  CHECK(support::same_bits(part.rows.out, support::decode(kv, step, {}, workers).out));
  const std::vector<attention_part> parts{part.view()};
  cpu::merge_parts<dim>(parts, sinks.data(), nhd_rows(part.rows.out.data(), step.q_len, step.q_heads, dim),
                        nhd_rows(part.rows.lse.data(), step.q_len, step.q_heads, 1));
  CHECK(support::worst_error(part.rows, kv, step, {.sink_logits = sinks.data()}) < 1e-6);
}

TEST_CASE("a prompt chunk's attention comes in parts too") {
  support::rng random(324);
  cpu::executor workers(2);
  const tensor kv(random, 1, 1, {120});
  const support::step_queries step(random, kv, 70, 2, dim);
  const auto sinks = support::normals(random, 2);
  const logit_rule rule{.sliding_window = 60, .sink_logits = sinks.data()};
  std::vector<index_t> positions(120);
  std::iota(positions.begin(), positions.end(), 0);
  std::vector<owned_part> parts;
  for (const index_t first : {0, 33, 100}) {
    const index_t length = (first == 0 ? 33 : first == 33 ? 100 : 120) - first;
    auto view = kv.view();
    view.k += offset_t(first) * dim;
    view.v += offset_t(first) * dim;
    view.lengths = &length;
    view.positions = positions.data() + first;
    parts.push_back(empty_part(step));
    cpu::prefill_attention_part(
        view, cpu::query_rows<float>{nhd_rows(step.q.data(), 70, 2, dim), step.first.data()}, rule,
        {nhd_rows(parts.back().rows.out.data(), 70, 2, dim), nhd_rows(parts.back().rows.lse.data(), 70, 2, 1)},
        workers);
  }
  CHECK(support::worst_error(merge(parts, step, rule.sink_logits), kv, step, rule) < 1e-5);
}

TEST_CASE("parts of other shapes, or without lse, are refused before anything is written") {
  support::rng random(325);
  const tensor kv(random, 1, 1, {3});
  const support::step_queries step(random, kv, 1, 2, dim), longer(random, kv, 2, 2, dim);
  const owned_part good = empty_part(step), bad = empty_part(longer);
  CHECK_THROWS_WITH(merge({good, bad}, step, nullptr), contains("out of a part is [1, 2, 2]; expected [1, 1, 2]"));
  std::vector<float> out(2 * dim, 7.0f);
  const std::vector<attention_part> without{{good.view().out, {}}};
  CHECK_THROWS_WITH(cpu::merge_parts<dim>(without, nullptr, nhd_rows(out.data(), 1, 2, dim), {}),
                    contains("lse of a part is null"));
  CHECK(out == std::vector<float>(2 * dim, 7.0f));
}

TEST_CASE("attention, scoring and appends refuse heads that do not divide and rows of another head dim") {
  support::rng random(326);
  cpu::executor workers(1);
  const tensor kv(random, 1, 2, {5, 5});
  const std::vector<float> data(4 * 128);
  std::vector<float> out(4 * 128);
  const index_t first = 4;
  const auto attend = [&](const rows_view<const float>& q, const rows_view<float>& to) {
    cpu::decode_workspace workspace;
    cpu::decode_attention(kv.view(), cpu::query_rows<float>{q, &first}, {}, nullptr, {to, {}}, workspace, workers);
  };
  const auto prefill = [&](const rows_view<const float>& q, const rows_view<float>& to) {
    cpu::prefill_attention(kv.view(), cpu::query_rows<float>{q, &first}, {}, {to, {}}, workers);
  };
  const auto q_of = [&](index_t heads, index_t width) { return nhd_rows(data.data(), 1, heads, width); };
  const auto out_of = [&](index_t heads, index_t width) { return nhd_rows(out.data(), 1, heads, width); };
  CHECK_NOTHROW(attend(q_of(4, 64), out_of(4, 64)));
  CHECK_THROWS_WITH(attend(q_of(3, 64), out_of(3, 64)),
                    contains("q_heads is 3; expected a multiple of kv_heads, which is 2"));
  CHECK_THROWS_WITH(prefill(q_of(3, 64), out_of(3, 64)), contains("q_heads is 3"));
  CHECK_THROWS_WITH(attend(q_of(4, 128), out_of(4, 64)), contains("head dim of q is 128; expected 64"));
  CHECK_THROWS_WITH(attend(q_of(4, 64), out_of(4, 128)), contains("head dim of out is 128; expected 64"));
  CHECK_THROWS_WITH(prefill(q_of(4, 64), out_of(2, 64)), contains("out is [1, 1, 2]; expected [1, 1, 4]"));

  std::vector<float> scores(10), lse(4);
  const std::vector<offset_t> offsets{0, 5};
  cpu::score_workspace<dim> workspace;
  const auto score = [&](const rows_view<const float>& q) {
    cpu::score_rows(kv.view(), cpu::query_rows<float>{q, &first}, {}, exact_score{}, scores.data(), offsets.data(),
                    workspace, workers);
  };
  CHECK_THROWS_WITH(score(q_of(3, 64)), contains("q_heads is 3"));
  CHECK_THROWS_WITH(score(q_of(4, 128)), contains("head dim of q is 128"));

  tensor written(random, 1, 2, {5, 5});
  kv_view<float, dim> room;
  room.k = written.k.data();
  room.v = written.v.data();
  room.k_strides = room.v_strides = written.view().k_strides;
  room.sequences = 1;
  room.kv_heads = 2;
  const index_t nothing = 0;
  room.lengths = &nothing;
  const auto before = written.k;
  CHECK_THROWS_WITH(cpu::append(room, q_of(2, 128), q_of(2, 64)), contains("head dim of k is 128; expected 64"));
  CHECK_THROWS_WITH(cpu::append(room, q_of(2, 64), q_of(2, 128)), contains("head dim of v is 128; expected 64"));
  CHECK(written.k == before);
}
