// Mixed batches of a cache on the GPU, of the shape of two layers of Llama-3.1-8B: what steps of different lengths, and
// a chunk of a prompt beside steps, cost against the same work apart. bf16; medians of CUDA events, whole calls.
//
//   bench_batches [CONTEXT] [SEQUENCES] [ROUNDS]        32768, 32 and 15 unless given
//
// steps/alike     4 tokens of every sequence, rows by sequence
// steps/uneven    1 to 8 tokens, 4 on average, rows packed
// steps/one       1 token of every sequence
// chunk           2,048 prompt tokens behind CONTEXT others, and their attention
// mixed           the last two in one batch
// draft           a draft of 4 tokens of every sequence, and nothing accepted
// draft/accepted  the same, and 1 to 4 tokens of each accepted together
// launches        kernels of one layer of `mixed`, with all sequences and with a quarter of them
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "tessera/backend/cuda/cache.cuh"
#include "tessera/methods/full.hpp"

namespace {

using namespace tessera;

constexpr index_t layers = 2, q_heads = 32, kv_heads = 8, dim = 128, chunk_tokens = 2048;

/// Random rows that every call reads, and its outputs.
struct rows {
  cuda::device_buffer<bf16> q, k, v, out;
  explicit rows(index_t tokens)
      : q(made(std::size_t(tokens) * q_heads * dim)),
        k(made(std::size_t(tokens) * kv_heads * dim)),
        v(made(std::size_t(tokens) * kv_heads * dim)),
        out(std::size_t(tokens) * q_heads * dim) {}
  static cuda::device_buffer<bf16> made(std::size_t count) {
    std::vector<bf16> host(count);
    std::uint32_t state = 12345;
    for (bf16& x : host) {
      state = state * 1664525u + 1013904223u;
      x = bf16(float(int(state >> 16) - 32768) / 16384);
    }
    cuda::device_buffer<bf16> on_device(count);
    cuda::check(cudaMemcpy(on_device.data(), host.data(), count * sizeof(bf16), cudaMemcpyHostToDevice), "cudaMemcpy");
    return on_device;
  }
};

template <class Method>
class measured {
 public:
  measured(index_t context, index_t sequences, int rounds)
      : context_(context),
        sequences_(sequences),
        rounds_(rounds),
        rows_(std::max(context, chunk_tokens + 8 * sequences)),
        cache_(model_shape{layers, q_heads, kv_heads}, Method(), options()) {
    for (index_t id = 0; id <= sequences; ++id) {
      cache_.open(nullptr);
      cache_.reserve(id, context + 64, nullptr);
      for (index_t layer = 0; layer < layers; ++layer)
        cache_.prefill(layer, id, part(rows_.q, q_heads, context), part(rows_.k, kv_heads, context),
                       part(rows_.v, kv_heads, context), nullptr);
      if (id < sequences) cache_.end_prefill(id, nullptr);
    }
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  void run() {
    const host_vector<index_t> all = ids();
    const double alike = time([&] { step(all, host_vector<index_t>(all.size(), 4)); });
    host_vector<batch_item> uneven;
    const index_t lengths[] = {1, 7, 2, 6, 3, 5, 8, 0};
    for (const index_t id : all) uneven.push_back({id, id % 8 == 7 ? 1 : lengths[id % 8]});
    index_t total = 0;
    for (const batch_item& item : uneven) total += item.tokens;
    const double packed = time([&] { pass(uneven); });
    const double one = time([&] { step(all, host_vector<index_t>(all.size(), 1)); });
    const double chunk = time([&] { pass({{sequences_, chunk_tokens, true}}); });
    host_vector<batch_item> both{{sequences_, chunk_tokens, true}};
    for (const index_t id : all) both.push_back({id, 1});
    const double mixed = time([&] { pass(both); });
    const double one_again = time([&] { step(all, host_vector<index_t>(all.size(), 1)); });
    const double chunk_again = time([&] { pass({{sequences_, chunk_tokens, true}}); });
    std::printf("%s, %d sequences of %d tokens, %d layers\n", Method::name, int(sequences_), int(context_),
                int(layers));
    std::printf("steps/alike   %8.1f us  %d tokens\n", alike, int(4 * sequences_));
    std::printf("steps/uneven  %8.1f us  %d tokens, %.3f of alike\n", packed, int(total), packed / alike);
    std::printf("steps/one     %8.1f us\nchunk         %8.1f us\n", one, chunk);
    std::printf("              %8.1f us  and %.1f us behind `mixed`\n", one_again, chunk_again);
    std::printf("mixed         %8.1f us  %.3f of both apart\n", mixed,
                2 * mixed / (one + chunk + one_again + chunk_again));
    const double drafted = time([&] { draft(all, false); }), accepted = time([&] { draft(all, true); });
    std::printf("draft         %8.1f us  %.3f of steps/alike\n", drafted, drafted / alike);
    std::printf("... accepted  %8.1f us  %.3f of steps/alike\n", accepted, accepted / alike);
    const host_vector<batch_item> fewer(both.begin(), both.begin() + 1 + sequences_ / 4);
    std::printf("launches      %d of a layer, %d with a quarter of the sequences\n", launches(both), launches(fewer));
  }

 private:
  cuda::cache_options options() const {
    cuda::cache_options sizes;
    sizes.sequences = sequences_ + 1;
    sizes.tokens = context_ + 2 * chunk_tokens;
    sizes.step_tokens = 8;
    sizes.draft_tokens = 4;
    sizes.rows =
        offset_t(layers) * kv_heads * (offset_t(sequences_) * (context_ + 2048) + 2 * (context_ + 2 * chunk_tokens));
    return sizes;
  }
  host_vector<index_t> ids() const {
    host_vector<index_t> all;
    for (index_t id = 0; id < sequences_; ++id) all.push_back(id);
    return all;
  }
  static rows_view<bf16> part(const cuda::device_buffer<bf16>& all, index_t heads, index_t tokens, index_t count = 1) {
    return nhd_rows(all.data(), tokens, heads, dim, count);
  }
  void step(const host_vector<index_t>& ids, const host_vector<index_t>& lengths) {
    const batch now = cache_.prepare_step(ids, lengths, nullptr);
    cache_.begin_step(now, nullptr);
    const index_t n = now.sequences();
    for (index_t layer = 0; layer < layers; ++layer)
      cache_.decode(layer, now, part(rows_.q, q_heads, now.tokens, n), part(rows_.k, kv_heads, now.tokens, n),
                    part(rows_.v, kv_heads, now.tokens, n), part(rows_.out, q_heads, now.tokens, n), {}, nullptr);
  }
  void draft(const host_vector<index_t>& ids, bool accepts) {
    const draft_step now = cache_.prepare_draft(ids, 4, nullptr);
    cache_.begin_step(now, nullptr);
    const index_t n = now.sequences();
    for (index_t layer = 0; layer < layers; ++layer)
      cache_.decode(layer, now, part(rows_.q, q_heads, 4, n), part(rows_.k, kv_heads, 4, n),
                    part(rows_.v, kv_heads, 4, n), part(rows_.out, q_heads, 4, n), {}, nullptr);
    host_vector<accepted_tokens> accepted;
    for (const index_t id : ids) {
      accepted.push_back({id, {}});
      for (index_t t = 0; accepts && t <= id % 4; ++t) accepted.back().nodes.push_back(t);
    }
    cache_.accept(accepted, nullptr);
  }
  void pass(const host_vector<batch_item>& items) {
    const mixed_batch work = cache_.prepare(items, nullptr);
    if (work.has_step()) cache_.begin_step(work.step, nullptr);
    for (index_t layer = 0; layer < layers; ++layer) process(layer, work, nullptr);
  }
  void process(index_t layer, const mixed_batch& work, cudaStream_t stream) {
    cache_.process(layer, work, part(rows_.q, q_heads, work.rows()), part(rows_.k, kv_heads, work.rows()),
                   part(rows_.v, kv_heads, work.rows()), part(rows_.out, q_heads, work.rows()), {}, stream);
  }
  /// Kernels of one layer, by recording it.
  int launches(const host_vector<batch_item>& items) {
    const mixed_batch work = cache_.prepare(items, nullptr);
    if (work.has_step()) cache_.begin_step(work.step, nullptr);
    cudaStream_t stream;
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    process(0, work, stream);
    cudaGraph_t graph;
    cuda::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    std::size_t nodes = 0;
    cuda::check(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
    cuda::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    cuda::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    for (index_t layer = 1; layer < layers; ++layer) process(layer, work, nullptr);
    return int(nodes);
  }
  /// The median time of a call, in microseconds. What it appended is taken back behind it.
  double time(const std::function<void()>& call) {
    cudaEvent_t begin, end;
    cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
    cuda::check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<float> times;
    for (int i = 0; i < rounds_ + 3; ++i) {
      cuda::check(cudaEventRecord(begin, nullptr), "cudaEventRecord");
      call();
      cuda::check(cudaEventRecord(end, nullptr), "cudaEventRecord");
      cuda::check(cudaEventSynchronize(end), "cudaEventSynchronize");
      float taken = 0;
      cuda::check(cudaEventElapsedTime(&taken, begin, end), "cudaEventElapsedTime");
      if (i >= 3) times.push_back(taken * 1000);
      for (index_t id = 0; id <= sequences_; ++id) cache_.truncate(id, context_, nullptr);
    }
    std::sort(times.begin(), times.end());
    return double(times[times.size() / 2]);
  }

  index_t context_, sequences_;
  int rounds_;
  rows rows_;
  cuda::cache<Method, bf16> cache_;
};

}  // namespace

int main(int count, char** arguments) try {
  const auto number = [&](int i, int otherwise) { return count > i ? std::atoi(arguments[i]) : otherwise; };
  const index_t context = number(1, 32768), sequences = number(2, 32);
  tessera::require(context >= 64 && sequences >= 8, "context and sequences", context, "at least 64, and at least 8",
                   "see the file's head");
  measured<tessera::full<tessera::bf16, dim>>(context, sequences, number(3, 15)).run();
} catch (const std::exception& failed) {
  std::fprintf(stderr, "%s\n", failed.what());
  return 1;
}
