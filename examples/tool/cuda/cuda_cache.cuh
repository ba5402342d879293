// A recipe's cache on the device behind the tool's interface and the CUDA engine's.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <tessera/backend/cuda/cache.cuh>
#include <tessera/backend/cuda/store/packed/unpack_rows.cuh>
#include <utility>
#include <vector>

#include "engine/cuda/kv_cache.hpp"
#include "tool/methods/method_cache.hpp"
#include "tool/methods/recipe_settings.hpp"

namespace tool {

/// tessera::cuda::cache of a conversation, or of several that decode together. Rows that come from the host are copied to the device, and outputs back.
template <class Recipe>
class cuda_cache_of final : public method_cache, public engine::cuda::kv_cache {
  using cache_type = tessera::cuda::cache<Recipe, float>;
  using T = typename cache_type::element_type;
  using device_rows = tessera::rows_view<const T>;
  static constexpr index_t longest_step = 8;
  static constexpr index_t longest_repeat = 2048 + 256;  // a part that is read again, and the sentence before it

 public:
  explicit cuda_cache_of(const cache_request& request) : cuda_cache_of(request, recipe_with_profile<Recipe>(request)) {}
  cuda_cache_of(const cache_request& request, const recipe_with_profile<Recipe>& wanted)
      : tokens_(options(request).tokens),
        packs_by_turn_(options(request).rows > 0),
        profile_(wanted.profile),
        cache_(request.shape, wanted.recipe, options(request)),
        ids_(std::size_t(request.conversations)) {
    for (index_t& id : ids_) id = cache_.open();
    select(0);
    tessera::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  // --- for the engine ----------------------------------------------------------------------------------------------

  engine::cuda::element type() const override {
    return std::is_same_v<T, tessera::bf16> ? engine::cuda::element::bf16 : engine::cuda::element::fp16;
  }

  int conversations() const override { return int(ids_.size()); }
  void select(int conversation) override { sequence_ = ids_[std::size_t(conversation)]; }

  void reserve(std::int64_t tokens, cudaStream_t stream) override {
    if (fuses_chunks<Recipe>) return;  // a prompt never lies there whole: its chunks make their own room
    // The first prompt takes the rows of the whole conversation: what nothing drops never moves.
    const bool takes_all = cache_.next_position(sequence_) == 0 && !packs_by_turn_;
    cache_.reserve(sequence_, takes_all ? tokens_ : index_t(tokens), stream);
  }

  void prefill(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
               cudaStream_t stream) override {
    observe(layer, q, k, v, tokens, stream);
    cache_.prefill_attention(layer, sequence_, queries(q, tokens), outputs(out, tokens), {}, stream);
  }

  void observe(int layer, const void* q, const void* k, const void* v, int tokens, cudaStream_t stream) override {
    cache_.prefill(layer, sequence_, queries(q, tokens), keys(k, tokens), keys(v, tokens), stream, boundaries_);
  }

  void begin_chunk(std::span<const std::uint8_t> boundaries) override { boundaries_ = boundaries; }

  bool rereads() const override { return Recipe::retain_type::rereads; }
  void reread(int layer, std::int64_t first, std::int64_t count, const void* q, const void* k, const void* v,
              int tokens, float* out, cudaStream_t stream) override {
    if constexpr (Recipe::retain_type::rereads) {
      cache_.reread(layer, sequence_, index_t(first), index_t(count), queries(q, tokens), keys(k, tokens),
                    keys(v, tokens), outputs(out, tokens), stream);
    }
  }

  void end_prefill(cudaStream_t stream) override {
    cache_.end_prefill(sequence_, stream);
    boundaries_ = {};
    reads_ = {};
  }

  void begin_step(int tokens, cudaStream_t stream) override {
    step_ = cache_.prepare_step(ids_, tokens, stream, std::exchange(boundaries_, {}));
  }

  int step_actions() const override { return step_.evicts_first + 2 * step_.evicts_last; }

  void begin_step_on_device(int, cudaStream_t stream) override { cache_.begin_step(step_, stream); }

  void decode(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
              cudaStream_t stream) override {
    const auto batch = index_t(ids_.size());
    cache_.decode(layer, step_, queries(q, tokens, batch), keys(k, tokens, batch), keys(v, tokens, batch),
                  outputs(out, tokens, batch), {}, stream);
  }

  void end_step() override {
    for (const index_t id : ids_) reads_.bytes += cache_.bytes_read(id);
    ++reads_.steps;
  }

  const std::int32_t* step_position() const override { return cache_.step_positions(); }

  // --- for the tool ------------------------------------------------------------------------------------------------

  index_t judged_together() const override {
    if constexpr (fuses_chunks<Recipe>) return cache_.recipe().schedule.chunk;
    return 0;
  }
  void announce(index_t tokens) override {
    if constexpr (fuses_chunks<Recipe>) {
      if constexpr (in_groups) reserved_ = cache_.plan_pages(sequence_, tokens).final_pages;
      cache_.announce(sequence_, tokens);
    }
  }
  std::optional<page_counts> pages() const override {
    if constexpr (in_groups) {
      const auto used = cache_.pages(sequence_);
      return page_counts{{used.begin(), used.end()}, {reserved_.begin(), reserved_.end()}};
    }
    return std::nullopt;
  }

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    const tessera::model_shape& shape = cache_.shape();
    const input_rows given = tessera::nhd_rows(q, tokens, shape.q_heads, cache_type::k_dim);
    observe(layer, given, tessera::nhd_rows(k, tokens, shape.kv_heads, cache_type::k_dim),
            tessera::nhd_rows(v, tokens, shape.kv_heads, cache_type::v_dim));
    uploaded rows(given, cache_type::k_dim);
    result attended(tokens, shape.q_heads);
    cache_.prefill_attention(layer, sequence_, rows.view, attended.out, {}, nullptr);
    attended.download(out, nullptr);
  }

  void reread(int layer, std::int64_t first, std::int64_t count, const float* q, const float* k, const float* v,
              int tokens, float* out) override {
    if constexpr (Recipe::retain_type::rereads) {
      const tessera::model_shape& shape = cache_.shape();
      const uploaded asked(tessera::nhd_rows(q, tokens, shape.q_heads, cache_type::k_dim), cache_type::k_dim),
          again(tessera::nhd_rows(k, tokens, shape.kv_heads, cache_type::k_dim), cache_type::k_dim),
          values(tessera::nhd_rows(v, tokens, shape.kv_heads, cache_type::v_dim), cache_type::v_dim);
      result attended(tokens, shape.q_heads);
      cache_.reread(layer, sequence_, index_t(first), index_t(count), asked.view, again.view, values.view, attended.out,
                    nullptr);
      attended.download(out, nullptr);
    }
  }

  void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) override {
    if (layer == 0) reserve(k.tokens, nullptr);
    const uploaded queries(q, cache_type::k_dim), keys(k, cache_type::k_dim), values(v, cache_type::v_dim);
    cache_.prefill(layer, sequence_, queries.view, keys.view, values.view, nullptr, boundaries_);
    tessera::cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // before the rows go
  }

  void attend_prompt(int layer, const input_rows& q, float* out, float* lse) override {
    const uploaded queries(q, cache_type::k_dim);
    result attended(q.tokens, q.heads);
    cache_.prefill_attention(layer, sequence_, queries.view, attended.out, attended.lse, nullptr);
    attended.download(out, lse);
  }

  void end_prefill() override { end_prefill(nullptr); }

  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    const tessera::model_shape& shape = cache_.shape();
    step(layer, tessera::nhd_rows(q, tokens, shape.q_heads, cache_type::k_dim),
         tessera::nhd_rows(k, tokens, shape.kv_heads, cache_type::k_dim),
         tessera::nhd_rows(v, tokens, shape.kv_heads, cache_type::v_dim), out, nullptr);
  }

  void step(int layer, const input_rows& q, const input_rows& k, const input_rows& v, float* out, float* lse) override {
    if (layer == 0) {
      begin_step(q.tokens, nullptr);
      cache_.begin_step(step_, nullptr);
    }
    const uploaded queries(q, cache_type::k_dim), keys(k, cache_type::k_dim), values(v, cache_type::v_dim);
    result attended(q.tokens, q.heads);
    cache_.decode(layer, step_, queries.view, keys.view, values.view, attended.out, attended.lse, nullptr);
    attended.download(out, lse);
    if (layer + 1 == cache_.shape().layers) end_step();
  }

  std::int64_t next_position() const override { return cache_.next_position(sequence_); }
  std::unique_ptr<method_cache> clone() const override { return std::make_unique<cuda_cache_of>(*this); }
  void set_budget(index_t tokens) override {
    cache_.set_budget(tokens);
    steps().clear();
  }
  index_t queries_needed(index_t tokens) const override { return cache_.recipe().queries_needed(tokens); }
  offset_t bytes() const override {
    offset_t total = 0;
    for (const index_t id : ids_) total += cache_.bytes(id);
    return total;
  }
  offset_t full_bytes(index_t tokens) const override { return cache_.full_bytes(tokens); }
  read_count reads() const override { return reads_; }
  std::vector<index_t> positions(int layer, index_t head) const override {
    return cache_.positions(layer, sequence_, head);
  }
  void trace_attended() override { cache_.trace_attended(true); }
  std::vector<std::vector<index_t>> attended(int layer) const override { return cache_.attended(layer, sequence_); }
  bool trace_lines() override {
    cache_.trace_lines(true);
    return true;
  }
  tessera::prompt_lines lines(int layer) const override { return cache_.lines(layer, sequence_); }
  std::optional<stored_rows> unpacked([[maybe_unused]] int layer) override {
    if constexpr (tessera::packing_layout<typename Recipe::layout_type>) {
      const index_t slots = index_t(cache_.positions(layer, sequence_, 0).size());
      const std::size_t rows = std::size_t(cache_.shape().kv_heads) * std::size_t(slots);
      const tessera::cuda::device_buffer<float> k(rows * cache_type::k_dim), v(rows * cache_type::v_dim);
      unpack_rows(cache_.view(layer, sequence_), slots, k.data(), v.data(), nullptr);
      return stored_rows{tessera::cuda::downloaded(k.data(), k.size()), tessera::cuda::downloaded(v.data(), v.size())};
    }
    return std::nullopt;
  }
  engine::cuda::kv_cache* on_device() override { return this; }

 private:
  /// Rows of the host, contiguous and rounded, on the device.
  struct uploaded {
    tessera::cuda::device_buffer<T> memory;
    device_rows view;

    uploaded(const input_rows& rows, int dim)
        : memory(std::size_t(rows.tokens) * std::size_t(rows.heads) * std::size_t(dim)) {
      std::vector<T> packed;
      packed.reserve(memory.size());
      for (index_t t = 0; t < rows.tokens; ++t) {
        for (index_t h = 0; h < rows.heads; ++h) {
          const float* from = rows.row(0, t, h);
          for (int d = 0; d < dim; ++d) packed.push_back(T(from[d]));
        }
      }
      tessera::cuda::check(cudaMemcpy(memory.data(), packed.data(), memory.bytes(), cudaMemcpyHostToDevice),
                           "cudaMemcpy");
      view = tessera::nhd_rows<const T>(memory.data(), rows.tokens, rows.heads, dim);
    }
  };

  /// Outputs and log-sum-exps on the device, on their way to the host.
  struct result {
    tessera::cuda::device_buffer<float> out_memory, lse_memory;
    tessera::rows_view<float> out, lse;

    result(index_t tokens, index_t heads)
        : out_memory(std::size_t(tokens) * std::size_t(heads) * std::size_t(cache_type::v_dim)),
          lse_memory(std::size_t(tokens) * std::size_t(heads)),
          out(tessera::nhd_rows(out_memory.data(), tokens, heads, cache_type::v_dim)),
          lse(tessera::nhd_rows(lse_memory.data(), tokens, heads, 1)) {}

    void download(float* out_to, float* lse_to) const {
      tessera::cuda::check(cudaMemcpy(out_to, out_memory.data(), out_memory.bytes(), cudaMemcpyDeviceToHost),
                           "cudaMemcpy");
      if (!lse_to) return;
      tessera::cuda::check(cudaMemcpy(lse_to, lse_memory.data(), lse_memory.bytes(), cudaMemcpyDeviceToHost),
                           "cudaMemcpy");
    }
  };

  /// Rows of the pool for one prompt at a time, which then moves once, and the tails of all conversations.
  static tessera::offset_t whole_rows(const cache_request& request) {
    constexpr index_t tail = 512;
    const index_t prompt = request.turn_tokens + tessera::spare_room(request.turn_tokens) + tail;
    return tessera::offset_t(request.shape.layers) * request.shape.kv_heads *
           (prompt + tessera::offset_t(request.conversations) * tail);
  }

  static tessera::cuda::cache_options options(const cache_request& request) {
    tessera::cuda::cache_options options;
    options.sequences = request.conversations;
    options.tokens = request.tokens + (Recipe::retain_type::rereads ? longest_repeat : 0);
    options.index_tokens = request.index_tokens > 0 ? request.index_tokens : request.tokens;  // whatever the budget
    options.step_tokens = longest_step;
    if constexpr (tessera::packing_layout<typename Recipe::layout_type>) {
      if (request.turn_tokens > 0) options.rows = whole_rows(request);
    }
    return options;
  }

  device_rows queries(const void* data, int tokens, index_t batch = 1) const {
    return tessera::nhd_rows(static_cast<const T*>(data), tokens, cache_.shape().q_heads, cache_type::k_dim, batch);
  }
  device_rows keys(const void* data, int tokens, index_t batch = 1) const {
    return tessera::nhd_rows(static_cast<const T*>(data), tokens, cache_.shape().kv_heads, cache_type::k_dim, batch);
  }
  tessera::rows_view<float> outputs(float* data, int tokens, index_t batch = 1) const {
    return tessera::nhd_rows(data, tokens, cache_.shape().q_heads, cache_type::v_dim, batch);
  }

  static constexpr bool in_groups = tessera::cuda::kv_store<typename Recipe::layout_type>::in_groups;

  index_t tokens_;
  bool packs_by_turn_;  // prompts lie whole one at a time
  std::shared_ptr<const tessera::profile> profile_;
  cache_type cache_;
  std::vector<index_t> reserved_;  // pages by group, for when the prompt has ended
  tessera::batch step_;
  std::vector<index_t> ids_;
  std::span<const std::uint8_t> boundaries_{};  // of the chunk, or step, that passes through the layers
  index_t sequence_ = 0;                        // the selected one
  read_count reads_;
};

/// Null for a recipe that the CUDA backend does not run: see tessera::runs_on_devices.
template <class Recipe>
std::unique_ptr<method_cache> make_if_it_runs(const cache_request& request) {
  if constexpr (tessera::runs_on_devices<Recipe>) {
    return std::make_unique<cuda_cache_of<Recipe>>(request);
  } else {
    return nullptr;
  }
}

}  // namespace tool
