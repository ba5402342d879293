// The GPU chooses what the CPU chooses.
#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "tessera/backend/cuda/choose/top_k.cuh"
#include "tessera/selector/top_blocks.hpp"
#include "tessera/selector/top_tokens.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {
struct row_case {
  index_t n, keep, tail;
  int kind;
};

/// Runs the rows on the device, twice, and compares with the selector's CPU body.
template <class Selector>
void compare(Selector selector, const std::vector<row_case>& rows, cuda::select_tuning tuning, unsigned seed,
             index_t misalign = 0, bool padded = false) {
  std::mt19937 rng(seed);
  index_t longest = 1;
  for (const auto& r : rows) longest = std::max(longest, r.n);
  const offset_t stride = longest + misalign;
  std::vector<float> scores(std::size_t(stride) * rows.size() + 8, NAN);
  std::vector<index_t> n, keep, tail;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (index_t i = 0; i < rows[r].n; ++i) scores[r * std::size_t(stride) + std::size_t(i)] = score(rows[r].kind, rng);
    n.push_back(rows[r].n), keep.push_back(rows[r].keep), tail.push_back(rows[r].tail);
  }
  buffer<float> d_scores(scores);
  buffer<index_t> d_n(n), d_keep(keep), d_tail(tail), out(std::size_t(stride) * rows.size()), counts(rows.size());
  cuda::select_problem problem{.scores = d_scores.data,
                               .score_stride = stride,
                               .n = {d_n.data},
                               .keep = {d_keep.data},
                               .tail = {d_tail.data},
                               .out = out.data,
                               .out_stride = stride,
                               .counts = counts.data,
                               .pad_to = padded ? longest : 0};
  const cuda::select_slots<Selector> op(selector, index_t(rows.size()), longest, tuning);
  std::vector<index_t> first;
  for (int run = 0; run < gpu_test::scaled(2); ++run) {
    out.fill(0x77), counts.fill(0x77);
    op.run(problem, nullptr, nullptr);
    cuda::check(cudaDeviceSynchronize(), "select");
    const auto got = out.get(), got_counts = counts.get();
    if (run == 1) REQUIRE(got == first);
    first = got;
    if (run == 1) break;
    std::vector<index_t> expected(static_cast<std::size_t>(longest));
    top_k_scratch scratch;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const index_t count = selector.select(scores.data() + r * std::size_t(stride), rows[r].n, rows[r].tail,
                                            rows[r].keep, expected.data(), scratch);
      INFO("row " << r << " n " << rows[r].n << " keep " << rows[r].keep << " tail " << rows[r].tail << " kind "
                  << rows[r].kind << " cluster " << tuning.cluster << " resident " << tuning.resident);
      REQUIRE(got_counts[r] == count);
      index_t wrong = -1;
      for (index_t i = count; i-- > 0;) {
        if (got[r * std::size_t(stride) + std::size_t(i)] != expected[std::size_t(i)]) wrong = i;
      }
      if constexpr (std::is_same_v<Selector, top_blocks>) UNSCOPED_INFO("block " << selector.block);
      if (wrong >= 0) {
        for (index_t i = wrong; i < std::min(count, wrong + 4); ++i) {
          const index_t g = got[r * std::size_t(stride) + std::size_t(i)], e = expected[std::size_t(i)];
          UNSCOPED_INFO(
              "at " << i << " got " << g << " expected " << e << " of score "
                    << scores[r * std::size_t(stride) + std::size_t(e)] << " for "
                    << (g >= 0 && g < rows[r].n ? scores[r * std::size_t(stride) + std::size_t(g)] : -12345.0f));
        }
      }
      REQUIRE(wrong == -1);
      // Nothing is written behind the count but padding.
      for (index_t i = count; i < longest; ++i) {
        if (got[r * std::size_t(stride) + std::size_t(i)] != (padded ? no_index : 0x77777777)) wrong = i;
      }
      REQUIRE(wrong == -1);
    }
  }
}

std::vector<row_case> random_rows(index_t n, std::mt19937& rng) {
  std::vector<row_case> rows;
  const std::vector<index_t> keeps{0, n / 16, n - 1, 1, n / 3 + 1, n, n + 7};
  for (int kind = 0; kind < 8; ++kind) {
    for (int i = 0; i < gpu_test::scaled(7); ++i) {
      rows.push_back({n, keeps[std::size_t(kind + i) % 7], index_t(rng() % 3 ? rng() % 40 : 0), kind});
    }
    if (kind >= gpu_test::scaled(8)) continue;
    rows.push_back(
        {index_t(rng() % (unsigned(n) + 1)), index_t(rng() % (unsigned(n) + 1)), index_t(rng() % 2000), kind});
  }
  return rows;
}
}  // namespace

TEST_CASE("the device chooses the tokens that the CPU chooses", "[gpu]") {
  if (gpu_missing()) return;
  std::mt19937 rng(11);
  for (const index_t n : gpu_test::scaled(std::vector<index_t>{0, 1, 2, 31, 32, 33, 1023, 1024, 1025}, 2)) {
    for (const cuda::select_tuning t :
         {cuda::select_tuning{1, 8192}, {4, 2048}, {8, 1028}, {1, 64}, {8, 0}, {1, 0, cuda::row_search::streamed}}) {
      compare(top_tokens{}, random_rows(n, rng), t, rng(), index_t(rng() % 4), rng() % 2);
    }
  }
  // Too long for registers; all that may be chosen fits in shared memory, or not.
  for (const index_t resident : {12288, 64}) {
    compare(top_tokens{}, random_rows(10000, rng), {1, resident, cuda::row_search::streamed}, rng(), 1, true);
  }
  // Held whole: by one block, up to 13 groups of four keys a thread, and by clusters.
  const index_t held = gpu_test::scaled(52000, 9000);
  for (const cuda::select_tuning t : {cuda::select_tuning{1, 52000}, {4, 13000}, {8, 6500}})
    compare(top_tokens{}, random_rows(held - index_t(rng() % 100), rng), t, rng(), index_t(rng() % 4), rng() % 2);
  // Rows of several tiles a block; streamed ones are guessed at.
  const index_t tiles = gpu_test::scaled(131072, 5000);
  for (const cuda::select_tuning t : {cuda::select_tuning{8, 16384},
                                      {1, 16384},
                                      {4, 16384},
                                      {1, 12288, cuda::row_search::streamed},
                                      {1, 2048, cuda::row_search::streamed},
                                      {1, 0, cuda::row_search::streamed}}) {
    std::vector<row_case> rows;
    for (int kind = 0; kind < 9; ++kind)
      rows.push_back({tiles - kind, tiles / 64 + kind * tiles / 150, kind * 17, kind});
    compare(top_tokens{}, rows, t, rng());
    compare(top_tokens{}, random_rows(tiles / 16, rng), t, rng(), index_t(rng() % 4), rng() % 2);
  }
  const index_t longest = gpu_test::scaled(1048576, 20000);
  std::vector<row_case> rows;
  for (int kind = 0; kind < gpu_test::scaled(4, 2); ++kind) {
    rows.push_back({longest - kind * 5, kind == 1 ? longest - longest / 20 : longest / 16, 64, kind});
  }
  compare(top_tokens{}, rows, {8, 16384}, rng(), 1);
  compare(top_tokens{}, rows, {1, 12288, cuda::row_search::streamed}, rng(), 3);
}

TEST_CASE("a streamed selection is exact where the guess at its cut misleads", "[gpu]") {
  if (gpu_missing()) return;
  std::mt19937 rng(14);
  const index_t n = gpu_test::scaled(131072, 40000);
  const auto compare_scores = [&](const std::vector<float>& scores, index_t keep) {
    buffer<float> d_scores(scores);
    buffer<index_t> counts(1), out{std::vector<index_t>(static_cast<std::size_t>(keep), no_index)};
    const cuda::select_slots<top_tokens> op({}, 1, n, cuda::select_tuning{1, 12288, cuda::row_search::streamed});
    op.run({.scores = d_scores.data,
            .score_stride = n,
            .n = {nullptr, n},
            .keep = {nullptr, keep},
            .tail = {nullptr, 0},
            .out = out.data,
            .out_stride = keep,
            .counts = counts.data},
           nullptr, nullptr);
    cuda::check(cudaDeviceSynchronize(), "select");
    std::vector<index_t> expected(static_cast<std::size_t>(n));
    top_k_scratch scratch;
    expected.resize(std::size_t(top_tokens{}.select(scores.data(), n, 0, keep, expected.data(), scratch)));
    REQUIRE(counts.get() == std::vector<index_t>{keep});
    REQUIRE(out.get() == expected);
  };
  std::vector<float> scores(static_cast<std::size_t>(n));
  const auto fill = [&](auto at) {
    for (index_t i = 0; i < n; ++i) scores[std::size_t(i)] = at(i);
  };
  for (const index_t keep : {index_t(1), n / 64, index_t(12288), index_t(12289), n / 2}) {
    fill([&](index_t i) { return float(i); });  // the best lie together
    compare_scores(scores, keep);
    fill([&](index_t i) { return i / 4 % 16 ? 0.5f * score(0, rng) : 8 + score(0, rng); });  // a period of the sample's
    compare_scores(scores, keep);
    fill([&](index_t i) { return i < n / 100 ? score(0, rng) : -infinity; });  // hardly any may be chosen
    compare_scores(scores, keep);
    fill([&](index_t i) { return i % 3 ? 1.0f : score(0, rng); });  // ties that do not fit
    compare_scores(scores, keep);
    fill([&](index_t) { return -1 - std::abs(score(0, rng)); });
    for (index_t i = 63; i < n; ++i) scores[std::size_t(i)] = scores[std::size_t(i / 63 * 63)];  // pooled
    compare_scores(scores, keep);
  }
}

TEST_CASE("the device chooses the blocks that the CPU chooses", "[gpu]") {
  if (gpu_missing()) return;
  std::mt19937 rng(12);
  for (const index_t n : gpu_test::scaled(std::vector<index_t>{0, 1, 31, 32, 33, 1025, 8192, 1023}, 2)) {
    for (const index_t block : gpu_test::scaled(std::vector<index_t>{1, 3, 16, 1000, 64}, 2)) {
      for (const cuda::select_tuning t : {cuda::select_tuning{1, 8192}, {8, 512}, {4, 4}}) {
        compare(top_blocks{block}, random_rows(n, rng), t, rng());
      }
    }
  }
  std::vector<row_case> rows;
  const index_t tiles = gpu_test::scaled(131072, 5000);
  for (int kind = 0; kind < 9; ++kind) rows.push_back({tiles - kind, tiles / 64 + kind * tiles / 150, kind * 17, kind});
  compare(top_blocks{16}, rows, {8, 1024}, rng());
  // The short block decides: it scores best, and what it leaves goes to one more block.
  for (int trial = 0; trial < gpu_test::scaled(200, 4); ++trial) {
    std::vector<row_case> few;
    for (int r = 0; r < 64; ++r)
      few.push_back({index_t(rng() % 70), index_t(rng() % 70), index_t(rng() % 5), int(rng() % 8)});
    compare(top_blocks{index_t(1 + rng() % 9)}, few, {trial % 2 ? 1 : 4, 64}, rng());
  }
}

TEST_CASE("a captured selection follows lengths and counts", "[gpu]") {
  if (gpu_missing()) return;
  std::mt19937 rng(13);
  const index_t rows = 6, capacity = gpu_test::scaled(40000, 17000);
  std::vector<float> scores(std::size_t(rows) * capacity);
  for (auto& s : scores) s = score(0, rng);
  buffer<float> d_scores(scores);
  buffer<index_t> n(rows), keep(rows), out(std::size_t(rows) * capacity), counts(rows);
  out.fill(0x77);
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  const cuda::select_slots<top_tokens> op({}, rows, capacity, cuda::device_info::current());
  cuda::select_problem problem{.scores = d_scores.data,
                               .score_stride = capacity,
                               .n = {n.data},
                               .keep = {keep.data},
                               .tail = {nullptr, 32},
                               .out = out.data,
                               .out_stride = capacity,
                               .counts = counts.data};
  graph captured(stream, [&] { op.run(problem, nullptr, stream); });
  for (int step = 0; step < gpu_test::scaled(20, 3); ++step) {
    std::vector<index_t> h_n, h_keep;
    for (index_t r = 0; r < rows; ++r)
      h_n.push_back(index_t(rng() % (capacity + 1))), h_keep.push_back(index_t(rng() % 3000));
    n.set(h_n), keep.set(h_keep);
    captured.launch();
    const auto got = out.get(), got_counts = counts.get();
    std::vector<index_t> expected(static_cast<std::size_t>(capacity));
    top_k_scratch scratch;
    for (index_t r = 0; r < rows; ++r) {
      const index_t count = top_tokens{}.select(scores.data() + offset_t(r) * capacity, h_n[std::size_t(r)], 32,
                                                h_keep[std::size_t(r)], expected.data(), scratch);
      REQUIRE(got_counts[std::size_t(r)] == count);
      REQUIRE(std::equal(expected.begin(), expected.begin() + count, got.begin() + offset_t(r) * capacity));
    }
  }
  cudaStreamDestroy(stream);
}

TEST_CASE("a selection refuses shapes that make no sense", "[gpu]") {
  REQUIRE_THROWS_AS((cuda::select_slots<top_blocks>(top_blocks{0}, 1, 10, cuda::select_tuning{1, 4})), tessera::error);
  if (gpu_missing()) return;
  for (const index_t capacity : {10, 3000, 20000, 200000}) {  // what tune_select gives for blocks of one is theirs
    for (const index_t rows : {1, 64}) {
      REQUIRE_NOTHROW(cuda::select_slots<top_blocks>(top_blocks{1}, rows, capacity, cuda::device_info::current()));
    }
  }
  REQUIRE_THROWS_AS((cuda::select_slots<top_tokens>({}, -1, 10, cuda::select_tuning{1, 4})), tessera::error);
  REQUIRE_THROWS_AS((cuda::select_slots<top_tokens>({}, 1, 10, cuda::select_tuning{3, 4})), tessera::error);
}
