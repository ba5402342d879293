// The example engine on a CUDA device: the same model, with bf16 weights, fp32 sums and an fp32 residual stream.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/config.hpp"
#include "engine/generate.hpp"
#include "kv_cache.hpp"

namespace engine::cuda {

/// Throws tessera::error with the cure unless there is a CUDA device that the engine can use.
void require_device();

/// Tokens of several conversations that pass through the model together: chunks of prompts and steps, one behind the other.
struct packed_rows {
  std::span<const token_t> tokens;
  std::span<const std::int32_t> positions;  ///< of each token in its conversation
  std::span<const std::int32_t> wanted;     ///< rows whose next tokens are wanted, ascending; none need be
  element type = element::bf16;             ///< of q, k and v
};
/// The attention of one layer: appends k and v to the conversations' caches, and writes what the queries attend to `out`.
/// Shapes   q, out [rows, q_heads, head_dim]; k, v [rows, kv_heads, head_dim]; on the device, out fp32.
using packed_attention = std::function<void(int layer, const void* q, const void* k, const void* v, float* out)>;

/// A model's weights on the device and its forward pass; see engine::llama, which it follows step by step.
///
/// Weights that are not bf16 in the checkpoint are rounded to it. The inputs of every matrix product are rounded to
/// bf16 too; everything between the products is fp32.
/// Errors: as engine::llama; no device, too little device memory.
/// Threads: one call at a time.
class llama {
 public:
  static constexpr int most_together = 64;  ///< conversations of a step

  static llama load(const std::filesystem::path& directory);

  /// A model of that shape with random weights, for timing.
  static llama random(const llama_config& config, std::uint64_t seed);
  /// The same with attention along vertical and slash lines: see line_weights.
  static llama with_lines(const llama_config& config, std::uint64_t seed);

  llama(llama&&) noexcept;
  llama& operator=(llama&&) noexcept;
  ~llama();

  const llama_config& config() const;

  /// What the engine launches on; caches must be used in its order.
  stream_t stream() const;

  /// Bytes of the weights on the device.
  std::int64_t weight_bytes() const;

  /// Appends one turn's prompt to `cache` and ends the cache's prefill.
  /// Returns  the logits [vocab_size] after the prompt's last token.
  std::vector<float> prefill(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options = {});

  /// Passes a prompt through the model once more, as engine::llama::reread. `prefill` does so where the cache asks for it.
  void reread(std::span<const token_t> prompt, kv_cache& cache, const prefill_options& options = {});

  /// Appends 1 to 8 tokens, causal among themselves.
  /// Returns  the logits [tokens, vocab_size] after each of them.
  std::vector<float> decode(std::span<const token_t> tokens, kv_cache& cache);

  /// Appends one token and returns the best one after it. The second such step over a cache is captured in a graph,
  /// later ones replay it.
  token_t next(token_t token, kv_cache& cache);
  /// The same for conversations that decode together, at most `most_together`: a token of each.
  std::vector<token_t> next(std::span<const token_t> tokens, kv_cache& cache);

  /// Passes tokens of several conversations through the model. `attend` is called once for each layer, and launches on
  /// `stream()`. Behind the last layer's attention only rows from the first wanted one on go on.
  /// Returns  the best token after each wanted row. It waits for the device.
  std::vector<token_t> pass(const packed_rows& rows, const packed_attention& attend);

  /// Prefills `prompt` and answers greedily; see engine::llama::generate.
  std::vector<token_t> generate(std::span<const token_t> prompt, kv_cache& cache, const generate_options& options = {});

  /// As `generate`, from the logits that a prefill or decode returned.
  std::vector<token_t> extend(std::span<const float> logits, kv_cache& cache, const generate_options& options = {});

 private:
  class state;
  explicit llama(std::unique_ptr<state> made);

  std::unique_ptr<state> state_;
};

}  // namespace engine::cuda
