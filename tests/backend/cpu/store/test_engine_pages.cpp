// Eviction in pages that an engine owns: choose, pack, free, append, attend, and all of it again, against a plain model.
#include "catch.hpp"

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/backend/cpu/store/free_pages.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/backend/cpu/store/virtual_blocks.hpp>
#include <tessera/budget/adaptive.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/scorer/position.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

#include "support/engine_case.hpp"
#include "support/scores.hpp"
#include "support/subsets.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::engine_pages;
using support::page_shape;
using support::plain_head;

namespace {

/// One engine through prompts, evictions and steps, beside a model that holds rows in vectors.
template <class T, int D, class Table, class Policy, int Dv = D>
struct conversation {
  static constexpr observes observed = Policy::observed;
  support::rng random;
  page_shape s;
  engine_pages<T, D, Table, Dv> engine;
  index_t group, q_heads;
  bool always_positions;  // else the first packing fills the column
  bool packed = false;
  Policy policy;
  std::vector<std::vector<plain_head>> model;  // by layer, then sequence * heads + head
  std::vector<index_t> next;                   // by sequence
  cpu::executor workers;
  cpu::choose_workspace<D> choosing;
  cpu::decode_workspace attending;

  explicit conversation(std::uint64_t seed)
      : random(seed),
        s(page_shape::drawn(random)),
        engine(s, random),
        group(random.between(1, 8)),
        q_heads(group * s.heads),
        always_positions(random.chance(0.5)),
        model(std::size_t(s.layers), std::vector<plain_head>(std::size_t(s.sequences * s.heads))),
        next(std::size_t(s.sequences), 0),
        workers(random.between(1, 3)) {
    policy.budget.tokens = random.pick({1, 2, 7, 20, 60, 500});
    if constexpr (observed == observes::window) policy.scorer.window = random.between(1, 6);
    if constexpr (observed == observes::window) policy.scorer.pool = random.pick({1, 3, 7});
    if constexpr (observed == observes::nothing) policy.scorer.sinks = random.between(0, 4);
  }

  auto view(index_t layer) { return engine.view(layer, engine.here(), always_positions || packed); }
  std::vector<float> rows(std::size_t count) { return support::normals(random, count); }

  /// New tokens of every sequence, at most `most`; some get none.
  std::vector<index_t> append(index_t most) {
    std::vector<index_t> added;
    for (index_t b = 0; b < s.sequences; ++b) {
      added.push_back(std::min(engine.room(b), random.chance(0.2) ? random.between(0, 1) : random.between(0, most)));
      engine.make_room(b, added.back());
    }
    const index_t tokens = std::max(1, *std::max_element(added.begin(), added.end()));
    for (index_t layer = 0; layer < s.layers; ++layer) {
      const auto k = rows(std::size_t(s.sequences * tokens * s.heads * D));
      const auto v = rows(std::size_t(s.sequences * tokens * s.heads * Dv));
      append_problem<decltype(view(0)), float> p;
      p.view = view(layer);
      p.k = nhd_rows(k.data(), tokens, s.heads, D, s.sequences);
      p.v = nhd_rows(v.data(), tokens, s.heads, Dv, s.sequences);
      p.lengths = engine.lengths.data() + layer * s.sequences * s.heads;
      p.new_tokens = added.data();
      p.first_position = next.data();
      if (always_positions || packed) p.positions = engine.position_column(layer, engine.here());
      p.scores = engine.score_column(layer, engine.here());
      p.pool = engine.facts();
      cpu::append(p);
      for (index_t b = 0; b < s.sequences; ++b) {
        for (index_t h = 0; h < s.heads; ++h) {
          plain_head& head = model[std::size_t(layer)][std::size_t(b * s.heads + h)];
          for (index_t t = 0; t < added[std::size_t(b)]; ++t) {
            const auto stored = [&](const float* from, int dim) {
              std::vector<float> row(from, from + dim);
              for (float& x : row) x = float(T(x));
              return row;
            };
            head.positions.push_back(next[std::size_t(b)] + t);
            head.scores.push_back(0);
            head.keys.push_back(stored(p.k.row(b, t, h), D));
            head.values.push_back(stored(p.v.row(b, t, h), Dv));
          }
        }
      }
    }
    for (index_t b = 0; b < s.sequences; ++b) next[std::size_t(b)] += added[std::size_t(b)];
    return added;
  }

  /// The scores of a head by definition, in double.
  std::vector<double> scores_of(index_t layer, index_t b, index_t h, const std::vector<float>& q, index_t queries,
                                index_t valid) {
    const plain_head& head = model[std::size_t(layer)][std::size_t(b * s.heads + h)];
    std::vector<double> scores(head.positions.size(), 0.0);
    if constexpr (observed == observes::every_query) scores.assign(head.scores.begin(), head.scores.end());
    if constexpr (observed == observes::nothing) {
      for (std::size_t i = 0; i < scores.size(); ++i) {
        scores[i] = head.positions[i] < policy.scorer.sinks ? 1e300 : double(head.positions[i]);
      }
    }
    if constexpr (observed == observes::window) {
      for (index_t t = 0; t < valid; ++t) {
        for (index_t g = 0; g < group; ++g) {
          const float* query =
              q.data() + ((std::size_t(b * queries + t)) * std::size_t(q_heads) + std::size_t(h * group + g)) * D;
          const auto row = head.attend(query, next[std::size_t(b)] - valid + t, D, Dv);
          for (std::size_t i = 0; i < scores.size(); ++i) scores[i] += row.probabilities[i];
        }
      }
      const index_t candidates = index_t(scores.size()) - std::min(valid, index_t(scores.size()));
      const auto pooled = support::oracle::max_pool(std::vector<double>(scores.begin(), scores.begin() + candidates),
                                                    policy.scorer.pool);
      std::copy(pooled.begin(), pooled.end(), scores.begin());
    }
    return scores;
  }

  void evict(const std::vector<index_t>& added) {
    const index_t queries = 6, rows_of_tables = s.rows();
    std::vector<index_t> valid, first, budgets;
    for (index_t b = 0; b < s.sequences; ++b) {
      valid.push_back(0);
      if constexpr (observed == observes::window) valid.back() = std::min(policy.scorer.window, added[std::size_t(b)]);
      first.push_back(next[std::size_t(b)] - valid.back());
      budgets.push_back(random.between(1, 40));
    }
    const bool by_sequence = random.chance(0.5);
    for (index_t layer = 0; layer < s.layers; ++layer) {
      auto& heads = model[std::size_t(layer)];
      if constexpr (observed == observes::every_query) {
        for (index_t row = 0; row < s.sequences * s.heads; ++row) {
          auto& head = heads[std::size_t(row)];
          head.scores = support::tied_scores(random, index_t(head.scores.size()), random.pick({1, 3, 50}));
          std::copy(head.scores.begin(), head.scores.end(),
                    engine.score_column(layer, engine.here()).row(row / s.heads, row % s.heads, s.heads));
        }
      }
      const auto q = rows(std::size_t(s.sequences * queries * q_heads * D));
      choose_problem<decltype(view(0)), float> c;
      c.view = view(layer);
      c.layer = layer, c.layers = s.layers;
      if constexpr (observed == observes::window) {
        c.q = nhd_rows(q.data(), queries, q_heads, D, s.sequences);
        c.valid = valid.data();
      }
      c.first_position = first.data();
      const auto column = engine.score_column(layer, engine.here());
      c.scores = {column.data, column.sequence_stride, column.head_stride, nullptr};
      if (by_sequence) c.budgets = budgets.data();
      c.pool = engine.facts();
      selection kept;
      cpu::score_and_choose(policy, c, kept, choosing, workers);
      REQUIRE(kept.rows() == s.sequences * s.heads);
      for (index_t b = 0; b < s.sequences; ++b)
        check_chosen(layer, b, kept, q, queries, valid[std::size_t(b)],
                     by_sequence ? budgets[std::size_t(b)] : policy.budget.tokens);

      if (random.chance(0.2)) {  // or whatever the engine chooses, nothing among it
        const auto* lengths = engine.lengths.data() + layer * s.sequences * s.heads;
        kept = support::random_subset(random, {lengths, lengths + kept.rows()}, random.pick({0.0, 0.5}));
      }
      pack_problem<decltype(view(0)), decltype(view(0))> p{c.view, kept.view(), c.view};
      p.positions = engine.position_column(layer, engine.here());
      p.source_scores = c.scores;
      p.scores = column;
      p.lengths = engine.lengths.data() + layer * s.sequences * s.heads;
      p.pool = engine.facts();
      cpu::pack(p, workers);
      for (index_t row = 0; row < kept.rows(); ++row)
        heads[std::size_t(row)].keep(kept.row(row), kept.counts[std::size_t(row)]);
    }
    packed = true;
    const index_t room = random.pick({0, 0, 1, 9});
    const auto before = engine.held;
    std::vector<index_t> freed(std::size_t(rows_of_tables * s.max_blocks), -1), counts(freed.size(), 0);
    cpu::free_pages(engine.freeing(engine.here(), engine.held.data(), freed.data(), counts.data(), room));
    for (index_t row = 0; row < rows_of_tables; ++row) {
      index_t longest = 0;
      for (index_t layer = 0; layer < s.layers; ++layer) {
        for (index_t h = 0; h < s.heads; ++h) {
          if (s.own_tables && h != row % s.heads) continue;
          longest = std::max(
              longest,
              index_t(model[std::size_t(layer)][std::size_t(row / s.tables() * s.heads + h)].positions.size()));
        }
      }
      const auto at = std::size_t(row);
      REQUIRE(engine.held[at] == std::min(before[at], (longest + room + s.page - 1) / s.page));
      REQUIRE(engine.held[at] + counts[at] == before[at]);
      for (index_t i = 0; i < counts[at]; ++i) {
        REQUIRE(freed[std::size_t(row * s.max_blocks + i)] ==
                engine.table[std::size_t(row * s.max_blocks + engine.held[at] + i)]);
      }
    }
    engine.take_back(freed, counts);
  }

  void check_chosen(index_t layer, index_t b, const selection& kept, const std::vector<float>& q, index_t queries,
                    index_t valid, index_t budget) {
    std::vector<std::vector<double>> scores, candidates;
    std::vector<index_t> lengths;
    const index_t tail = observed == observes::window ? valid : policy.scorer.protected_tail(budget);
    for (index_t h = 0; h < s.heads; ++h) {
      scores.push_back(scores_of(layer, b, h, q, queries, valid));
      lengths.push_back(index_t(scores.back().size()));
      candidates.emplace_back(scores.back().begin(), scores.back().end() - std::min(tail, lengths.back()));
    }
    std::vector<index_t> counts = lengths;
    const bool whole = *std::max_element(lengths.begin(), lengths.end()) <= budget;
    constexpr bool adaptive_budget = std::is_same_v<typename Policy::budget_type, adaptive>;
    if (!whole && adaptive_budget) counts = support::oracle::adaptive_counts(candidates, lengths, budget, tail, 200);
    for (index_t h = 0; h < s.heads; ++h) {
      const index_t row = b * s.heads + h, length = lengths[std::size_t(h)];
      if (!whole && !adaptive_budget) counts[std::size_t(h)] = std::min(length, budget);
      const std::vector<index_t> slots(kept.row(row), kept.row(row) + kept.counts[std::size_t(row)]);
      const index_t count = std::clamp(counts[std::size_t(h)], std::min(tail, length), length);
      if constexpr (observed == observes::window) {
        // Heads whose scores differ by rounding may win each other's places.
        REQUIRE(std::abs(index_t(slots.size()) - count) <= (adaptive_budget ? 1 : 0));
        REQUIRE(support::may_be_chosen(scores[std::size_t(h)], tail, slots, 1e-4));
      } else {
        REQUIRE(slots == support::oracle::top_tokens(scores[std::size_t(h)], tail, count));
      }
    }
  }

  void check_stored() {
    for (index_t layer = 0; layer < s.layers; ++layer) {
      const auto view = this->view(layer);
      bool same = true;
      for (index_t b = 0; b < s.sequences; ++b) {
        for (index_t h = 0; h < s.heads; ++h) {
          const plain_head& head = model[std::size_t(layer)][std::size_t(b * s.heads + h)];
          REQUIRE(view.length(b, h) == index_t(head.positions.size()));
          for (index_t i = 0; i < view.length(b, h); ++i) {
            REQUIRE(view.position(b, h, i) == head.positions[std::size_t(i)]);
            same &= engine.score_column(layer, engine.here()).entry(b, h, s.heads, i) == head.scores[std::size_t(i)];
            for (int d = 0; d < D; ++d)
              same &= float(view.key(b, h, i)[d]) == head.keys[std::size_t(i)][std::size_t(d)];
            for (int d = 0; d < Dv; ++d)
              same &= float(view.value(b, h, i)[d]) == head.values[std::size_t(i)][std::size_t(d)];
          }
        }
      }
      REQUIRE(same);
    }
    REQUIRE(engine.outside_is_untouched());
  }

  /// Kernels that know one length a sequence read every head as a sequence of its own, and see the same.
  void check_one_head_view(index_t layer, index_t tokens, const std::vector<float>& q,
                           const std::vector<index_t>& first, const std::vector<float>& expected) {
    const auto view = this->view(layer);
    if (D != Dv && !s.split && !s.own_tables) {  // heads of K and of V are cut differently: one table cannot say both
      REQUIRE_THROWS(one_head_view(view, nullptr, 1));
      return;
    }
    const index_t width = s.max_blocks + random.between(0, 2), rows = s.sequences * s.heads;
    std::vector<index_t> blocks(std::size_t(rows * width), -9), first_of_row;
    cpu::virtual_blocks(view, width, blocks.data(), engine.facts());
    std::vector<float> by_head, out(expected.size());
    for (index_t row = 0; row < rows; ++row) {
      first_of_row.push_back(first[std::size_t(row / s.heads)]);
      for (index_t t = 0; t < tokens; ++t) {
        const auto from = q.begin() + (offset_t((row / s.heads * tokens + t) * q_heads) + row % s.heads * group) * D;
        by_head.insert(by_head.end(), from, from + group * D);
      }
    }
    cpu::decode_attention(
        one_head_view(view, blocks.data(), width),
        cpu::query_rows<float>{nhd_rows<const float>(by_head.data(), tokens, group, D, rows), first_of_row.data()},
        logit_rule{}, nullptr, {nhd_rows(out.data(), tokens, group, Dv, rows), {}}, attending, workers);
    bool same = true;
    for (index_t row = 0; row < rows; ++row) {
      for (index_t t = 0; t < tokens; ++t) {
        const auto from =
            expected.begin() + (offset_t((row / s.heads * tokens + t) * q_heads) + row % s.heads * group) * Dv;
        same &= std::equal(from, from + group * Dv, out.begin() + offset_t(row * tokens + t) * group * Dv);
      }
      const index_t used = ceil_div(view.length(row / s.heads, row % s.heads), s.page);
      for (index_t i = used; i < width; ++i) same &= blocks[std::size_t(row * width + i)] == -1;
    }
    REQUIRE(same);
  }

  void decode(index_t tokens) {
    for (index_t layer = 0; layer < s.layers; ++layer) {
      const auto q = rows(std::size_t(s.sequences * tokens * q_heads * D));
      std::vector<float> out(std::size_t(s.sequences * tokens * q_heads * Dv), 1e9f);
      std::vector<index_t> first;
      for (const index_t position : next) first.push_back(std::max(0, position - tokens));
      cpu::decode_attention(
          view(layer), cpu::query_rows<float>{nhd_rows(q.data(), tokens, q_heads, D, s.sequences), first.data()},
          logit_rule{}, nullptr, {nhd_rows(out.data(), tokens, q_heads, Dv, s.sequences), {}}, attending, workers);
      check_one_head_view(layer, tokens, q, first, out);
      double worst = 0;
      for (std::size_t row = 0; row < out.size() / Dv; ++row) {
        const index_t q_head = index_t(row) % q_heads, t = index_t(row) / q_heads % tokens,
                      b = index_t(row) / q_heads / tokens;
        const auto expected = model[std::size_t(layer)][std::size_t(b * s.heads + q_head / group)].attend(
            q.data() + row * D, first[std::size_t(b)] + t, D, Dv);
        worst = std::max(worst, support::row_error(out.data() + row * Dv, expected.out));
      }
      REQUIRE(worst < 1e-4);
    }
  }

  void run() {
    CAPTURE(s.sequences, s.heads, s.page, s.max_blocks, s.hnd, s.own_tables, s.split, group, policy.budget.tokens);
    for (int turn = 0; turn < 3; ++turn) {
      const auto added = append(turn == 0 ? 150 : 40);
      check_stored();
      evict(added);
      check_stored();
      for (int step = 0; step < 2; ++step) {
        append(random.between(1, 3));
        check_stored();
        decode(random.between(1, 3));
      }
    }
  }
};

template <class T, int D, class Table, class Scorer, class Budget, int Dv = D>
void converse(std::uint64_t seed) {
  for (index_t i = 0; i < support::scaled(25); ++i) {
    CAPTURE(i);
    conversation<T, D, Table, retain<Scorer, Budget, top_tokens>, Dv>(seed * 1000 + std::uint64_t(i)).run();
  }
}

}  // namespace

TEST_CASE("an engine evicts twice in pages of its own and decodes on: a window of queries") {
  converse<float, 64, block_table, observation_window, uniform>(1);
  converse<bf16, 64, csr_table, observation_window, uniform, 80>(2);
  converse<float, 64, block_table, observation_window, adaptive>(3);
}

TEST_CASE("an engine evicts twice in pages of its own and decodes on: accumulated scores, ties, heads that compete") {
  converse<float, 64, block_table, accumulated_attention, adaptive>(4);
  converse<fp16, 80, csr_table, accumulated_attention, uniform, 64>(5);
}

TEST_CASE("an engine evicts twice in pages of its own and decodes on: positions, exactly") {
  converse<bf16, 64, block_table, position, uniform>(6);
  converse<float, 64, csr_table, position, uniform>(7);
}

TEST_CASE("log-sum-exps that the engine hands over choose what our own choose") {
  support::rng random(8);
  for (index_t i = 0; i < support::scaled(40); ++i) {
    conversation<float, 64, block_table, retain<observation_window, uniform, top_tokens>> c(900 + std::uint64_t(i));
    c.append(100);
    const index_t queries = 5, rows = queries * c.group;
    const auto q = c.rows(std::size_t(c.s.sequences * queries * c.q_heads * 64));
    choose_problem<decltype(c.view(0)), float> p;
    p.view = c.view(0);
    p.q = nhd_rows(q.data(), queries, c.q_heads, 64, c.s.sequences);
    p.first_position = c.next.data();
    selection own, given;
    cpu::score_and_choose(c.policy, p, own, c.choosing, c.workers);
    std::vector<float> by_head(q.size() / 64), by_token(by_head.size());
    cpu::row_log_sum_exp(p.view, cpu::query_rows<float>{p.q, p.first_position}, p.rule, by_head.data(),
                         c.choosing.scoring, c.workers);
    for (index_t b = 0; b < c.s.sequences; ++b) {
      for (index_t h = 0; h < c.q_heads; ++h) {
        for (index_t t = 0; t < queries; ++t) {
          by_token[std::size_t((b * queries + t) * c.q_heads + h)] =
              by_head[std::size_t((b * c.s.heads + h / c.group) * rows + t * c.group + h % c.group)];
        }
      }
    }
    p.lse = nhd_rows<const float>(by_token.data(), queries, c.q_heads, 1, c.s.sequences);
    cpu::score_and_choose(c.policy, p, given, c.choosing, c.workers);
    REQUIRE(own.counts == given.counts);
    REQUIRE(own.indices == given.indices);
  }
}
