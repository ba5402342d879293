// A second stage over an engine's own blocks on the CPU: the index by block and what a step reads by it, against an oracle
// in double, against the index by row, and against Quest's own cache.
#include "catch.hpp"

#include <cstring>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/read/extrema/block_index.hpp>
#include <tessera/backend/cpu/read/extrema/choose_by_blocks.hpp>
#include <tessera/backend/cpu/read/extrema/page_index.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/scorer/page_min_max.hpp>
#include <tessera/selector/tokens_or_pages.hpp>
#include <tessera/selector/top_pages.hpp>
#include <tessera/tessera.hpp>

#include "support/engine/block_engine.hpp"

using namespace tessera;
using support::block_engine;
using support::block_keys;
using support::block_layout;
namespace oracle = support::oracle;

namespace {

cpu::executor& workers() {
  static cpu::executor one(2);
  return one;
}

template <class T, int D>
struct chosen_rows {
  std::vector<index_t> slots, counts;
  offset_t stride = 0;
  std::vector<index_t> row(index_t r) const {
    return {slots.begin() + r * stride, slots.begin() + r * stride + counts[std::size_t(r)]};
  }
  selection_view view() const { return {slots.data(), counts.data(), nullptr, stride}; }
};

template <class T, int D>
block_extrema_view<T, D> index_of(const block_engine<T, D>& engine, std::vector<T>& memory, index_t page) {
  return block_extrema<D>(memory.data(), page, engine.block, engine.kv_heads);
}

template <class T, int D>
index_blocks_problem<typename block_engine<T, D>::view_type> indexing(const block_engine<T, D>& engine,
                                                                      std::vector<T>& memory, index_t page) {
  index_blocks_problem<typename block_engine<T, D>::view_type> p;
  p.view = engine.view(engine.host());
  p.index = index_of(engine, memory, page);
  p.pool = {engine.blocks, engine.max_blocks};
  return p;
}

template <class T, int D, class Scorer, class Selector>
chosen_rows<T, D> choose(const block_engine<T, D>& engine, std::vector<T>& memory, const Scorer& scorer,
                         const Selector& selector, index_t read, const index_t* reads = nullptr) {
  choose_by_blocks_problem<typename block_engine<T, D>::view_type> p;
  p.view = engine.view(engine.host());
  p.index = index_of(engine, memory, scorer.page);
  p.read = read;
  p.reads = reads;
  p.q = engine.queries(engine.host());
  p.first_position = engine.first.data();
  p.rule = engine.rule;
  p.rule.sink_logits = engine.host().sinks;
  p.pool = {engine.blocks, engine.max_blocks};
  chosen_rows<T, D> made;
  made.stride = max_chosen_slots(read, scorer.page, std::max(engine.tokens, scorer.protected_tail(read)),
                                 std::max(1, engine.longest()));
  made.slots.assign(std::size_t(engine.rows()) * std::size_t(made.stride), -7);
  made.counts.assign(std::size_t(engine.rows()), -7);
  p.out = made.slots.data();
  p.out_stride = made.stride;
  p.counts = made.counts.data();
  host_vector<cpu::page_workspace<D>> workspaces;
  cpu::choose_by_blocks(p, scorer, selector, workspaces, workers());
  return made;
}

/// Every stored page of the index against cpu::page_index over the same keys, bit for bit; everything else untouched.
template <class T, int D>
void holds_the_extrema(const block_engine<T, D>& engine, std::vector<T>& memory, index_t page, std::uint8_t fill) {
  const auto view = engine.view(engine.host());
  const auto by_block = index_of(engine, memory, page);
  std::vector<char> written(memory.size(), 0);
  bool same = true;
  for (index_t b = 0; b < engine.sequences; ++b) {
    auto one = view;
    one.sequences = 1;
    one.lengths += b;
    one.table.blocks += b * engine.max_blocks;
    cpu::page_index<T, D> by_row;
    by_row.reset(engine.kv_heads, page);
    by_row.extend(one);
    for (index_t h = 0; h < engine.kv_heads; ++h) {
      for (index_t p = 0; p * page < view.length(b, h); ++p) {
        const slot_address at = view.table.locate(b, h, p * page);
        const T* const low = by_block.lower(at.outer, index_t(at.row / page), h);
        for (int d = 0; d < D; ++d) {
          same &= std::memcmp(low + d, by_row.view().lower(h, d) + p, sizeof(T)) == 0;
          same &= page == 1 || std::memcmp(low + D + d, by_row.view().upper(h, d) + p, sizeof(T)) == 0;
          written[std::size_t(low + d - memory.data())] = written[std::size_t(low + D + d - memory.data())] = 1;
        }
      }
    }
  }
  REQUIRE(same);
  T untouched;
  std::memset(&untouched, fill, sizeof(T));
  for (std::size_t i = 0; i < memory.size(); ++i)
    same &= written[i] || std::memcmp(&memory[i], &untouched, sizeof(T)) == 0;
  REQUIRE(same);
}

template <class T>
std::vector<T> filled(std::size_t count, std::uint8_t byte) {
  std::vector<T> memory(count);
  std::memset(static_cast<void*>(memory.data()), byte, count * sizeof(T));
  return memory;
}

template <class T, int D>
block_engine<T, D> random_engine(support::rng& random, index_t longest = 300) {
  return support::random_engine<T, D>(
      random, random.pick({block_layout::nhd, block_layout::hnd, block_layout::columns}), random.pick({16, 16, 48}),
      longest, random.pick({block_keys::normal, block_keys::repeated, block_keys::integers, block_keys::specials}));
}

template <class T, int D>
void grows_in_runs(std::uint64_t seed) {
  support::rng random(seed);
  for (index_t i = 0; i < support::scaled(120); ++i) {
    auto engine = random_engine<T, D>(random);
    const index_t page = random.pick({1, 4, 8, 16});
    CAPTURE(i, page, engine.block, int(engine.layout), engine.sequences, engine.kv_heads);
    auto memory = filled<T>(engine.index_elements(page), 0x33);
    const auto whole = engine.lengths;
    std::vector<index_t> firsts(whole.size(), 0), now(whole.size(), 0);
    // Keys that are not written yet are anything; an engine's chunks, steps, and a repeated call.
    for (bool done = false; !done;) {
      done = true;
      for (std::size_t b = 0; b < whole.size(); ++b) {
        if (now[b] < engine.shared[b]) {  // as a prefix cache finds it: once it has been written, and all of it
          done = false;
          if (now[0] < whole[0]) continue;
          now[b] = engine.shared[b];
        }
        firsts[b] = random.chance(0.2) ? std::max(engine.shared[b], now[b] - random.between(0, 3)) : now[b];
        now[b] = std::min(whole[b], now[b] + random.pick({0, 1, 1, 7, 16, 40, 200}));
        done &= now[b] == whole[b];
      }
      engine.lengths = now;
      auto p = indexing(engine, memory, page);
      p.first_slots = firsts.data();
      p.new_tokens = 1;
      cpu::index_blocks(p, workers());
      if (random.chance(0.3)) holds_the_extrema(engine, memory, page, 0x33);
    }
    holds_the_extrema(engine, memory, page, 0x33);
    auto at_once = filled<T>(memory.size(), 0x33);
    cpu::index_blocks(indexing(engine, at_once, page), workers());
    REQUIRE(std::memcmp(memory.data(), at_once.data(), memory.size() * sizeof(T)) == 0);
  }
}

template <class T, int D>
void quest_chooses_the_oracles(std::uint64_t seed, index_t times) {
  support::rng random(seed);
  index_t open = 0, rows = 0;
  for (index_t i = 0; i < support::scaled(times); ++i) {
    const auto engine = random_engine<T, D>(random);
    const index_t page = random.pick({4, 8, 16, 16, 16});
    const page_min_max scorer{page, D, random.pick({0, 1, 1, 1, 20})};
    const index_t read = random.between(1, std::max(1, engine.longest()));
    auto memory = filled<T>(engine.index_elements(page), 0xff);  // NaN
    cpu::index_blocks(indexing(engine, memory, page), workers());
    std::vector<index_t> reads;
    for (index_t b = 0; b < engine.sequences; ++b) reads.push_back(random.between(1, read));
    const bool apart = random.chance(0.3);
    const auto got = choose(engine, memory, scorer, top_pages{page}, read, apart ? reads.data() : nullptr);
    const auto view = engine.view(engine.host());
    for (index_t row = 0; row < engine.rows(); ++row) {
      const index_t b = row / engine.kv_heads, h = row % engine.kv_heads, n = view.length(b, h);
      const index_t keep = apart ? reads[std::size_t(b)] : read;
      const index_t tail = std::max(engine.tokens > 1 ? engine.tokens : 0, scorer.protected_tail(keep));
      CAPTURE(i, row, n, page, keep, tail, engine.group, engine.tokens, engine.block, int(engine.layout));
      const auto chosen = got.row(row);
      if (n <= keep) {
        REQUIRE(index_t(chosen.size()) == n);
        continue;
      }
      const auto expected = engine.expected(b, h, {oracle::estimate::quest, page, D});
      const auto want = oracle::top_pages(expected.scores, tail, keep, page);
      const auto verdict = oracle::compare_choices(expected, want, chosen, page);
      REQUIRE(verdict != oracle::agreement::wrong);
      open += verdict == oracle::agreement::rounding;
      ++rows;
    }
  }
  CHECK(open < 0.05 * rows + 5);
}

/// The same slots as by an index of the method's own, whatever the scorer and the unit.
template <class T, int D, class Scorer>
void chooses_as_by_row(support::rng& random, const Scorer& scorer, selection_unit unit) {
  const auto engine = random_engine<T, D>(random);
  const index_t read = random.between(1, std::max(1, engine.longest()));
  CAPTURE(scorer.page, scorer.channels, int(unit), read, engine.block, int(engine.layout), engine.tokens, engine.group);
  auto memory = filled<T>(engine.index_elements(scorer.page), 0xff);
  cpu::index_blocks(indexing(engine, memory, scorer.page), workers());
  const tokens_or_pages selector{unit, scorer.page};
  const auto got = choose(engine, memory, scorer, selector, read);
  const auto view = engine.view(engine.host());
  logit_rule rule = engine.rule;
  rule.sink_logits = engine.host().sinks;
  for (index_t b = 0; b < engine.sequences; ++b) {
    auto one = view;
    one.sequences = 1;
    one.lengths += b;
    one.table.blocks += b * engine.max_blocks;
    cpu::page_index<T, D> index;
    index.reset(engine.kv_heads, scorer.page);
    index.extend(one);
    const cpu::query_rows<T> queries{engine.queries(engine.host()).sequence(b), &engine.first[std::size_t(b)]};
    cpu::page_workspace<D> workspace;
    for (index_t h = 0; h < engine.kv_heads; ++h) {
      std::vector<index_t> want(std::size_t(one.length(0, h)) + 1);
      const index_t tail = std::max(engine.tokens > 1 ? engine.tokens : 0, scorer.protected_tail(read));
      const auto choice = cpu::choose_by_pages(one, 0, h, index.view(), queries, rule, scorer, selector, tail, read,
                                               want.data(), nullptr, workspace);
      want.resize(std::size_t(choice.count));
      REQUIRE(got.row(b * engine.kv_heads + h) == want);
    }
  }
}

}  // namespace

TEST_CASE("an index by block grows as an engine writes, and touches nobody else's pages") {
  grows_in_runs<fp32, 64>(301);
  grows_in_runs<bf16, 80>(302);
}

TEST_CASE("Quest over an engine's blocks chooses what the oracle chooses") {
  quest_chooses_the_oracles<fp32, 64>(303, 500);
  quest_chooses_the_oracles<bf16, 96>(304, 200);
}

TEST_CASE("a choice by block is that by row: pages and tokens, all channels and some, pages of one slot") {
  support::rng random(305);
  for (index_t i = 0; i < support::scaled(250); ++i) {
    const auto unit = random.pick({selection_unit::token, selection_unit::page});
    chooses_as_by_row<fp32, 64>(random, page_min_max{random.pick({1, 4, 16}), 64}, unit);
    chooses_as_by_row<bf16, 64>(random, hybrid_min_max{random.pick({1, 2, 8, 16}), random.pick({1, 7, 31, 64})}, unit);
  }
}

TEST_CASE("attention over what is chosen reads an engine's blocks, slots of every kv_head") {
  support::rng random(306);
  for (index_t i = 0; i < support::scaled(80); ++i) {
    auto engine = support::random_engine<fp32, 64>(random, random.pick({block_layout::nhd, block_layout::columns}), 16,
                                                   200, block_keys::normal);
    engine.rule.soft_cap = 0;
    engine.rule.sliding_window = 0;
    engine.sinks.clear();
    const index_t read = random.between(1, std::max(1, engine.longest()));
    auto memory = filled<fp32>(engine.index_elements(16), 0xff);
    cpu::index_blocks(indexing(engine, memory, 16), workers());
    const auto chosen = choose(engine, memory, page_min_max{16, 64}, top_pages{16}, read);
    const auto view = engine.view(engine.host());
    const std::size_t rows = std::size_t(engine.sequences * engine.tokens * engine.q_heads());
    std::vector<float> out(rows * 64, -1.0f);
    cpu::decode_workspace workspace;
    const selection_view selected = chosen.view();
    cpu::decode_attention(view, cpu::query_rows<fp32>{engine.queries(engine.host()), engine.first.data()}, engine.rule,
                          &selected, {nhd_rows(out.data(), engine.tokens, engine.q_heads(), 64, engine.sequences), {}},
                          workspace, workers());
    double worst = 0;
    for (std::size_t r = 0; r < rows; ++r) {
      const index_t b = index_t(r) / (engine.tokens * engine.q_heads()), head = index_t(r) % engine.q_heads();
      const index_t token = index_t(r) / engine.q_heads() % engine.tokens, h = head / engine.group;
      const fp32* const q = engine.q.data() + r * 64;
      std::vector<double> logits;
      std::vector<index_t> seen;
      for (const index_t slot : chosen.row(b * engine.kv_heads + h)) {
        if (slot > engine.first[std::size_t(b)] + token) continue;
        double dot = 0;
        for (int d = 0; d < 64; ++d) dot += double(q[d]) * double(view.key(b, h, slot)[d * view.k_strides.dim]);
        logits.push_back(dot / 8);
        seen.push_back(slot);
      }
      double top = -1e300, sum = 0;
      for (const double x : logits) top = std::max(top, x);
      for (double& x : logits) sum += x = std::exp(x - top);
      for (int d = 0; d < 64; ++d) {
        double want = 0;
        for (std::size_t s = 0; s < seen.size(); ++s) want += logits[s] / sum * double(view.value(b, h, seen[s])[d]);
        worst = std::max(worst, std::abs(want - double(out[r * 64 + std::size_t(d)])));
      }
    }
    REQUIRE(worst < 2e-5);
  }
}

TEST_CASE("steps over an engine's blocks have the outputs of Quest's own cache") {
  constexpr index_t kv_heads = 2, group = 3, q_heads = 6, dim = 64, prompt = 333, steps = 40, budget = 128;
  quest<fp32, dim> recipe;
  recipe.set_budget(budget);
  cache<quest<fp32, dim>> kv({1, q_heads, kv_heads}, recipe, std::make_shared<cpu::executor>(1));
  support::rng random(307);
  block_engine<fp32, dim> engine;
  engine.kv_heads = kv_heads;
  engine.group = group;
  engine.lengths = {prompt + steps};
  engine.max_blocks = engine.blocks = ceil_div(prompt + steps, 16);
  for (index_t i = 0; i < engine.blocks; ++i) engine.table.push_back((i * 5 + 3) % engine.blocks);
  engine.pool.assign(std::size_t(engine.blocks * 16 * kv_heads) * 2 * dim, fp32(0));
  const auto k = support::normals(random, std::size_t(prompt + steps) * kv_heads * dim);
  const auto v = support::normals(random, k.size());
  const auto q = support::normals(random, std::size_t(prompt + steps) * q_heads * dim);
  for (index_t t = 0; t < prompt + steps; ++t) {
    for (index_t h = 0; h < kv_heads; ++h) {
      for (int d = 0; d < dim; ++d) {
        engine.key(0, h, t, d) = k[std::size_t((t * kv_heads + h) * dim + d)];
        engine.value(0, h, t, d) = v[std::size_t((t * kv_heads + h) * dim + d)];
      }
    }
  }
  const auto rows = [&](const std::vector<float>& x, index_t first, index_t tokens, index_t heads) {
    return nhd_rows<const float>(x.data() + std::size_t(first) * std::size_t(heads) * dim, tokens, heads, dim);
  };
  const index_t id = kv.open();
  kv.prefill(0, id, rows(q, 0, prompt, q_heads), rows(k, 0, prompt, kv_heads), rows(v, 0, prompt, kv_heads));
  kv.end_prefill(id);
  auto memory = filled<fp32>(engine.index_elements(16), 0xff);
  index_t indexed = 0;
  std::vector<float> want(q_heads * dim), got(q_heads * dim);
  cpu::decode_workspace attending;
  for (index_t t = prompt; t < prompt + steps; ++t) {
    const batch step = kv.prepare_step({id}, 1);
    kv.decode(0, step, rows(q, t, 1, q_heads), rows(k, t, 1, kv_heads), rows(v, t, 1, kv_heads),
              nhd_rows(want.data(), 1, q_heads, dim));
    engine.lengths = {t + 1};
    engine.first = {t};
    engine.q.assign(q.begin() + t * q_heads * dim, q.begin() + (t + 1) * q_heads * dim);
    auto p = indexing(engine, memory, 16);
    p.first_slots = &indexed;
    cpu::index_blocks(p, workers());
    indexed = t + 1;
    const auto chosen = choose(engine, memory, page_min_max{16, dim}, top_pages{16}, budget / 2);
    REQUIRE(chosen.counts[0] <= budget / 2);
    const selection_view selected = chosen.view();
    cpu::decode_attention(engine.view(engine.host()),
                          cpu::query_rows<fp32>{engine.queries(engine.host()), engine.first.data()}, logit_rule{},
                          &selected, {nhd_rows(got.data(), 1, q_heads, dim), {}}, attending, workers());
    REQUIRE(std::memcmp(want.data(), got.data(), want.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("what does not fit an engine's blocks is refused in a sentence") {
  support::rng random(308);
  auto engine = support::random_engine<fp32, 64>(random, block_layout::nhd, 16, 100, block_keys::normal);
  engine.lengths[0] = std::max(engine.lengths[0], 1);
  if (engine.table[0] < 0) engine.table[0] = 0;
  auto memory = filled<fp32>(engine.index_elements(8), 0xff);
  auto p = indexing(engine, memory, 8);
  p.index.page = 5;
  CHECK_THROWS_WITH(cpu::index_blocks(p, workers()),
                    "page of the index is 5; expected a divisor of the engine's block, which is 16; "
                    "index pages that lie within a block");
  p.index.page = 8;
  p.index.data = nullptr;
  CHECK_THROWS_WITH(cpu::index_blocks(p, workers()), contains("data of the index is null"));
  p.index.data = memory.data();
  const std::vector<index_t> negative(std::size_t(engine.sequences), -1);
  p.first_slots = negative.data();
  CHECK_THROWS_WITH(cpu::index_blocks(p, workers()),
                    contains("first new slot of sequence 0 is -1; expected at least 0"));
  p.first_slots = nullptr;
  engine.table[0] = engine.blocks;
  CHECK_THROWS_WITH(cpu::index_blocks(p, workers()), contains("entry 0 of the table of sequence 0"));
  engine.table[0] = 0;
  const std::vector<index_t> too_many(std::size_t(engine.sequences), 9);
  CHECK_THROWS_WITH(choose(engine, memory, page_min_max{8, 64}, top_pages{8}, 8, too_many.data()),
                    contains("tokens to read of sequence 0 is 9; expected 1 to 8"));
}
