// A small Llama runtime on the CPU. It knows no compression method: what it stores and reads goes through `kv_cache`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <tessera/backend/cpu/kernel/executor.hpp>
#include <vector>

#include "checkpoint.hpp"
#include "config.hpp"
#include "engine/gate/gate.hpp"
#include "generate.hpp"
#include "kv_cache.hpp"
#include "ops.hpp"

namespace engine {

/// A model's weights and its forward pass.
///
/// Positions: the engine asks `cache.next_position()` once per chunk or step, before layer 0. A cache raises it by the
/// chunk's tokens when the chunk has passed through the last layer, not before.
/// Errors: every argument is checked before the cache is touched. When the cache, or a progress callback, throws
/// during a chunk, layers before that point hold the chunk and later ones do not: drop the cache.
/// Threads: one call at a time, because all calls share the working memory.
class llama {
 public:
  /// Loads config.json, the weights and, where there is one, the gate from a folder. `executor` must outlive the model.
  /// Errors: see `load_config`, `checkpoint::open`, `checkpoint::weight` and `load_gate`.
  static llama load(const std::filesystem::path& directory, tessera::cpu::executor& executor);

  const llama_config& config() const { return config_; }

  /// Appends one turn's prompt to `cache` and ends the cache's prefill.
  /// Returns  the logits [vocab_size] after the prompt's last token.
  /// Errors   an empty prompt, a token outside the vocabulary, a chunk below 1, a prompt that would pass
  ///          max_position_embeddings, or a cache that takes scores where the model has no gate.
  std::vector<float> prefill(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options = {});

  /// Passes the prompt that `cache` holds last, and has not ended, through the model once more, part by part (see
  /// `kv_cache::reread`). `prefill` does so where the cache asks for it.
  /// Errors   as `prefill`; a part below 1; a part with its sentence does not fit behind the prompt.
  void reread(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options = {});

  /// Appends 1 to 8 tokens, causal among themselves.
  /// Returns  the logits [tokens, vocab_size] after each of them.
  /// Errors   as `prefill`; more than 8 tokens.
  std::vector<float> decode(std::span<const token_t> tokens, kv_cache& cache);

  /// Prefills `prompt` and answers greedily: equal logits go to the lower token id.
  /// Returns  the answer, a token that stopped it included. Its last token has not been decoded, so the cache lacks
  ///          it: a next turn's prompt must begin with it. Empty when max_new is 0.
  /// Errors   as `prefill`; prompt and max_new together would pass max_position_embeddings.
  std::vector<token_t> generate(std::span<const token_t> prompt, kv_cache& cache, const generate_options& options = {});

  /// As `generate`, from the logits that a prefill or decode returned.
  std::vector<token_t> extend(std::span<const float> logits, kv_cache& cache, const generate_options& options = {});

 private:
  struct layer {
    std::vector<float> attention_norm, mlp_norm;  // [hidden]
    matrix qkv;                                   // q, k and v stacked: [q_size + 2 * kv_size, hidden]
    std::vector<float> qkv_bias;                  // [q_size + 2 * kv_size]; empty: none
    std::vector<float> q_norm, k_norm;            // [head_dim]; empty: none
    matrix attention_out;                         // [hidden, q_size]
    matrix gate_up;                               // gate and up stacked: [2 * intermediate, hidden]
    matrix down;                                  // [hidden, intermediate]
  };
  // Working memory of one chunk, kept between calls.
  struct workspace {
    std::vector<float> hidden, normed, qkv, q, k, v, attended, projected, gate_up, activated, gated, scores;
    void resize(const llama_config& config, std::int32_t tokens);
  };
  enum class phase { prefill, decode };

  llama(llama_config config, const checkpoint& weights, tessera::cpu::executor& executor);

  void forward(std::span<const token_t> tokens, kv_cache& cache, phase now, std::int32_t wanted);
  void attend(const layer& weights, int index, std::int64_t first, std::int32_t tokens, const rope_table& table,
              kv_cache& cache, phase now);
  void score(int index, std::int64_t first, std::int32_t tokens, kv_cache& cache);
  void finish_layer(const layer& weights, float* hidden, const float* attended, std::int32_t rows);
  void require_numbers(const char* what, int index, const std::vector<float>& values, std::int32_t width,
                       std::int64_t first, std::int32_t tokens, float most) const;
  std::vector<float> logits_of(std::int32_t tokens, std::int32_t wanted);

  llama_config config_;
  tessera::cpu::executor* executor_;
  matrix embedding_;  // [vocab, hidden]
  matrix head_;       // [vocab, hidden]; empty when tied to the embedding
  std::vector<float> final_norm_;
  std::vector<layer> layers_;
  std::optional<std::vector<gate_layer>> gate_;
  std::vector<float> frequencies_;
  workspace work_;
};

}  // namespace engine
