// Forks of a cache on the GPU, of Llama-3.1-8B's shape: what a fork takes in time and memory by the placement of rows,
// and what the first step of each side takes, which replaces the pages that it writes to. bf16; medians, whole calls.
//
//   bench_forks [CONTEXT] [LAYERS] [ROUNDS] [DOCUMENT]        131072, 32, 15 and 16384 unless given
//
// fork         the call, until the host has it back and until the device is through
// memory       what the fork takes, of what a copy of the rows takes
// first step   of the fork, and of the original behind it; the second one of both for comparison
// prefix       the same fork before the prompt has ended
// questions    of 256 tokens about a document of DOCUMENT tokens whose prompt waits: the fork, the question's tokens and
//              the end of the prompt, against the latter two in a sequence that shares nothing. And the pages of the
//              document and ten questions, whose prompts have ended, against those of the document and ten times what
//              one keeps
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "cache_rows.cuh"
#include "tessera/backend/cuda/cache.cuh"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/ragged_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/snapkv.hpp"

namespace {

using namespace tessera;

using cache_bench::chunk_tokens, cache_bench::dim, cache_bench::kv_heads, cache_bench::q_heads;
using cache_bench::median, cache_bench::rows;

using clock = std::chrono::steady_clock;
double elapsed_us(clock::time_point begun) {
  return std::chrono::duration<double, std::micro>(clock::now() - begun).count();
}
void wait() { cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

template <class Method>
void measure(const char* name, index_t context, index_t layers, int rounds) {
  const rows given;
  cuda::cache_options sizes;
  sizes.sequences = 2;
  sizes.tokens = context + 64;
  Method method;
  if constexpr (requires { method.placement.heads; }) method.placement.heads = 4;
  cuda::cache<Method, bf16> kv(model_shape{layers, q_heads, kv_heads}, method, sizes);
  const auto part = [&](const cuda::device_buffer<bf16>& all, index_t heads, index_t tokens) {
    return nhd_rows(all.data(), tokens, heads, dim, 1);
  };
  const index_t id = kv.open(nullptr);
  for (index_t done = 0; done < context; done += chunk_tokens) {
    const index_t tokens = std::min(chunk_tokens, context - done);
    for (index_t layer = 0; layer < layers; ++layer)
      kv.prefill(layer, id, part(given.q, q_heads, 0), part(given.k, kv_heads, tokens), part(given.k, kv_heads, tokens),
                 nullptr);
  }
  wait();
  const auto step = [&](index_t of) {
    const auto begun = clock::now();
    const batch now = kv.prepare_step({of}, 1, nullptr);
    kv.begin_step(now, nullptr);
    for (index_t layer = 0; layer < layers; ++layer)
      kv.decode(layer, now, part(given.q, q_heads, 1), part(given.k, kv_heads, 1), part(given.k, kv_heads, 1),
                part(given.out, q_heads, 1), {}, nullptr);
    wait();
    return elapsed_us(begun);
  };
  std::vector<double> host, device, prefix, first, first_of_original, second;
  const double copied = double(context) * layers * kv_heads * dim * 2 * sizeof(bf16);
  double taken = 0;
  const auto fork = [&](std::vector<double>& called, std::vector<double>* done) {
    wait();
    const offset_t held = kv.bytes(id);
    const auto begun = clock::now();
    const index_t copy = kv.fork(id);
    called.push_back(elapsed_us(begun));
    wait();
    if (done) done->push_back(elapsed_us(begun));
    taken = std::max(taken, double(kv.bytes(id) + kv.bytes(copy) - held));
    return copy;
  };
  for (int i = 0; i < rounds + 2; ++i) kv.close(fork(prefix, nullptr), nullptr);
  kv.end_prefill(id, nullptr);
  for (int i = 0; i < rounds + 2; ++i) {
    const index_t copy = fork(host, &device);
    first.push_back(step(copy));
    first_of_original.push_back(step(id));
    second.push_back(step(copy));
    second.push_back(step(id));
    kv.close(copy, nullptr);
    kv.truncate(id, context, nullptr);
  }
  std::printf("%-14s fork %9.1f us, %9.1f us with the device's part; memory %.4f of a copy; prefix %9.1f us\n", name,
              median(host), median(device), taken / copied, median(prefix));
  std::printf("%-14s first step %9.1f us, of the original %9.1f us; the next ones %9.1f us\n", "", median(first),
              median(first_of_original), median(second));
}

template <class Method>
void ask(Method method, index_t document, index_t layers, int rounds) {
  constexpr index_t question = 256;
  const rows given;
  cuda::cache_options sizes;
  sizes.sequences = 13;
  sizes.tokens = document + question + 64;
  sizes.rows = offset_t(layers) * kv_heads * (4 * offset_t(sizes.tokens) + 16 * 4096);
  cuda::cache<Method, bf16> kv(model_shape{layers, q_heads, kv_heads}, method, sizes);
  const auto part = [&](const cuda::device_buffer<bf16>& all, index_t heads, index_t tokens) {
    return nhd_rows(all.data(), tokens, heads, dim, 1);
  };
  const auto write = [&](index_t id, index_t tokens) {
    for (index_t layer = 0; layer < layers; ++layer) {
      kv.prefill(layer, id, part(given.q, q_heads, tokens), part(given.k, kv_heads, tokens),
                 part(given.k, kv_heads, tokens), nullptr);
      kv.prefill_attention(layer, id, part(given.q, q_heads, tokens), part(given.out, q_heads, tokens), {}, nullptr);
    }
  };
  const auto write_document = [&] {
    const index_t id = kv.open(nullptr);
    for (index_t done = 0; done < document; done += chunk_tokens) write(id, std::min(chunk_tokens, document - done));
    wait();
    return id;
  };
  std::vector<double> alone, forked;
  const index_t prefix = write_document();
  const offset_t all = kv.available().pages;
  offset_t kept = 0;
  for (int i = 0; i < rounds + 2; ++i) {
    const index_t fresh = write_document();
    auto begun = clock::now();
    write(fresh, question);
    kv.end_prefill(fresh, nullptr);
    wait();
    alone.push_back(elapsed_us(begun));
    kept = all - kv.available().pages;
    kv.close(fresh, nullptr);
    wait();
    begun = clock::now();
    const index_t copy = kv.fork(prefix);
    write(copy, question);
    kv.end_prefill(copy, nullptr);
    wait();
    forked.push_back(elapsed_us(begun));
    kv.close(copy, nullptr);
  }
  std::vector<index_t> open;
  for (int i = 0; i < 10; ++i) {
    open.push_back(kv.fork(prefix));
    write(open.back(), question);
    kv.end_prefill(open.back(), nullptr);
  }
  wait();
  const offset_t whole = offset_t(layers) * ((document + 15) / 16);
  const offset_t own = Method::retain_type::drops ? kept : offset_t(layers) * (question / 16);
  const double taken = double(whole + all - kv.available().pages), expected = double(whole + 10 * own);
  std::printf(
      "%-14s %d tokens behind %d: %9.1f us, of a fork %9.1f us, %.3f; ten at once %.3f of one document and ten "
      "of what each keeps\n",
      Method::name, int(question), int(document), median(alone), median(forked), median(forked) / median(alone),
      taken / expected);
}

}  // namespace

int main(int count, char** arguments) try {
  const auto number = [&](int i, int otherwise) { return count > i ? std::atoi(arguments[i]) : otherwise; };
  const index_t context = number(1, 131072), layers = number(2, 32), document = number(4, 16384);
  const int rounds = number(3, 15);
  require(context >= 1 && layers >= 1 && rounds >= 1 && document >= 1, "arguments", count - 1, "positive numbers",
          "bench_forks [CONTEXT] [LAYERS] [ROUNDS] [DOCUMENT]");
  using rows_type = dense_rows<bf16, dim>;
  std::printf("%d tokens, %d layers, %d rounds\n", int(context), int(layers), rounds);
  measure<full<bf16, dim>>("runs", context, layers, rounds);
  measure<full<bf16, dim, dim, stored<rows_type, fixed_pages<16>>>>("fixed_pages", context, layers, rounds);
  measure<full<bf16, dim, dim, stored<rows_type, ragged_pages>>>("ragged_pages", context, layers, rounds);
  ask(full<bf16, dim, dim, stored<rows_type, fixed_pages<16>>>{}, document, layers, rounds);
  snapkv<bf16, dim, dim, stored<rows_type, fixed_pages<16>>> compressed;
  compressed.set_budget(1024);
  ask(compressed, document, layers, rounds);
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
