// A second stage over an engine's own blocks on the CPU: the index by block and what a step reads by it, against an oracle
// in double, and against the index by row.
#include "catch.hpp"

#include <cstring>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/read/extrema/block_index.hpp>
#include <tessera/backend/cpu/read/extrema/choose_by_blocks.hpp>
#include <tessera/backend/cpu/read/extrema/page_index.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/scorer/page_min_max.hpp>
#include <tessera/selector/tokens_or_pages.hpp>
#include <tessera/selector/top_pages.hpp>

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
                         const Selector& selector, index_t read, const index_t* reads = nullptr,
                         const index_t* channels = nullptr) {
  choose_by_blocks_problem<typename block_engine<T, D>::view_type> p;
  p.view = engine.view(engine.host());
  p.index = index_of(engine, memory, scorer.page);
  p.read = read;
  p.reads = reads;
  p.channels = channels;
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

TEST_CASE("sequences of one call choose by plans of their own") {
  support::rng random(307);
  for (index_t i = 0; i < support::scaled(60); ++i) {
    const auto engine = random_engine<fp32, 64>(random);
    auto memory = filled<fp32>(engine.index_elements(4), 0xff);
    cpu::index_blocks(indexing(engine, memory, 4), workers());
    std::vector<index_t> reads(engine.lengths.size()), channels(reads.size());
    for (index_t& own : reads) own = random.between(1, 300);
    for (index_t& own : channels) own = random.between(1, 64);
    const auto all = choose(engine, memory, hybrid_min_max{4, 7}, top_pages{4}, 300, reads.data(), channels.data());
    for (index_t row = 0; row < engine.rows(); ++row) {
      const auto b = std::size_t(row / engine.kv_heads);
      REQUIRE(all.row(row) == choose(engine, memory, hybrid_min_max{4, channels[b]}, top_pages{4}, reads[b]).row(row));
    }
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

TEST_CASE("a table in CSR form finds the same pages") {
  support::rng random(309);
  for (index_t i = 0; i < support::scaled(40); ++i) {
    const auto engine = random_engine<fp32, 64>(random);
    const auto dense = engine.view(engine.host());
    kv_view<const fp32, 64, csr_table> view;
    std::vector<index_t> indptr{0}, indices;
    for (index_t b = 0; b < engine.sequences; ++b) {
      const auto from = engine.table.begin() + b * engine.max_blocks;
      indices.insert(indices.end(), from, from + ceil_div(engine.lengths[std::size_t(b)], engine.block));
      indptr.push_back(index_t(indices.size()));
    }
    view.k = dense.k;
    view.k_strides = dense.k_strides;
    view.sequences = engine.sequences;
    view.kv_heads = engine.kv_heads;
    view.lengths = dense.lengths;
    view.length_strides = {1, 0};
    view.table = {indptr.data(), indices.data(), engine.block};
    auto memory = filled<fp32>(engine.index_elements(8), 0xff), same = memory;
    cpu::index_blocks(indexing(engine, memory, 8), workers());
    cpu::index_blocks(index_blocks_problem<decltype(view)>{.view = view, .index = index_of(engine, same, 8)},
                      workers());
    REQUIRE(std::memcmp(memory.data(), same.data(), memory.size() * sizeof(fp32)) == 0);
    const auto want = choose(engine, memory, page_min_max{8, 64}, top_pages{8}, 24);
    std::vector<index_t> slots(want.slots.size()), counts(want.counts.size());
    choose_by_blocks_problem<decltype(view)> p;
    p.view = view;
    p.index = index_of(engine, same, 8);
    p.read = 24;
    p.q = engine.queries(engine.host());
    p.first_position = engine.first.data();
    p.rule = engine.rule;
    p.out = slots.data();
    p.out_stride = want.stride;
    p.counts = counts.data();
    host_vector<cpu::page_workspace<64>> workspaces;
    cpu::choose_by_blocks(p, page_min_max{8, 64}, top_pages{8}, workspaces, workers());
    REQUIRE(counts == want.counts);
    for (index_t row = 0; row < engine.rows(); ++row) {
      const auto chosen = want.row(row);
      REQUIRE(std::equal(chosen.begin(), chosen.end(), slots.begin() + row * want.stride));
    }
  }
}

TEST_CASE("what does not fit an engine's blocks is refused in a sentence") {
  support::rng random(308);
  auto engine = support::random_engine<fp32, 64>(random, block_layout::nhd, 16, 100, block_keys::normal);
  engine.lengths[0] = std::max(engine.lengths[0], 1);
  engine.table[0] = std::max(engine.table[0], 0);
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
  CHECK_THROWS_WITH(choose(engine, memory, page_min_max{8, 64}, top_pages{8}, 8, nullptr, negative.data()),
                    contains("channels of sequence 0 is -1; expected 1 to 64"));
}
