// What the host checks of an engine's tables, lengths and selections, and rows by id.
#include "catch.hpp"

#include <limits>
#include <numeric>

#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/backend/cpu/store/free_pages.hpp>
#include <tessera/backend/cpu/store/gather_rows.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/backend/cpu/store/virtual_blocks.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/scorer/position.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

#include "support/engine_case.hpp"

using namespace tessera;
using support::engine_pages;

namespace {

/// A small engine with one sequence of 20 tokens and one of 5, in pages of 4.
struct small_engine {
  support::rng random{7};
  engine_pages<float, 64, block_table> engine;
  cpu::executor workers{1};
  selection all;
  std::vector<index_t> freed = std::vector<index_t>(20), counts = std::vector<index_t>(2);

  small_engine() : engine({.layers = 1, .sequences = 2, .heads = 2, .page = 4, .max_blocks = 10, .pages = 30}, random) {
    engine.make_room(0, 23);
    engine.make_room(1, 5);
    engine.lengths = {20, 20, 5, 5};
    all.reset({20, 20, 5, 5});
    for (index_t r = 0; r < 4; ++r) {
      all.counts[std::size_t(r)] = engine.lengths[std::size_t(r)];
      std::iota(all.row(r), all.row(r) + all.counts[std::size_t(r)], 0);
    }
  }
  auto view() { return engine.view(0, engine.here(), false); }
  void pack() {
    pack_problem<decltype(view()), decltype(view())> p{view(), all.view(), view()};
    p.pool = engine.facts();
    cpu::pack(p, workers);
  }
  void append(index_t tokens) {
    const std::vector<float> rows(std::size_t(2 * tokens * 2 * 64));
    append_problem<decltype(view()), float> p{view(), nhd_rows(rows.data(), tokens, 2, 64, 2),
                                              nhd_rows(rows.data(), tokens, 2, 64, 2)};
    p.pool = engine.facts();
    cpu::append(p);
  }
  void choose(index_t tokens) {
    choose_problem<decltype(view()), float> p;
    p.view = view();
    p.pool = engine.facts();
    p.first_position = engine.lengths.data();
    selection kept;
    cpu::choose_workspace<64> workspace;
    retain<position, uniform, top_tokens> policy;
    policy.budget.tokens = tokens;
    cpu::score_and_choose(policy, p, kept, workspace, workers);
  }
  void free_pages() {
    cpu::free_pages(engine.freeing(engine.here(), engine.held.data(), freed.data(), counts.data(), 0));
  }
};

}  // namespace

TEST_CASE("rows by id are gathered for a batch and go back") {
  const std::vector<index_t> by_id{0, 1, 10, 11, 20, 21, 30, 31}, ids{2, 0, 3};
  std::vector<index_t> rows(6), back = by_id;
  cpu::gather_rows(by_id.data(), ids.data(), 3, 2, rows.data());
  CHECK(rows == std::vector<index_t>{20, 21, 0, 1, 30, 31});
  for (index_t& x : rows) ++x;
  cpu::scatter_rows(rows.data(), ids.data(), 3, 2, back.data());
  CHECK(back == std::vector<index_t>{1, 2, 10, 11, 21, 22, 31, 32});
}

TEST_CASE("pages that sequences share stay as they are, unless a row would move in them") {
  small_engine e;
  e.engine.table[10] = e.engine.table[0];  // both sequences begin with the same page
  CHECK_NOTHROW(e.pack());                 // nothing moves
  e.all.row(0)[19] = 19, e.all.row(0)[4] = 4;
  for (index_t i = 4; i < 19; ++i) e.all.row(0)[i] = i + 1;
  e.all.counts[0] = 19;
  CHECK_NOTHROW(e.pack());  // rows move behind it
  for (index_t i = 2; i < 18; ++i) e.all.row(1)[i] = i + 2;
  e.all.counts[1] = 18;
  CHECK_THROWS_WITH(e.pack(), contains("into which rows of sequence 0, kv_head 1 move, in tables is 2 times; "
                                       "expected once; pack what sequences share into fresh pages"));
}

TEST_CASE("what an engine gets wrong is said before anything is written") {
  small_engine good;
  CHECK_NOTHROW(good.pack());
  CHECK_NOTHROW(good.append(3));
  const auto untouched = [](const small_engine& e) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(e.engine.pool.data());
    return std::all_of(bytes, bytes + e.engine.pool.size() * sizeof(float), [](unsigned char b) { return b == 0xff; });
  };
  {
    small_engine e;
    e.engine.table[1] = 30;
    CHECK_THROWS_WITH(
        e.pack(),
        contains("entry 1 of the table of sequence 0, kv_head 0 is 30; expected a page of the pool, 0 to 29"));
    CHECK_THROWS_WITH(e.choose(4), contains("entry 1 of the table"));
    CHECK_THROWS_WITH(e.free_pages(), contains("entry 1 of table row 0 is 30"));
    e.engine.table[1] = -1;
    CHECK_THROWS_WITH(e.append(1), contains("entry 1 of the table of sequence 0, kv_head 0 is -1"));
    CHECK(untouched(e));
  }
  {
    small_engine e;
    e.engine.lengths[2] = 41;
    CHECK_THROWS_WITH(
        e.choose(4),
        contains("tokens of sequence 1, kv_head 0 is 41; expected at most 40, which is all that its table reaches"));
    CHECK_THROWS_WITH(e.append(1), contains("is 42; expected at most 40"));
    CHECK_THROWS_WITH(e.free_pages(), contains("pages that row 1 of the tables holds is 2; expected 11 to 10"));
  }
  {
    small_engine e;
    CHECK_THROWS_WITH(e.append(36), contains("is 56; expected at most 40"));
    e.all.row(1)[7] = 6;
    CHECK_THROWS_WITH(e.pack(), contains("chosen slot 7 (sequence 0, kv_head 1) is 6; expected more than the one "
                                         "before it, which is 6, and below 20"));
    e.all.row(1)[7] = 7, e.all.row(3)[4] = 5;
    CHECK_THROWS_WITH(e.pack(), contains("chosen slot 4 (sequence 1, kv_head 1) is 5"));
    e.all.row(3)[4] = 4, e.all.row(2)[0] = -1;
    CHECK_THROWS_WITH(e.pack(), contains("chosen slot 0 (sequence 1, kv_head 0) is -1; expected 0 to 4"));
    e.all.row(2)[0] = 0, e.all.counts[2] = 6;
    CHECK_THROWS_WITH(e.pack(), contains("count of chosen slots (sequence 1, kv_head 0) is 6; expected 0 to 5"));
    CHECK(untouched(e));
  }
  {
    small_engine e;
    e.engine.held[0] = 4;
    CHECK_THROWS_WITH(e.free_pages(), contains("pages that row 0 of the tables holds is 4; expected 5 to 10"));
    choose_problem<decltype(e.view()), float> p;
    p.view = e.view();
    selection kept;
    cpu::choose_workspace<64> workspace;
    CHECK_THROWS_WITH(
        cpu::score_and_choose(retain<observation_window, uniform, top_tokens>{}, p, kept, workspace, e.workers),
        contains("first_position is null"));
    CHECK_THROWS_WITH(
        cpu::score_and_choose(retain<accumulated_attention, uniform, top_tokens>{}, p, kept, workspace, e.workers),
        contains("scores is null"));
    pack_problem<decltype(e.view()), decltype(e.view())> uneven{e.view(), e.all.view(), e.view()};
    uneven.target.length_strides = {1, 0};
    uneven.lengths = e.engine.lengths.data();
    e.all.counts[1] = 19;
    CHECK_THROWS_WITH(cpu::pack(uneven, e.workers),
                      contains("(sequence 0, kv_head 1) is 19; expected 20, as in the other heads of the sequence"));
  }
}

TEST_CASE("problems whose shapes or memory make no sense are refused") {
  small_engine e;
  auto freeing = e.engine.freeing(e.engine.here(), e.engine.held.data(), e.freed.data(), e.counts.data(), 0);
  freeing.spare_tokens = -4;
  CHECK_THROWS_WITH(cpu::free_pages(freeing), contains("spare_tokens is -4; expected at least 0"));
  freeing.spare_tokens = 0, freeing.layers = 0;
  CHECK_THROWS_WITH(cpu::free_pages(freeing), contains("layers is 0; expected at least 1"));
  freeing.layers = 1, freeing.freed = nullptr;
  CHECK_THROWS_WITH(cpu::free_pages(freeing), contains("memory of page_counts, freed and freed_count is null"));

  // More tables than heads: nothing may be looked at, and no loop over the heads of a table may go on for ever.
  const std::vector<index_t> indptr{0, 1, 2, 3}, pages{0, 1, 2}, lengths{4, 4};
  kv_view<float, 64, csr_table> view;
  view.sequences = 1, view.kv_heads = 2;
  view.lengths = lengths.data(), view.length_strides = {2, 1};
  view.table = {indptr.data(), pages.data(), 4, 3};
  CHECK_THROWS_WITH(cpu::require_pages(view, {}),
                    contains("tables of a sequence is 3; expected 1, or one for each kv_head, which are 2"));
  view.table.tables_per_sequence = 0;
  CHECK_THROWS_WITH(cpu::require_pages(view, {}), contains("tables of a sequence is 0"));
  view.table.tables_per_sequence = 2;
  CHECK_NOTHROW(cpu::require_pages(view, {}));
  CHECK_THROWS_WITH(cpu::virtual_blocks(view, 0, nullptr), contains("max_blocks is 0; expected at least 1"));

  append_problem<decltype(e.view()), float> rows{e.view(), nhd_rows<const float>(nullptr, 1, 2, 64, 2),
                                                 nhd_rows<const float>(nullptr, 1, 2, 64, 2)};
  CHECK_THROWS_WITH(cpu::append(rows), contains("memory of the problem is null"));
  pack_problem<decltype(e.view()), decltype(e.view())> move{e.view(), e.all.view(), e.view()};
  std::vector<float> scores(100);
  move.scores = {scores.data(), 50, 25};
  CHECK_THROWS_WITH(cpu::pack(move, e.workers), contains("source_scores or source_segments is null"));
}

TEST_CASE("heads whose pages, lengths or positions do not follow one another cannot be sequences of their own") {
  small_engine e;
  std::vector<index_t> blocks(40);
  auto view = e.view();
  CHECK_THROWS_WITH(cpu::virtual_blocks(view, 4, blocks.data()),
                    contains("tokens of sequence 0, kv_head 0 is 20; expected at most 16"));
  CHECK_THROWS_WITH(cpu::virtual_blocks(view, 10, blocks.data(), {.pages = 1 << 30}), contains("expected below 2^31"));
  view.length_strides = {1, 0};
  CHECK_THROWS_WITH(one_head_view(view, blocks.data(), 10),
                    contains("stride of lengths from sequence to sequence is 1"));
  view = e.view();
  view.positions = blocks.data();
  view.position_strides = {50, 20};
  CHECK_THROWS_WITH(one_head_view(view, blocks.data(), 10), contains("is 50; expected kv_heads times"));
  view = e.view();
  view.v_strides.outer *= 2;
  CHECK_THROWS_WITH(one_head_view(view, blocks.data(), 10), contains("heads in a page of V"));
  view.v_strides.outer += 1;
  CHECK_THROWS_WITH(one_head_view(view, blocks.data(), 10), contains("stride from page to page"));
}

TEST_CASE("tokens whose positions, or the one behind them, 32 bits do not hold are refused") {
  small_engine engine;
  const auto append_at = [&](index_t first, index_t tokens) {
    const std::vector<float> rows(std::size_t(2 * tokens * 2 * 64));
    const std::vector<index_t> positions{0, first};
    append_problem<decltype(engine.view()), float> p{engine.view(), nhd_rows(rows.data(), tokens, 2, 64, 2),
                                                     nhd_rows(rows.data(), tokens, 2, 64, 2)};
    p.first_position = positions.data();
    p.pool = engine.engine.facts();
    cpu::append(p);
  };
  constexpr index_t most = std::numeric_limits<index_t>::max();
  CHECK_THROWS_WITH(append_at(most, 1), contains("tokens of sequence 1 is 2147483648; expected at most 2147483647"));
  CHECK_THROWS_WITH(append_at(most - 1, 2), contains("tokens of sequence 1 is 2147483648"));
  CHECK_NOTHROW(append_at(most - 2, 2));
}
