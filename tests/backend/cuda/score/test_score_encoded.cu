// Scores of encoded rows on the GPU: the bits that the decoded rows give.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cuda/score/score.cuh"
#include "tessera/scorer/accumulated_attention.hpp"
#include "tessera/scorer/exact_score.hpp"
#include "tessera/scorer/observation_window.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

/// Keys of a batch in runs of `capacity` rows, or in shuffled pages of 16, encoded and decoded.
template <class Encoding, int D, class Table, class Scorer>
void compare(index_t sequences, index_t heads, index_t group, index_t queries, index_t capacity, bool accumulate) {
  using T = typename Encoding::element_type;
  using stored = typename Encoding::stored_type;
  CAPTURE(D, sequences, heads, group, queries, capacity, Scorer::name);
  constexpr index_t page = 16;
  capacity = ceil_div(capacity, page) * page;
  const index_t rows = sequences * heads, pages = capacity / page;
  const auto given = normal<T>(std::size_t(rows) * std::size_t(capacity) * D);
  constexpr int units = D / elements_of_unit<stored>;
  std::vector<stored> encoded(given.size() / std::size_t(D / units));
  std::vector<T> decoded(given.size());
  std::vector<float> scales(std::size_t(rows) * std::size_t(capacity));
  for (std::size_t r = 0; r < scales.size(); ++r) {
    stored* const row = encoded.data() + r * units;
    scales[r] = encode_row<Encoding>(given.data() + r * D, D, row, 1);
    if constexpr (element_block<stored>) {
      if (draw(0, 200) == 0) row[0].step = fp16(NAN);
    } else {
      if (draw(0, 200) == 0) row[5] = stored(NAN);
    }
    for (int d = 0; d < D; ++d) decoded[r * D + std::size_t(d)] = T(float(row_elements(row, d)[0]) * scales[r]);
  }
  std::vector<index_t> lengths, blocks, first;
  std::vector<offset_t> begins;
  for (index_t r = 0; r < rows; ++r) {
    const bool fresh = std::is_same_v<Table, ragged> || r % heads == 0;
    lengths.push_back(fresh ? draw(1, capacity) : lengths.back());
    begins.push_back(offset_t(rows - 1 - r) * capacity);
  }
  for (index_t i = 0; i < rows * pages; ++i) blocks.push_back(i);
  std::shuffle(blocks.begin(), blocks.end(), rng());
  for (index_t b = 0; b < sequences; ++b) first.push_back(std::max(0, lengths[std::size_t(b * heads)] - queries));

  const auto q = normal<T>(std::size_t(sequences * queries * heads * group * D), 2);
  const buffer<T> d_q(q), d_decoded(decoded);
  const buffer<stored> d_encoded(encoded);
  const buffer<float> d_scales(scales);
  const buffer<index_t> d_lengths(lengths), d_blocks(blocks), d_first(first);
  const buffer<offset_t> d_begins(begins);
  const std::vector<float> before(std::size_t(rows * capacity), accumulate ? 0.25f : 0.0f);
  const auto run = [&](auto view, auto* k) {
    constexpr int row = decltype(view)::k_units;
    view.k = k;
    view.sequences = sequences;
    view.kv_heads = heads;
    view.lengths = d_lengths.data;
    view.length_strides = {heads, 1};
    view.scales.k = d_scales.data;
    if constexpr (std::is_same_v<Table, ragged>) {
      view.k_strides = {0, 0, row, 1};
      view.table = {d_begins.data, heads};
    } else if constexpr (std::is_same_v<Table, block_table>) {
      view.k_strides = {page * row, 0, row, 1};
      view.table = {d_blocks.data, page, offset_t(heads) * pages, pages};
      view.scales.outer = page;
    } else {
      view.k_strides = {offset_t(heads) * capacity * row, offset_t(capacity) * row, row, 1};
      view.scales.outer = offset_t(heads) * capacity, view.scales.head = capacity;
    }
    buffer<float> scores(before);
    cuda::score_problem<decltype(view)> p;
    p.view = view;
    p.q = nhd_rows<const T>(d_q.data, queries, heads * group, D, sequences);
    p.first_position = d_first.data;
    p.scores = scores.data;
    p.row_stride = capacity;
    p.accumulate = accumulate;
    // Made for a larger batch than comes.
    const cuda::attentive_score<decltype(view), Scorer> op(sequences + 1, heads, heads * group, queries, capacity,
                                                           cuda::device_info::current());
    const buffer<unsigned char> memory(op.workspace_bytes());
    op.run(p, {}, memory.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "scoring");
    return scores.get();
  };
  const auto expected = run(kv_view<const T, D, Table>{}, d_decoded.data);
  const auto got = run(kv_view<const Encoding, D, Table>{}, d_encoded.data);
  long wrong = 0, scored = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    wrong += !(got[i] == expected[i] || (got[i] != got[i] && expected[i] != expected[i]));
    scored += got[i] == got[i] && got[i] != before[i];
  }
  REQUIRE(wrong == 0);
  REQUIRE(scored > 0);
}

template <class Encoding, int D, class Table>
void all_scorers() {
  for (int i = 0; i < scaled(3); ++i) {
    const index_t capacity = draw(40, scaled(1200, 200));
    compare<Encoding, D, Table, observation_window>(draw(1, 3), draw(1, 3), draw(1, 8), 32, capacity, false);
    compare<Encoding, D, Table, exact_score>(draw(1, 3), 2, 4, 1, capacity, false);
    compare<Encoding, D, Table, accumulated_attention>(draw(1, 2), 2, 3, draw(33, 120), capacity, true);
  }
}

}  // namespace

TEST_CASE("encoded keys score as the decoded ones do, behind every table", "[gpu]") {
  if (gpu_missing()) return;
  all_scorers<fp8_elements<bf16>, 128, contiguous>();
  all_scorers<fp8_elements<bf16>, 64, block_table>();
  all_scorers<fp8_elements<fp16>, 80, ragged>();
  all_scorers<fp8_elements<bf16>, 256, ragged>();
  all_scorers<int8_elements<bf16>, 128, block_table>();
  all_scorers<grouped_elements<bf16, 4, 64>, 128, block_table>();
  all_scorers<grouped_elements<bf16, 2, 64>, 64, ragged>();
}
