// Rung 9: eviction in pages that an engine owns. It has the pools, the block tables, lengths and positions. Tessera chooses
// what stays, moves it down in the engine's pages, says which of them are empty, and attends what is left.
// The region between the markers stands in docs/engines.md word for word; a check compares the two.
#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/backend/cpu/store/free_pages.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/methods/ada_snapkv.hpp>

#include "own_pages/own_pages.hpp"

using namespace own_pages;
using view_type = kv_view<float, dim, block_table>;

/// New tokens of all sequences, a prompt's or a step's: every head takes them behind what it holds.
void append(const memory<float>& e, block_tables& tables, const model& x, const counts& added, counts& next) {
  const index_t most = *std::max_element(added.begin(), added.end());
  for (index_t b = 0; b < sequences; ++b) tables.reserve(b, e.longest(b) + added[std::size_t(b)]);
  for (index_t layer = 0; layer < layers; ++layer) {
    const auto k = model::take<float>(x.layer[std::size_t(layer)].k, heads, next, added);
    const auto v = model::take<float>(x.layer[std::size_t(layer)].v, heads, next, added);
    cpu::append(appending(e, layer, k.data(), v.data(), most, added.data(), next.data()));
  }
  for (index_t b = 0; b < sequences; ++b) next[std::size_t(b)] += added[std::size_t(b)];
}

// [evict]
/// Keeps what a method's first stage chooses by the newest `seen` queries of each sequence. Empty pages go back to the
/// engine's pool. Returns how many.
template <class Policy>
index_t evict(const memory<float>& e, block_tables& tables, const Policy& policy, const model& x, const counts& seen,
              const counts& next, cpu::executor& workers) {
  counts first = next;
  for (index_t b = 0; b < sequences; ++b) first[std::size_t(b)] -= seen[std::size_t(b)];
  selection kept;
  cpu::choose_workspace<dim> scratch;
  for (index_t layer = 0; layer < layers; ++layer) {
    const auto q = model::take<float>(x.layer[std::size_t(layer)].q, q_heads, first, seen);
    choose_problem<view_type, float> choose;
    choose.view = e.view(layer);
    choose.layer = layer;
    choose.layers = layers;
    choose.q = nhd_rows(q.data(), *std::max_element(seen.begin(), seen.end()), q_heads, dim, sequences);
    choose.valid = seen.data();
    choose.first_position = first.data();
    cpu::score_and_choose(policy, choose, kept, scratch, workers);

    pack_problem<view_type, view_type> move{choose.view, kept.view(), choose.view};  // in place
    move.positions = e.position_column(layer);
    move.lengths = e.layer_lengths(layer);
    move.pool = {pages, max_blocks};
    cpu::pack(move, workers);
  }
  std::vector<index_t> freed(std::size_t(sequences * max_blocks)), freed_count(sequences);
  free_pages_problem<view_type> give_back;
  give_back.view = e.view(0);
  give_back.layers = layers;  // they share the tables: a page is empty when it is so in all of them
  give_back.layer_stride = rows;
  give_back.page_counts = tables.held.data();  // pages of each sequence, before and after
  give_back.freed = freed.data();
  give_back.freed_stride = max_blocks;
  give_back.freed_count = freed_count.data();
  cpu::free_pages(give_back);
  return tables.take_back(freed, freed_count);
}
// [evict]

/// One step over what is left; the largest difference from attention by definition.
double decode(const memory<float>& e, const model& x, const counts& newest, cpu::executor& workers) {
  double worst = 0;
  cpu::decode_workspace scratch;
  for (index_t layer = 0; layer < layers; ++layer) {
    const auto q = model::take<float>(x.layer[std::size_t(layer)].q, q_heads, newest, counts(sequences, 1));
    const cpu::query_rows<float> queries{nhd_rows(q.data(), 1, q_heads, dim, sequences), newest.data()};
    std::vector<float> out(q.size());
    cpu::decode_attention(e.view(layer), queries, logit_rule{}, nullptr,
                          {nhd_rows(out.data(), 1, q_heads, dim, sequences), {}}, scratch, workers);
    worst = std::max(worst, x.worst_error(out, layer, e, newest));
  }
  return worst;
}

int main() {
  const model x;
  block_tables tables;
  std::vector<float> k(layers * pages * page * heads * dim), v(k.size());
  std::vector<index_t> lengths(layers * rows), positions(lengths.size() * slots);
  const memory<float> e{k.data(), v.data(), lengths.data(), positions.data(), tables.blocks.data()};
  cpu::executor workers;
  ladder::checks check;
  ada_snapkv<float, dim> method;  // heads of a layer compete: they keep different numbers of tokens
  method.set_budget(48);

  counts next(sequences), seen{32, 20, 32};  // positions to come; queries that the scorer sees, all of a short prompt
  append(e, tables, x, {250, 20, 129}, next);
  for (int turn = 0; turn < 2; ++turn) {
    const index_t used = pages - index_t(tables.unused.size());
    const index_t freed = evict(e, tables, method.retain, x, seen, next, workers);
    std::printf("%d of %d pages are free again\n", int(freed), int(used));
    check(freed > 0, "an eviction gives whole pages back");
    double worst = 0;
    for (int i = 0; i < 40; ++i) {
      const counts newest = next;
      append(e, tables, x, {1, 1, 1}, next);
      worst = std::max(worst, decode(e, x, newest, workers));
    }
    check(worst < 1e-5, "40 steps over the pages that are left equal attention over the kept rows");
    seen.assign(sequences, 32);  // the second eviction goes by the steps' queries
  }
  return check.exit_code();
}
