// Serving by one method on a GPU: its cache within the memory, the example engine's model, the scheduler.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/backend/cuda/cache.cuh>
#include <tessera/backend/cuda/store/saved_sequence.cuh>
#include <tessera/layout/dense_rows.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/stored.hpp>

#include "queued_cache.hpp"
#include "scheduler.hpp"
#include "served.hpp"

namespace serving {

using tessera::bf16;
inline constexpr int head_dim = 128;
using rows_in_pages = tessera::stored<tessera::dense_rows<bf16, head_dim>, tessera::fixed_pages<16>>;

struct wall_clock {
  double now() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void wait_until(double seconds) const {
    std::this_thread::sleep_for(std::chrono::duration<double>(std::max(0.0, seconds - now())));
  }
};

/// One saved sequence in page-locked memory, which the device writes and reads.
class pinned_bytes {
 public:
  template <class Cache>
  void save(Cache& cache, index_t id) {
    cache.save(id, saved_);
    saved_.wait();
  }
  template <class Cache>
  index_t load(Cache& cache) {
    return cache.load(saved_);
  }
  std::size_t bytes() const { return saved_.bytes(); }

 private:
  tessera::cuda::saved_sequence saved_;
};

/// Passes of the whole model; attention and cache are the method's.
class device_model {
 public:
  explicit device_model(engine::cuda::llama& model) : model_(model) {}

  template <class Cache>
  std::vector<token_t> pass(Cache& cache, const tessera::mixed_batch& work, const std::vector<token_t>& tokens,
                            const std::vector<std::int32_t>& wanted) {
    const engine::llama_config& config = model_.config();
    const double begun = wall_clock().now();
    std::vector<std::int32_t> positions;
    for (std::size_t i = 0; i < work.items.size(); ++i) {
      for (index_t t = 0; t < work.items[i].tokens; ++t) positions.push_back(work.positions[i] + t);
    }
    const auto rows = [&](auto* data, index_t heads) {
      return tessera::nhd_rows(data, work.rows(), heads, config.head_dim);
    };
    cache.begin(work);
    const auto attend = [&](int layer, const void* q, const void* k, const void* v, float* out) {
      cache.process(layer, work, rows(static_cast<const bf16*>(q), config.num_attention_heads),
                    rows(static_cast<const bf16*>(k), config.num_key_value_heads),
                    rows(static_cast<const bf16*>(v), config.num_key_value_heads),
                    rows(out, config.num_attention_heads));
      if (layer + 1 == config.num_hidden_layers && work.rows() == work.step.sequences())
        launch_seconds += wall_clock().now() - begun;
    };
    return model_.pass({tokens, positions, wanted}, attend);
  }

  double launch_seconds = 0;  ///< of passes without a chunk, until the host has launched the last layer's attention

 private:
  engine::cuda::llama& model_;
};

/// How a method is served.
template <class Method>
struct served_setup {
  Method method;
  tessera::sequence_options budgets{};
  tessera::cuda::cache_options sizes{};  ///< its prompts and budgets; not sequences, tokens and rows
  double pooled = 1;                     ///< share of its tokens that a sequence has in the pool behind its prompt
  double later_bytes = 0;                ///< of a sequence, beside its pages, that the cache makes when prompts end
};

/// Counts of tokens.
struct extents {
  index_t longest = 0, shortest = tessera::max_tokens;  ///< of a conversation, and of a first prompt
  double mean = 0, mean_own = 0;  ///< of a conversation; and without its document, where that is shared
  double documents = 0;           ///< of all documents
  index_t document_count = 0;

  extents(const std::vector<conversation>& conversations, bool shares) {
    std::set<int> seen;
    for (const conversation& entry : conversations) {
      longest = std::max(longest, index_t(entry.tokens()));
      shortest = std::min(shortest, index_t(entry.first_prompt()));
      mean += double(entry.tokens()) / double(conversations.size());
      mean_own += double(entry.tokens() - (shares ? entry.shared : 0)) / double(conversations.size());
      if (!shares || entry.document < 0 || !seen.insert(entry.document).second) continue;
      documents += double(entry.shared);
      document_count += 1;
    }
  }
};

/// A method with a budget that is the same share of every conversation.
template <class Method>
served_setup<Method> with_share(Method method, const serving_case& given) {
  const extents counts(given.conversations, given.options.shares_prefixes);
  const auto part = [&](index_t tokens) { return index_t(std::ceil(given.share * tokens)); };
  served_setup<Method> made{std::move(method)};
  made.method.set_budget(part(counts.longest));
  made.budgets.budget.share = given.share;
  made.sizes.smallest_budget = part(counts.shortest);
  return made;
}

inline double used_bytes() {
  std::size_t free = 0, total = 0;
  tessera::cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return double(total - free);
}

/// The sizes of a cache that takes so many bytes in all: as many sequences as are likely to run together, and what they leave
/// as the pool.
/// Errors   less memory than one conversation needs: tessera::error.
template <class Method>
tessera::cuda::cache_options fitted_sizes(const served_setup<Method>& setup, const tessera::model_shape& shape,
                                          const serving_case& given, outcome& made) {
  const extents counts(given.conversations, given.options.shares_prefixes);
  tessera::cuda::cache_options sizes = setup.sizes;
  sizes.tokens = counts.longest + 64;
  sizes.first_prompt = counts.shortest;
  const double row_bytes = double(Method::layout_type::token_bytes());
  const double token_bytes = row_bytes * shape.layers * shape.kv_heads;

  // What a cache takes beside its pool follows from two small ones. The first of all loads kernels.
  const auto taken = [&](index_t sequences) {
    sizes.sequences = sequences;
    sizes.rows = offset_t(16) * shape.kv_heads * shape.layers;
    const double initial_bytes = used_bytes();
    const tessera::cuda::cache<Method, float> probe(shape, setup.method, sizes);
    return used_bytes() - initial_bytes;
  };
  taken(2);
  const double two = taken(2), made_by_sequence = (taken(6) - two) / 4, fixed = two - 2 * made_by_sequence;
  const double by_sequence = made_by_sequence + setup.later_bytes;
  // As many sequences as their pages leave memory for, where most are shorter than the mean at a time: the pages shall run
  // short first. One more than the scheduler opens: a full cache says that no memory is available. Where the documents
  // leave little room, they are not stored, and sequences have them alone.
  const index_t stored = counts.document_count;
  const double left = given.memory - fixed - (stored + 1) * by_sequence;
  const auto fitting_beside = [&](double documents, double mean) {
    const double entry = by_sequence + 0.8 * setup.pooled * mean * token_bytes;
    return std::ceil((left - (documents + (1 - setup.pooled) * 1.5 * counts.longest) * token_bytes) / entry);
  };
  const double likely = std::max(fitting_beside(counts.documents, counts.mean_own), fitting_beside(0, counts.mean));
  const double upper_bound = (left - 1.1 * counts.longest * token_bytes) / std::max(1.0, by_sequence);
  const double fitting = std::min({std::max(1.0, likely), upper_bound, double(given.options.sequences)});
  made.sequences = std::min(given.options.sequences, std::max(index_t(fitting), index_t(1)) + stored);
  made.other_bytes = fixed + (made.sequences + 1) * by_sequence;
  made.pool_bytes = given.memory - made.other_bytes;
  tessera::require(made.pool_bytes > 0, "memory in GiB", given.memory / (1 << 30),
                   "more than what " + std::to_string(made.sequences) + " sequences take beside their pages, " +
                       std::to_string(made.other_bytes / (1 << 30)),
                   "raise --memory");
  sizes.sequences = made.sequences + 1;
  sizes.rows = offset_t(made.pool_bytes / row_bytes);
  return sizes;
}

/// Serves the conversations in a cache that takes `given.memory` bytes in all.
/// Errors   less memory than the longest conversation needs: tessera::error.
template <class Method>
outcome serve_on_device(served_setup<Method> setup, const serving_case& given) {
  using cache_type = tessera::cuda::cache<Method, float>;
  const engine::llama_config& config = given.model.config();
  const tessera::model_shape shape{config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads};
  outcome made;
  const tessera::cuda::cache_options sizes = fitted_sizes(setup, shape, given, made);
  cache_type cache(shape, setup.method, sizes);
  queued_cache<cache_type, pinned_bytes, cudaStream_t> queued(cache, setup.budgets, given.model.stream());
  device_model model(given.model);
  wall_clock clock;
  scheduler_options options = given.options;
  options.sequences = made.sequences;
  using scheduler_type = scheduler<decltype(queued), device_model, wall_clock>;
  {  // kernels are loaded, and the engine's memory is made
    const auto shortest = std::min_element(
        given.conversations.begin(), given.conversations.end(),
        [](const conversation& a, const conversation& b) { return a.first_prompt() < b.first_prompt(); });
    std::vector<conversation> warm(1);
    warm.front().turns = {{shortest->turns.front().prompt, 4}};
    scheduler_options unlimited = options;
    unlimited.limit = 0;
    scheduler_type(queued, model, clock, unlimited).run(warm, [](const serving_statistics&, int, int) {});
  }
  model.launch_seconds = 0;
  const double initial_bytes = used_bytes() - given.memory;  // the engine has its memory by now
  double looked = 0;
  made.counts = scheduler_type(queued, model, clock, options)
                    .run(given.conversations, [&](const serving_statistics& counts, int running, int waiting) {
                      if (given.show) given.show(counts, running, waiting);
                      if (clock.now() - looked < 1) return;
                      looked = clock.now();
                      made.most_bytes = std::max(made.most_bytes, used_bytes() - initial_bytes);
                    });
  made.launch_seconds = model.launch_seconds;
  made.peak_pool_bytes = double(queued.bytes_of(made.counts.peak_units));
  return made;
}

}  // namespace serving
