// What the example engine asks of a cache. The engine knows nothing of any compression method: it hands over
// queries, keys and values and gets attention outputs back.
#pragma once

#include <cstdint>
#include <span>

namespace engine {

/// The cache of one conversation, all layers. Keys and queries come after RoPE.
/// Shapes   q, out [tokens, q_heads, head_dim]; k, v [tokens, kv_heads, head_dim]; fp32, contiguous.
/// Errors   implementations throw tessera::error and leave the cache unchanged.
class kv_cache {
 public:
  virtual ~kv_cache() = default;

  /// Before a chunk of a prompt, or a decode step, passes through the layers: one flag for each of its tokens, 1 where a segment
  /// of the text ends, or none where the caller does not know. Valid until it has passed. Most caches do not care.
  virtual void begin_chunk(std::span<const std::uint8_t> boundaries) { (void)boundaries; }

  /// Appends a chunk of the prompt to `layer` and writes its causal attention to `out`.
  virtual void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) = 0;

  /// Whether a prompt must pass through the model once more before its prefill ends: see `reread`. Most caches do not care.
  virtual bool rereads() const { return false; }

  /// Tokens that repeat `count` prompt tokens from position `first` on. They stand behind the prompt, attend to all of it and to
  /// themselves, and are forgotten; `out` gets their attention. Only asked where `rereads`.
  virtual void reread(int layer, std::int64_t first, std::int64_t count, const float* q, const float* k, const float* v,
                      int tokens, float* out) {
    (void)layer, (void)first, (void)count, (void)q, (void)k, (void)v, (void)tokens, (void)out;
  }

  /// Whether tokens come with scores of the model's gate: `set_scores`, behind each `prefill` and `decode` of a layer. Most caches
  /// do not care.
  virtual bool takes_scores() const { return false; }
  /// Scores [kv_heads, tokens] of a layer's tokens from position `first` on. Only given where `takes_scores`.
  virtual void set_scores(int layer, std::int64_t first, const float* scores, int tokens) {
    (void)layer, (void)first, (void)scores, (void)tokens;
  }

  /// Ends a turn's prefill, after its last chunk has passed through every layer. A cache may drop tokens here.
  virtual void end_prefill() = 0;

  /// Appends a decode step of 1 to 8 tokens to `layer` and writes its attention to `out`.
  virtual void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) = 0;

  /// The logical position of the next token: tokens seen so far, whatever has been dropped.
  virtual std::int64_t next_position() const = 0;
};

}  // namespace engine
