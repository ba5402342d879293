// What the host refuses of an engine's calls to the device, and rows by id.
#include <tessera/backend/cpu/choose/score_and_choose.hpp>

#include "backend/cuda/device.hpp"
#include "tessera/backend/cuda/choose/score_and_choose.cuh"
#include "tessera/backend/cuda/store/append.cuh"
#include "tessera/backend/cuda/store/free_pages.cuh"
#include "tessera/backend/cuda/store/gather_rows.cuh"
#include "tessera/backend/cuda/store/pack.cuh"
#include "tessera/backend/cuda/store/virtual_blocks.cuh"
#include "tessera/budget/uniform.hpp"
#include "tessera/scorer/accumulated_attention.hpp"
#include "tessera/scorer/observation_window.hpp"
#include "tessera/selector/top_tokens.hpp"

using namespace tessera;
using namespace gpu_test;

TEST_CASE("rows by id are gathered on the device and go back", "[gpu]") {
  if (gpu_missing()) return;
  for (const index_t width : {1, 3, 64, 200}) {
    std::vector<index_t> by_id(std::size_t(width) * 9);
    std::iota(by_id.begin(), by_id.end(), 0);
    const std::vector<index_t> ids{7, 0, 3, 8, 2};
    buffer<index_t> d_by_id(by_id), d_ids(ids), rows(ids.size() * std::size_t(width));
    cuda::gather_rows(d_by_id.data, d_ids.data, index_t(ids.size()), width, rows.data, nullptr);
    auto got = rows.get();
    for (std::size_t i = 0; i < got.size(); ++i) {
      REQUIRE(got[i] == ids[i / std::size_t(width)] * width + index_t(i % std::size_t(width)));
      got[i] = by_id[std::size_t(got[i])] = -1 - got[i];
    }
    rows.set(got);
    cuda::scatter_rows(rows.data, d_ids.data, index_t(ids.size()), width, d_by_id.data, nullptr);
    REQUIRE(d_by_id.get() == by_id);
  }
}

TEST_CASE("a scorer of a window without queries is refused on both backends in the same sentence", "[gpu]") {
  using view = kv_view<bf16, 64, ragged>;
  const retain<observation_window, uniform, top_tokens> policy;
  const index_t position = 20, length = 20;
  const offset_t begin = 0;
  std::vector<bf16> rows(20 * 64);
  choose_problem<view, bf16> p;
  p.view.k = rows.data(), p.view.v = rows.data();
  p.view.k_strides = p.view.v_strides = {0, 0, 64, 1};
  p.view.sequences = p.view.kv_heads = 1;
  p.view.lengths = &length;
  p.view.table.begin = &begin;
  p.first_position = &position;
  const std::string sentence =
      "queries is none; expected the last ones of each prompt, which this scorer observes; set q and first_position";
  selection kept;
  cpu::choose_workspace<64> workspace;
  cpu::executor workers(1);
  CHECK_THROWS_WITH(cpu::score_and_choose(policy, p, kept, workspace, workers), contains(sentence));
  if (gpu_missing()) return;
  const cuda::score_and_choose<view, std::remove_const_t<decltype(policy)>> choose(policy, {1, 1, 1, 1, 20, 20},
                                                                                   cuda::device_info::current());
  CHECK_THROWS_WITH(choose.run(policy, p, nullptr, nullptr), contains(sentence));
}

TEST_CASE("what the host can know of an engine's call is refused on the device", "[gpu]") {
  if (gpu_missing()) return;
  const auto device = cuda::device_info::current();
  using view = kv_view<bf16, 64, block_table>;
  retain<accumulated_attention, uniform, top_tokens> policy;
  policy.budget.tokens = 40;
  const cuda::score_and_choose<view, decltype(policy)> small(policy, {2, 2, 4, 1, 100, 32}, device);
  choose_problem<view, bf16> p;
  p.view.sequences = 3, p.view.kv_heads = 2;
  CHECK_THROWS_WITH(small.run(policy, p, nullptr, nullptr), contains("sequences and kv_heads is 3 and 2"));
  p.view.sequences = 2;
  CHECK_THROWS_WITH(small.run(policy, p, nullptr, nullptr), contains("scores is null"));
  const float one = 0;
  p.scores = {&one, 300, 100, nullptr};
  CHECK_THROWS_WITH(small.run(policy, p, nullptr, nullptr), contains("sequence stride of the scores is 300"));
  p.scores.sequence_stride = 200;
  CHECK_THROWS_WITH(small.run(policy, p, nullptr, nullptr),
                    contains("tokens that a kv_head may keep is 40; expected at most 32"));
  const index_t number = 1;
  p.budgets = &number;
  CHECK_THROWS_WITH(small.run(policy, p, nullptr, nullptr), contains("tails is null"));

  free_pages_problem<view> f;
  f.view.kv_heads = 2;
  f.view.table = {nullptr, 0, 0, 0};
  CHECK_THROWS_WITH(cuda::free_pages(f, nullptr), contains("slots of a page is 0"));
  f.view.table.page = 16, f.pool.max_blocks = 9, f.freed_stride = 8;
  CHECK_THROWS_WITH(cuda::free_pages(f, nullptr), contains("freed_stride is 8"));
  f.freed_stride = 9, f.spare_tokens = -1;
  CHECK_THROWS_WITH(cuda::free_pages(f, nullptr), contains("spare_tokens is -1"));
  f.spare_tokens = 0, f.view.sequences = 1;
  CHECK_THROWS_WITH(cuda::free_pages(f, nullptr), contains("memory of page_counts, freed and freed_count is null"));
  CHECK_THROWS_WITH(cuda::virtual_blocks(f.view, 0, nullptr, nullptr), contains("max_blocks is 0"));
  const cuda::pack<view, view, true> in_place(1, 1, 10, device);
  pack_problem<view, view> k{};
  bf16 row{};
  k.source.k = &row;
  CHECK_THROWS_WITH(in_place.run(k, nullptr, nullptr), contains("memory of target is another"));
  k.target.k = &row;
  float column = 0;
  k.scores = {&column, 1, 1, nullptr};
  CHECK_THROWS_WITH(in_place.run(k, nullptr, nullptr), contains("source_scores or source_segments is null"));

  const cuda::append<view, bf16> one_sequence(1, 2);
  append_problem<view, bf16> a{};
  a.view.sequences = 2, a.view.kv_heads = 2;
  CHECK_THROWS_WITH(one_sequence.run(a, nullptr, nullptr), contains("sequences and kv_heads is 2 and 2"));
}
