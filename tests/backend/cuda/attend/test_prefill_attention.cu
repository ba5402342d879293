// GPU prefill attention against the CPU's: every head dim, every table, caps, windows, sinks, evictions, chunks.
#include <memory>

#include "backend/cuda/attend/prefill_case.hpp"
#include "catch.hpp"
#include "tessera/backend/cpu/attend/attend.hpp"
#include "tessera/backend/cuda/attend/prefill/prefill_attention.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

/// A whole case: pools, queries and outputs on both sides.
template <class T, int D, int Dv, class Table, class Out>
struct trial {
  using pools_type = pools<T, D, Dv, Table>;
  using view_type = typename pools_type::view_type;
  shape s;
  pools_type stored;
  std::vector<T> q;
  std::vector<float> sinks;
  std::unique_ptr<buffer<T>> d_k, d_v, d_q;
  std::unique_ptr<buffer<index_t>> d_lengths, d_positions, d_first, d_blocks, d_indptr;
  std::unique_ptr<buffer<offset_t>> d_begin;
  std::unique_ptr<buffer<float>> d_sinks, lse;
  std::unique_ptr<buffer<Out>> out;

  explicit trial(const shape& of)
      : s(of),
        stored(of),
        q(normal<T>(of.query_rows() * D, of.spread)),
        sinks(normal<float>(std::size_t(of.q_heads()))) {
    upload();
    lse = std::make_unique<buffer<float>>(s.query_rows());
    out = std::make_unique<buffer<Out>>(s.query_rows() * Dv);
  }
  void upload() {
    d_k = std::make_unique<buffer<T>>(stored.k), d_v = std::make_unique<buffer<T>>(stored.v);
    d_q = std::make_unique<buffer<T>>(q), d_sinks = std::make_unique<buffer<float>>(sinks);
    d_lengths = std::make_unique<buffer<index_t>>(stored.lengths);
    d_positions = std::make_unique<buffer<index_t>>(stored.positions);
    d_first = std::make_unique<buffer<index_t>>(stored.first);
    d_blocks = std::make_unique<buffer<index_t>>(stored.blocks);
    d_indptr = std::make_unique<buffer<index_t>>(stored.indptr);
    d_begin = std::make_unique<buffer<offset_t>>(stored.begin);
  }
  cuda::prefill_problem<view_type, Out> problem() const {
    logit_rule rule = s.rule;
    if (s.sinks) rule.sink_logits = d_sinks->data;
    return {stored.at(d_k->data, d_v->data, d_lengths->data, d_positions->data, d_blocks->data, d_indptr->data,
                      d_begin->data),
            nhd_rows<const T>(d_q->data, s.tokens, s.q_heads(), D, s.sequences),
            d_first->data,
            rule,
            nhd_rows(out->data, s.tokens, s.q_heads(), Dv, s.sequences),
            nhd_rows(lse->data, s.tokens, s.q_heads(), 1, s.sequences)};
  }
  int multiprocessors = 0;  ///< that the operation believes in, so that blocks attend many items; 0: those there are
  cuda::prefill_attention<view_type, Out> operation() const {
    auto device = cuda::device_info::current();
    if (multiprocessors > 0) device.multiprocessors = multiprocessors;
    return {s.sequences, s.heads, s.q_heads(), device};
  }
  void run(bool split) {
    out->fill(0xff), lse->fill(0xff);
    const auto op = operation();
    buffer<unsigned char> workspace(split ? op.workspace_bytes() : 0);
    workspace.fill(0xff);
    op.run(problem(), split ? workspace.data : nullptr, nullptr);
    cuda::check(cudaDeviceSynchronize(), "prefill attention");
  }

  /// Worst relative error of a query row's output; large where a log-sum-exp or a NaN differs.
  double error() const {
    std::vector<float> expected(s.query_rows() * Dv), expected_lse(s.query_rows());
    logit_rule rule = s.rule;
    if (s.sinks) rule.sink_logits = sinks.data();
    cpu::executor workers;
    cpu::prefill_attention(
        stored.host(),
        cpu::query_rows<T>{nhd_rows(q.data(), s.tokens, s.q_heads(), D, s.sequences), stored.first.data()}, rule,
        {nhd_rows(expected.data(), s.tokens, s.q_heads(), Dv, s.sequences),
         nhd_rows(expected_lse.data(), s.tokens, s.q_heads(), 1, s.sequences)},
        workers);
    const auto got = out->get();
    const auto got_lse = lse->get();
    double worst = 0;
    for (std::size_t row = 0; row < s.query_rows(); ++row) {
      double difference = 0, size = 0;
      for (std::size_t i = row * Dv; i < (row + 1) * Dv; ++i) {
        const float x = expected[i], y = float(got[i]);
        if (std::isfinite(x) != std::isfinite(y) || (!std::isfinite(x) && std::isinf(x) && x != y)) return 1e9;
        if (!std::isfinite(x)) continue;
        difference += std::pow(double(x) - y, 2), size += std::pow(double(x), 2);
      }
      if (size == 0 && difference != 0) return 1e8;
      if (size > 0) worst = std::max(worst, std::sqrt(difference / size));
      const float a = expected_lse[row], b = got_lse[row];
      const bool same = std::isfinite(a) ? std::abs(a - b) < 1e-3f * std::max(1.0f, std::abs(a))
                                         : (std::isnan(a) ? std::isnan(b) : a == b);
      if (!same) return 1e7;
    }
    return worst;
  }
};

shape random_shape(int kind) {
  const index_t groups[] = {1, 2, 3, 4, 5, 7, 8, 16};
  shape s{draw(1, 3), draw(1, 3), groups[draw(0, 7)], draw(1, scaled(260)), draw(0, scaled(700))};
  s.evicted = draw(0, 1) == 1;
  if (kind % 6 == 1) s.rule.soft_cap = 15;
  if (kind % 6 == 2) s.rule.sliding_window = draw(1, 150);
  if (kind % 6 == 3) s.sinks = true;
  if (kind % 6 == 4) s.spread = 6;
  if (kind % 6 == 5) s.rule.scale = draw(0, 1) ? 0.3f : -0.2f;
  return s;
}

template <class T, int D, int Dv, class Table, class Out = float>
void try_shapes() {
  for (const int kind : scaled(cases(12), 3)) {
    const shape s = random_shape(kind);
    INFO("head dims " << D << ", " << Dv << " table " << typeid(Table).name() << " sequences " << s.sequences
                      << " heads " << s.heads << " group " << s.group << " tokens " << s.tokens << " stored "
                      << s.stored << " evicted " << s.evicted << " case " << kind % 6 << " scale " << s.rule.scale
                      << " window " << s.rule.sliding_window);
    trial<T, D, Dv, Table, Out> of(s);
    for (const bool split : {false, true}) {
      of.run(split);
      // Weights are rounded to 16 bits before they meet the values, and so is a 16-bit output.
      CHECK(of.error() < 1.2e-2);
      const auto once = of.out->get();
      if (!split) of.multiprocessors = draw(1, 3);
      of.run(split);
      CHECK(same_bits(once, of.out->get()));
      of.multiprocessors = 0;
    }
  }
}

}  // namespace

TEST_CASE("log-sum-exps of the newest tokens alone have the bits of all, and nothing else is written", "[gpu]") {
  if (gpu_missing()) return;
  const auto compare = [](auto of, bool split) {
    of.run(split);
    const auto all = of.lse->get();
    const auto op = of.operation();
    buffer<unsigned char> workspace(split ? op.workspace_bytes() : 0);
    const std::size_t a_token = std::size_t(of.s.q_heads()), tokens = std::size_t(of.s.tokens);
    for (const index_t newest : {index_t(1), draw(1, of.s.tokens), of.s.tokens}) {
      CAPTURE(newest, of.s.tokens, of.s.sequences, of.s.q_heads(), split);
      of.lse->fill(0xff);
      auto problem = of.problem();
      problem.lse = nhd_rows(of.lse->data, newest, of.s.q_heads(), 1, of.s.sequences);
      op.run(problem, split ? workspace.data : nullptr, nullptr);
      cuda::check(cudaDeviceSynchronize(), "prefill attention");
      const auto some = of.lse->get();
      const std::size_t few = std::size_t(newest) * a_token;
      for (std::size_t b = 0; b < std::size_t(of.s.sequences); ++b) {
        const auto expected = all.begin() + std::ptrdiff_t((b + 1) * tokens * a_token - few);
        const auto got = some.begin() + std::ptrdiff_t(b * few);
        REQUIRE(same_bits(std::vector<float>(expected, expected + std::ptrdiff_t(few)),
                          std::vector<float>(got, got + std::ptrdiff_t(few))));
      }
      for (std::size_t i = few * std::size_t(of.s.sequences); i < some.size(); ++i) REQUIRE(std::isnan(some[i]));
    }
  };
  for (const int kind : scaled(cases(12), 2)) {
    shape s = random_shape(kind);
    compare(trial<bf16, 128, 128, csr_table, float>(s), kind % 2);
    compare(trial<fp16, 96, 96, contiguous, float>(s), kind % 2);
  }
}

TEST_CASE("GPU prefill attention equals the CPU's at every head dim, over every table", "[gpu]") {
  if (gpu_missing()) return;
  try_shapes<bf16, 64, 64, contiguous>();
  try_shapes<fp16, 64, 64, ragged>();
  try_shapes<bf16, 80, 80, block_table, fp16>();
  try_shapes<fp16, 96, 96, csr_table>();
  try_shapes<bf16, 128, 128, block_table, bf16>();
  try_shapes<bf16, 192, 128, csr_table>();
  try_shapes<bf16, 192, 192, ragged>();
  try_shapes<fp16, 256, 256, contiguous, fp16>();
}

TEST_CASE("GPU prefill attention holds at the edges of its tiles", "[gpu]") {
  if (gpu_missing()) return;
  for (const index_t tokens : scaled(std::vector<index_t>{1, 2, 15, 31, 32, 33, 63, 64, 65, 129}, 3)) {
    for (const index_t stored : scaled(std::vector<index_t>{0, 1, 63, 64, 65, 127}, 2)) {
      for (const index_t window : {0, 1, 64}) {
        shape s{1, 1, draw(0, 1) ? 4 : 1, tokens, stored};
        s.rule.sliding_window = window;
        INFO("tokens " << tokens << " stored " << stored << " window " << window << " group " << s.group);
        trial<bf16, 64, 64, contiguous, float> of(s);
        of.run(false);
        CHECK(of.error() < 1.2e-2);
        of.run(true);
        CHECK(of.error() < 1.2e-2);
      }
    }
  }
}

TEST_CASE("blocks of prefill attention attend many items, some of them again", "[gpu]") {
  if (gpu_missing()) return;
  for (int i = 0; i < scaled(6, 4); ++i) {
    shape s{draw(1, 2), 2, draw(1, 4), draw(200, 500), draw(0, 300)};
    if (i % 3 == 1) s.rule.sliding_window = 90;
    s.evicted = i % 3 == 2;
    trial<bf16, 128, 128, contiguous, float> of(s);
    for (int spoilt = i / 2; spoilt > 0; --spoilt) {
      of.stored.v[std::size_t(draw(0, int(of.stored.v.size()) - 1))] = spoilt == 1 ? bf16(NAN) : bf16(infinity);
    }
    of.upload();
    std::vector<float> first;
    for (const int multiprocessors : {0, 1, 2, 5}) {
      INFO("case " << i << " on " << multiprocessors << " sequences " << s.sequences << " group " << s.group
                   << " tokens " << s.tokens << " stored " << s.stored);
      of.multiprocessors = multiprocessors;
      of.run(multiprocessors > 0 && i % 2);  // a workspace: in the order in which blocks come
      CHECK(of.error() < 1.2e-2);
      if (first.empty()) first = of.out->get();
      CHECK(same_bits(first, of.out->get()));
    }
  }
}

TEST_CASE("GPU prefill attention finds its block among many heads of different lengths", "[gpu]") {
  if (gpu_missing()) return;
  for (const index_t sequences : scaled(std::vector<index_t>{1, 8, 9, 17}, 2)) {  // 4, 32, 36, 68 rows
    shape s{sequences, 4, draw(1, 3), draw(1, scaled(300)), scaled(2000)};
    s.evicted = true;
    INFO("sequences " << sequences << " group " << s.group << " tokens " << s.tokens << " stored " << s.stored);
    trial<bf16, 64, 64, csr_table, float> of(s);
    of.run(false);
    CHECK(of.error() < 1.2e-2);
  }
}

TEST_CASE("GPU prefill attention gives a row the same bits however the prompt is cut", "[gpu]") {
  if (gpu_missing()) return;
  for (int i = 0; i < 4; ++i) {
    shape s{1, 2, 4, scaled(500), scaled(300)};
    s.evicted = i % 2;
    if (i == 2) s.rule.sliding_window = 90;
    if (i == 3) s.spread = 6;
    trial<bf16, 64, 64, contiguous, float> of(s);
    of.run(false);
    const auto whole = of.out->get(), whole_lse = of.lse->get();
    of.out->fill(0xff), of.lse->fill(0xff);
    const auto problem = of.problem();
    for (index_t done = 0; done < s.tokens;) {
      const index_t some = std::min(s.tokens - done, draw(1, 150));
      buffer<index_t> first(std::vector<index_t>{of.stored.first[0] + done});
      auto chunk = problem;
      chunk.first_position = first.data;
      chunk.q.data = problem.q.row(0, done, 0), chunk.out.data = problem.out.row(0, done, 0);
      chunk.lse.data = problem.lse.row(0, done, 0);
      chunk.q.tokens = chunk.out.tokens = chunk.lse.tokens = some;
      of.operation().run(chunk, nullptr, nullptr);
      cuda::check(cudaDeviceSynchronize(), "prefill attention");
      done += some;
    }
    CHECK(same_bits(whole, of.out->get()));
    CHECK(same_bits(whole_lse, of.lse->get()));
  }
}

TEST_CASE("GPU prefill attention shows NaN and infinity to those rows alone that see them", "[gpu]") {
  if (gpu_missing()) return;
  for (int kind = 0; kind < 6; ++kind) {
    shape s{1, 1, 2, 150, 100};
    if (kind % 2) s.rule.sliding_window = 40;
    trial<bf16, 64, 64, contiguous, float> of(s);
    auto& tensor = kind < 4 ? of.stored.v : of.stored.k;
    const float special = kind == 0 ? infinity : kind == 1 ? -infinity : NAN;
    for (const index_t slot : {130, 133, 171})
      tensor[std::size_t(slot) * 64 + std::size_t(draw(0, 63))] = bf16(special);
    of.upload();
    INFO("case " << kind);
    of.run(false);
    CHECK(of.error() < 1.2e-2);
    of.run(true);
    CHECK(of.error() < 1.2e-2);
  }
}

TEST_CASE("GPU prefill attention in a captured graph follows the lengths", "[gpu]") {
  if (gpu_missing()) return;
  shape s{2, 2, 4, scaled(100), scaled(400)};
  trial<bf16, 64, 64, contiguous, float> of(s);
  of.stored.lengths[1] = s.capacity();  // every slot is written: lengths may grow to here
  for (auto* pool : {&of.stored.k, &of.stored.v}) *pool = normal<bf16>(pool->size());
  of.upload();
  const auto op = of.operation();
  const auto problem = of.problem();
  buffer<unsigned char> workspace(op.workspace_bytes());
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  {
    graph captured(stream, [&] { op.run(problem, workspace.data, stream); });
    for (int i = 0; i < 5; ++i) {
      for (index_t sequence = 0; sequence < s.sequences; ++sequence) {
        of.stored.first[std::size_t(sequence)] = draw(0, s.stored);
        for (index_t head = 0; head < s.heads; ++head) {
          of.stored.lengths[std::size_t(sequence * s.heads + head)] = draw(0, s.capacity());
        }
      }
      of.d_first->set(of.stored.first), of.d_lengths->set(of.stored.lengths);
      of.out->fill(0xff), of.lse->fill(0xff);
      cuda::check(cudaDeviceSynchronize(), "poison");
      captured.launch();
      CHECK(of.error() < 1.2e-2);
    }
  }
  cuda::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

TEST_CASE("GPU prefill attention refuses what it cannot run, before it launches", "[gpu]") {
  if (gpu_missing()) return;
  using trial_type = trial<bf16, 64, 64, contiguous, float>;
  using operation = cuda::prefill_attention<trial_type::view_type>;
  const auto device = cuda::device_info::current();
  CHECK_THROWS_WITH(operation(1, 4, 6, device), contains("q_heads is 6"));
  CHECK_THROWS_WITH(operation(0, 4, 8, device), contains("sequences * kv_heads"));
  auto small = device;
  small.shared_memory = 1024;
  CHECK_THROWS_WITH(operation(1, 4, 8, small), contains("shared memory of a block"));

  trial_type of({2, 2, 2, 5, 10});
  const auto op = of.operation();
  const auto good = of.problem();
  const auto refused = [&](auto&& spoil, const char* name) {
    auto bad = good;
    spoil(bad);
    CHECK_THROWS_WITH(op.run(bad, nullptr, nullptr), contains(name));
  };
  refused([](auto& p) { p.view.sequences = 3; }, "view.sequences is 3");
  refused([](auto& p) { p.view.kv_heads = 4; }, "view.kv_heads is 4");
  refused([](auto& p) { p.q.heads = 8; }, "q [sequences, tokens, q_heads] is [2, 5, 8]");
  refused([](auto& p) { p.q.sequences = 1; }, "q [sequences, tokens, q_heads]");
  refused([](auto& p) { p.out.tokens = 4; }, "out [sequences, tokens, q_heads]");
  refused([](auto& p) { p.lse.heads = 2; }, "lse [sequences, tokens, q_heads]");
  refused([](auto& p) { p.lse.tokens = p.q.tokens + 1; }, "lse [sequences, tokens, q_heads]");
  refused([](auto& p) { p.view.k = nullptr; }, "view is null");
  refused([](auto& p) { p.view.lengths = nullptr; }, "view is null");
  refused([](auto& p) { p.first_position = nullptr; }, "problem is null");
  refused([](auto& p) { p.q.data += 4; }, "address of q");
  refused([](auto& p) { p.view.v += 1; }, "address of values");
  refused([](auto& p) { p.view.k_strides.token = 68; }, "stride of keys is 68");
  refused([](auto& p) { p.view.v_strides.dim = 2; }, "stride of a row's elements is 2");
  refused([](auto& p) { p.q.token_stride += 4; }, "stride of q");
  refused([](auto& p) { p.out.data += 1; }, "address of out");
  refused([](auto& p) { p.out.head_stride = 65; }, "stride of out is 65");

  auto nothing = good;
  nothing.q.tokens = nothing.out.tokens = nothing.lse.tokens = 0;
  of.out->fill(0x11);
  const auto before = of.out->get();
  op.run(nothing, nullptr, nullptr);
  auto no_lse = good;
  no_lse.lse = {};
  cuda::check(cudaDeviceSynchronize(), "nothing");
  CHECK(same_bits(before, of.out->get()));
  op.run(no_lse, nullptr, nullptr);
  cuda::check(cudaDeviceSynchronize(), "without lse");
  const auto without = of.out->get();
  of.run(false);
  CHECK(same_bits(without, of.out->get()));
  CHECK(of.error() < 1.2e-2);
}
