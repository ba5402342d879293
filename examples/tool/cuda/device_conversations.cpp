#include "device_conversations.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <optional>
#include <span>
#include <tessera/backend/cuda/device/memory.cuh>
#include <utility>
#include <vector>

#include "engine/cuda/kv_cache.hpp"

namespace tool {
namespace {

using tessera::untyped_input;

/// Outputs and log-sum-exps on the device, on their way to the host.
struct result {
  tessera::cuda::device_buffer<float> out_memory, lse_memory;
  tessera::rows_view<float> out, lse;

  result(index_t tokens, index_t heads, index_t dim)
      : out_memory(std::size_t(tokens) * std::size_t(heads) * std::size_t(dim)),
        lse_memory(std::size_t(tokens) * std::size_t(heads)),
        out(tessera::nhd_rows(out_memory.data(), tokens, heads, dim)),
        lse(tessera::nhd_rows(lse_memory.data(), tokens, heads, 1)) {}

  void download(float* out_to, float* lse_to) const {
    tessera::cuda::check(cudaMemcpy(out_to, out_memory.data(), out_memory.bytes(), cudaMemcpyDeviceToHost),
                         "cudaMemcpy");
    if (!lse_to) return;
    tessera::cuda::check(cudaMemcpy(lse_to, lse_memory.data(), lse_memory.bytes(), cudaMemcpyDeviceToHost),
                         "cudaMemcpy");
  }
};

/// Rows of the host on the device, contiguous and rounded to a type of two bytes.
struct uploaded {
  tessera::cuda::device_buffer<std::uint16_t> memory;
  untyped_input view;

  uploaded(const input_rows& rows, tessera::element_kind element)
      : memory(std::size_t(rows.tokens) * std::size_t(rows.heads) * std::size_t(rows.dim)) {
    if (element == tessera::element_kind::bf16) {
      upload<tessera::bf16>(rows);
    } else {
      upload<tessera::fp16>(rows);
    }
  }

 private:
  template <class T>
  void upload(const input_rows& rows) {
    std::vector<T> packed;
    packed.reserve(memory.size());
    for (index_t t = 0; t < rows.tokens; ++t) {
      for (index_t h = 0; h < rows.heads; ++h) {
        const float* from = rows.row(0, t, h);
        for (index_t d = 0; d < rows.dim; ++d) packed.push_back(T(from[d]));
      }
    }
    tessera::cuda::check(cudaMemcpy(memory.data(), packed.data(), memory.bytes(), cudaMemcpyHostToDevice),
                         "cudaMemcpy");
    const void* const data = memory.data();
    view = tessera::nhd_rows(static_cast<const T*>(data), rows.tokens, rows.heads, rows.dim);
  }
};

class conversations_on_device final : public method_cache, public engine::cuda::kv_cache {
 public:
  conversations_on_device(std::unique_ptr<tessera::any_cache> cache, index_t conversations, index_t tokens,
                          bool packs_by_turn)
      : tokens_(tokens), packs_by_turn_(packs_by_turn), cache_(std::move(cache)), ids_(std::size_t(conversations)) {
    for (index_t& id : ids_) id = cache_->open();
    select(0);
    tessera::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  conversations_on_device(const conversations_on_device& other)
      : method_cache(other),
        engine::cuda::kv_cache(other),
        tokens_(other.tokens_),
        packs_by_turn_(other.packs_by_turn_),
        cache_(other.cache_->clone()),
        reserved_(other.reserved_),
        step_(other.step_),
        ids_(other.ids_),
        boundaries_(other.boundaries_),
        sequence_(other.sequence_),
        reads_(other.reads_) {}
  conversations_on_device& operator=(const conversations_on_device&) = delete;

  // --- for the engine ----------------------------------------------------------------------------------------------

  engine::cuda::element type() const override {
    return facts().input == tessera::element_kind::bf16 ? engine::cuda::element::bf16 : engine::cuda::element::fp16;
  }

  int conversations() const override { return int(ids_.size()); }
  void select(int conversation) override { sequence_ = ids_[std::size_t(conversation)]; }

  void reserve(std::int64_t tokens, cudaStream_t stream) override {
    if (facts().chunk > 0) return;  // a prompt never lies there whole: its chunks make their own room
    // The first prompt takes the rows of the whole conversation: what nothing drops never moves.
    const bool takes_all = cache_->next_position(sequence_) == 0 && !packs_by_turn_;
    cache_->reserve(sequence_, takes_all ? tokens_ : index_t(tokens), stream);
  }

  void prefill(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
               cudaStream_t stream) override {
    observe(layer, q, k, v, tokens, stream);
    cache_->prefill_attention(layer, sequence_, queries(q, tokens), outputs(out, tokens), {}, stream);
  }

  void observe(int layer, const void* q, const void* k, const void* v, int tokens, cudaStream_t stream) override {
    cache_->prefill(layer, sequence_, queries(q, tokens), keys(k, tokens), values(v, tokens), boundaries_, stream);
  }

  void begin_chunk(std::span<const std::uint8_t> boundaries) override { boundaries_ = boundaries; }

  bool rereads() const override { return facts().rereads; }
  void reread(int layer, std::int64_t first, std::int64_t count, const void* q, const void* k, const void* v,
              int tokens, float* out, cudaStream_t stream) override {
    cache_->reread(layer, sequence_, index_t(first), index_t(count), queries(q, tokens), keys(k, tokens),
                   values(v, tokens), outputs(out, tokens), stream);
  }

  void end_prefill(cudaStream_t stream) override {
    cache_->end_prefill(sequence_, stream);
    boundaries_ = {};
    reads_ = {};
  }

  void begin_step(int tokens, cudaStream_t stream) override {
    step_ = cache_->prepare_step(ids_, tokens, std::exchange(boundaries_, {}), stream);
  }

  int step_actions() const override { return step_.evicts_first + 2 * step_.evicts_last; }

  void begin_step_on_device(int, cudaStream_t stream) override { cache_->begin_step(step_, stream); }

  void decode(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
              cudaStream_t stream) override {
    const auto batch = index_t(ids_.size());
    cache_->decode(layer, step_, queries(q, tokens, batch), keys(k, tokens, batch), values(v, tokens, batch),
                   outputs(out, tokens, batch), {}, stream);
  }

  void end_step() override {
    for (const index_t id : ids_) reads_.bytes += cache_->bytes_read(id);
    ++reads_.steps;
  }

  const std::int32_t* step_position() const override { return cache_->step_positions(); }

  // --- for the tool ------------------------------------------------------------------------------------------------

  index_t judged_together() const override { return facts().chunk; }
  void announce(index_t tokens) override {
    if (facts().chunk == 0) return;
    if (facts().shares_pages) reserved_ = cache_->plan_pages(sequence_, tokens).final_pages;
    cache_->announce(sequence_, tokens);
  }
  std::optional<page_counts> pages() const override {
    if (!facts().shares_pages) return std::nullopt;
    const auto used = cache_->pages(sequence_);
    return page_counts{{used.begin(), used.end()}, {reserved_.begin(), reserved_.end()}};
  }

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    const input_rows given = host_rows(q, tokens, shape().q_heads, facts().k_dim);
    observe(layer, given, host_rows(k, tokens, shape().kv_heads, facts().k_dim),
            host_rows(v, tokens, shape().kv_heads, facts().v_dim));
    const uploaded rows(given, facts().input);
    const result attended(tokens, shape().q_heads, facts().v_dim);
    cache_->prefill_attention(layer, sequence_, rows.view, attended.out);
    attended.download(out, nullptr);
  }

  void reread(int layer, std::int64_t first, std::int64_t count, const float* q, const float* k, const float* v,
              int tokens, float* out) override {
    const uploaded asked(host_rows(q, tokens, shape().q_heads, facts().k_dim), facts().input),
        again(host_rows(k, tokens, shape().kv_heads, facts().k_dim), facts().input),
        read(host_rows(v, tokens, shape().kv_heads, facts().v_dim), facts().input);
    const result attended(tokens, shape().q_heads, facts().v_dim);
    cache_->reread(layer, sequence_, index_t(first), index_t(count), asked.view, again.view, read.view, attended.out);
    attended.download(out, nullptr);
  }

  void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) override {
    if (layer == 0) reserve(k.tokens, nullptr);
    const uploaded asked(q, facts().input), written(k, facts().input), read(v, facts().input);
    cache_->prefill(layer, sequence_, asked.view, written.view, read.view, boundaries_);
    tessera::cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // before the rows go
  }

  void attend_prompt(int layer, const input_rows& q, float* out, float* lse) override {
    const uploaded asked(q, facts().input);
    const result attended(q.tokens, q.heads, facts().v_dim);
    cache_->prefill_attention(layer, sequence_, asked.view, attended.out, attended.lse);
    attended.download(out, lse);
  }

  void end_prefill() override { end_prefill(nullptr); }

  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    step(layer, host_rows(q, tokens, shape().q_heads, facts().k_dim),
         host_rows(k, tokens, shape().kv_heads, facts().k_dim), host_rows(v, tokens, shape().kv_heads, facts().v_dim),
         out, nullptr);
  }

  void step(int layer, const input_rows& q, const input_rows& k, const input_rows& v, float* out, float* lse) override {
    if (layer == 0) {
      begin_step(q.tokens, nullptr);
      cache_->begin_step(step_);
    }
    const uploaded asked(q, facts().input), written(k, facts().input), read(v, facts().input);
    const result attended(q.tokens, q.heads, facts().v_dim);
    cache_->decode(layer, step_, asked.view, written.view, read.view, attended.out, attended.lse);
    attended.download(out, lse);
    if (layer + 1 == shape().layers) end_step();
  }

  std::int64_t next_position() const override { return cache_->next_position(sequence_); }
  bool saves() const override { return facts().saves; }
  void save(const std::function<void(const void*, std::size_t)>& sink) override { cache_->save(sequence_, sink); }
  void load(const std::function<std::size_t(void*, std::size_t)>& source) override {
    cache_->close(sequence_);  // a device's cache has no sequence to spare
    const auto use = [&](index_t id) { std::replace(ids_.begin(), ids_.end(), std::exchange(sequence_, id), id); };
    try {
      use(cache_->load(source));
    } catch (...) {
      use(cache_->open());
      throw;
    }
  }
  std::unique_ptr<method_cache> clone() const override { return std::make_unique<conversations_on_device>(*this); }
  void set_budget(index_t tokens) override {
    cache_->set_budget(tokens);
    steps().clear();
  }
  index_t queries_needed(index_t tokens) const override { return cache_->queries_needed(tokens); }
  offset_t bytes() const override {
    offset_t total = 0;
    for (const index_t id : ids_) total += cache_->bytes(id);
    return total;
  }
  offset_t full_bytes(index_t tokens) const override { return cache_->full_bytes(tokens); }
  read_count reads() const override { return reads_; }
  std::vector<index_t> positions(int layer, index_t head) const override {
    return cache_->positions(layer, sequence_, head);
  }
  void trace_attended() override { cache_->trace_attended(true); }
  std::vector<std::vector<index_t>> attended(int layer) const override { return cache_->attended(layer, sequence_); }
  bool trace_lines() override {
    cache_->trace_lines(true);
    return true;
  }
  tessera::prompt_lines lines(int layer) const override { return cache_->lines(layer, sequence_); }
  std::optional<unpacked_rows> unpacked(int layer) override {
    if (!facts().packs) return std::nullopt;
    return cache_->unpacked(layer, sequence_);
  }
  engine::cuda::kv_cache* on_device() override { return this; }

 private:
  const tessera::any_cache_facts& facts() const { return cache_->facts(); }
  const tessera::model_shape& shape() const { return cache_->shape(); }

  static input_rows host_rows(const float* data, index_t tokens, index_t heads, index_t dim) {
    return tessera::nhd_rows(data, tokens, heads, dim);
  }
  untyped_input device_rows(const void* data, index_t tokens, index_t heads, index_t dim, index_t batch) const {
    if (facts().input == tessera::element_kind::bf16)
      return tessera::nhd_rows(static_cast<const tessera::bf16*>(data), tokens, heads, dim, batch);
    return tessera::nhd_rows(static_cast<const tessera::fp16*>(data), tokens, heads, dim, batch);
  }
  untyped_input queries(const void* data, index_t tokens, index_t batch = 1) const {
    return device_rows(data, tokens, shape().q_heads, facts().k_dim, batch);
  }
  untyped_input keys(const void* data, index_t tokens, index_t batch = 1) const {
    return device_rows(data, tokens, shape().kv_heads, facts().k_dim, batch);
  }
  untyped_input values(const void* data, index_t tokens, index_t batch = 1) const {
    return device_rows(data, tokens, shape().kv_heads, facts().v_dim, batch);
  }
  tessera::rows_view<float> outputs(float* data, index_t tokens, index_t batch = 1) const {
    return tessera::nhd_rows(data, tokens, shape().q_heads, facts().v_dim, batch);
  }

  index_t tokens_;
  bool packs_by_turn_;  // prompts lie whole one at a time
  std::unique_ptr<tessera::any_cache> cache_;
  std::vector<index_t> reserved_;  // pages by group, for when the prompt has ended
  tessera::batch step_;
  std::vector<index_t> ids_;
  std::span<const std::uint8_t> boundaries_{};  // of the chunk, or step, that passes through the layers
  index_t sequence_ = 0;                        // the selected one
  read_count reads_;
};

}  // namespace

std::unique_ptr<method_cache> device_conversations(std::unique_ptr<tessera::any_cache> cache, index_t conversations,
                                                   index_t tokens, bool packs_by_turn) {
  return std::make_unique<conversations_on_device>(std::move(cache), conversations, tokens, packs_by_turn);
}

}  // namespace tool
