// The CUDA cache of TANGRAM: shares by head, chunk by chunk, in runs and in ragged pages, against the CPU's.
#include <deque>

#include "cases/calls_case.hpp"
#include "cases/memory_case.hpp"
#include "cases/serving_case.hpp"
#include "cases/steps_case.hpp"
#include "tessera/backend/cuda/store/virtual_blocks.cuh"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fp8_rows.hpp"
#include "tessera/layout/ragged_pages.hpp"
#include "tessera/layout/runs.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/tangram.hpp"
#include "tessera/scorer/accumulated_attention.hpp"
#include "tessera/scorer/value_norm.hpp"
#include "tessera/scorer/weighted_by.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

constexpr int dim = 64;
using over_pages = tangram<bf16, dim>;
using over_runs = tangram<bf16, dim, dim, stored<dense_rows<bf16, dim>, runs>>;
using over_fp8 = tangram<bf16, dim, dim, stored<fp8_rows<bf16, dim>, ragged_pages>>;
template <class Scorer>
using by_shares = recipe<retain<Scorer, calibrated, top_tokens>, stored<dense_rows<bf16, dim>, ragged_pages>,
                         retrieve_all, dense_decode, each_chunk>;

/// Shares by head that live as long as the program: caches point to them.
const double* random_shares(index_t count) {
  static std::deque<std::vector<double>> all;
  std::vector<double>& shares = all.emplace_back();
  for (index_t i = 0; i < count; ++i) shares.push_back(draw(0, 9) ? double(draw(1, 50)) / 64 : 1.0);
  return shares.data();
}

/// Shares of a random table or, sometimes, of the first prompt; chunks short enough that prompts have several; groups of all
/// sizes that the heads allow.
struct in_chunks {
  template <class Method>
  void operator()(Method& method, const model_shape& shape) const {
    if (draw(0, 3)) {
      method.retain.budget.shares = {random_shares(shape.layers * shape.kv_heads), shape.layers, shape.kv_heads};
    }
    method.schedule.chunk = draw(0, 3) ? draw(8, 90) : 1000;
    method.dense_layers = draw(0, 4) ? 0 : 1;
    if constexpr (requires { method.placement.heads; }) {
      std::vector<index_t> divisors;
      for (index_t heads = 1; heads <= shape.kv_heads; ++heads) {
        if (shape.kv_heads % heads == 0) divisors.push_back(heads);
      }
      method.placement.heads = divisors[std::size_t(draw(0, int(divisors.size()) - 1))];
      method.placement.page = 1 << draw(0, 5);
      method.placement.cluster = clustering(draw(0, 3));
    }
  }
};

/// A cache of one sequence, and what is put into it.
template <class Method>
struct one_cache {
  model_shape shape;
  cuda::cache<Method> kv;

  one_cache(const model_shape& of, const Method& method, index_t tokens, index_t sequences = 1)
      : shape(of), kv(of, method, {.sequences = sequences, .tokens = tokens, .step_tokens = 3}) {
    for (index_t i = 0; i < sequences; ++i) kv.open();
  }
  void prompt(index_t id, const std::deque<step_rows<bf16>>& chunks) {
    std::size_t next = 0;
    for (; next < chunks.size(); next += std::size_t(shape.layers)) {
      for (index_t layer = 0; layer < shape.layers; ++layer) chunk(layer, id, chunks[next + std::size_t(layer)]);
    }
    kv.end_prefill(id, nullptr);
  }
  void chunk(index_t layer, index_t id, const step_rows<bf16>& x) {
    kv.prefill(layer, id, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
               nullptr);
  }
  std::vector<float> step(const std::vector<index_t>& ids, const std::deque<step_rows<bf16>>& rows) {
    const batch now = kv.prepare_step(ids, rows.front().tokens, nullptr);
    kv.begin_step(now, nullptr);
    std::vector<float> all;
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const auto& x = rows[std::size_t(layer)];
      buffer<float> out(std::size_t(x.sequences * x.tokens * x.q_heads * dim));
      out.fill(0xff);
      kv.decode(layer, now, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
                nhd_rows(out.data, x.tokens, x.q_heads, dim, x.sequences), {}, nullptr);
      for (const float value : out.get()) all.push_back(value);
    }
    return all;
  }
};

std::deque<step_rows<bf16>> rows_of(const model_shape& shape, std::initializer_list<index_t> tokens,
                                    index_t sequences = 1) {
  std::deque<step_rows<bf16>> rows;
  for (const index_t n : tokens) {
    for (index_t layer = 0; layer < shape.layers; ++layer) rows.emplace_back(sequences, n, shape, dim);
  }
  return rows;
}

/// Prompts whose chunks are judged by the scorer's own log-sum-exps, by those of the cache's attention, and behind attention of
/// other queries, which says nothing of the window's; and by the CPU. Own and other agree bit for bit; of the rest tokens at
/// the cut may be swapped, as scores differ by rounding, and that prompt ends.
template <class Method>
void judge_behind_attention(int count, scales kind) {
  const float largest = row_largest<typename Method::layout_type::rows_type::encoding_type>(kind);
  long selections = 0, swapped = 0;
  for (const int i : cases(gpu_test::scaled(count, 4))) {
    const index_t layers = draw(1, 2), kv_heads = draw(1, 4), group = draw(1, 8), q_heads = kv_heads * group;
    Method method;
    method.set_budget(draw(40, 120));
    method.retain.scorer.window = draw(1, 32);
    const std::vector<float> sinks = normal<float>(std::size_t(layers * q_heads), 2);
    const buffer<float> device_sinks(sinks);
    model_shape shape{layers, q_heads, kv_heads};
    in_chunks{}(method, shape);
    method.schedule.chunk = draw(8, 90);
    if (i % 5 == 1) method.attention.rule.soft_cap = 15;
    if (i % 5 == 2) method.attention.rule.sliding_window = draw(20, 150);
    if (i % 5 == 3) method.attention.rule.scale = 0.3f;
    const bool with_sinks = i % 4 == 1, odd_keys = i % 4 == 2;
    if (with_sinks) shape.sink_logits = sinks.data();
    cache<Method> host(shape, method, std::make_shared<cpu::executor>(1));
    host.open();
    if (with_sinks) shape.sink_logits = device_sinks.data;
    one_cache<Method> own(shape, method, 600), handed(shape, method, 600), other(shape, method, 600);

    bool same = true;
    const auto compare = [&] {
      for (index_t layer = 0; layer < layers; ++layer) {
        for (index_t h = 0; h < kv_heads; ++h) {
          const auto expected = own.kv.positions(layer, 0, h);
          REQUIRE(other.kv.positions(layer, 0, h) == expected);
          for (const auto& got : {handed.kv.positions(layer, 0, h), host.positions(layer, 0, h)}) {
            REQUIRE(got.size() == expected.size());  // shares count by lengths
            std::vector<index_t> missing;
            std::set_difference(expected.begin(), expected.end(), got.begin(), got.end(), std::back_inserter(missing));
            if (same) REQUIRE(missing.size() <= 1);
            ++selections, swapped += !missing.empty();
            same = same && missing.empty();
          }
        }
      }
    };
    const index_t most = i % 3 ? 90 : 12;  // pieces shorter than the window too
    CAPTURE(i, layers, kv_heads, group, method.schedule.chunk, method.retain.scorer.window, most, with_sinks, odd_keys);
    for (index_t pieces = draw(1, 6); pieces > 0 && same; --pieces) {
      const index_t tokens = draw(1, most);
      for (index_t layer = 0; layer < layers; ++layer) {
        step_rows<bf16> x(1, tokens, shape, dim, largest);
        if (odd_keys && draw(0, 1)) {
          x.k[std::size_t(draw(0, int(x.k.size()) - 1))] = bf16(draw(0, 1) ? NAN : INFINITY);
          x.dk.set(x.k);
        }
        const step_rows<bf16> others(1, tokens, shape, dim);
        host.prefill(layer, 0, x.rows(x.q.data(), q_heads), x.rows(x.k.data(), kv_heads), x.rows(x.v.data(), kv_heads));
        for (one_cache<Method>* each : {&own, &handed, &other}) each->chunk(layer, 0, x);
        buffer<float> out(std::size_t(tokens * q_heads * dim)), lse(std::size_t(tokens * q_heads));
        const auto to = nhd_rows(out.data, tokens, q_heads, dim);
        const auto wanted = draw(0, 1) ? nhd_rows(lse.data, tokens, q_heads, 1) : rows_view<float>{};
        handed.kv.prefill_attention(layer, 0, x.rows(x.dq.data, q_heads), to, wanted, nullptr);
        other.kv.prefill_attention(layer, 0, others.rows(others.dq.data, q_heads), to, wanted, nullptr);
        if (draw(0, 3) == 0) {  // of the newest tokens alone, once more
          const index_t skip = draw(0, tokens - 1);
          handed.kv.prefill_attention(layer, 0, x.rows(x.dq.data, q_heads, skip),
                                      nhd_rows(out.data, tokens - skip, q_heads, dim), {}, nullptr);
        }
      }
      compare();
    }
    if (!same) continue;
    host.end_prefill(0);
    for (one_cache<Method>* each : {&own, &handed, &other}) each->kv.end_prefill(0, nullptr);
    compare();
  }
  INFO(swapped << " of " << selections << " selections differ by a token at the cut");
  CHECK(swapped <= 2 + selections / 100);
}

index_t total(const std::vector<index_t>& pages) { return std::accumulate(pages.begin(), pages.end(), index_t(0)); }

}  // namespace

TEST_CASE("tangram keeps by shares, in chunks and turns, what the CPU keeps, in ragged pages",
          "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  hold_conversations<over_pages>(60, scales::any, in_chunks{});
}
TEST_CASE("tangram keeps by shares, in chunks and turns, what the CPU keeps, in runs", "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  hold_conversations<over_runs>(40, scales::any, in_chunks{});
}
TEST_CASE("tangram over fp8 rows in ragged pages holds the CPU's conversations", "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  hold_conversations<over_fp8>(20, scales::even, in_chunks{});
}
TEST_CASE("shares go with accumulated and with weighted scores", "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  hold_conversations<by_shares<accumulated_attention>>(20, scales::any, in_chunks{});
  hold_conversations<by_shares<weighted_by<observation_window, value_norm>>>(20, scales::any, in_chunks{});
}

TEST_CASE("chunks are judged alike by the scorer's log-sum-exps and by those of the prompt's attention",
          "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  judge_behind_attention<over_pages>(60, scales::any);
  judge_behind_attention<over_runs>(30, scales::any);
  judge_behind_attention<over_fp8>(20, scales::even);
}

TEST_CASE("attention over ragged pages has the bits of attention over runs on the device", "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  for (int i = 0; i < gpu_test::scaled(40, 3); ++i) {
    const index_t layers = draw(1, 3), kv_heads = draw(1, 2) * 2;
    const model_shape shape{layers, kv_heads * draw(1, 8), kv_heads};
    over_pages paged;
    in_chunks{}(paged, shape);
    paged.retain.scorer.window = draw(1, 16);
    over_runs plain;
    plain.retain = paged.retain;
    plain.schedule = paged.schedule;
    plain.dense_layers = paged.dense_layers;
    CAPTURE(i, layers, kv_heads, paged.schedule.chunk, paged.placement.page, paged.placement.heads);
    one_cache<over_pages> one(shape, paged, 600, 2);
    one_cache<over_runs> other(shape, plain, 600, 2);
    for (const index_t id : {0, 1}) {
      const auto prompt = rows_of(shape, {draw(1, 60), draw(1, 60), draw(1, 60)});
      one.prompt(id, prompt);
      other.prompt(id, prompt);
    }
    for (int s = 0; s < shrunk(20, 4); ++s) {
      const auto rows = rows_of(shape, {draw(0, 3) ? 1 : 3}, 2);
      REQUIRE(same_bits(one.step({0, 1}, rows), other.step({0, 1}, rows)));
    }
    for (const index_t id : {0, 1}) {
      for (index_t layer = 0; layer < layers; ++layer) {
        for (index_t h = 0; h < kv_heads; ++h) {
          REQUIRE(one.kv.positions(layer, id, h) == other.kv.positions(layer, id, h));
        }
      }
    }
  }
}

TEST_CASE("a prompt takes the pages that were foreseen, and gives the others back", "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  for (int i = 0; i < gpu_test::scaled(60, 5); ++i) {
    const index_t layers = draw(1, 3), kv_heads = draw(1, 4);
    const model_shape shape{layers, kv_heads, kv_heads};
    over_pages method;
    in_chunks{}(method, shape);
    method.retain.budget.shares = {random_shares(layers * kv_heads), layers, kv_heads};
    method.schedule.chunk = draw(8, 60);
    one_cache<over_pages> one(shape, method, 800);
    const index_t chunk = method.schedule.chunk;
    for (int turn = 0; turn < 2; ++turn) {
      const index_t tokens = draw(1, 200);
      CAPTURE(i, turn, tokens, chunk, method.placement.heads, method.placement.page);
      const page_plan plan = one.kv.plan_pages(0, tokens);
      if (turn == 0) REQUIRE(one.kv.upper_bound_pages(tokens) == plan.peak);
      one.kv.announce(0, tokens);
      index_t most = total(one.kv.pages(0));
      for (index_t done = 0; done < tokens; done += chunk) {
        const auto rows = rows_of(shape, {std::min(chunk, tokens - done)});
        for (index_t layer = 0; layer < layers; ++layer) {
          one.chunk(layer, 0, rows[std::size_t(layer)]);
          most = std::max(most, total(one.kv.pages(0)));
        }
      }
      one.kv.end_prefill(0, nullptr);
      REQUIRE(most == plan.peak);
      REQUIRE(one.kv.pages(0) == plan.final_pages);
    }
    one.kv.close(0);
    REQUIRE(one.kv.open() == 0);
    REQUIRE(total(one.kv.pages(0)) == 0);
  }
}

TEST_CASE("layers that slide take no more pages than their windows were promised", "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  for (int i = 0; i < gpu_test::scaled(20, 3); ++i) {
    model_shape shape{6, 2, 2, i % 2 == 0 ? 16 : 40};
    for (index_t layer = 0; layer < 6; ++layer) shape.sliding.push_back(layer != 5);
    over_pages method;
    method.retain.budget.shares = {random_shares(12), 6, 2};
    method.schedule.chunk = draw(8, 32);
    method.placement.heads = 2;
    method.placement.page = 4;
    method.placement.cluster = clustering::layer;
    const index_t tokens = draw(500, 700), chunk = method.schedule.chunk;
    {
      one_cache<over_pages> unbounded(shape, method, 800);
      method.placement.max_pages = unbounded.kv.upper_bound_pages(tokens);
    }
    CAPTURE(i, shape.window, tokens, chunk, method.placement.max_pages);
    // Every layer but the last holds its window, what it may have left behind, and two chunks.
    REQUIRE(method.placement.max_pages <=
            5 * ceil_div(shape.window + spare_room(shape.window) + 2 * chunk, 4) + ceil_div(tokens, 4));
    one_cache<over_pages> one(shape, method, 800);
    one.kv.announce(0, tokens);
    for (index_t done = 0; done < tokens; done += chunk) {
      const auto rows = rows_of(shape, {std::min(chunk, tokens - done)});
      for (index_t layer = 0; layer < 6; ++layer) one.chunk(layer, 0, rows[std::size_t(layer)]);
    }
    one.kv.end_prefill(0, nullptr);
  }
}

TEST_CASE("a prompt that does not fit into the pool is refused before any of it is taken", "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  const model_shape shape{2, 4, 4};
  over_pages method;
  const double* shares = random_shares(8);
  method.retain.budget.shares = {shares, 2, 4};
  method.schedule.chunk = 32;
  method.placement.max_pages = 0;
  one_cache<over_pages> free_pool(shape, method, 400);
  const index_t wanted = free_pool.kv.upper_bound_pages(150);
  method.placement.max_pages = wanted;
  one_cache<over_pages> one(shape, method, 400, 2);
  const auto prompt = rows_of(shape, {32, 32, 32, 32, 22});
  one.kv.announce(0, 150);
  REQUIRE_THROWS_WITH(one.kv.announce(1, 20), contains("pages of the pool"));
  const auto small = rows_of(shape, {20});
  REQUIRE_THROWS_WITH(one.chunk(0, 1, small[0]), contains("pages of the pool"));
  one.prompt(0, prompt);           // what was promised is there
  method.placement.max_pages = 0;  // a prompt that is not announced may set more aside than it takes
  one_cache<over_pages> alone(shape, method, 400);
  alone.prompt(0, prompt);
  for (index_t layer = 0; layer < 2; ++layer) {
    for (index_t h = 0; h < 4; ++h) REQUIRE(one.kv.positions(layer, 0, h) == alone.kv.positions(layer, 0, h));
  }
  one.kv.close(0);
  one.kv.announce(1, 20);
  one.prompt(1, small);
}

TEST_CASE("a head's blocks in ragged pages are a sequence of one head to paged kernels", "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  const model_shape shape{1, 8, 4};
  over_pages method;
  method.retain.budget.shares = {random_shares(4), 1, 4};
  method.schedule.chunk = 40;
  method.placement.heads = 2;
  one_cache<over_pages> one(shape, method, 400);
  one.prompt(0, rows_of(shape, {40, 40, 33}));
  const auto view = one.kv.view(0, 0);
  const index_t most = 32;
  buffer<index_t> blocks(std::size_t(4 * most));
  cuda::virtual_blocks(view, most, blocks.data, nullptr);
  const auto flat = one_head_view(view, blocks.data, most);
  using flat_type = std::remove_const_t<decltype(flat)>;
  using view_type = std::remove_const_t<decltype(view)>;
  const auto device = cuda::device_info::current();
  const step_rows<bf16> x(1, 1, shape, dim);
  const buffer<index_t> first(std::vector<index_t>(4, 113));
  const auto attended = [&](const auto& of, rows_view<const bf16> q, index_t sequences, index_t kv_heads) {
    using type = std::remove_cvref_t<decltype(of)>;
    const cuda::decode_attention<type> op(sequences, kv_heads, q.heads, 1, device);
    buffer<unsigned char> workspace(op.workspace_bytes());
    op.prepare(workspace.data, nullptr);
    buffer<float> out(std::size_t(8 * dim));
    op.run({of, q, first.data, {}, nhd_rows(out.data, 1, q.heads, dim, sequences), {}, {}}, workspace.data, nullptr);
    return out.get();
  };
  const auto together = attended(static_cast<const view_type&>(view), x.rows(x.dq.data, 8), 1, 4);
  const auto apart = attended(static_cast<const flat_type&>(flat), nhd_rows<const bf16>(x.dq.data, 1, 2, dim, 4), 4, 1);
  REQUIRE(same_bits(together, apart));
}

TEST_CASE("a recorded step in ragged pages follows its growing cache", "[gpu][cache][tangram]") {
  if (gpu_missing()) return;
  replay_steps<over_pages>();
}
TEST_CASE("a cache in ragged pages serves conversations of all lengths in the memory that it began with",
          "[gpu][cache][tangram][long]") {
  if (gpu_missing()) return;
  serve<over_pages>(support::scaled(2500), shrunk(64, 4));
}
TEST_CASE("every allocation of a cache in ragged pages fails once, and the conversation goes on",
          "[gpu][cache][tangram][long]") {
  if (gpu_missing()) return;
  faulty_conversation<over_pages>::fails_everywhere_once();
}
