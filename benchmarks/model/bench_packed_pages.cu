// Packed rows of MosaicKV on the GPU in pages of a shared pool, and in planes; Llama-3.1-8B's heads, bf16.
//
//   bench_packed_pages [CONTEXT] [BATCH] [LAYERS] [SEQUENCES] [LONGEST]   262144, 4, 4, 32 and 131072 unless given
//
// memory   SEQUENCES sequences of 1,024 to LONGEST tokens in one cache, each length the same factor longer: what they
//          take in pages, against packed rows, bits, means of blocks, bases and whole tails by formula; what planes set
//          aside for them; what a fork of the longest takes, at once and after 100 steps
// steps    of BATCH sequences of CONTEXT tokens, of which a step reads 6.25 %: a layer's part, in pages, in planes and
//          of Quest over whole rows, in turns; medians
// turn     of 2,048 tokens behind LONGEST, appended, attended and ended in all layers, beside the same of `full`; the
//          least of five
// prefill  of LONGEST tokens in chunks of 2,048, with attention: time, and the most that the cache held, bases counted,
//          where chunks stay whole, where the prefill packs them, and of `full`
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

#include "cache_rows.cuh"
#include "tessera/backend/cuda/cache.cuh"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/mosaickv.hpp"
#include "tessera/methods/quest.hpp"

namespace {

using namespace tessera;

using cache_bench::chunk_tokens, cache_bench::dim, cache_bench::kv_heads, cache_bench::q_heads;
using cache_bench::median, cache_bench::rows;

using in_planes = mosaickv<bf16, dim>;
using in_pages = mosaickv<bf16, dim, dim, stored<dense_rows<bf16, dim>, fixed_pages<16>>>;

template <class Method>
class measured_cache {
 public:
  measured_cache(const Method& method, index_t layers, const cuda::cache_options& sizes)
      : layers_(layers), kv_(model_shape{layers, q_heads, kv_heads}, method, sizes) {}

  /// Writes a prompt, whose queries attend to nothing: only what is stored counts.
  index_t write(index_t tokens) {
    const index_t id = kv_.open(nullptr);
    for (index_t done = 0; done < tokens; done += chunk_tokens) {
      const index_t some = (std::min)(chunk_tokens, tokens - done);
      for (index_t layer = 0; layer < layers_; ++layer)
        kv_.prefill(layer, id, part(given_.q, q_heads, some), part(given_.k, kv_heads, some),
                    part(given_.k, kv_heads, some), nullptr);
    }
    kv_.end_prefill(id, nullptr);
    return id;
  }
  /// The same for the tokens of a turn, with attention. Returns the time until the device is through, in microseconds.
  double turn(index_t id, index_t tokens) {
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    begun_.record();
    append(id, tokens);
    kv_.end_prefill(id, nullptr);
    done_.record();
    return begun_.until(done_);
  }
  /// A whole prompt in chunks, with attention. Returns the time in seconds.
  double read(index_t id, index_t tokens) {
    begun_.record();
    for (index_t done = 0; done < tokens; done += chunk_tokens) append(id, (std::min)(chunk_tokens, tokens - done));
    kv_.end_prefill(id, nullptr);
    done_.record();
    return begun_.until(done_) / 1e6;
  }
  /// Returns the time on the device, in microseconds.
  double step(const std::vector<index_t>& ids) {
    const index_t batch_size = index_t(ids.size());
    const batch now = kv_.prepare_step(ids, 1, nullptr);
    kv_.begin_step(now, nullptr);
    begun_.record();
    for (index_t layer = 0; layer < layers_; ++layer)
      kv_.decode(layer, now, part(given_.q, q_heads, 1, batch_size), part(given_.k, kv_heads, 1, batch_size),
                 part(given_.k, kv_heads, 1, batch_size), part(given_.out, q_heads, 1, batch_size), {}, nullptr);
    done_.record();
    return begun_.until(done_) / layers_;
  }
  cuda::cache<Method, bf16>& operator*() { return kv_; }
  cuda::cache<Method, bf16>* operator->() { return &kv_; }

 private:
  void append(index_t id, index_t tokens) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      kv_.prefill(layer, id, part(given_.q, q_heads, tokens), part(given_.k, kv_heads, tokens),
                  part(given_.k, kv_heads, tokens), nullptr);
      kv_.prefill_attention(layer, id, part(given_.q, q_heads, tokens), part(given_.out, q_heads, tokens), {}, nullptr);
    }
  }
  static auto part(const cuda::device_buffer<bf16>& all, index_t heads, index_t tokens, index_t sequences = 1) {
    return nhd_rows(all.data(), tokens, heads, dim, sequences);
  }
  index_t layers_;
  rows given_;
  cache_bench::mark begun_, done_;
  cuda::cache<Method, bf16> kv_;
};

/// Bytes that a layer of a sequence needs: packed rows with their bits, means, bases, and a whole tail.
double needed_bytes(index_t tokens) {
  const auto made = in_pages().layout.rows;
  const double k = made.key_format().value_bytes() + made.key_format().bit_bytes(),
               v = made.value_format().value_bytes() + made.value_format().bit_bytes();
  const index_t packed = made.tail.packed_after_prompt(tokens), block = in_pages().retrieve.mean_block();
  const double segments = double((packed + made.segment - 1) / made.segment);
  const double basis = double(made.key_format().channels + made.value_format().channels) * dim * 4;
  return kv_heads * (packed * (k + v) + std::ceil(double(packed) / block) * k + segments * basis +
                     (tokens - packed) * 2.0 * dim * 2);
}

void measure_memory(index_t layers, index_t sequences, index_t longest) {
  std::vector<index_t> lengths;
  double tokens = 0, needed = 0;
  for (index_t i = 0; i < sequences; ++i) {
    const double share = sequences > 1 ? double(i) / (sequences - 1) : 1;
    lengths.push_back(index_t(1024 * std::pow(double(longest) / 1024, share)));
    tokens += lengths.back(), needed += layers * needed_bytes(lengths.back());
  }
  cuda::cache_options sizes;
  sizes.sequences = sequences + 2;  // a cache that has no sequence left says that no page is available
  sizes.tokens = longest + 1024;
  sizes.rows = offset_t((tokens * 0.45 + longest + 8192) * layers * kv_heads);
  measured_cache<in_pages> kv({}, layers, sizes);
  const offset_t all = kv->available().pages;
  const double page_bytes = 16.0 * kv_heads * 2 * dim * 2;
  std::vector<index_t> ids;
  double sum = 0;
  for (const index_t length : lengths) ids.push_back(kv.write(length)), sum += double(kv->bytes(ids.back()));
  const offset_t used = all - kv->available().pages;
  const double bases = sum - used * page_bytes;
  std::printf(
      "memory  %d sequences of 1024 to %d tokens, %.0f in all, %d layers: %.1f MB in pages and bases, %.1f by formula: "
      "%.3f; whole rows would take %.1f\n",
      sequences, longest, tokens, layers, (used * page_bytes + bases) / 1e6, needed / 1e6,
      (used * page_bytes + bases) / needed, tokens * layers * kv_heads * 2 * dim * 2 / 1e6);
  const auto row = in_pages().layout.rows;
  const double planes = double(sequences) * sizes.tokens * layers * kv_heads *
                        (row.key_format().value_bytes() + row.value_format().value_bytes() +
                         row.key_format().bit_bytes() + row.value_format().bit_bytes());
  std::printf("        planes set %.1f MB aside for as many sequences of that length\n", planes / 1e6);
  const offset_t before = kv->available().pages;
  const double alone = double(kv->bytes(ids.back()));
  const index_t fork = kv->fork(ids.back());
  std::printf("fork    of the longest: %lld pages at once", static_cast<long long>(before - kv->available().pages));
  for (int i = 0; i < 100; ++i) kv.step({fork});
  std::printf(", after 100 steps %.4f of the sequence\n", (before - kv->available().pages) * page_bytes / alone);
}

template <class Method>
std::unique_ptr<measured_cache<Method>> filled(index_t layers, index_t context, index_t batch_size) {
  Method method;
  method.set_budget(context / 16);
  cuda::cache_options sizes;
  sizes.sequences = batch_size;
  sizes.tokens = context + 4096;
  auto made = std::make_unique<measured_cache<Method>>(method, layers, sizes);
  for (index_t i = 0; i < batch_size; ++i) made->write(context);
  return made;
}

void measure_steps(index_t layers, index_t context, index_t batch_size) {
  const auto pages = filled<in_pages>(layers, context, batch_size);
  const auto planes = filled<in_planes>(layers, context, batch_size);
  std::vector<index_t> ids;
  for (index_t i = 0; i < batch_size; ++i) ids.push_back(i);
  const auto quests = filled<quest<bf16, dim>>(layers, context, batch_size);
  std::vector<double> of_pages, of_planes, of_quest;
  for (int round = 0; round < 60; ++round) {
    of_pages.push_back(pages->step(ids));
    of_planes.push_back(planes->step(ids));
    of_quest.push_back(quests->step(ids));
  }
  std::printf(
      "steps   %d sequences of %d tokens, 6.25 %%: %.1f us a layer in pages, %.1f in planes (%.3f); quest %.1f, of "
      "planes "
      "%.2f\n",
      batch_size, context, median(of_pages), median(of_planes), median(of_pages) / median(of_planes), median(of_quest),
      median(of_quest) / median(of_planes));
}

template <class Method>
double least_turn(index_t layers, index_t context) {
  cuda::cache_options sizes;
  sizes.tokens = context + 6 * chunk_tokens;
  measured_cache<Method> kv({}, layers, sizes);
  const index_t id = kv.write(context);
  double least = kv.turn(id, chunk_tokens);
  for (int i = 0; i < 4; ++i) least = (std::min)(least, kv.turn(id, chunk_tokens));
  return least;
}
void measure_turn(index_t layers, index_t context) {
  const double whole = least_turn<full<bf16, dim>>(layers, context), pages = least_turn<in_pages>(layers, context),
               planes = least_turn<in_planes>(layers, context);
  std::printf("turn    of %d tokens behind %d: %.0f us a layer in pages, %.0f in planes, full %.0f: %.2f and %.2f\n",
              chunk_tokens, context, pages / layers, planes / layers, whole / layers, pages / whole, planes / whole);
}

/// Reads a prompt, and reports the time and the share of `full`'s cache that was held at most.
template <class Method>
void read_prompt(const char* name, const Method& method, index_t layers, index_t tokens, double share) {
  const double whole = double(tokens) * layers * kv_heads * 2 * dim * 2;
  cuda::cache_options sizes;
  sizes.sequences = 2;  // a cache that has no sequence left says that no page is available
  sizes.tokens = tokens + chunk_tokens;
  sizes.rows = offset_t(share * tokens * layers * kv_heads);
  measured_cache<Method> kv(method, layers, sizes);
  const offset_t all = kv->available().pages;
  const index_t id = kv->open(nullptr);
  const double seconds = kv.read(id, tokens);
  double most = double(kv->peak_bytes());
  if constexpr (std::is_same_v<Method, in_pages>)
    most += double(kv->bytes(id)) - double(all - kv->available().pages) * 16 * kv_heads * 2 * dim * 2;  // bases
  std::printf("prefill of %d tokens in %d layers, %s: %.2f s, at most %.1f MB held: %.3f of full's cache\n", tokens,
              layers, name, seconds, most / 1e6, most / whole);
}
void measure_prefill(index_t layers, index_t tokens) {
  read_prompt("full", full<bf16, dim, dim, stored<dense_rows<bf16, dim>, fixed_pages<16>>>(), layers, tokens, 1.01);
  in_pages method;
  method.set_budget(tokens / 16);
  read_prompt("mosaickv", method, layers, tokens, 1.4);
  method.layout.rows.prefill = prefill_rows::packed;
  read_prompt("mosaickv, prefill=packed", method, layers, tokens, 0.45);
}

}  // namespace

int main(int count, char** given) {
  const auto number = [&](int i, int otherwise) { return count > i ? std::atoi(given[i]) : otherwise; };
  const int context = number(1, 262144), batch_size = number(2, 4), layers = number(3, 4), sequences = number(4, 32),
            longest = number(5, 131072);
  if (context < 2048 || batch_size < 1 || layers < 1 || sequences < 1 || longest < 1024) {
    std::fprintf(stderr,
                 "bench_packed_pages: expected a context of 2048 tokens or more, at least one sequence and one "
                 "layer, and longest sequences of 1024 tokens or more\n");
    return 2;
  }
  try {
    measure_memory(layers, sequences, longest);
    measure_steps(layers, context, batch_size);
    measure_turn(layers, longest);
    measure_prefill(layers, longest);
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "bench_packed_pages: %s\n", problem.what());
    return 1;
  }
}
