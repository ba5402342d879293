// The GPU scores what the CPU scores.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cpu/score/score.hpp"
#include "tessera/backend/cuda/score/score.cuh"
#include "tessera/scorer/accumulated_attention.hpp"
#include "tessera/scorer/exact_score.hpp"
#include "tessera/scorer/observation_window.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

/// A scorer that is no exponential: any weigh must work.
struct bounded_logit {
  static constexpr const char* name = "bounded_logit";
  static constexpr observes observed = observes::window;
  static constexpr bool comparable_across_heads = true;
  TESSERA_HD float weigh(float logit, float lse) const { return 1.0f / (1.0f + fast_exp(lse * 0.1f - logit)); }
  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const {}
};

/// The largest weight of a window's rows, and of every row so far.
template <class S>
struct loudest : S {
  static constexpr row_join rows = row_join::maximum;
};

struct shape {
  int sequences, heads, group, queries, capacity;
  float soft_cap = 0;
  int window = 0;
  bool sinks = false, spread = false, some_valid = false, odd_values = false;
};

/// One batch on both sides. K is contiguous [sequences, heads, capacity, D], or paged through `Table`.
template <class T, int D, class Table>
struct batch {
  using view_type = kv_view<const T, D, Table>;
  shape s;
  int pages_per_row, page = 16;
  std::vector<T> k, q;
  std::vector<index_t> lengths, positions, first, valid, blocks, indptr;
  std::vector<offset_t> begin;
  std::vector<float> sink_logits;

  explicit batch(const shape& with) : s(with) {
    const int rows = s.sequences * s.heads;
    pages_per_row = (s.capacity + page - 1) / page;
    k = normal<T>(std::size_t(rows) * pages_per_row * page * D);
    q = normal<T>(std::size_t(s.sequences) * s.queries * s.heads * s.group * D, 2);
    sink_logits = normal<float>(std::size_t(s.heads * s.group), 3);
    for (int r = 0; r < rows; ++r)
      lengths.push_back(draw(0, 5) == 0 ? draw(0, std::min(2, s.capacity)) : draw(1, s.capacity));
    lengths[std::size_t(draw(0, rows - 1))] = s.capacity;
    if (std::is_same_v<Table, csr_table> || std::is_same_v<Table, block_table>) {
      for (int r = 0; r < rows; ++r) lengths[std::size_t(r)] = lengths[std::size_t(r / s.heads * s.heads)];
    }
    for (int b = 0; b < s.sequences; ++b) {
      int most = 1;
      for (int h = 0; h < s.heads; ++h) {
        int at = 0;
        const int stored = lengths[std::size_t(b * s.heads + h)];
        for (int i = 0; i < s.capacity; ++i) {
          positions.push_back(at);
          at += s.spread ? draw(1, 3) : 1;
          if (i < stored) most = std::max(most, positions.back() + 1);
        }
      }
      first.push_back(std::max(0, most - draw(1, s.queries + 1)));
      valid.push_back(s.some_valid ? draw(0, s.queries) : s.queries);
    }
    for (int r = 0; r < s.sequences * pages_per_row; ++r) blocks.push_back(r);
    std::shuffle(blocks.begin(), blocks.end(), rng());
    for (int b = 0; b <= s.sequences; ++b) indptr.push_back(b * pages_per_row);
    for (int r = 0; r < rows; ++r) begin.push_back(offset_t(r) * pages_per_row * page);
    if (s.odd_values) {
      for (int i = 0; i < 6; ++i)
        k[std::size_t(draw(0, int(k.size() - 1)))] = T(i % 2 ? NAN : (i % 4 ? INFINITY : -INFINITY));
      for (int d = 0; d < D; ++d) q[std::size_t(d)] = T(d == 3 ? NAN : 1.0f);
    }
  }

  view_type view(const T* at, const index_t* len, const index_t* pos, const index_t* tab, const index_t* ptr,
                 const offset_t* beg) const {
    view_type v;
    v.k = at;
    const offset_t rows = offset_t(pages_per_row) * page;
    v.sequences = s.sequences;
    v.kv_heads = s.heads;
    if constexpr (std::is_same_v<Table, contiguous>) v.k_strides = {s.heads * rows * D, rows * D, D, 1};
    if constexpr (std::is_same_v<Table, ragged>) v.k_strides = {0, 0, D, 1}, v.table = {beg, s.heads};
    if constexpr (std::is_same_v<Table, block_table>) {
      v.k_strides = {offset_t(s.heads) * page * D, offset_t(page) * D, D, 1};
      v.table = {tab, page, pages_per_row, 0};
    }
    if constexpr (std::is_same_v<Table, csr_table>) {
      v.k_strides = {offset_t(s.heads) * page * D, D, offset_t(s.heads) * D, 1};
      v.table = {ptr, tab, page, 1};
    }
    v.lengths = len;
    v.length_strides = {s.heads, 1};
    v.positions = s.spread ? pos : nullptr;
    v.position_strides = {offset_t(s.heads) * s.capacity, s.capacity};
    return v;
  }
  view_type host() const {
    return view(k.data(), lengths.data(), positions.data(), blocks.data(), indptr.data(), begin.data());
  }
};

template <class T, int D, class Table, class Scorer>
void compare(const shape& s, bool accumulate = false, bool engine_lse = false) {
  CAPTURE(D, s.sequences, s.heads, s.group, s.queries, s.capacity, s.soft_cap, s.window, s.sinks, s.spread,
          s.some_valid, s.odd_values, accumulate, engine_lse, Scorer::name);
  const batch<T, D, Table> b(s);
  const int rows = s.sequences * s.heads, query_rows = s.queries * s.group, q_heads = s.heads * s.group;
  const Scorer scorer{};
  logit_rule rule;
  rule.soft_cap = s.soft_cap;
  rule.sliding_window = s.window;
  rule.sink_logits = s.sinks ? b.sink_logits.data() : nullptr;

  // Host, one sequence at a time since the number of valid queries differs.
  std::vector<float> expected(std::size_t(rows) * s.capacity), before = normal<float>(expected.size());
  if (joins_rows_by<Scorer> == row_join::maximum) {
    for (float& x : before) x = std::abs(x) * 0.1f;  // as weights are: never below 0
  }
  if (accumulate) expected = before;
  std::vector<float> all_lse(std::size_t(s.sequences) * s.queries * q_heads, 0.0f);
  cpu::executor workers(2);
  cpu::score_workspace<D> workspace;
  for (int n = 0; n < s.sequences; ++n) {
    auto view = b.host();
    // A view of sequence n alone: shift what is indexed by sequence.
    view.sequences = 1;
    view.lengths += n * s.heads;
    if (view.positions) view.positions += offset_t(n) * s.heads * s.capacity;
    if constexpr (std::is_same_v<Table, contiguous>) view.k += n * view.k_strides.outer;
    if constexpr (std::is_same_v<Table, ragged>) view.table.begin += n * s.heads;
    if constexpr (std::is_same_v<Table, block_table>) view.table.blocks += n * b.pages_per_row;
    if constexpr (std::is_same_v<Table, csr_table>) view.table.indptr += n;
    auto q = nhd_rows<const T>(b.q.data() + offset_t(n) * s.queries * q_heads * D, b.valid[n], q_heads, D);
    std::vector<float> lse(std::size_t(b.valid[n]) * q_heads + 1);
    std::vector<offset_t> offsets;
    for (int h = 0; h < s.heads; ++h) offsets.push_back(offset_t(n * s.heads + h) * s.capacity);
    const cpu::query_rows<T> queries{q, &b.first[n]};
    cpu::row_log_sum_exp(view, queries, rule, lse.data(), workspace, workers);
    // What the engine gives is taken as it is, also where it is not what these keys come to.
    std::vector<char> given(lse.size());
    for (std::size_t r = 0; engine_lse && r < lse.size(); ++r) {
      given[r] = draw(0, 5) > 0;
      if (given[r]) lse[r] += 0.5f;
    }
    cpu::accumulate_scores(view, queries, rule, scorer, lse.data(), expected.data(), offsets.data(), workspace,
                           workers);
    for (int h = 0; h < s.heads; ++h) {
      for (int t = 0; t < b.valid[n]; ++t) {
        for (int g = 0; g < s.group; ++g) {
          const std::size_t row = std::size_t(h) * b.valid[n] * s.group + t * s.group + g;
          all_lse[(std::size_t(n) * s.queries + t) * q_heads + h * s.group + g] =
              given[row] ? lse[row] : (row % 2 ? NAN : INFINITY);
        }
      }
    }
  }

  buffer<T> k(b.k), q(b.q);
  buffer<index_t> lengths(b.lengths), positions(b.positions), first(b.first), valid(b.valid), blocks(b.blocks),
      indptr(b.indptr);
  buffer<offset_t> begin(b.begin);
  buffer<float> sinks(b.sink_logits), scores(expected.size()), lse(all_lse);
  using view_type = kv_view<const T, D, Table>;
  cuda::score_problem<view_type> p;
  p.view = b.view(k.data, lengths.data, positions.data, blocks.data, indptr.data, begin.data);
  p.q = nhd_rows<const T>(q.data, s.queries, q_heads, D, s.sequences);
  p.first_position = first.data;
  p.valid = s.some_valid ? valid.data : nullptr;
  p.rule = rule;
  p.rule.sink_logits = s.sinks ? sinks.data : nullptr;
  if (engine_lse) p.lse = nhd_rows<const float>(lse.data, s.queries, q_heads, 1, s.sequences);
  p.scores = scores.data;
  p.row_stride = s.capacity;
  p.accumulate = accumulate;
  const cuda::attentive_score<view_type, Scorer> op(s.sequences, s.heads, q_heads, s.queries, s.capacity,
                                                    cuda::device_info::current());
  buffer<unsigned char> memory(op.workspace_bytes());
  memory.fill(0xff);
  std::vector<float> got, again;
  const buffer<float> nothing(std::vector<float>(all_lse.size(), NAN));
  for (int round = 0; round < 2; ++round) {
    if (accumulate)
      scores.set(before);
    else
      scores.fill(0xff);
    // An engine that gives a number for no row is one that gives nothing, bit for bit.
    if (!engine_lse && round) p.lse = nhd_rows<const float>(nothing.data, s.queries, q_heads, 1, s.sequences);
    op.run(p, scorer, memory.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "scoring");
    (round ? again : got) = scores.get();
  }
  REQUIRE(same_bits(got, again));
  const auto last = [](float x) { return x != x || x == -infinity; };
  int wrong = 0;
  float worst = 0;
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < b.lengths[r]; ++t) {
      const float e = expected[std::size_t(r) * s.capacity + t], g = got[std::size_t(r) * s.capacity + t];
      const float allowed = 3e-4f * std::abs(e) + 2e-6f * query_rows;
      if (last(e) != last(g) || (!last(e) && e != g && !(std::abs(e - g) <= allowed))) {
        if (wrong++ == 0) UNSCOPED_INFO("row " << r << " token " << t << " expected " << e << " got " << g);
      }
      if (!last(e)) worst = std::max(worst, std::abs(e - g) / allowed);
    }
  }
  CAPTURE(worst);
  REQUIRE(wrong == 0);
}

/// Counts round the ten rules, so that a few cases of each instantiation together see them all.
int next_rule() {
  static int next = 0;
  return next++ % 10;
}

template <class T, int D, class Table = contiguous>
void all_rules() {
  const int groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 16};
  for (int trial = 0; trial < scaled(10); ++trial) {
    const int i = next_rule();
    shape s{draw(1, 3), draw(1, 3), groups[draw(0, 8)], draw(1, 34), i == 9 ? draw(1, 3) : draw(1, scaled(1500, 300))};
    if (i == 1) s.soft_cap = 15;
    if (i == 2 || i == 6) s.window = draw(1, 200);
    s.sinks = i == 3;
    s.spread = i == 4 || i == 6;
    s.some_valid = i == 5 || i == 4;
    s.odd_values = i == 7 || i == 8;
    if (i == 8) s.soft_cap = 20;
    compare<T, D, Table, observation_window>(s, i == 5, i == 3 || i >= 6);
    s.queries = std::min(s.queries, 8);
    if (i % 2) compare<T, D, Table, exact_score>(s);
    s.queries = draw(1, scaled(150, 40));
    compare<T, D, Table, accumulated_attention>(s, true);
  }
}

}  // namespace

TEST_CASE("GPU scores equal the CPU's for every head dim", "[gpu]") {
  if (gpu_missing()) return;
  all_rules<bf16, 64>();
  all_rules<fp16, 80>();
  all_rules<bf16, 96>();
  all_rules<fp16, 128>();
  all_rules<bf16, 192>();
  all_rules<fp16, 256>();
}

TEST_CASE("GPU scores equal the CPU's behind every table", "[gpu]") {
  if (gpu_missing()) return;
  all_rules<bf16, 128, ragged>();
  all_rules<bf16, 128, block_table>();
  all_rules<bf16, 128, csr_table>();
}

TEST_CASE("GPU scores take any weigh", "[gpu]") {
  if (gpu_missing()) return;
  for (int i = 0; i < 4; ++i)
    compare<bf16, 128, contiguous, bounded_logit>({2, 2, 4, 32, scaled(900, 200), 0, 0, false, i == 1, i == 2, i == 3});
}

TEMPLATE_TEST_CASE("chunks of queries give the bits of one call on the GPU", "[gpu]",
                   (std::integral_constant<int, 128>), (std::integral_constant<int, 192>)) {
  if (gpu_missing()) return;
  constexpr int D = TestType::value;
  using view_type = kv_view<const bf16, D>;
  const int heads = 2, group = 3, tokens = scaled(700, 150), part = tokens / 7;
  const auto hk = normal<bf16>(std::size_t(heads) * tokens * D),
             hq = normal<bf16>(std::size_t(tokens) * heads * group * D);
  buffer<bf16> k(hk), q(hq);
  buffer<index_t> length(1), first(1);
  const auto info = cuda::device_info::current();
  const auto run = [&](const std::vector<int>& chunks) {
    buffer<float> scores(std::vector<float>(std::size_t(heads) * tokens, 0.0f));
    int at = 0;
    for (const int n : chunks) {
      length.set({at + n});
      first.set({at});
      cuda::score_problem<view_type> p;
      p.view.k = k.data;
      p.view.k_strides = {offset_t(heads) * tokens * D, offset_t(tokens) * D, D, 1};
      p.view.sequences = 1;
      p.view.kv_heads = heads;
      p.view.lengths = length.data;
      p.q = nhd_rows<const bf16>(q.data + offset_t(at) * heads * group * D, n, heads * group, D);
      p.first_position = first.data;
      p.rule.sliding_window = 3 * part;
      p.scores = scores.data;
      p.row_stride = tokens;
      p.accumulate = true;
      const cuda::attentive_score<view_type, accumulated_attention> op(1, heads, heads * group, n, at + n, info);
      buffer<unsigned char> memory(op.workspace_bytes());
      op.run(p, {}, memory.data, nullptr);
      cuda::check(cudaDeviceSynchronize(), "scoring");
      at += n;
    }
    return scores.get();
  };
  const auto whole = run({tokens});
  REQUIRE(same_bits(whole, run({1, part, 3 * part, 33, tokens - 4 * part - 34})));
  REQUIRE(same_bits(whole, run({3 * part, 1, 1, tokens - 3 * part - 3, 1})));
}

TEST_CASE("a captured scoring call follows lengths that change", "[gpu]") {
  if (gpu_missing()) return;
  using view_type = kv_view<const bf16, 128>;
  const int heads = 2, group = 4, capacity = 3000, queries = 32;
  buffer<bf16> k(normal<bf16>(std::size_t(heads) * capacity * 128)),
      q(normal<bf16>(std::size_t(queries) * heads * group * 128));
  buffer<index_t> length(1), first(1);
  buffer<float> scores(std::size_t(heads) * capacity);
  cuda::score_problem<view_type> p;
  p.view.k = k.data;
  p.view.k_strides = {offset_t(heads) * capacity * 128, offset_t(capacity) * 128, 128, 1};
  p.view.sequences = 1;
  p.view.kv_heads = heads;
  p.view.lengths = length.data;
  p.q = nhd_rows<const bf16>(q.data, queries, heads * group, 128);
  p.first_position = first.data;
  p.scores = scores.data;
  p.row_stride = capacity;
  const cuda::attentive_score<view_type, observation_window> op(1, heads, heads * group, queries, capacity,
                                                                cuda::device_info::current());
  buffer<unsigned char> memory(op.workspace_bytes());
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cuda::check(cudaStreamCreate(&stream), "stream");
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  op.run(p, {}, memory.data, stream);
  cuda::check(cudaStreamEndCapture(stream, &graph), "capture");
  cuda::check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (const int n : {40, 3000, 1, 777, 0, 2048}) {
    length.set({n});
    first.set({std::max(0, n - queries)});
    scores.fill(0xff);
    op.run(p, {}, memory.data, stream);
    cuda::check(cudaStreamSynchronize(stream), "run");
    const auto expected = scores.get();
    scores.fill(0xff);
    cuda::check(cudaGraphLaunch(exec, stream), "replay");
    cuda::check(cudaStreamSynchronize(stream), "replay");
    REQUIRE(same_bits(expected, scores.get()));
    int unwritten = 0;
    for (int i = 0; i < n; ++i) unwritten += !(expected[std::size_t(i)] >= 0);
    REQUIRE(unwritten == 0);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_CASE("GPU scoring refuses what it cannot take before anything is launched", "[gpu]") {
  if (gpu_missing()) return;
  using op = cuda::attentive_score<kv_view<const bf16, 128>, observation_window>;
  const auto info = cuda::device_info::current();
  REQUIRE_THROWS_WITH(op(1, 3, 8, 32, 100, info), contains("q_heads"));
  REQUIRE_THROWS_WITH(op(1, 2, 8, 0, 100, info), contains("queries"));
  cuda::score_problem<kv_view<const bf16, 128>> p;
  p.view.sequences = 1, p.view.kv_heads = 2;
  p.q = nhd_rows<const bf16>(nullptr, 4, 8, 128);
  REQUIRE_THROWS_WITH(op(1, 2, 8, 32, 100, info).run(p, {}, nullptr, nullptr), contains("memory of q is null"));
}

TEST_CASE("the device takes the largest weight where the CPU does, and a NaN stays", "[gpu]") {
  if (gpu_missing()) return;
  for (const int i : scaled(cases(16), 4)) {
    shape s{draw(1, 3), draw(1, 3), draw(1, 8), draw(1, 34), draw(1, scaled(900, 200))};
    s.odd_values = i % 4 == 3;
    s.some_valid = i % 4 == 2;
    s.spread = i % 4 == 1;
    compare<bf16, 128, contiguous, loudest<observation_window>>(s);
    compare<fp16, 256, contiguous, loudest<accumulated_attention>>(s, i % 2);
    compare<bf16, 64, ragged, loudest<accumulated_attention>>(s, i % 2);
  }
}
