// A cache whose reads nobody counts.
#pragma once

#include "engine/cuda/kv_cache.hpp"

namespace model_bench {

/// The cache without `end_step`: counting asks the device for the lengths of every layer after each step. It captures
/// steps of its own.
class uncounted final : public engine::cuda::kv_cache {
 public:
  explicit uncounted(engine::cuda::kv_cache& cache) : cache_(cache) {}

  engine::cuda::element type() const override { return cache_.type(); }
  int conversations() const override { return cache_.conversations(); }
  void select(int conversation) override { cache_.select(conversation); }
  void reserve(std::int64_t tokens, engine::cuda::stream_t stream) override { cache_.reserve(tokens, stream); }
  void begin_chunk(std::span<const std::uint8_t> boundaries) override { cache_.begin_chunk(boundaries); }
  void prefill(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
               engine::cuda::stream_t stream) override {
    cache_.prefill(layer, q, k, v, tokens, out, stream);
  }
  void observe(int layer, const void* q, const void* k, const void* v, int tokens,
               engine::cuda::stream_t stream) override {
    cache_.observe(layer, q, k, v, tokens, stream);
  }
  void end_prefill(engine::cuda::stream_t stream) override { cache_.end_prefill(stream); }
  void begin_step(int tokens, engine::cuda::stream_t stream) override { cache_.begin_step(tokens, stream); }
  int step_actions() const override { return cache_.step_actions(); }
  void begin_step_on_device(int tokens, engine::cuda::stream_t stream) override {
    cache_.begin_step_on_device(tokens, stream);
  }
  void decode(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
              engine::cuda::stream_t stream) override {
    cache_.decode(layer, q, k, v, tokens, out, stream);
  }
  const std::int32_t* step_position() const override { return cache_.step_position(); }
  std::int64_t next_position() const override { return cache_.next_position(); }

 private:
  engine::cuda::kv_cache& cache_;
};

}  // namespace model_bench
