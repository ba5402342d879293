#include "backend.hpp"

#include <algorithm>
#include <tessera/core/error.hpp>
#include <utility>

#include "engine/model.hpp"
#include "engine/ops.hpp"
#include "tool/methods/values.hpp"

#ifdef TESSERA_TOOL_CUDA
#include "cuda/make_cuda_cache.hpp"
#include "cuda/run_on_cuda.hpp"
#endif

namespace tool {
namespace {

/// Hands a prompt to several caches on the CPU.
class cpu_fan_out final : public engine::kv_cache {
 public:
  cpu_fan_out(const std::vector<std::unique_ptr<method_cache>>& caches, const engine::llama_config& config)
      : caches_(caches), config_(config) {}

  void begin_chunk(std::span<const std::uint8_t> boundaries) override {
    for (const auto& cache : caches_) cache->begin_chunk(boundaries);
  }
  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    caches_[0]->prefill(layer, q, k, v, tokens, out);
    const input_rows queries = tessera::nhd_rows(q, tokens, config_.num_attention_heads, config_.head_dim);
    const input_rows keys = tessera::nhd_rows(k, tokens, config_.num_key_value_heads, config_.head_dim);
    const input_rows values = tessera::nhd_rows(v, tokens, config_.num_key_value_heads, config_.head_dim);
    for (std::size_t i = 1; i < caches_.size(); ++i) caches_[i]->observe(layer, queries, keys, values);
  }
  bool takes_scores() const override {
    return std::any_of(caches_.begin(), caches_.end(), [](const auto& cache) { return cache->takes_scores(); });
  }
  void set_scores(int layer, std::int64_t first, const float* scores, int tokens) override {
    for (const auto& cache : caches_) {
      if (cache->takes_scores()) cache->set_scores(layer, first, scores, tokens);
    }
  }
  void end_prefill() override {}
  void decode(int, const float*, const float*, const float*, int, float*) override {
    tessera::fail("decode step", "for all methods at once", "a step of one method", "decode with a copy of its cache");
  }
  std::int64_t next_position() const override { return caches_[0]->next_position(); }

 private:
  const std::vector<std::unique_ptr<method_cache>>& caches_;
  const engine::llama_config& config_;
};

class cpu_runner final : public runner {
 public:
  explicit cpu_runner(engine::llama model) : model_(std::move(model)) {}

  backend where() const override { return backend::cpu; }
  const engine::llama_config& config() const override { return model_.config(); }
  std::vector<float> prefill(std::span<const engine::token_t> prompt, method_cache& cache,
                             const engine::prefill_options& options) override {
    return model_.prefill(prompt, cache, in_chunks(options));
  }
  std::vector<float> prefill_all(std::span<const engine::token_t> prompt,
                                 const std::vector<std::unique_ptr<method_cache>>& caches,
                                 const engine::prefill_options& options) override {
    cpu_fan_out all(caches, model_.config());
    return model_.prefill(prompt, all, in_chunks(options));
  }
  void reread(std::span<const engine::token_t> prompt, method_cache& cache,
              const engine::prefill_options& options) override {
    model_.reread(prompt, cache, options);
  }
  std::vector<float> decode(std::span<const engine::token_t> tokens, method_cache& cache) override {
    return model_.decode(tokens, cache);
  }
  std::vector<engine::token_t> extend(std::span<const float> logits, method_cache& cache,
                                      const engine::generate_options& options) override {
    return model_.extend(logits, cache, options);
  }

 private:
  engine::llama model_;
};

}  // namespace

engine::repeat_options repeat_sentences(const engine::tokenizer& tokenizer) {
  return {tokenizer.encode("\n\nRepeat the previous context exactly."),
          tokenizer.encode("\n\nRepeat the part of the previous context exactly, starting with"),
          tokenizer.encode("\n")};
}

std::vector<std::string> backends() {
#ifdef TESSERA_TOOL_CUDA
  return {"cpu", "cuda"};
#else
  return {"cpu"};
#endif
}

backend require_backend(std::string_view name) {
#ifdef TESSERA_TOOL_CUDA
  if (name == "cuda") {
    require_cuda_device();
    return backend::cuda;
  }
#else
  if (name == "cuda") {
    tessera::fail(
        "backend", "cuda", "cpu",
        "leave --backend out, because this build has no CUDA backend, or build with a CUDA compiler and cuBLAS");
  }
#endif
  require_one_of("backend", name, backends());
  return backend::cpu;
}

tessera::model_shape shape_of(const engine::llama_config& config) {
  tessera::model_shape shape{config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads};
  if (config.rotates.empty()) shape.rope_frequencies = engine::rope_frequencies(config);  // else not every layer's
  return shape;
}

std::unique_ptr<method_cache> make_cache(const method_info& method, [[maybe_unused]] backend where,
                                         const cache_request& request) {
  tessera::require(!method.needs_rope || !request.shape.rope_frequencies.empty(), "method", method.name,
                   "one that undoes no RoPE, as some layers of the model have none", "choose another method");
#ifdef TESSERA_TOOL_CUDA
  if (where == backend::cuda) {
    tessera::require(method.on_cuda, "method", method.name, "one that the CUDA backend runs",
                     "use --backend cpu; `tessera list` says which methods run on the CPU only");
    return make_cuda_cache(method.name, request);
  }
#endif
  return method.make(request);
}

std::unique_ptr<runner> load_model(const std::filesystem::path& folder, [[maybe_unused]] backend where,
                                   tessera::cpu::executor& workers) {
#ifdef TESSERA_TOOL_CUDA
  if (where == backend::cuda) return run_on_cuda(folder);
#endif
  return std::make_unique<cpu_runner>(engine::llama::load(folder, workers));
}

}  // namespace tool
