// Slots whose positions do not ascend, as in a ring: refused, or read through a list that has them in order.
#include "catch.hpp"

#include <cmath>
#include <numeric>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/choose/lines.hpp>
#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/backend/cpu/store/ordered_slots.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/prefill/vertical_slash.hpp>
#include <tessera/scorer/key_norm.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/scorer/position.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

#include "support/kv_tensor.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::kv_tensor;
using support::rng;

namespace {

constexpr int dim = 64;
using ring_view = kv_view<const float, dim>;

/// The rows of a tensor, turned by some slots in every (sequence, kv_head): what was written last stands before what was
/// written first.
kv_tensor<float, dim> turned(const kv_tensor<float, dim>& straight, rng& random) {
  auto ring = straight;
  for (index_t row = 0; row < straight.sequences * straight.kv_heads; ++row) {
    const index_t b = row / straight.kv_heads, h = row % straight.kv_heads, n = straight.length(b, h);
    const index_t by = n < 2 ? 0 : random.between(1, n - 1);
    for (index_t slot = 0; slot < n; ++slot) {
      const std::size_t from = straight.row(b, h, slot), to = straight.row(b, h, (slot + by) % n);
      ring.positions[to] = straight.positions[from];
      std::copy_n(straight.k.begin() + offset_t(from) * dim, dim, ring.k.begin() + offset_t(to) * dim);
      std::copy_n(straight.v.begin() + offset_t(from) * dim, dim, ring.v.begin() + offset_t(to) * dim);
    }
  }
  return ring;
}

struct asked {
  std::vector<float> q;
  std::vector<index_t> first;
  index_t tokens, heads, sequences;

  asked(rng& random, const kv_tensor<float, dim>& stored, index_t tokens_, index_t group)
      : q(support::normals(random, std::size_t(stored.sequences * tokens_ * stored.kv_heads * group * dim))),
        tokens(tokens_),
        heads(stored.kv_heads * group),
        sequences(stored.sequences) {
    // The newest queries: some of what is stored lies behind the first of them.
    for (index_t b = 0; b < sequences; ++b) first.push_back(std::max(0, stored.newest(b) + 1 - tokens));
  }
  cpu::query_rows<float> rows() const { return {nhd_rows(q.data(), tokens, heads, dim, sequences), first.data()}; }
};

template <class View>
std::vector<float> attend(const View& view, const asked& by, const logit_rule& rule, bool prompt) {
  std::vector<float> out(by.q.size());
  cpu::executor workers(2);
  cpu::decode_workspace workspace;
  const cpu::attention_output to{nhd_rows(out.data(), by.tokens, by.heads, dim, by.sequences), {}};
  if (prompt) {
    cpu::prefill_attention(view, by.rows(), rule, to, workers);
  } else {
    cpu::decode_attention(view, by.rows(), rule, nullptr, to, workspace, workers);
  }
  return out;
}

template <class Scorer, class View>
selection choose(const View& view, const asked& by) {
  retain<Scorer, uniform, top_tokens> policy;
  policy.budget.tokens = 20;
  if constexpr (Scorer::observed == observes::window) policy.scorer.window = by.tokens;
  choose_problem<View, float> problem;
  problem.view = view;
  problem.q = by.rows().q;
  problem.first_position = by.first.data();
  selection kept;
  cpu::choose_workspace<dim> scratch;
  cpu::executor workers(1);
  cpu::score_and_choose(policy, problem, kept, scratch, workers);
  return kept;
}

kv_tensor<float, dim> stored(rng& random, index_t sequences, index_t heads, index_t most) {
  std::vector<index_t> lengths;
  for (index_t row = 0; row < sequences * heads; ++row) lengths.push_back(random.between(30, most));
  kv_tensor<float, dim> made(random, sequences, heads, lengths);
  made.scatter_positions(random);
  return made;
}

}  // namespace

TEST_CASE("attention and choices refuse slots whose positions do not ascend, before anything is written") {
  rng random(411);
  const auto straight = stored(random, 2, 2, 60);
  const auto ring = turned(straight, random);
  const asked by(random, ring, 4, 2);
  const auto sentence = contains("expected more than that of the slot before it");
  for (const bool prompt : {false, true}) CHECK_THROWS_WITH(attend(ring.view(), by, {}, prompt), sentence);
  CHECK_THROWS_WITH(choose<position>(ring.view(), by), sentence);
  CHECK_THROWS_WITH(choose<key_norm>(ring.view(), by), sentence);
  CHECK_THROWS_WITH(choose<observation_window>(ring.view(), by), sentence);
  cpu::line_workspace<dim> memory;
  prompt_lines lines;
  cpu::executor workers(1);
  const auto one = stored(random, 1, 1, 60);
  const auto one_ring = turned(one, random);
  const asked one_by(random, one_ring, 4, 1);
  CHECK_THROWS_WITH(cpu::choose_lines(vertical_slash{}, one_ring.view(), one_by.rows(), {}, lines, memory, workers),
                    sentence);

  // Two slots of one position are no order either, and the sentence names the slot.
  const std::vector<index_t> at{0, 3, 3, 9}, counts{4};
  ring_view twice = straight.view();
  twice.sequences = twice.kv_heads = 1;
  twice.lengths = counts.data();
  twice.positions = at.data();
  const index_t first = 9;
  std::vector<float> out(dim);
  cpu::decode_workspace workspace;
  const cpu::query_rows<float> row{nhd_rows(by.q.data(), 1, 1, dim), &first};
  CHECK_THROWS_WITH(
      cpu::decode_attention(twice, row, {}, nullptr, {nhd_rows(out.data(), 1, 1, dim), {}}, workspace, workers),
      contains("position of slot 2 (sequence 0, kv_head 0) is 3; expected more than that of the slot before it, "
               "which is 3"));
}

TEST_CASE("nobody looks at positions that are said to ascend") {
  rng random(412);
  const auto straight = stored(random, 1, 2, 60);
  const asked by(random, straight, 1, 2);
  auto view = straight.view();
  const auto looked_at = attend(view, by, {}, false);
  view.order = slot_order::ascending;
  CHECK(support::same_bits(attend(view, by, {}, false), looked_at));
  // A claim that is wrong is not found out: that is what it saves.
  const auto ring = turned(straight, random);
  auto claimed = ring.view();
  claimed.order = slot_order::ascending;
  CHECK_NOTHROW(attend(claimed, by, {}, false));
}

TEST_CASE("slots of a ring in the order of their positions give what slots in order give, to the bit") {
  rng random(413);
  for (index_t i = 0; i < support::scaled(40); ++i) {
    const auto straight = stored(random, random.between(1, 3), random.between(1, 3), 150);
    const auto ring = turned(straight, random);
    const asked by(random, straight, random.between(1, 8), random.between(1, 4));
    logit_rule rule;
    rule.sliding_window = random.pick({0, 4, 30});
    cpu::ordered_slots ordered;
    ordered.list(ring.view());
    const auto view = ordered.view(ring.view());
    for (const bool prompt : {false, true}) {
      REQUIRE(support::same_bits(attend(view, by, rule, prompt), attend(straight.view(), by, rule, prompt)));
    }
    const auto same_choice = [&](const selection& chosen, const selection& expected) {
      REQUIRE(chosen.counts == expected.counts);
      for (index_t row = 0; row < chosen.rows(); ++row) {
        const index_t b = row / ring.kv_heads, h = row % ring.kv_heads;
        for (index_t c = 0; c < chosen.counts[std::size_t(row)]; ++c) {
          REQUIRE(ring.position(b, h, ordered.slot(row, chosen.row(row)[c])) ==
                  straight.position(b, h, expected.row(row)[c]));
        }
      }
    };
    same_choice(choose<position>(view, by), choose<position>(straight.view(), by));
    same_choice(choose<observation_window>(view, by), choose<observation_window>(straight.view(), by));
  }
}

TEST_CASE("cells that an engine reuses, listed by position, give what rows in order give, to the bit") {
  rng random(415);
  for (index_t i = 0; i < support::scaled(20); ++i) {
    const index_t heads = random.between(1, 3), sequences = 2;
    const auto straight =
        stored(random, sequences, 1, 90);  // one head says how long a sequence is, and where it stands
    const index_t cells = straight.length(0, 0) + straight.length(1, 0) + random.between(0, 30);
    std::vector<index_t> free(static_cast<std::size_t>(cells)), slots, positions, lengths;
    std::iota(free.begin(), free.end(), 0);
    std::vector<offset_t> begins;
    const auto k = support::normals(random, std::size_t(cells * heads * dim));
    const auto v = support::normals(random, k.size());
    for (index_t b = 0; b < sequences; ++b) {
      begins.insert(begins.end(), std::size_t(heads), offset_t(slots.size()));
      lengths.push_back(straight.length(b, 0));
      for (index_t slot = 0; slot < straight.length(b, 0); ++slot) {
        const auto cell = free.begin() + random.between(0, index_t(free.size()) - 1);
        slots.push_back(*cell);
        free.erase(cell);
        positions.push_back(straight.position(b, 0, slot));
      }
    }
    kv_view<const float, dim, filtered<contiguous>> view;
    view.k = k.data(), view.v = v.data();
    view.k_strides = view.v_strides = {0, dim, offset_t(heads) * dim};
    view.sequences = sequences, view.kv_heads = heads;
    view.lengths = lengths.data(), view.length_strides = {1, 0};
    view.positions = positions.data(), view.position_begin = begins.data();
    view.table = {{}, slots.data(), begins.data(), heads};

    const index_t longest = std::max(lengths[0], lengths[1]);
    std::vector<float> k_in_order(std::size_t(sequences * longest * heads * dim)), v_in_order = k_in_order;
    for (index_t b = 0; b < sequences; ++b) {
      for (index_t slot = 0; slot < lengths[std::size_t(b)]; ++slot) {
        for (index_t h = 0; h < heads; ++h) {
          const offset_t to = ((offset_t(b) * longest + slot) * heads + h) * dim;
          std::copy_n(view.key(b, h, slot), dim, k_in_order.begin() + to);
          std::copy_n(view.value(b, h, slot), dim, v_in_order.begin() + to);
        }
      }
    }
    ring_view in_order;
    in_order.k = k_in_order.data(), in_order.v = v_in_order.data();
    in_order.k_strides = in_order.v_strides = {offset_t(longest) * heads * dim, dim, offset_t(heads) * dim};
    in_order.sequences = sequences, in_order.kv_heads = heads;
    in_order.lengths = lengths.data(), in_order.length_strides = {1, 0};
    in_order.positions = positions.data(), in_order.position_begin = begins.data();

    asked by(random, straight, random.between(1, 8), heads * random.between(1, 4));
    for (const bool prompt : {false, true})
      REQUIRE(support::same_bits(attend(view, by, {}, prompt), attend(in_order, by, {}, prompt)));
    const auto chosen = choose<observation_window>(view, by), expected = choose<observation_window>(in_order, by);
    REQUIRE((chosen.indices == expected.indices && chosen.counts == expected.counts));
  }
}

TEST_CASE("a column beside the rows of a ring goes through the list too") {
  const std::vector<index_t> at{8, 9, 3, 5, 2, 1, 7}, counts{4, 3};
  const std::vector<float> scores{80, 90, 30, 50, 20, 10, 70};
  const std::vector<offset_t> begin{0, 4};
  ring_view view;
  view.sequences = 1, view.kv_heads = 2;
  view.lengths = counts.data(), view.length_strides = {2, 1};
  view.positions = at.data(), view.position_begin = begin.data();
  cpu::ordered_slots ordered;
  ordered.list(view);
  CHECK(ordered.in_order(slot_column<const float>{scores.data(), 0, 0, begin.data()}) ==
        std::vector<float>{30, 50, 80, 90, 10, 20, 70});
  CHECK(std::vector<offset_t>(ordered.begins(), ordered.begins() + 3) == std::vector<offset_t>{0, 4, 7});
}

TEST_CASE("a list of slots refuses what cannot be put in order") {
  const std::vector<index_t> at{5, 2, 5}, counts{3};
  ring_view view;
  view.sequences = view.kv_heads = 1;
  view.lengths = counts.data();
  cpu::ordered_slots ordered;
  CHECK_THROWS_WITH(ordered.list(view), contains("positions of the view is null"));
  view.positions = at.data();
  CHECK_THROWS_WITH(ordered.list(view), contains("position of slots 0 and 2 is 5"));
}

TEST_CASE("of a long text the newest tokens stay") {
  rng random(414);
  for (const index_t next : {1 << 24, (1 << 30) + 17}) {
    kv_tensor<float, dim> held(random, 1, 1, {100});
    held.positions.resize(100);
    std::iota(held.positions.begin(), held.positions.end(), next - 100);
    asked by(random, held, 1, 1);
    by.first = {next};
    std::vector<index_t> newest(20);
    std::iota(newest.begin(), newest.end(), 80);
    const selection kept = choose<position>(held.view(), by);
    CHECK(std::vector<index_t>(kept.row(0), kept.row(0) + kept.counts[0]) == newest);
  }
}
