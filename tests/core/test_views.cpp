// Every way in which an engine lays out its cache, expressed as a kv_view and attended where it lies.
#include "catch.hpp"

#include <limits>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/core/selection.hpp>

#include "support/kv_tensor.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::kv_tensor;

namespace {

constexpr int dim = 64;
constexpr index_t batch = 3, heads = 4, group = 2;
const std::vector<index_t> sequence_lengths{37, 5, 48};

kv_tensor<float, dim> plain() {
  support::rng random(7);
  std::vector<index_t> lengths;
  for (const index_t length : sequence_lengths) lengths.insert(lengths.end(), std::size_t(heads), length);
  return {random, batch, heads, lengths};
}

template <class View>
std::vector<float> attend(const View& view) {
  support::rng random(8);
  const auto q = support::normals(random, std::size_t(batch * heads * group * dim));
  std::vector<index_t> first;
  for (const index_t length : sequence_lengths) first.push_back(length - 1);
  std::vector<float> out(q.size());
  cpu::executor workers(1);
  cpu::decode_workspace workspace;
  cpu::decode_attention(
      view, cpu::query_rows<float>{nhd_rows(q.data(), 1, heads * group, dim, batch), first.data()}, logit_rule{},
      nullptr, cpu::attention_output{nhd_rows(out.data(), 1, heads * group, dim, batch), {}}, workspace, workers);
  return out;
}

/// Pages handed out in a scrambled order; page 0 is nobody's, and what nobody wrote is NaN.
struct paged_memory {
  std::vector<float> k, v;
  paged_memory(index_t pages, index_t page_elements)
      : k(std::size_t(pages * page_elements), std::numeric_limits<float>::quiet_NaN()), v(k) {}
};

index_t scrambled(index_t i, index_t pages) { return 1 + (i * 7 + 3) % (pages - 1); }

template <class View>
View with_shape(View view) {
  view.sequences = batch;
  view.kv_heads = heads;
  view.lengths = sequence_lengths.data();
  view.length_strides = {1, 0};
  return view;
}

// [own_table]
/// Sequences that begin alike: the pages of what they share stand once, in `prefix`, the others in a row a sequence.
struct prefix_table {
  static constexpr index_t page = 16;
  const index_t* prefix = nullptr;  // [prefix_pages]
  index_t prefix_pages = 0;
  const index_t* own = nullptr;  // [sequences, max_blocks]
  index_t max_blocks = 0;

  TESSERA_HD index_t page_of(index_t sequence, index_t, index_t i) const {
    return i < prefix_pages ? prefix[i] : own[offset_t(sequence) * max_blocks + i - prefix_pages];
  }
  TESSERA_HD slot_address locate(index_t sequence, index_t head, index_t slot) const {
    return {page_of(sequence, head, slot / page), slot % page};
  }
};
static_assert(takes_paged_path<kv_view<const bf16, 128, prefix_table>>);
// [own_table]

/// A table that says nothing of its pages.
struct silent_table {
  prefix_table table;
  TESSERA_HD slot_address locate(index_t sequence, index_t head, index_t slot) const {
    return table.locate(sequence, head, slot);
  }
};
struct table_of_wide_ids : silent_table {
  index_t page = 16;
  offset_t page_of(index_t sequence, index_t head, index_t i) const { return table.page_of(sequence, head, i); }
};
struct listed_table : silent_table {
  index_t page = 16;
  const index_t* pages(index_t, index_t) const { return nullptr; }
  index_t tables(index_t) const { return 1; }
};
template <class Table>
inline constexpr bool in_pages = takes_paged_path<kv_view<float, dim, Table>>;
static_assert(in_pages<block_table> && in_pages<csr_table> && in_pages<listed_table>);
static_assert(!in_pages<contiguous> && !in_pages<ragged> && !in_pages<filtered<block_table>>);
static_assert(!in_pages<silent_table> && !in_pages<table_of_wide_ids>);

/// Copies the plain tensor to wherever a view says that its rows are.
template <class View>
void fill(const View& view, const kv_tensor<float, dim>& from) {
  for (index_t b = 0; b < batch; ++b) {
    for (index_t h = 0; h < heads; ++h) {
      for (index_t s = 0; s < from.length(b, h); ++s) {
        for (int d = 0; d < dim; ++d) {
          view.key(b, h, s)[d * view.k_strides.dim] = from.k[from.row(b, h, s) * dim + std::size_t(d)];
          view.value(b, h, s)[d * view.v_strides.dim] = from.v[from.row(b, h, s) * dim + std::size_t(d)];
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("FlashInfer pages in NHD and HND order behind a CSR table are read where they lie") {
  const auto reference = plain();
  constexpr index_t page = 8, pages = 17;
  std::vector<index_t> indptr{0}, indices;
  for (const index_t length : sequence_lengths) {
    for (index_t i = 0; i < ceil_div(length, page); ++i) indices.push_back(scrambled(index_t(indices.size()), pages));
    indptr.push_back(index_t(indices.size()));
  }
  REQUIRE(index_t(indices.size()) < pages);
  for (const bool nhd : {true, false}) {
    paged_memory memory(pages, page * heads * dim);
    kv_view<float, dim, csr_table> view;
    view.k = memory.k.data();
    view.v = memory.v.data();
    view.k_strides = nhd ? row_strides{page * heads * dim, dim, heads * dim, 1}
                         : row_strides{page * heads * dim, page * dim, dim, 1};
    view.v_strides = view.k_strides;
    view.table = {indptr.data(), indices.data(), page, 1};
    view = with_shape(view);
    fill(view, reference);
    CHECK(
        memory.k[std::size_t(indices[1] * view.k_strides.outer + 2 * view.k_strides.head + 3 * view.k_strides.token)] ==
        reference.k[reference.row(0, 2, page + 3) * dim]);
    CHECK(support::same_bits(attend(view), attend(reference.view())));
  }
}

TEST_CASE("a CSR table with one row for every head reads each head from its own pages") {
  const auto reference = plain();
  constexpr index_t page = 16, pages = 37;
  std::vector<index_t> indptr{0}, indices;
  for (index_t row = 0; row < batch * heads; ++row) {
    for (index_t i = 0; i < ceil_div(sequence_lengths[std::size_t(row / heads)], page); ++i) {
      indices.push_back(scrambled(index_t(indices.size()), pages));
    }
    indptr.push_back(index_t(indices.size()));
  }
  REQUIRE(index_t(indices.size()) < pages);
  paged_memory memory(pages, page * dim);
  kv_view<float, dim, csr_table> view;
  view.k = memory.k.data();
  view.v = memory.v.data();
  view.k_strides = view.v_strides = {page * dim, 0, dim, 1};
  view.table = {indptr.data(), indices.data(), page, heads};
  view = with_shape(view);
  fill(view, reference);
  CHECK(support::same_bits(attend(view), attend(reference.view())));
}

TEST_CASE("vLLM's block table, TensorRT-LLM's pool and TANGRAM's virtual block ids are block tables") {
  const auto reference = plain();
  constexpr index_t page = 16, most_blocks = 3, pages = 40;
  std::vector<index_t> blocks(std::size_t(batch * heads * most_blocks), no_index);
  kv_view<float, dim, block_table> view;
  SECTION("vLLM: blocks [sequences, max_blocks], K and V in halves of one block") {
    std::vector<float> memory(std::size_t(pages * 2 * page * heads * dim), std::numeric_limits<float>::quiet_NaN());
    for (index_t b = 0, given = 0; b < batch; ++b) {
      for (index_t i = 0; i < ceil_div(sequence_lengths[std::size_t(b)], page); ++i) {
        blocks[std::size_t(b * most_blocks + i)] = scrambled(given++, pages);
      }
    }
    view.k = memory.data();
    view.v = memory.data() + page * heads * dim;
    view.k_strides = view.v_strides = {2 * page * heads * dim, dim, heads * dim, 1};
    view.table = {blocks.data(), page, most_blocks, 0};
    view = with_shape(view);
    fill(view, reference);
    CHECK(support::same_bits(attend(view), attend(reference.view())));
  }
  SECTION("TensorRT-LLM: a pool [blocks, 2, kv_heads, page, d] with a table of its own for every head") {
    std::vector<float> memory(std::size_t(pages * 2 * heads * page * dim), std::numeric_limits<float>::quiet_NaN());
    for (index_t h = 0, given = 0; h < heads; ++h) {
      for (index_t b = 0; b < batch; ++b) {
        for (index_t i = 0; i < ceil_div(sequence_lengths[std::size_t(b)], page); ++i) {
          blocks[std::size_t((b * heads + h) * most_blocks + i)] = scrambled(given++, pages);
        }
      }
    }
    view.k = memory.data();
    view.v = memory.data() + heads * page * dim;
    view.k_strides = view.v_strides = {2 * heads * page * dim, page * dim, dim, 1};
    view.table = {blocks.data(), page, heads * most_blocks, most_blocks};
    view = with_shape(view);
    fill(view, reference);
    CHECK(support::same_bits(attend(view), attend(reference.view())));
  }
  SECTION("TANGRAM: [2, pages, group, block, d] seen as single-head pages, id = page * group + column") {
    constexpr index_t columns = 2;
    paged_memory memory(pages * columns, page * dim);
    // Heads 0 and 1 form a group, heads 2 and 3 another; a group's heads share pages and have a column each.
    for (index_t b = 0, given = 0; b < batch; ++b) {
      for (index_t i = 0; i < ceil_div(sequence_lengths[std::size_t(b)], page); ++i) {
        for (index_t pair = 0; pair < heads / columns; ++pair) {
          const index_t physical = scrambled(given++, pages);
          for (index_t column = 0; column < columns; ++column) {
            blocks[std::size_t((b * heads + pair * columns + column) * most_blocks + i)] = physical * columns + column;
          }
        }
      }
    }
    view.k = memory.k.data();
    view.v = memory.v.data();
    view.k_strides = view.v_strides = {page * dim, 0, dim, 1};
    view.table = {blocks.data(), page, heads * most_blocks, most_blocks};
    view = with_shape(view);
    fill(view, reference);
    CHECK(support::same_bits(attend(view), attend(reference.view())));
  }
}

TEST_CASE("an engine's own table of pages gives the bits of Tessera's") {
  const auto reference = plain();
  constexpr index_t page = prefix_table::page, most_blocks = 3, pages = 12, prefix_pages = 1;
  // The last sequence is the longest; what it has in the shared page is what all have there.
  const std::vector<index_t> prefix{7}, own{3, no_index, no_index, no_index, 5, 1};
  const std::vector<index_t> blocks{7, 3, no_index, 7, no_index, no_index, 7, 5, 1};
  paged_memory memory(pages, page * heads * dim);
  kv_view<float, dim, block_table> theirs;
  theirs.k = memory.k.data();
  theirs.v = memory.v.data();
  theirs.k_strides = theirs.v_strides = {page * heads * dim, dim, heads * dim, 1};
  theirs.table = {blocks.data(), page, most_blocks, 0};
  std::vector<index_t> lengths{20, 5, 48};
  theirs = with_shape(theirs);
  theirs.lengths = lengths.data();
  for (index_t b = 0; b < batch; ++b) {
    for (index_t h = 0; h < heads; ++h) {
      for (index_t s = 0; s < lengths[std::size_t(b)]; ++s) {
        std::copy_n(&reference.k[reference.row(2, h, s) * dim], dim, theirs.key(b, h, s));
        std::copy_n(&reference.v[reference.row(2, h, s) * dim], dim, theirs.value(b, h, s));
      }
    }
  }
  const auto behind = [&](const auto& table) {
    kv_view<const float, dim, std::remove_cvref_t<decltype(table)>> view;
    view.k = theirs.k;
    view.v = theirs.v;
    view.k_strides = theirs.k_strides;
    view.v_strides = theirs.v_strides;
    view = with_shape(view);
    view.lengths = lengths.data();
    view.table = table;
    return view;
  };
  const prefix_table table{prefix.data(), prefix_pages, own.data(), most_blocks - prefix_pages};
  const auto expected = attend(theirs);
  CHECK(support::same_bits(attend(behind(table)), expected));
  CHECK(support::same_bits(attend(behind(silent_table{table})), expected));
}

TEST_CASE("rows and views of memory that may be written are taken where they are only read") {
  const auto reference = plain();
  kv_tensor<float, dim> copy = reference;
  kv_view<float, dim> written;
  written.k = copy.k.data();
  written.v = copy.v.data();
  const kv_view<const float, dim> given = reference.view();
  written.k_strides = given.k_strides;
  written.v_strides = given.v_strides;
  written.sequences = given.sequences;
  written.kv_heads = given.kv_heads;
  written.lengths = given.lengths;
  written.length_strides = {given.length_strides.sequence, given.length_strides.head};
  written.positions = given.positions;
  written.position_strides = {given.position_strides.sequence, given.position_strides.head};
  written.position_begin = given.position_begin;
  written.order = slot_order::ascending;
  written.table = given.table;
  const kv_view<const float, dim> read = written;
  CHECK(read.k == written.k);
  CHECK(read.v == written.v);
  CHECK(read.order == slot_order::ascending);
  CHECK(read.position_row(1, 1) == written.position_row(1, 1));
  CHECK(support::same_bits(attend(read), attend(given)));

  std::vector<float> memory(2 * 3 * 4 * dim);
  const rows_view<float> rows = hnd_rows(memory.data(), 3, 4, dim, 2);
  const rows_view<const float> same = rows, also = read_only(rows);
  CHECK(same.row(1, 2, 3) == rows.row(1, 2, 3));
  CHECK(also.row(1, 2, 3) == rows.row(1, 2, 3));
  CHECK((same.sequences == 2 && same.tokens == 3 && same.heads == 4 && same.dim == dim));
}

TEST_CASE("FlashAttention, Hugging Face and llama.cpp tensors need no table") {
  const auto reference = plain();
  constexpr index_t capacity = 52;
  paged_memory memory(batch, heads * capacity * dim);
  kv_view<float, dim> view;
  view.k = memory.k.data();
  view.v = memory.v.data();
  SECTION("FlashAttention: [B, S, H, d] with seqused") {
    view.k_strides = view.v_strides = {capacity * heads * dim, dim, heads * dim, 1};
  }
  SECTION("Hugging Face: [B, H, S, d]") {
    view.k_strides = view.v_strides = {heads * capacity * dim, capacity * dim, dim, 1};
  }
  SECTION("llama.cpp: byte strides nb1, nb2, nb3, V transposed") {
    const std::size_t k_bytes[] = {heads * dim * sizeof(float), dim * sizeof(float),
                                   heads * capacity * dim * sizeof(float)};
    const std::size_t v_bytes[] = {capacity * sizeof(float), dim * capacity * sizeof(float),
                                   heads * capacity * dim * sizeof(float)};
    const auto elements = [](std::size_t bytes) { return offset_t(bytes / sizeof(float)); };
    view.k_strides = {elements(k_bytes[2]), elements(k_bytes[1]), elements(k_bytes[0]), 1};
    view.v_strides = {elements(v_bytes[2]), elements(v_bytes[1]), 1, elements(v_bytes[0])};
  }
  view = with_shape(view);
  fill(view, reference);
  // A transposed V is summed by another kernel: equal to rounding.
  const auto out = attend(view), expected = attend(reference.view());
  CHECK(support::row_error(out.data(), expected) < 1e-6);
}

TEST_CASE("ragged rows give every head a length of its own") {
  const auto reference = plain();
  std::vector<offset_t> begin;
  offset_t total = 0;
  for (index_t row = 0; row < batch * heads; ++row) {
    begin.push_back(total);
    total += sequence_lengths[std::size_t(row / heads)] + row;  // uneven room behind each
  }
  paged_memory memory(index_t(total), dim);
  kv_view<float, dim, ragged> view;
  view.k = memory.k.data();
  view.v = memory.v.data();
  view.k_strides = view.v_strides = {0, 0, dim, 1};
  view.table = {begin.data(), heads};
  view = with_shape(view);
  fill(view, reference);
  CHECK(support::same_bits(attend(view), attend(reference.view())));
}

TEST_CASE("positions are the slots, a strided table, or ragged rows") {
  kv_view<const float, dim> view;
  view.kv_heads = 2;
  CHECK(view.position(1, 1, 5) == 5);
  const std::vector<index_t> table{0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32};
  view.positions = table.data();
  view.position_strides = {6, 3};
  CHECK(view.position(1, 1, 2) == 32);
  view.position_strides = {3, 0};
  CHECK(view.position(1, 1, 2) == 12);
  const std::vector<offset_t> begin{0, 1, 3, 7};
  view.position_begin = begin.data();
  CHECK(view.position(1, 0, 1) == 11);
  CHECK(view.position(1, 1, 3) == 31);
}

TEST_CASE("NHD and HND rows of queries address the same entries in their own order") {
  std::vector<float> memory(2 * 3 * 4 * 5);
  const auto nhd = nhd_rows(memory.data(), 3, 4, 5, 2), hnd = hnd_rows(memory.data(), 3, 4, 5, 2);
  CHECK(nhd.row(1, 2, 3) - memory.data() == ((1 * 3 + 2) * 4 + 3) * 5);
  CHECK(hnd.row(1, 2, 3) - memory.data() == ((1 * 4 + 3) * 3 + 2) * 5);
}

TEST_CASE("a selection's rows lie one after another, or at a fixed stride") {
  selection chosen;
  chosen.reset({2, 0, 3});
  CHECK(chosen.rows() == 3);
  CHECK(chosen.offsets == std::vector<offset_t>{0, 2, 2, 5});
  CHECK(chosen.indices == std::vector<index_t>(5, no_index));
  CHECK(chosen.counts == std::vector<index_t>{0, 0, 0});
  chosen.row(2)[0] = 9;
  chosen.counts[2] = 1;
  CHECK(chosen.view().row(2)[0] == 9);
  CHECK(chosen.view().count(2) == 1);
  const std::vector<index_t> padded{1, 2, no_index, 4, no_index, no_index}, counts{2, 1};
  const selection_view fixed{padded.data(), counts.data(), nullptr, 3};
  CHECK(fixed.row(1)[0] == 4);
  CHECK(fixed.count(1) == 1);
}
