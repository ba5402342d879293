// Where a command computes: which backends there are, and a model with its caches on one of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/config.hpp"
#include "engine/generate.hpp"
#include "engine/tokenizer.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

enum class backend { cpu, cuda };

/// Tokens of a prompt that pass through the layers together unless a command says otherwise, on every backend: methods that choose
/// for each chunk, as lines are chosen, answer alike only where chunks are. It is enough to keep a large device busy.
inline constexpr std::int32_t prompt_chunk = 2048;

/// The backends of this build.
std::vector<std::string> backends();

/// Errors: no backend of that name, one that is not compiled in, or a machine that cannot run it.
backend require_backend(std::string_view name);

/// What a cache must know of a model.
tessera::model_shape shape_of(const engine::llama_config& config);

/// What KVzip tells a model to make it write a text once more.
engine::repeat_options repeat_sentences(const engine::tokenizer& tokenizer);

/// An empty cache of a method. `request.tokens` must be there for CUDA.
/// Errors: parameters or shapes that make no sense; on CUDA also an element type or head dim that is not compiled, and
/// too little device memory.
std::unique_ptr<method_cache> make_cache(const method_info& method, backend where, const cache_request& request);

/// A model on a backend. It takes caches of the same backend; see engine::llama for what its functions do.
class runner {
 public:
  virtual ~runner() = default;

  virtual backend where() const = 0;
  virtual const engine::llama_config& config() const = 0;

  /// Prompts are handed over in chunks of so many tokens from now on, whatever `options.chunk` says.
  void set_chunk(std::int32_t tokens) { chunk_ = tokens; }

  virtual std::vector<float> prefill(std::span<const engine::token_t> prompt, method_cache& cache,
                                     const engine::prefill_options& options = {}) = 0;

  /// One prompt for several empty caches at once: the first computes the attention, which is the same for all while
  /// nothing has been dropped; the others only observe. Ends no cache's prefill.
  virtual std::vector<float> prefill_all(std::span<const engine::token_t> prompt,
                                         const std::vector<std::unique_ptr<method_cache>>& caches,
                                         const engine::prefill_options& options = {}) = 0;

  /// The prompt of a cache that `rereads` passes through the model once more.
  virtual void reread(std::span<const engine::token_t> prompt, method_cache& cache,
                      const engine::prefill_options& options) = 0;

  /// A step of 1 to 8 tokens. Returns the logits behind each.
  virtual std::vector<float> decode(std::span<const engine::token_t> tokens, method_cache& cache) = 0;

  virtual std::vector<engine::token_t> extend(std::span<const float> logits, method_cache& cache,
                                              const engine::generate_options& options = {}) = 0;

 protected:
  engine::prefill_options in_chunks(engine::prefill_options options) const {
    options.chunk = chunk_;
    return options;
  }

 private:
  std::int32_t chunk_ = prompt_chunk;
};

/// Loads a model's weights to where they are needed. `workers` must outlive the runner.
/// Errors: see engine::llama::load.
std::unique_ptr<runner> load_model(const std::filesystem::path& folder, backend where, tessera::cpu::executor& workers);

}  // namespace tool
