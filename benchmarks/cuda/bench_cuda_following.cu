// LoopServe's decoding, one layer of a whole step: rows appended, attention over the list, queries remembered; and of the step that
// chooses again, the choice too.
//
// The layers of one cache take turns, as many as make the lists that they read larger than the L2 together. A step is recorded once,
// its beginning included, and replayed: lists grow by a token a replay, or are chosen anew in each.
#include "cuda_bench.hpp"
#include "tessera/backend/cuda/cache.cuh"
#include "tessera/methods/loopserve_decode.hpp"

namespace gpu_bench::of_following {
namespace {

// Every replay appends a token: as many outputs lie between two choices.
constexpr index_t budget = 1024, chunk = 16384, replays = 64, window = 16;

using method = loopserve_decode<bf16, head_dim>;
using cache_type = cuda::cache<method>;

struct held {
  cache_type cache;
  buffer<float> out;
  batch step{};
  held(const model_shape& shape, const method& recipe, const cuda::cache_options& options)
      : cache(shape, recipe, options), out(std::size_t(options.sequences * shape.q_heads * head_dim)) {}
};

rows_view<const bf16> random_tokens(index_t tokens, index_t heads, index_t sequences = 1, std::size_t skip = 0) {
  return nhd_rows<const bf16>(random_rows(std::size_t(1) << 26) + skip, tokens, heads, head_dim, sequences);
}

prepared step_of(index_t sequences, index_t context, bool chooses) {
  const double list_bytes = double(sequences) * kv_heads * budget * method::layout_type::token_bytes();
  const index_t layers = input_sets(list_bytes);
  method recipe;
  recipe.set_budget(budget);
  recipe.schedule.first = 0;  // no steps that read everything
  cuda::cache_options options;
  options.sequences = sequences;
  options.tokens = context + 4 * replays;
  options.step_tokens = 1;
  const auto all = std::make_shared<held>(model_shape{layers, q_heads, kv_heads}, recipe, options);
  cache_type& cache = all->cache;
  std::vector<index_t> ids;
  for (index_t s = 0; s < sequences; ++s) {
    ids.push_back(cache.open(stream()));
    cache.reserve(ids.back(), context + 4 * replays, stream());
    for (index_t done = 0; done < context; done += chunk) {
      for (index_t layer = 0; layer < layers; ++layer) {
        const std::size_t skip = std::size_t(done / chunk + layer + s) % 16 * head_dim * 64;
        const index_t tokens = std::min(chunk, context - done);
        cache.prefill(layer, ids.back(), random_tokens(window, q_heads), random_tokens(tokens, kv_heads, 1, skip),
                      random_tokens(tokens, kv_heads, 1, skip + (std::size_t(1) << 25)), stream());
      }
    }
    cache.end_prefill(ids.back(), stream());
  }
  const auto decode = [&](index_t layer) {
    if (layer == 0) cache.begin_step(all->step, stream());
    cache.decode(layer, all->step, random_tokens(1, q_heads, sequences), random_tokens(1, kv_heads, sequences, 1 << 20),
                 random_tokens(1, kv_heads, sequences, 1 << 21),
                 nhd_rows(all->out.data(), 1, q_heads, head_dim, sequences), {}, stream());
  };
  // Two choices make room for what is decoded between them. The step to be recorded is the one that chooses a third time, or the
  // one behind the second choice.
  index_t choices = 0;
  for (;;) {
    all->step = cache.prepare_step(ids, 1, stream());
    const bool chooses_now = all->step.evicts_last;
    if (choices == 2 && chooses_now == chooses) break;
    choices += chooses_now;
    for (index_t layer = 0; layer < layers; ++layer) decode(layer);
  }
  prepared made;
  made.keep = all;
  made.bytes = list_bytes + (chooses ? double(sequences) * kv_heads * context * method::layout_type::key_bytes() : 0);
  made.graph = std::make_unique<replay>(layers, decode);
  return made;
}

const int registered = [] {
  for (const index_t sequences : {1, 8}) {
    const std::string where = "loopserve/B" + std::to_string(sequences) + "/128K/";
    add(where + "step", [=] { return step_of(sequences, 131072, false); });
    add(where + "choosing", [=] { return step_of(sequences, 131072, true); });
  }
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_following
