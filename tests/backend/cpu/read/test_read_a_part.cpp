// A decode step that reads a part of an engine's pages, as the guide for engines shows it, beside Quest's own cache.
#include "catch.hpp"

#include <cmath>
#include <cstring>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/read/extrema/block_index.hpp>
#include <tessera/backend/cpu/read/extrema/choose_by_blocks.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/scorer/page_min_max.hpp>
#include <tessera/selector/top_pages.hpp>
#include <tessera/tessera.hpp>

#include "support/engine/block_engine.hpp"

using namespace tessera;
using support::block_engine;

namespace {

// [read_a_part]
/// What an engine keeps beside one layer's pool, and a decode step that reads a part of it as Quest does.
struct part_reader {
  static constexpr int dim = 64;
  static constexpr index_t page = 16, read = 64;  // a page divides the engine's block; a step attends 64 tokens
  using view_type = kv_view<const fp32, dim, block_table>;

  page_min_max scorer = page_min_max{page}.fitted(1, dim);
  std::vector<fp32> extrema;  // [blocks * pages of a block, kv_heads, 2, dim]
  host_vector<cpu::page_workspace<dim>> choosing;
  cpu::decode_workspace attending;

  auto index_of(const view_type& view) {
    return block_extrema<dim>(extrema.data(), page, view.table.page, view.kv_heads);
  }
  /// The engine has written keys: of sequence b the slots from first_slots[b] on, up to its length.
  void follow(const view_type& view, const index_t* first_slots, cpu::executor& workers) {
    index_blocks_problem<view_type> p;
    p.view = view;
    p.index = index_of(view);
    p.first_slots = first_slots;
    cpu::index_blocks(p, workers);
  }
  /// One token of each sequence, stored and indexed: q, out [sequences, 1, q_heads, dim].
  void attend(const view_type& view, const rows_view<const fp32>& q, const index_t* first_position,
              const rows_view<float>& out, cpu::executor& workers) {
    const index_t rows = view.sequences * view.kv_heads, max_chosen = read + 2 * page;
    std::vector<index_t> slots(std::size_t(rows * max_chosen)), counts(std::size_t(rows), 0);
    choose_by_blocks_problem<view_type> p;
    p.view = view;
    p.index = index_of(view);
    p.read = read;
    p.q = q;
    p.first_position = first_position;
    p.out = slots.data();
    p.out_stride = max_chosen;
    p.counts = counts.data();
    cpu::choose_by_blocks(p, scorer, top_pages{page}, choosing, workers);
    const selection_view chosen{slots.data(), counts.data(), nullptr, max_chosen};
    cpu::decode_attention(view, cpu::query_rows<fp32>{q, first_position}, logit_rule{}, &chosen, {out, {}}, attending,
                          workers);
  }
};
// [read_a_part]

}  // namespace

TEST_CASE("steps over an engine's blocks have the outputs of Quest's own cache") {
  constexpr index_t kv_heads = 2, group = 3, q_heads = 6, dim = 64, prompt = 333, steps = 40;
  quest<fp32, dim> recipe;
  recipe.set_budget(2 * part_reader::read);
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
  cpu::executor workers(1);
  part_reader reader;
  reader.extrema = std::vector<fp32>(engine.index_elements(16), fp32(std::nanf("")));
  index_t indexed = 0;
  std::vector<float> want(q_heads * dim), got(q_heads * dim);
  for (index_t t = prompt; t < prompt + steps; ++t) {
    const batch step = kv.prepare_step({id}, 1);
    kv.decode(0, step, rows(q, t, 1, q_heads), rows(k, t, 1, kv_heads), rows(v, t, 1, kv_heads),
              nhd_rows(want.data(), 1, q_heads, dim));
    engine.lengths = {t + 1};
    const auto view = engine.view(engine.host());
    reader.follow(view, &indexed, workers);
    indexed = t + 1;
    reader.attend(view, rows(q, t, 1, q_heads), &t, nhd_rows(got.data(), 1, q_heads, dim), workers);
    REQUIRE(std::memcmp(want.data(), got.data(), want.size() * sizeof(float)) == 0);
  }
}
