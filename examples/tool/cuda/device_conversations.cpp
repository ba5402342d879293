#include "device_conversations.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <optional>
#include <span>
#include <tessera/backend/cuda/device/memory.cuh>
#include <utility>
#include <vector>

#include "engine/cuda/kv_cache.hpp"
#include "tool/methods/any_conversation.hpp"

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

class conversations_on_device final : public any_conversation, public engine::cuda::kv_cache {
 public:
  conversations_on_device(std::unique_ptr<tessera::any_cache> cache, element_type given, index_t conversations,
                          index_t tokens, bool packs_by_turn)
      : any_conversation(std::move(cache), given),
        tokens_(tokens),
        packs_by_turn_(packs_by_turn),
        ids_(std::size_t(conversations)) {
    for (index_t& id : ids_) id = cache_->open();
    select(0);
    tessera::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  conversations_on_device(const conversations_on_device& other) = default;
  conversations_on_device(const conversations_on_device& other, index_t sequence)
      : any_conversation(other, sequence),
        tokens_(other.tokens_),
        packs_by_turn_(other.packs_by_turn_),
        ids_{sequence} {}

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
    cache_->prefill_attention(layer, sequence_, device_queries(q, tokens), outputs(out, tokens), {}, stream);
  }

  void observe(int layer, const void* q, const void* k, const void* v, int tokens, cudaStream_t stream) override {
    cache_->prefill(layer, sequence_, device_queries(q, tokens), device_keys(k, tokens), device_values(v, tokens),
                    boundaries_, stream);
  }

  void begin_chunk(std::span<const std::uint8_t> boundaries) override { any_conversation::begin_chunk(boundaries); }
  bool rereads() const override { return any_conversation::rereads(); }
  bool takes_scores() const override { return any_conversation::takes_scores(); }
  std::int64_t next_position() const override { return any_conversation::next_position(); }

  void reread(int layer, std::int64_t first, std::int64_t count, const void* q, const void* k, const void* v,
              int tokens, float* out, cudaStream_t stream) override {
    cache_->reread(layer, sequence_, index_t(first), index_t(count), device_queries(q, tokens), device_keys(k, tokens),
                   device_values(v, tokens), outputs(out, tokens), stream);
  }

  void set_scores(int layer, std::int64_t first, const float* scores, int tokens, cudaStream_t stream) override {
    cache_->set_scores(layer, sequence_, index_t(first), tokens, scores, stream);
  }

  void end_prefill(cudaStream_t stream) override {
    cache_->end_prefill(sequence_, stream);
    ended_prompt();
  }

  void begin_step(int tokens, cudaStream_t stream) override {
    step_ = cache_->prepare_step(ids_, tokens, std::exchange(boundaries_, {}), stream);
  }

  int step_actions() const override { return step_.evicts_first + 2 * step_.evicts_last; }

  void begin_step_on_device(int, cudaStream_t stream) override { cache_->begin_step(step_, stream); }

  void decode(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
              cudaStream_t stream) override {
    const auto batch = index_t(ids_.size());
    cache_->decode(layer, step_, device_queries(q, tokens, batch), device_keys(k, tokens, batch),
                   device_values(v, tokens, batch), outputs(out, tokens, batch), {}, stream);
  }

  void end_step() override {
    for (const index_t id : ids_) reads_.bytes += cache_->bytes_read(id);
    ++reads_.steps;
  }

  const std::int32_t* step_position() const override { return cache_->step_positions(); }

  // --- for the tool ------------------------------------------------------------------------------------------------

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    observe(layer, queries(q, tokens), keys(k, tokens), values(v, tokens));
    const uploaded rows(queries(q, tokens), facts().input);
    const result attended(tokens, shape().q_heads, facts().v_dim);
    cache_->prefill_attention(layer, sequence_, rows.view, attended.out);
    attended.download(out, nullptr);
  }

  void reread(int layer, std::int64_t first, std::int64_t count, const float* q, const float* k, const float* v,
              int tokens, float* out) override {
    const uploaded asked(queries(q, tokens), facts().input), again(keys(k, tokens), facts().input),
        read(values(v, tokens), facts().input);
    const result attended(tokens, shape().q_heads, facts().v_dim);
    cache_->reread(layer, sequence_, index_t(first), index_t(count), asked.view, again.view, read.view, attended.out);
    attended.download(out, nullptr);
  }

  void set_scores(int layer, std::int64_t first, const float* scores, int tokens) override {
    tessera::cuda::device_buffer<float> there(std::size_t(tokens) * std::size_t(shape().kv_heads));
    tessera::cuda::check(cudaMemcpy(there.data(), scores, there.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    set_scores(layer, first, there.data(), tokens, nullptr);
    tessera::cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // before the scores go
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
    step(layer, queries(q, tokens), keys(k, tokens), values(v, tokens), out, nullptr);
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
  std::unique_ptr<method_cache> fork() override {
    tessera::require(ids_.size() == 1, "conversations that decode together", ids_.size(), "1", "read the prompt anew");
    auto made = std::make_unique<conversations_on_device>(*this, cache_->fork(sequence_));
    if (facts().chunk == 0 && !packs_by_turn_)  // as a first prompt
      cache_->reserve(made->sequence_, tokens_ - index_t(next_position()), nullptr);
    tessera::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the engine's stream is another one
    return made;
  }
  void set_budget(index_t tokens) override {
    any_conversation::set_budget(tokens);
    steps().clear();
  }
  offset_t bytes() const override {
    offset_t total = 0;
    for (const index_t id : ids_) total += cache_->bytes(id);
    return total;
  }
  engine::cuda::kv_cache* on_device() override { return this; }

 private:
  untyped_input device_rows(const void* data, index_t tokens, index_t heads, index_t dim, index_t batch) const {
    if (facts().input == tessera::element_kind::bf16)
      return tessera::nhd_rows(static_cast<const tessera::bf16*>(data), tokens, heads, dim, batch);
    return tessera::nhd_rows(static_cast<const tessera::fp16*>(data), tokens, heads, dim, batch);
  }
  untyped_input device_queries(const void* data, index_t tokens, index_t batch = 1) const {
    return device_rows(data, tokens, shape().q_heads, facts().k_dim, batch);
  }
  untyped_input device_keys(const void* data, index_t tokens, index_t batch = 1) const {
    return device_rows(data, tokens, shape().kv_heads, facts().k_dim, batch);
  }
  untyped_input device_values(const void* data, index_t tokens, index_t batch = 1) const {
    return device_rows(data, tokens, shape().kv_heads, facts().v_dim, batch);
  }
  tessera::rows_view<float> outputs(float* data, index_t tokens, index_t batch = 1) const {
    return tessera::nhd_rows(data, tokens, shape().q_heads, facts().v_dim, batch);
  }

  index_t tokens_;
  bool packs_by_turn_;        // prompts lie whole one at a time
  std::vector<index_t> ids_;  // sequence_ is the selected one
};

}  // namespace

std::unique_ptr<method_cache> device_conversations(std::unique_ptr<tessera::any_cache> cache, element_type given,
                                                   index_t conversations, index_t tokens, bool packs_by_turn) {
  return std::make_unique<conversations_on_device>(std::move(cache), given, conversations, tokens, packs_by_turn);
}

}  // namespace tool
