// Page tables of an engine's own on the GPU: the paged path, and the bits of Tessera's tables.
#include "backend/cuda/attend/decode_case.hpp"
#include "backend/cuda/attend/prefill_case.hpp"
#include "tessera/backend/cuda/attend/prefill/prefill_attention.cuh"

using namespace tessera;
using namespace gpu_test;
using namespace decode_test;

namespace {

constexpr index_t first_page = 3;

/// Ids that are counted from another page on: none of them lies in memory.
struct moved_table {
  const index_t* ids = nullptr;  // [sequences, max_blocks], each `first_page` too small
  index_t page = 16;
  index_t max_blocks = 0;
  TESSERA_HD index_t page_of(index_t sequence, index_t, index_t i) const {
    return ids[offset_t(sequence) * max_blocks + i] + first_page;
  }
  TESSERA_HD slot_address locate(index_t sequence, index_t head, index_t slot) const {
    return {page_of(sequence, head, slot / page), slot % page};
  }
};

/// A block table under another name.
struct listed_table {
  const index_t* ids = nullptr;  // [sequences, max_blocks]
  index_t page = 16;
  index_t max_blocks = 0;
  TESSERA_HD const index_t* pages(index_t sequence, index_t) const { return ids + offset_t(sequence) * max_blocks; }
  TESSERA_HD index_t tables(index_t) const { return 1; }
  TESSERA_HD slot_address locate(index_t sequence, index_t head, index_t slot) const {
    return {pages(sequence, head)[slot / page], slot % page};
  }
};

/// One that says nothing of its pages.
struct silent_table {
  listed_table table;
  TESSERA_HD slot_address locate(index_t sequence, index_t head, index_t slot) const {
    return table.locate(sequence, head, slot);
  }
};

template <class Table>
inline constexpr bool in_pages = takes_paged_path<kv_view<const bf16, 64, Table>>;
static_assert(in_pages<block_table> && in_pages<moved_table> && in_pages<listed_table> && !in_pages<silent_table>);

/// The same memory behind another table.
template <class Table, class E, int D, int Dv>
kv_view<const E, D, Table, Dv> behind(const kv_view<const E, D, block_table, Dv>& from, const Table& table) {
  kv_view<const E, D, Table, Dv> view;
  view.k = from.k, view.v = from.v;
  view.k_strides = from.k_strides, view.v_strides = from.v_strides;
  view.sequences = from.sequences, view.kv_heads = from.kv_heads;
  view.lengths = from.lengths, view.length_strides = {from.length_strides.sequence, from.length_strides.head};
  view.positions = from.positions;
  view.position_strides = {from.position_strides.sequence, from.position_strides.head};
  view.table = table, view.scales = from.scales;
  return view;
}

std::vector<index_t> moved(std::vector<index_t> ids) {
  for (index_t& id : ids) id -= first_page;
  return ids;
}

/// `check(table)` for each of the tables that an engine may have in place of `blocks`.
template <class Check>
void each_table(const std::vector<index_t>& blocks, const block_table& theirs, const Check& check) {
  const buffer<index_t> ids(moved(blocks));
  const auto max_blocks = index_t(theirs.sequence_stride);
  const listed_table listed{theirs.blocks, theirs.page, max_blocks};
  check(moved_table{ids.data, theirs.page, max_blocks});
  check(listed);
  check(silent_table{listed});
}

/// Decode steps over Tessera's block table, then over an engine's tables.
template <class E, int D>
void decode_alike(const decode_shape& s) {
  decode_case<E, D, block_table> one(s);
  const auto bits_of = [&one](const auto& op, const auto& problem) {
    buffer<unsigned char> workspace(op.workspace_bytes());
    op.prepare(workspace.data, nullptr);
    one.poison();
    op.run(problem, workspace.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "decode attention");
    auto bits = one.out.get();
    const auto lse = one.lse.get();
    bits.insert(bits.end(), lse.begin(), lse.end());
    return bits;
  };
  const auto theirs = one.problem();
  const auto expected = bits_of(one.operation(), theirs);
  CHECK(one.error_now() < 5e-3);
  each_table(one.table, theirs.view.table, [&](const auto& table) {
    using view_type = decltype(behind(theirs.view, table));
    cuda::decode_problem<view_type> own;
    own.view = behind(theirs.view, table);
    own.q = theirs.q, own.first_position = theirs.first_position, own.rule = theirs.rule;
    own.out = theirs.out, own.lse = theirs.lse, own.chosen = theirs.chosen, own.usual_row = theirs.usual_row;
    const cuda::decode_attention<view_type> op(s.sequences, s.heads, one.q_heads, s.tokens,
                                               cuda::device_info::current());
    CHECK(same_bits(bits_of(op, own), expected));
  });
}

template <class View, class Out>
std::vector<float> prefill_bits(const cuda::prefill_problem<View, Out>& problem, const shape& s, buffer<float>& out) {
  const cuda::prefill_attention<View, Out> op(s.sequences, s.heads, s.q_heads(), cuda::device_info::current());
  buffer<unsigned char> workspace(op.workspace_bytes());
  out.fill(0xff);
  op.run(problem, workspace.data, nullptr);
  cuda::check(cudaDeviceSynchronize(), "prefill attention");
  return out.get();
}

}  // namespace

TEST_CASE("GPU decode steps over an engine's own page tables have the bits of Tessera's", "[gpu]") {
  if (gpu_missing()) return;
  for (const bool gather : {false, true}) {
    for (const index_t tokens : {1, 3}) {
      const decode_shape s{
          .sequences = 3, .heads = 2, .tokens = tokens, .capacity = shrunk(3000, 600), .gather = gather};
      INFO("gather " << gather << " tokens " << tokens);
      decode_alike<bf16, 64>(s);   // tiles of 32 tokens: two pages each
      decode_alike<bf16, 128>(s);  // tiles of 16: a page each
      decode_alike<fp8_elements<bf16>, 128>(s);
    }
  }
}

TEST_CASE("GPU prompts over an engine's own page tables have the bits of Tessera's", "[gpu]") {
  if (gpu_missing()) return;
  for (const bool evicted : {false, true}) {
    shape s{2, 2, 4, scaled(200, 40), scaled(600, 60)};
    s.evicted = evicted;
    const pools<bf16, 128, 128, block_table> stored(s);
    const auto q = normal<bf16>(s.query_rows() * 128);
    const buffer<bf16> k(stored.k), v(stored.v), queries(q);
    const buffer<index_t> lengths(stored.lengths), positions(stored.positions), first(stored.first),
        blocks(stored.blocks);
    buffer<float> out(s.query_rows() * 128);
    const auto problem_over = [&](const auto& view) {
      cuda::prefill_problem<std::remove_cvref_t<decltype(view)>> problem;
      problem.view = view;
      problem.q = nhd_rows(queries.data, s.tokens, s.q_heads(), 128, s.sequences);  // memory that may be written
      problem.first_position = first.data;
      problem.rule = {};
      problem.out = nhd_rows(out.data, s.tokens, s.q_heads(), 128, s.sequences);
      problem.lse = {};
      return problem;
    };
    const auto theirs = stored.at(k.data, v.data, lengths.data, positions.data, blocks.data, nullptr, nullptr);
    const auto expected = prefill_bits(problem_over(theirs), s, out);
    each_table(stored.blocks, theirs.table, [&](const auto& table) {
      CHECK(same_bits(prefill_bits(problem_over(behind(theirs, table)), s, out), expected));
    });
  }
}
