// GPU decode attention against the CPU's: head dims, tables, caps, windows, selections, sinks, growing lengths, errors.
#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "tessera/backend/cpu/attend/attend.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

struct shape {
  index_t sequences = 2, heads = 2, group = 4, tokens = 1, capacity = 500;
  float soft_cap = 0;
  index_t window = 0;
  bool gather = false, sinks = false;
  index_t most_sequences = 0, most_tokens = 0;  // of the operation; 0: those of the problem
  int multiprocessors = 0;                      // that the operation believes in; 0: the device's
};

constexpr index_t page = 16;

__global__ void add_one(index_t* counts, int n) {
  if (int(threadIdx.x) < n) ++counts[threadIdx.x];
}

/// A slow producer: what follows it on the stream has begun long before it writes.
template <class T>
__global__ void produce(T* values, const T* from, std::size_t count, index_t* lengths, int rows) {
  const long long begin = clock64();
  while (clock64() - begin < 20000) {
  }
  const std::size_t step = gridDim.x * std::size_t(blockDim.x);
  for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < count; i += step) values[i] = from[i];
  if (blockIdx.x == 0 && int(threadIdx.x) < rows) ++lengths[threadIdx.x];
}

/// One problem on the host and on the device.
template <class T, int D, class Table = contiguous, int Dv = D, class Out = float>
struct decode_case {
  using view_type = kv_view<const T, D, Table, Dv>;
  using problem_type = cuda::decode_problem<view_type, Out>;
  static constexpr bool paged = std::is_same_v<Table, block_table>;

  shape s;
  index_t rows, q_heads, capacity;
  std::size_t queries;
  std::vector<T> k, v, q;
  std::vector<float> sinks;
  std::vector<index_t> lengths, first, chosen, counts, positions, table;
  buffer<T> d_k, d_v, d_q;
  buffer<float> d_sinks, lse;
  buffer<Out> out;
  buffer<index_t> d_lengths, d_first, d_chosen, d_counts, d_positions, d_table;
  cpu::executor workers;

  explicit decode_case(const shape& of)
      : s(of),
        rows(s.sequences * s.heads),
        q_heads(s.heads * s.group),
        capacity(ceil_div(s.capacity, page) * page),
        queries(std::size_t(s.sequences * s.tokens * q_heads)),
        k(normal<T>(std::size_t(rows) * std::size_t(capacity) * D)),
        v(normal<T>(std::size_t(rows) * std::size_t(capacity) * Dv)),
        q(normal<T>(queries * D)),
        sinks(normal<float>(std::size_t(q_heads))),
        lengths(std::size_t(rows)),
        first(std::size_t(s.sequences), capacity - s.tokens),
        chosen(std::size_t(rows) * std::size_t(capacity), no_index),
        counts(std::size_t(rows)),
        positions(std::size_t(rows) * std::size_t(capacity)),
        table(std::size_t(s.sequences) * std::size_t(capacity / page)),
        d_k(k),
        d_v(v),
        d_q(q),
        d_sinks(sinks),
        lse(queries),
        out(queries * Dv),
        d_lengths(std::size_t(rows)),
        d_first(first),
        d_chosen(chosen.size()),
        d_counts(std::size_t(rows)),
        d_positions(positions.size()),
        d_table(table.size()) {
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = index_t(i);
    std::shuffle(table.begin(), table.end(), rng());
    d_table.set(table);
    std::vector<index_t> drawn(static_cast<std::size_t>(rows));
    // Some rows hold nothing and some one token, the others whatever.
    for (auto& length : drawn) length = draw(0, 5) == 0 ? draw(0, 1) : draw(0, capacity);
    set_lengths(drawn);
  }

  void set_lengths(const std::vector<index_t>& to) {
    lengths = to;
    for (index_t r = 0; r < rows; ++r) {
      const index_t length = lengths[std::size_t(r)];
      // As after an eviction: a gap before the newest tokens.
      for (index_t i = 0; i < capacity; ++i) {
        positions[std::size_t(r * capacity + i)] = i + (i >= length - s.tokens ? capacity - length : 0);
      }
      counts[std::size_t(r)] = 0;
      for (index_t i = 0; i < length; ++i) {
        if (draw(0, 2) == 0) chosen[std::size_t(r * capacity + counts[std::size_t(r)]++)] = i;
      }
    }
    d_lengths.set(lengths), d_positions.set(positions), d_chosen.set(chosen), d_counts.set(counts);
  }

  view_type view_of(const T* keys, const T* values, const index_t* length, const index_t* position,
                    const index_t* blocks) const {
    view_type view;
    view.k = keys, view.v = values;
    if constexpr (paged) {
      view.k_strides = {offset_t(s.heads) * page * D, offset_t(page) * D, D, 1};
      view.v_strides = {offset_t(s.heads) * page * Dv, offset_t(page) * Dv, Dv, 1};
      view.table = {blocks, page, capacity / page, 0};
    } else {
      view.k_strides = {offset_t(s.heads) * capacity * D, offset_t(capacity) * D, D, 1};
      view.v_strides = {offset_t(s.heads) * capacity * Dv, offset_t(capacity) * Dv, Dv, 1};
    }
    view.sequences = s.sequences, view.kv_heads = s.heads;
    view.lengths = length, view.length_strides = {s.heads, 1};
    view.positions = position, view.position_strides = {offset_t(s.heads) * capacity, capacity};
    return view;
  }

  problem_type problem() const {
    problem_type p;
    p.view = view_of(d_k.data, d_v.data, d_lengths.data, d_positions.data, d_table.data);
    p.q = nhd_rows<const T>(d_q.data, s.tokens, q_heads, D, s.sequences);
    p.first_position = d_first.data;
    p.rule =
        logit_rule{.soft_cap = s.soft_cap, .sliding_window = s.window, .sink_logits = s.sinks ? d_sinks.data : nullptr};
    p.out = nhd_rows(out.data, s.tokens, q_heads, Dv, s.sequences);
    p.lse = nhd_rows(lse.data, s.tokens, q_heads, 1, s.sequences);
    p.chosen = {};
    if (s.gather) p.chosen = {d_chosen.data, d_counts.data, nullptr, capacity};
    return p;
  }
  cuda::decode_attention<view_type, Out> operation() const {
    auto device = cuda::device_info::current();
    if (s.multiprocessors) device.multiprocessors = s.multiprocessors;
    return {s.most_sequences ? s.most_sequences : s.sequences, s.heads, q_heads,
            s.most_tokens ? s.most_tokens : s.tokens, device};
  }
  void poison() { out.fill(0xff), lse.fill(0xff); }

  /// Relative error of what the device wrote, over the outputs; large where a log-sum-exp or an empty row is wrong.
  double error_now() {
    std::vector<float> expected(queries * Dv), expected_lse(queries);
    cpu::decode_workspace scratch;
    const selection_view selected{chosen.data(), counts.data(), nullptr, capacity};
    const logit_rule rule{
        .soft_cap = s.soft_cap, .sliding_window = s.window, .sink_logits = s.sinks ? sinks.data() : nullptr};
    cpu::decode_attention(
        view_of(k.data(), v.data(), lengths.data(), positions.data(), table.data()),
        cpu::query_rows<T>{nhd_rows<const T>(q.data(), s.tokens, q_heads, D, s.sequences), first.data()}, rule,
        s.gather ? &selected : nullptr,
        {nhd_rows(expected.data(), s.tokens, q_heads, Dv, s.sequences),
         nhd_rows(expected_lse.data(), s.tokens, q_heads, 1, s.sequences)},
        scratch, workers);
    const auto got = out.get();
    const auto got_lse = lse.get();
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const float value = float(got[i]), other = expected[i];
      if (!std::isfinite(other)) {
        if (std::isnan(other) ? !std::isnan(value) : value != other) return 1e9;
        continue;
      }
      if (!std::isfinite(value) || (expected_lse[i / Dv] == -infinity && value != 0)) return 1e9;
      difference += std::pow(double(value) - other, 2);
      size += std::pow(double(other), 2);
    }
    for (std::size_t i = 0; i < got_lse.size(); ++i) {
      const float value = got_lse[i], other = expected_lse[i];
      const bool same = std::isfinite(other) ? std::abs(value - other) < 0.01f
                                             : (std::isnan(other) ? std::isnan(value) : value == other);
      if (!same) return 1e9;
    }
    return size > 0 ? std::sqrt(difference / size) : 0;
  }
};

/// The error of one case, run twice: the second run must repeat the first to the bit.
template <class Case>
double error_of(const shape& s) {
  Case one(s);
  const auto op = one.operation();
  buffer<unsigned char> workspace(op.workspace_bytes());
  workspace.fill(0xff);
  op.prepare(workspace.data, nullptr);
  std::vector<decltype(one.out.get())> outs;
  for (int run = 0; run < 2; ++run) {
    one.poison();
    op.run(one.problem(), workspace.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "decode attention");
    outs.push_back(one.out.get());
  }
  return same_bits(outs[0], outs[1]) ? one.error_now() : 1e9;
}

template <class Case>
void try_shapes(int cases, double bound = 5e-3) {  // weights are rounded to 16 bits before they meet the values
  for (int i = 0; i < scaled(cases, 6); ++i) {     // each sort at least once
    const index_t groups[] = {1, 2, 3, 4, 5, 7, 8, 16};
    shape s{draw(1, 3), draw(1, 4), groups[draw(0, 7)], draw(1, 8), draw(8, shrunk(2000, 600))};
    if (i % 6 == 1) s.soft_cap = 20;
    if (i % 6 == 2) s.window = 100;
    s.gather = i % 6 == 3 || i % 6 == 4;
    s.sinks = i % 6 == 5;
    if (i % 2) s.most_sequences = s.sequences + draw(0, 3), s.most_tokens = s.tokens + draw(0, 8);
    INFO("sequences " << s.sequences << " heads " << s.heads << " group " << s.group << " tokens " << s.tokens
                      << " capacity " << s.capacity << " case " << i);
    CHECK(error_of<Case>(s) < bound);
  }
}

template <class F>
bool refuses(const F& run) {
  try {
    run();
  } catch (const tessera::error& e) {
    return std::string(e.what()).find("expected") != std::string::npos;
  }
  return false;
}

}  // namespace

TEST_CASE("GPU decode attention equals the CPU's at every head dim, and repeats to the bit") {
  if (gpu_missing()) return;
  try_shapes<decode_case<bf16, 64>>(12);
  try_shapes<decode_case<bf16, 80>>(12);
  try_shapes<decode_case<bf16, 96>>(12);
  try_shapes<decode_case<bf16, 128>>(12);
  try_shapes<decode_case<bf16, 192>>(12);
  try_shapes<decode_case<bf16, 256>>(12);
}

TEST_CASE("GPU decode attention reads block tables, fp16, values of another dim, and writes bf16 and fp16") {
  if (gpu_missing()) return;
  try_shapes<decode_case<bf16, 128, block_table>>(12);
  try_shapes<decode_case<fp16, 192, contiguous, 128>>(6, 1e-3);
  try_shapes<decode_case<bf16, 64, contiguous, 64, bf16>>(6);
  try_shapes<decode_case<fp16, 64, block_table, 64, fp16>>(6, 1e-3);
}

TEST_CASE("GPU decode attention over hundreds of rows of uneven length") {
  if (gpu_missing()) return;
  for (const index_t sequences : scaled(std::vector<index_t>{5, 33, 100}, 2)) {
    CHECK(error_of<decode_case<bf16, 64>>({.sequences = sequences, .heads = 8, .capacity = 700}) < 5e-3);
    CHECK(error_of<decode_case<bf16, 64>>({.sequences = sequences, .heads = 8, .capacity = 30, .gather = true}) < 5e-3);
  }
}

TEST_CASE("GPU decode attention where a block reads a long row, and many rows one after the other") {
  if (gpu_missing()) return;
  // What says where tiles lie is read in windows of 32 tiles; a whole device would give no block so many.
  for (const int multiprocessors : {1, 3}) {
    for (const bool gather : {false, true}) {
      const shape s{.sequences = 3,
                    .heads = 2,
                    .capacity = scaled(gather ? 30000 : 14000, 600),
                    .gather = gather,
                    .multiprocessors = multiprocessors};
      CHECK(error_of<decode_case<bf16, 128, block_table>>(s) < 5e-3);
      CHECK(error_of<decode_case<bf16, 128>>(s) < 5e-3);
      CHECK(error_of<decode_case<bf16, 64, block_table>>(s) < 5e-3);
    }
  }
}

namespace {

/// Spoils elements of some tokens of a row, and returns the error of the step.
template <class Case>
double error_of_spoiled(const shape& s, bool keys, float special, const std::vector<index_t>& back) {
  Case one(s);
  // Full rows: the step's own tokens are the last ones.
  one.set_lengths(std::vector<index_t>(std::size_t(one.rows), one.capacity));
  const auto dim = index_t(one.v.size() / (std::size_t(one.rows) * std::size_t(one.capacity)));
  for (index_t row = 0; row < one.rows; row += 2) {
    for (const index_t i : back) {
      const auto token = std::size_t(row * one.capacity + one.capacity - i);
      (keys ? one.k : one.v)[token * std::size_t(dim) + std::size_t(draw(0, dim - 1))] = bf16(special);
    }
  }
  one.d_k.set(one.k), one.d_v.set(one.v);
  const auto op = one.operation();
  buffer<unsigned char> workspace(op.workspace_bytes());
  op.prepare(workspace.data, nullptr);
  one.poison();
  op.run(one.problem(), workspace.data, nullptr);
  cuda::check(cudaDeviceSynchronize(), "decode attention");
  return one.error_now();
}

}  // namespace

TEST_CASE("GPU decode attention shows NaN and infinity to those query rows alone that see them") {
  if (gpu_missing()) return;
  for (const float special : {float(NAN), infinity, -infinity}) {
    for (const bool keys : {false, true}) {
      if (keys && special == special) continue;  // an infinite key gives logits of either sign: not a mask's matter
      for (const float cap : {0.0f, 20.0f}) {
        for (const bool gather : {false, true}) {
          INFO("special " << special << " in keys " << keys << " cap " << cap << " gather " << gather);
          // Two tokens a step: the first must not see the second, which is the last one stored.
          const shape two{.tokens = 2, .capacity = 400, .soft_cap = cap, .gather = gather};
          CHECK(error_of_spoiled<decode_case<bf16, 128>>(two, keys, special, {1}) < 5e-3);
          CHECK(error_of_spoiled<decode_case<bf16, 64>>(two, keys, special, {1}) < 5e-3);
          // A window of 100: tokens beyond it are stored and not seen; with several tokens, by some alone.
          for (const index_t tokens : {1, 3}) {
            const shape window{.tokens = tokens, .capacity = 400, .soft_cap = cap, .window = 100, .gather = gather};
            CHECK(error_of_spoiled<decode_case<bf16, 128>>(window, keys, special, {101, 104, 250, 399}) < 5e-3);
            CHECK(error_of_spoiled<decode_case<bf16, 64>>(window, keys, special, {99, 101, 102, 130}) < 5e-3);
            CHECK(error_of_spoiled<decode_case<bf16, 80>>(window, keys, special, {99, 101, 102, 130}) < 5e-3);
          }
        }
      }
    }
  }
}

TEST_CASE("a captured GPU decode step is replayed while lengths grow") {
  if (gpu_missing()) return;
  decode_case<bf16, 128> one({.sequences = 3, .heads = 2, .capacity = 1200});
  std::vector<index_t> lengths = {0, 1, 127, 128, 700, 1100};
  one.set_lengths(lengths);
  const auto op = one.operation();
  buffer<unsigned char> workspace(op.workspace_bytes());
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  op.prepare(workspace.data, stream);
  {
    graph step(stream, [&] { op.run(one.problem(), workspace.data, stream); });
    for (int i = 0; i < shrunk(80, 17); ++i) {
      one.poison();
      step.launch();
      // Positions of the grown rows are set on the host with everything else; the length is what the step reads anew.
      if (i % 8 == 0) CHECK(one.error_now() < 5e-3);
      add_one<<<1, 32, 0, stream>>>(one.d_lengths.data, one.rows);
      cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      for (auto& length : lengths) ++length;
      CHECK(one.d_lengths.get() == lengths);
      one.set_lengths(lengths);
    }
  }
  cudaStreamDestroy(stream);
}

TEST_CASE("GPU decode steps that begin while what they read is written give the bits of steps that wait") {
  if (gpu_missing()) return;
  // Keys, values and lengths are written by the launches before; the second step's query is the first's output, and both
  // use one workspace. The rows are cut into many parts, or have one each.
  using pair_case = decode_case<bf16, 128, contiguous, 128, bf16>;
  for (const index_t sequences : {1, 20}) {
    pair_case one({.sequences = sequences, .heads = 2, .capacity = scaled(6000, 600)});
    one.set_lengths(std::vector<index_t>(std::size_t(one.rows), one.capacity - 32));
    const auto lengths = one.lengths;
    const auto op = one.operation();
    buffer<unsigned char> workspace(op.workspace_bytes());
    buffer<bf16> second_out(one.queries * 128), new_k(normal<bf16>(one.k.size())), new_v(normal<bf16>(one.v.size()));
    cudaStream_t stream;
    cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
    op.prepare(workspace.data, stream);
    const auto chain = [&](bool waiting) {
      const auto pause = [&] {
        if (waiting) cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      };
      produce<<<20, 256, 0, stream>>>(one.d_v.data, new_v.data, new_v.count, one.d_lengths.data, 0);
      produce<<<20, 256, 0, stream>>>(one.d_k.data, new_k.data, new_k.count, one.d_lengths.data, int(one.rows));
      pause();
      op.run(one.problem(), workspace.data, stream);
      pause();
      auto next = one.problem();
      next.q = nhd_rows<const bf16>(one.out.data, 1, one.q_heads, 128, sequences);
      next.out = nhd_rows(second_out.data, 1, one.q_heads, 128, sequences);
      op.run(next, workspace.data, stream);
      pause();
    };
    const auto outputs_of = [&](int rounds, const auto& run) {
      one.d_k.set(one.k), one.d_v.set(one.v), one.d_lengths.set(lengths);
      one.poison(), second_out.fill(0xff);
      cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      for (int round = 0; round < rounds; ++round) run();
      cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      auto both = one.out.get();
      const auto second = second_out.get();
      both.insert(both.end(), second.begin(), second.end());
      return both;
    };
    {
      graph captured(stream, [&] { chain(false); });
      const auto replay = [&] { cuda::check(cudaGraphLaunch(captured.ready, stream), "cudaGraphLaunch"); };
      for (const int rounds : {1, 1, 7}) {
        const auto expected = outputs_of(rounds, [&] { chain(true); });
        CHECK(same_bits(outputs_of(rounds, [&] { chain(false); }), expected));
        CHECK(same_bits(outputs_of(rounds, replay), expected));
      }
    }
    cudaStreamDestroy(stream);
  }
}

TEST_CASE("GPU decode attention refuses what it was not made for, before a launch") {
  if (gpu_missing()) return;
  decode_case<bf16, 64> one({.sequences = 2, .heads = 2, .group = 2, .tokens = 2, .capacity = 64});
  const auto op = one.operation();
  buffer<unsigned char> workspace(op.workspace_bytes());
  op.prepare(workspace.data, nullptr);
  const auto refused = [&](const auto& change) {
    auto problem = one.problem();
    change(problem);
    return refuses([&] { op.run(problem, workspace.data, nullptr); });
  };
  CHECK_FALSE(refused([](auto&) {}));
  CHECK(refused([](auto& p) { p.view.sequences = 3; }));
  CHECK(refused([](auto& p) { p.q.tokens = 3; }));
  CHECK(refused([](auto& p) { p.q.heads = 8; }));
  CHECK(refused([](auto& p) { p.view.kv_heads = 1; }));
  CHECK(refused([](auto& p) { p.q.data += 1; }));
  CHECK(refused([](auto& p) { p.view.k += 4; }));
  CHECK(refused([](auto& p) { p.view.v_strides.token = 66; }));
  CHECK(refused([](auto& p) { p.view.k_strides.head += 1; }));
  CHECK(refused([](auto& p) { p.view.v_strides.dim = 2; }));
  CHECK_FALSE(refused([](auto& p) { p.view.sequences = 0; }));
  const auto device = cuda::device_info::current();
  using operation = cuda::decode_attention<decode_case<bf16, 64>::view_type>;
  CHECK(refuses([&] { operation(1, 3, 8, 1, device); }));
  CHECK(refuses([&] { operation(0, 2, 8, 1, device); }));
  CHECK(refuses([&] { operation(1, 2, 8, 0, device); }));
  CHECK(refuses([&] { operation(600, 2, 8, 1, device); }));
  cuda::check(cudaDeviceSynchronize(), "decode attention");
}
