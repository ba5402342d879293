// A second stage over an engine's own blocks on the GPU: the index by block has the CPU's bits, a choice by it is the
// oracle's but for scores that fp32 cannot tell apart, and both follow tables and lengths in a captured graph.
#include <cstring>
#include <memory>

#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "support/engine/block_engine.hpp"
#include "tessera/backend/cpu/attend/attend.hpp"
#include "tessera/backend/cpu/read/extrema/block_index.hpp"
#include "tessera/backend/cpu/read/extrema/choose_by_blocks.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/read/extrema/block_index.cuh"
#include "tessera/backend/cuda/read/extrema/choose_by_blocks.cuh"
#include "tessera/scorer/hybrid_min_max.hpp"
#include "tessera/scorer/page_min_max.hpp"

using namespace tessera;
using gpu_test::buffer;
using gpu_test::gpu_missing;
using gpu_test::scaled;
using gpu_test::shrunk;
using support::block_engine;
using support::block_keys;
using support::block_layout;
namespace oracle = support::oracle;

namespace {

/// An engine's memory on the device, and an index of its pool.
template <class T, int D>
struct device_engine {
  using view_type = typename block_engine<T, D>::view_type;
  const block_engine<T, D>& engine;
  index_t page;
  buffer<T> pool, q, index;
  buffer<index_t> table, lengths, first, first_slots;
  buffer<float> sinks;

  device_engine(const block_engine<T, D>& of, index_t page_)
      : engine(of),
        page(page_),
        pool(of.pool),
        q(of.q),
        index(of.index_elements(page_)),
        table(of.table),
        lengths(of.lengths),
        first(of.first),
        first_slots(std::vector<index_t>(of.lengths.size(), 0)),
        sinks(of.sinks) {
    index.fill(0x33);
  }
  typename block_engine<T, D>::pointers at() const {
    return {pool.data, q.data, table.data, lengths.data, first.data, engine.sinks.empty() ? nullptr : sinks.data};
  }
  block_extrema_view<T, D> extrema() const { return block_extrema<D>(index.data, page, engine.block, engine.kv_heads); }
  index_blocks_problem<view_type> indexing(index_t new_tokens) const {
    index_blocks_problem<view_type> p;
    p.view = engine.view(at());
    p.index = extrema();
    p.first_slots = first_slots.data;
    p.new_tokens = new_tokens;
    p.pool = {engine.blocks, engine.max_blocks};
    return p;
  }
  choose_by_blocks_problem<view_type> choosing(index_t read, buffer<index_t>& out, buffer<index_t>& counts,
                                               index_t stride) const {
    choose_by_blocks_problem<view_type> p;
    p.view = engine.view(at());
    p.index = extrema();
    p.read = read;
    p.q = engine.queries(at());
    p.first_position = first.data;
    p.rule = engine.rule;
    p.rule.sink_logits = at().sinks;
    p.out = out.data;
    p.out_stride = stride;
    p.counts = counts.data;
    return p;
  }
};

template <class T, int D>
std::vector<T> index_of_the_cpu(const block_engine<T, D>& engine, index_t page) {
  std::vector<T> memory(engine.index_elements(page));
  std::memset(static_cast<void*>(memory.data()), 0x33, memory.size() * sizeof(T));
  index_blocks_problem<typename block_engine<T, D>::view_type> p;
  p.view = engine.view(engine.host());
  p.index = block_extrema<D>(memory.data(), page, engine.block, engine.kv_heads);
  cpu::executor alone(1);
  cpu::index_blocks(p, alone);
  return memory;
}

template <class T, int D>
block_engine<T, D> random_engine(support::rng& random, index_t longest) {
  return support::random_engine<T, D>(
      random, random.pick({block_layout::nhd, block_layout::hnd}), random.pick({16, 16, 16, 32}), longest,
      random.pick({block_keys::normal, block_keys::repeated, block_keys::integers, block_keys::specials}));
}

template <class T, int D>
void index_has_the_cpus_bits(std::uint64_t seed) {
  support::rng random(seed + support::more_seed());
  for (int i = 0; i < scaled(60, 4); ++i) {
    auto engine = random_engine<T, D>(random, shrunk(600, 100));
    const index_t page = random.pick({1, 4, 8, 16, 16});
    CAPTURE(i, page, engine.block, int(engine.layout), engine.sequences, engine.kv_heads, engine.longest());
    device_engine<T, D> device(engine, page);
    const auto whole = engine.lengths;
    std::vector<index_t> firsts(whole.size(), 0), now(whole.size(), 0);
    for (bool done = false; !done;) {
      done = true;
      for (std::size_t b = 0; b < whole.size(); ++b) {
        if (now[b] < engine.shared[b]) {
          done = false;
          if (now[0] < whole[0]) continue;
          now[b] = engine.shared[b];
        }
        firsts[b] = random.chance(0.2) ? std::max(engine.shared[b], now[b] - random.between(0, 3)) : now[b];
        now[b] = std::min(whole[b], now[b] + random.pick({0, 1, 1, 16, 40, 200}));
        done &= now[b] == whole[b];
      }
      device.lengths.set(now);
      device.first_slots.set(firsts);
      cuda::index_blocks(device.indexing(random.pick({0, 1, 100})), nullptr);
    }
    REQUIRE(gpu_test::same_bits(device.index.get(), index_of_the_cpu(engine, page)));
  }
}

template <class Scorer>
constexpr oracle::estimate estimate_of =
    std::is_same_v<Scorer, page_min_max> ? oracle::estimate::quest : oracle::estimate::hsa;

template <class T, int D, class Scorer>
void chooses_the_oracles(std::uint64_t seed, int times, index_t longest) {
  support::rng random(seed + support::more_seed());
  index_t open = 0, rows = 0;
  const auto info = cuda::device_info::current();
  for (int i = 0; i < scaled(times, 4); ++i) {
    const auto engine = random_engine<T, D>(random, longest);
    Scorer scorer{random.pick({4, 8, 16, 16}), D, random.pick({0, 1, 1, 20})};
    if (estimate_of<Scorer> == oracle::estimate::hsa) scorer.channels = random.pick({1, 7, 31, D});
    const auto unit = estimate_of<Scorer> == oracle::estimate::quest
                          ? selection_unit::page
                          : random.pick({selection_unit::token, selection_unit::page});
    const index_t read = random.between(1, std::max(1, engine.longest()));
    device_engine<T, D> device(engine, scorer.page);
    auto of_device = info;
    if (random.chance(0.3)) of_device.multiprocessors = 1;  // more tiles a block
    const cuda::choose_by_blocks<typename block_engine<T, D>::view_type, Scorer> choose(
        scorer, unit,
        {engine.sequences + random.between(0, 1), engine.kv_heads, engine.q_heads(), engine.tokens,
         std::max(1, engine.longest()), read},
        of_device);
    const index_t stride = choose.max_chosen() + random.between(0, 3);
    buffer<index_t> out(std::size_t(engine.rows() * stride)), counts(std::size_t(engine.rows()));
    buffer<unsigned char> workspace(choose.workspace_bytes());
    out.fill(0xee), counts.fill(0xee), workspace.fill(0xff);
    auto p = device.choosing(read, out, counts, stride);
    std::vector<index_t> reads, channels;
    for (index_t b = 0; b < engine.sequences; ++b) {
      reads.push_back(random.between(1, read));
      channels.push_back(Scorer::normalised ? random.between(1, D) : D);
    }
    const buffer<index_t> reads_at(reads), channels_at(channels);
    const bool apart = random.chance(0.3), planned = random.chance(0.3);
    if (apart) p.reads = reads_at.data;
    if (planned) p.channels = channels_at.data;
    cuda::index_blocks(device.indexing(0), nullptr);
    choose.run(p, workspace.data, nullptr);
    const auto got = out.get(), count = counts.get();
    for (index_t row = 0; row < engine.rows(); ++row) {
      const index_t b = row / engine.kv_heads, h = row % engine.kv_heads, n = engine.lengths[std::size_t(b)];
      const index_t keep = apart ? reads[std::size_t(b)] : read;
      const index_t tail = std::max(engine.tokens > 1 ? engine.tokens : 0, std::min(scorer.protected_tail(read), keep));
      CAPTURE(i, row, n, scorer.page, scorer.channels, int(unit), keep, tail, engine.group, engine.tokens, engine.block,
              int(engine.layout));
      REQUIRE((count[std::size_t(row)] >= 0 && count[std::size_t(row)] <= choose.max_chosen()));
      const std::vector<index_t> chosen(got.begin() + row * stride,
                                        got.begin() + row * stride + count[std::size_t(row)]);
      for (index_t rest = row * stride + count[std::size_t(row)]; rest < (row + 1) * stride; ++rest)
        REQUIRE(got[std::size_t(rest)] == index_t(0xeeeeeeee));
      if (n <= keep) {
        REQUIRE(index_t(chosen.size()) == n);
        for (index_t slot = 0; slot < n; ++slot) REQUIRE(chosen[std::size_t(slot)] == slot);
        continue;
      }
      const auto expected = engine.expected(
          b, h, {estimate_of<Scorer>, scorer.page, planned ? channels[std::size_t(b)] : scorer.channels});
      const auto want = unit == selection_unit::token ? oracle::top_tokens(expected.scores, std::min(tail, keep), keep)
                                                      : oracle::top_pages(expected.scores, tail, keep, scorer.page);
      const auto verdict =
          oracle::compare_choices(expected, want, chosen, unit == selection_unit::token ? 1 : scorer.page);
      REQUIRE(verdict != oracle::agreement::wrong);
      open += verdict == oracle::agreement::rounding;
      ++rows;
    }
    choose.run(p, workspace.data, nullptr);
    REQUIRE(gpu_test::same_bits(out.get(), got));
  }
  CHECK(open < 0.08 * rows + 5);
}

}  // namespace

TEST_CASE("an index by block on the device has the bits of the CPU's") {
  if (gpu_missing()) return;
  index_has_the_cpus_bits<bf16, 128>(401);
  index_has_the_cpus_bits<fp16, 80>(402);
  index_has_the_cpus_bits<fp32, 64>(403);
}

TEST_CASE("Quest over an engine's blocks chooses on the device what the oracle chooses") {
  if (gpu_missing()) return;
  chooses_the_oracles<bf16, 128, page_min_max>(404, 120, 500);
  chooses_the_oracles<fp16, 96, page_min_max>(405, 60, 300);
  chooses_the_oracles<fp32, 64, page_min_max>(406, 80, 400);
  chooses_the_oracles<bf16, 64, page_min_max>(407, 8, shrunk(6000, 700));  // more than a tile of pages
}

TEST_CASE("hybrid sparse attention over an engine's blocks chooses on the device what the oracle chooses") {
  if (gpu_missing()) return;
  chooses_the_oracles<bf16, 64, hybrid_min_max>(408, 100, 400);
  chooses_the_oracles<fp32, 80, hybrid_min_max>(409, 40, 300);
}

TEST_CASE("a captured step over an engine's blocks follows tables, lengths and first slots") {
  if (gpu_missing()) return;
  using view_type = block_engine<bf16, 128>::view_type;
  constexpr index_t sequences = 4, kv_heads = 2, group = 4, page = 16, max_blocks = 40, blocks = 80, read = 64;
  support::rng random(410);
  block_engine<bf16, 128> engine;
  engine.sequences = sequences;
  engine.kv_heads = kv_heads;
  engine.group = group;
  engine.layout = block_layout::hnd;
  engine.max_blocks = max_blocks;
  engine.blocks = blocks;
  for (const float x : support::normals(random, std::size_t(blocks * 16 * kv_heads) * 2 * 128))
    engine.pool.push_back(bf16(x));
  for (const float x : support::normals(random, std::size_t(sequences * group * kv_heads) * 128))
    engine.q.push_back(bf16(x));
  engine.table.assign(std::size_t(sequences * max_blocks), 0);
  engine.lengths.assign(sequences, 0);
  engine.first.assign(sequences, 0);
  engine.shared.assign(sequences, 0);
  device_engine<bf16, 128> device(engine, page);
  const auto info = cuda::device_info::current();
  const cuda::choose_by_blocks<view_type, page_min_max> choose(
      page_min_max{page, 128}, selection_unit::page, {sequences, kv_heads, group * kv_heads, 1, max_blocks * 16, read},
      info);
  cuda::decode_attention<view_type> attend(sequences, kv_heads, group * kv_heads, 1, info);
  buffer<index_t> out(std::size_t(engine.rows() * choose.max_chosen())), counts(std::size_t(engine.rows()));
  buffer<unsigned char> choosing(choose.workspace_bytes()), attending(attend.workspace_bytes());
  buffer<float> output(std::size_t(sequences * group * kv_heads) * 128);
  cudaStream_t stream{};
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  attend.prepare(attending.data, stream);
  const auto step = [&] {
    cuda::index_blocks(device.indexing(1), stream);
    const auto p = device.choosing(read, out, counts, choose.max_chosen());
    choose.run(p, choosing.data, stream);
    attend.run({p.view,
                p.q,
                p.first_position,
                p.rule,
                nhd_rows(output.data, 1, group * kv_heads, 128, sequences),
                {},
                {out.data, counts.data, nullptr, choose.max_chosen()}},
               attending.data, stream);
  };
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  {
    gpu_test::graph captured(stream, step);
    for (int turn = 0; turn < scaled(12, 3); ++turn) {
      std::vector<index_t> ids(blocks), firsts;
      std::iota(ids.begin(), ids.end(), 0);
      for (index_t i = blocks - 1; i > 0; --i) std::swap(ids[std::size_t(i)], ids[std::size_t(random.between(0, i))]);
      index_t next = 0;
      for (index_t b = 0; b < sequences; ++b) {
        engine.lengths[std::size_t(b)] = random.pick({0, 1, 16, random.between(1, 320), 320});
        engine.first[std::size_t(b)] = std::max(0, engine.lengths[std::size_t(b)] - 1);
        for (index_t i = 0; i < 20; ++i) engine.table[std::size_t(b * max_blocks + i)] = ids[std::size_t(next++)];
        firsts.push_back(0);
      }
      device.table.set(engine.table), device.lengths.set(engine.lengths), device.first.set(engine.first);
      device.first_slots.set(firsts);
      captured.launch();
      const auto slots = out.get(), count = counts.get();
      const auto result = output.get();
      for (index_t row = 0; row < engine.rows(); ++row) {
        const index_t n = engine.lengths[std::size_t(row / kv_heads)];
        REQUIRE(count[std::size_t(row)] == (n <= read ? n : n % 16 == 0 ? read : read - 16 + n % 16));
      }
      output.fill(0), out.fill(0xff), counts.fill(0xff);
      step();
      cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      REQUIRE(gpu_test::same_bits(counts.get(), count));
      REQUIRE(gpu_test::same_bits(output.get(), result));
      // Attention over the choice against the CPU's, over the same slots.
      std::vector<float> want(result.size(), 0.0f);
      const selection_view chosen{slots.data(), count.data(), nullptr, choose.max_chosen()};
      cpu::decode_workspace workspace;
      cpu::executor alone(1);
      cpu::decode_attention(
          engine.view(engine.host()), cpu::query_rows<bf16>{engine.queries(engine.host()), engine.first.data()},
          logit_rule{}, &chosen, {nhd_rows(want.data(), 1, group * kv_heads, 128, sequences), {}}, workspace, alone);
      float worst = 0;
      for (std::size_t i = 0; i < want.size(); ++i) worst = std::max(worst, std::abs(want[i] - result[i]));
      REQUIRE(worst < 2e-2f);
    }
  }
  cuda::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

TEST_CASE("what the kernels over blocks cannot take is refused in a sentence") {
  if (gpu_missing()) return;
  support::rng random(411);
  auto engine = support::random_engine<bf16, 64>(random, block_layout::nhd, 16, 60, block_keys::normal);
  device_engine<bf16, 64> device(engine, 8);
  auto p = device.indexing(1);
  p.index.strides.token = 2 * 64 * engine.kv_heads + 4;
  CHECK_THROWS_WITH(cuda::index_blocks(p, nullptr), contains("stride of the index is "));
  const cuda::choose_by_blocks<block_engine<bf16, 64>::view_type, page_min_max> choose(
      page_min_max{8, 64}, selection_unit::page,
      {engine.sequences, engine.kv_heads, engine.q_heads(), engine.tokens, std::max(1, engine.longest()), 16},
      cuda::device_info::current());
  buffer<index_t> out(std::size_t(engine.rows() * choose.max_chosen())), counts(std::size_t(engine.rows()));
  auto c = device.choosing(17, out, counts, choose.max_chosen());
  CHECK_THROWS_WITH(choose.run(c, nullptr, nullptr), contains("what this object was made for"));
  c.read = 16, c.out_stride = 1;
  CHECK_THROWS_WITH(choose.run(c, nullptr, nullptr), contains("out_stride is 1; expected at least "));
}
