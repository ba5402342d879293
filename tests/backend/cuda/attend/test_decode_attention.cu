// GPU decode attention against the CPU's: head dims, tables, caps, windows, selections, sinks, growing lengths, errors.
#include "backend/cuda/attend/decode_case.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace decode_test;

namespace {

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
    CHECK(error_of<decode_case<bf16, 64>>({.sequences = sequences, .heads = 8, .capacity = shrunk(700, 60)}) < 5e-3);
    CHECK(error_of<decode_case<bf16, 64>>({.sequences = sequences, .heads = 8, .capacity = 30, .gather = true}) < 5e-3);
  }
  // So many tiles for so few multiprocessors that the beginnings of rows count when the work is cut.
  for (const int multiprocessors : {1, 2, 5}) {
    CHECK(error_of<decode_case<bf16, 64>>(
              {.sequences = 20, .heads = 8, .capacity = shrunk(700, 60), .multiprocessors = multiprocessors}) < 5e-3);
    CHECK(error_of<decode_case<bf16, 128, block_table>>(
              {.sequences = 33, .heads = 4, .capacity = shrunk(300, 40), .multiprocessors = multiprocessors}) < 5e-3);
  }
}

TEST_CASE("GPU decode attention where a block reads a long row, and many rows one after the other") {
  if (gpu_missing()) return;
  // What says where tiles lie is read in windows of 32 tiles; a whole device would give no block so many.
  for (const int multiprocessors : {1, 3}) {
    for (const bool gather : {false, true}) {
      const decode_shape s{.sequences = 3,
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

TEST_CASE("GPU decode attention shows NaN and infinity to those query rows alone that see them") {
  if (gpu_missing()) return;
  for (const float special : {float(NAN), infinity, -infinity}) {
    for (const bool keys : {false, true}) {
      if (keys && special == special) continue;  // an infinite key gives logits of either sign: not a mask's matter
      for (const float cap : {0.0f, 20.0f}) {
        for (const bool gather : {false, true}) {
          INFO("special " << special << " in keys " << keys << " cap " << cap << " gather " << gather);
          // Two tokens a step: the first must not see the second, which is the last one stored.
          const decode_shape two{.tokens = 2, .capacity = 400, .soft_cap = cap, .gather = gather};
          CHECK(error_of_spoiled<decode_case<bf16, 128>>(two, keys, special, {1}) < 5e-3);
          CHECK(error_of_spoiled<decode_case<bf16, 64>>(two, keys, special, {1}) < 5e-3);
          // A window of 100: tokens beyond it are stored and not seen; with several tokens, by some alone.
          for (const index_t tokens : {1, 3}) {
            const decode_shape window{
                .tokens = tokens, .capacity = 400, .soft_cap = cap, .window = 100, .gather = gather};
            CHECK(error_of_spoiled<decode_case<bf16, 128>>(window, keys, special, {101, 104, 250, 399}) < 5e-3);
            CHECK(error_of_spoiled<decode_case<bf16, 64>>(window, keys, special, {99, 101, 102, 130}) < 5e-3);
            CHECK(error_of_spoiled<decode_case<bf16, 80>>(window, keys, special, {99, 101, 102, 130}) < 5e-3);
          }
        }
      }
    }
  }
}

TEST_CASE("GPU decode attention over short selections, as many blocks a row as there is room for") {
  if (gpu_missing()) return;
  for (int i = 0; i < scaled(60, 6); ++i) {
    // One row up to more of them than the device has multiprocessors, of one tile up to more than are read by clusters.
    const decode_shape s{.sequences = draw(1, i % 3 == 0 ? 40 : 4),
                         .heads = draw(1, 4),
                         .group = draw(1, 8),
                         .tokens = draw(1, 8),
                         .capacity = draw(1, i % 3 == 0 ? 800 : shrunk(6000, 600)),
                         .gather = i % 2 == 0,
                         .by_offsets = false,
                         .usual_row = i % 2 == 0 ? 0 : draw(1, 1500)};  // some rows are longer
    INFO("sequences " << s.sequences << " heads " << s.heads << " group " << s.group << " tokens " << s.tokens
                      << " capacity " << s.capacity);
    CHECK(error_of<decode_case<bf16, 128>>(s) < 5e-3);
    CHECK(error_of<decode_case<bf16, 64, block_table>>(s) < 5e-3);
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
  CHECK(refused([](auto& p) { p.view.sequences = -1; }));
  CHECK(refused([](auto& p) { p.q.tokens = -1; }));
  CHECK(refused([](auto& p) { p.q.sequences = 1; }));
  CHECK(refused([](auto& p) { p.q.dim = 128; }));
  CHECK(refused([](auto& p) { p.q.data = nullptr; }));
  CHECK(refused([](auto& p) { p.out.data = nullptr; }));
  CHECK(refused([](auto& p) { p.out.tokens = 1; }));
  CHECK(refused([](auto& p) { p.lse.heads = 2; }));
  CHECK(refused([](auto& p) { p.first_position = nullptr; }));
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
