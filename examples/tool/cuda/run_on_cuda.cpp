#include "run_on_cuda.hpp"

#include <algorithm>
#include <tessera/core/error.hpp>
#include <utility>

#include "engine/cuda/model.hpp"

namespace tool {
namespace {

engine::cuda::kv_cache& device_cache(method_cache& cache) {
  engine::cuda::kv_cache* found = cache.on_device();
  tessera::require(found != nullptr, "cache", "on the CPU", "a cache on the device", "make it for backend::cuda");
  return *found;
}

/// Hands a prompt to several caches on the device.
class cuda_fan_out final : public engine::cuda::kv_cache {
 public:
  explicit cuda_fan_out(const std::vector<std::unique_ptr<method_cache>>& caches) {
    for (const auto& cache : caches) caches_.push_back(&device_cache(*cache));
  }

  engine::cuda::element type() const override { return caches_[0]->type(); }
  void reserve(std::int64_t tokens, engine::cuda::stream_t stream) override {
    for (auto* cache : caches_) cache->reserve(tokens, stream);
  }
  void begin_chunk(std::span<const std::uint8_t> boundaries) override {
    for (auto* cache : caches_) cache->begin_chunk(boundaries);
  }
  void prefill(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
               engine::cuda::stream_t stream) override {
    caches_[0]->prefill(layer, q, k, v, tokens, out, stream);
    for (std::size_t i = 1; i < caches_.size(); ++i) caches_[i]->observe(layer, q, k, v, tokens, stream);
  }
  void observe(int layer, const void* q, const void* k, const void* v, int tokens,
               engine::cuda::stream_t stream) override {
    for (auto* cache : caches_) cache->observe(layer, q, k, v, tokens, stream);
  }
  bool takes_scores() const override {
    return std::any_of(caches_.begin(), caches_.end(), [](const auto* cache) { return cache->takes_scores(); });
  }
  void set_scores(int layer, std::int64_t first, const float* scores, int tokens,
                  engine::cuda::stream_t stream) override {
    for (auto* cache : caches_) {
      if (cache->takes_scores()) cache->set_scores(layer, first, scores, tokens, stream);
    }
  }
  void end_prefill(engine::cuda::stream_t) override {}
  void begin_step(int, engine::cuda::stream_t) override { fail_step(); }
  void begin_step_on_device(int, engine::cuda::stream_t) override { fail_step(); }
  void decode(int, const void*, const void*, const void*, int, float*, engine::cuda::stream_t) override { fail_step(); }
  const std::int32_t* step_position() const override { return caches_[0]->step_position(); }
  std::int64_t next_position() const override { return caches_[0]->next_position(); }

 private:
  [[noreturn]] static void fail_step() {
    tessera::fail("decode step", "for all methods at once", "a step of one method", "decode with a copy of its cache");
  }

  std::vector<engine::cuda::kv_cache*> caches_;
};

class cuda_runner final : public runner {
 public:
  explicit cuda_runner(engine::cuda::llama model) : model_(std::move(model)) {}

  backend where() const override { return backend::cuda; }
  const engine::llama_config& config() const override { return model_.config(); }
  std::vector<float> prefill(std::span<const engine::token_t> prompt, method_cache& cache,
                             const engine::prefill_options& options) override {
    engine::prefill_options chunked = in_chunks(options);
    if (cache.judged_together() > 0) chunked.chunk = std::min(chunked.chunk, cache.judged_together());
    return model_.prefill(prompt, device_cache(cache), chunked);
  }
  std::vector<float> prefill_all(std::span<const engine::token_t> prompt,
                                 const std::vector<std::unique_ptr<method_cache>>& caches,
                                 const engine::prefill_options& options) override {
    cuda_fan_out all(caches);
    return model_.prefill(prompt, all, in_chunks(options));
  }
  void reread(std::span<const engine::token_t> prompt, method_cache& cache,
              const engine::prefill_options& options) override {
    model_.reread(prompt, device_cache(cache), options);
  }
  std::vector<float> decode(std::span<const engine::token_t> tokens, method_cache& cache) override {
    return model_.decode(tokens, device_cache(cache));
  }
  std::vector<engine::token_t> extend(std::span<const float> logits, method_cache& cache,
                                      const engine::generate_options& options) override {
    return model_.extend(logits, device_cache(cache), options);
  }

 private:
  engine::cuda::llama model_;
};

}  // namespace

void require_cuda_device() { engine::cuda::require_device(); }

std::unique_ptr<runner> run_on_cuda(const std::filesystem::path& folder) {
  return std::make_unique<cuda_runner>(engine::cuda::llama::load(folder));
}

}  // namespace tool
