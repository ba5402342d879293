// Rung 8: the same recipe on the GPU. One decode step is recorded in a CUDA graph and replayed while the cache grows.
// The region between the markers stands in docs/cuda.md word for word; a check compares the two.
#include <cstdio>
#include <vector>

#include <tessera/backend/cuda/cache.cuh>
#include <tessera/methods/snapkv.hpp>

#include "support/ladder.hpp"

using namespace tessera;

constexpr index_t layers = 2, q_heads = 8, kv_heads = 2, dim = 64, prompt = 2048, steps = 100;

/// Numbers on the device that stand for a model's: queries and keys come after RoPE.
struct tensors {
  cuda::device_buffer<bf16> q, k, v;
  cuda::device_buffer<float> out{q_heads * dim};

  explicit tensors(const ladder::tensors& made) : q(on_device(made.q)), k(on_device(made.k)), v(on_device(made.v)) {}
  static cuda::device_buffer<bf16> on_device(const std::vector<float>& values) {
    const std::vector<bf16> host(values.begin(), values.end());
    cuda::device_buffer<bf16> copy(host.size());
    cuda::check(cudaMemcpy(copy.data(), host.data(), copy.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    return copy;
  }
  auto queries(index_t n) const { return nhd_rows<const bf16>(q.data(), n, q_heads, dim); }
  auto keys(index_t n) const { return nhd_rows<const bf16>(k.data(), n, kv_heads, dim); }
  auto values(index_t n) const { return nhd_rows<const bf16>(v.data(), n, kv_heads, dim); }
};

// [gpu]
using method = snapkv<bf16, dim>;

// From prompt to `steps` decode steps; `x` stands for the model. Everything but `x` is what an engine writes.
void compress_and_replay(cuda::cache<method>& kv, index_t id, const tensors& x, cudaStream_t stream) {
  kv.reserve(id, prompt, stream);
  for (index_t layer = 0; layer < layers; ++layer) {
    kv.prefill(layer, id, x.queries(prompt), x.keys(prompt), x.values(prompt), stream);
  }
  kv.end_prefill(id, stream);  // chooses what stays, frees the rest

  const batch one = kv.prepare_step({id}, 1, stream);  // the host's part of a step: room for one more token
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  kv.begin_step(one, stream);  // the device's part: positions move on, every layer appends and attends
  for (index_t layer = 0; layer < layers; ++layer) {
    kv.decode(layer, one, x.queries(1), x.keys(1), x.values(1), nhd_rows(x.out.data(), 1, q_heads, dim), {}, stream);
  }
  cudaGraph_t graph;
  cudaGraphExec_t step;
  cuda::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cuda::check(cudaGraphInstantiate(&step, graph, 0), "cudaGraphInstantiate");

  cuda::check(cudaGraphLaunch(step, stream), "cudaGraphLaunch");
  for (index_t i = 1; i < steps; ++i) {
    kv.prepare_step({id}, 1, stream);
    cuda::check(cudaGraphLaunch(step, stream), "cudaGraphLaunch");
  }
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  cudaGraphExecDestroy(step);
  cudaGraphDestroy(graph);
}
// [gpu]

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device on this machine");
    return 0;
  }
  try {
    method recipe;
    recipe.set_budget(256);
    cuda::cache<method> kv({layers, q_heads, kv_heads}, recipe, {.sequences = 1, .tokens = 4096});
    const index_t id = kv.open();
    cudaStream_t stream;
    cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
    compress_and_replay(kv, id, tensors(ladder::tensors(prompt, q_heads, kv_heads, dim)), stream);

    const auto positions = kv.positions(1, id, 0);
    std::printf("%d tokens seen, %d stored per kv_head, %lld of %lld bytes held\n", int(kv.next_position(id)),
                int(positions.size()), static_cast<long long>(kv.bytes(id)),
                static_cast<long long>(kv.full_bytes(prompt + steps)));
    cuda::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    return positions.size() == 256 + steps && positions.back() == prompt + steps - 1 ? 0 : 1;
  } catch (const error& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
}
