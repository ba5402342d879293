// What the CUDA engine asks of a cache: the engine's kv_cache over device memory. The engine knows nothing of any
// compression method.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

// As in cuda_runtime_api.h, so that nothing here needs the toolkit.
struct CUstream_st;
struct CUgraphExec_st;

namespace engine::cuda {

using stream_t = CUstream_st*;

/// What a cache takes.
enum class element { bf16, fp16 };

/// Decode steps that a model has captured over one cache. They hold addresses of both, so they live in the cache and
/// die with it; a copy of a cache begins with none.
class captured_steps {
 public:
  /// One graph for each model, number of tokens and what else a step does.
  struct step {
    std::uint64_t model;  ///< a number that no other model has: an address may be used again
    int tokens, actions;
    int runs = 0;  ///< before it was captured
    CUgraphExec_st* graph = nullptr;
  };

  captured_steps() = default;
  captured_steps(const captured_steps&) {}
  captured_steps& operator=(const captured_steps&) {
    clear();
    return *this;
  }
  ~captured_steps() { clear(); }

  step& of(std::uint64_t model, int tokens, int actions);

  /// Forgets all graphs: for a cache whose steps launch something else from now on.
  void clear();

 private:
  std::vector<step> steps_;
};

/// The cache of one conversation, or of several that decode together, all layers. Keys and queries come after RoPE.
/// Shapes   q, out [tokens, q_heads, head_dim]; k, v [tokens, kv_heads, head_dim]; contiguous, on the device; q, k and
///          v of `type`, out fp32. In steps the rows of one conversation lie behind those of the one before.
/// Streams  everything is ordered by the stream that it is given.
/// Errors   implementations throw tessera::error and leave the cache unchanged.
class kv_cache {
 public:
  virtual ~kv_cache() = default;

  virtual element type() const = 0;

  /// Conversations that a step goes on with, each by as many tokens.
  virtual int conversations() const { return 1; }
  /// Whose prompts and positions are meant from now on; the first one's at the beginning.
  virtual void select(int) {}

  /// Makes room for so many more tokens in every layer; before a prompt, so that nothing moves while it comes.
  virtual void reserve(std::int64_t tokens, stream_t stream) = 0;

  /// Before a chunk of a prompt, or `begin_step`: where the segments of the text end, as engine::kv_cache has it.
  virtual void begin_chunk(std::span<const std::uint8_t> boundaries) { (void)boundaries; }

  /// Appends a chunk of the prompt to `layer` and writes its causal attention to `out`.
  virtual void prefill(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
                       stream_t stream) = 0;

  /// Appends a chunk of the prompt to `layer` and lets the method see its queries; computes no attention.
  virtual void observe(int layer, const void* q, const void* k, const void* v, int tokens, stream_t stream) = 0;

  /// Whether a prompt must pass through the model once more before its prefill ends, and that: as engine::kv_cache has it.
  virtual bool rereads() const { return false; }
  virtual void reread(int layer, std::int64_t first, std::int64_t count, const void* q, const void* k, const void* v,
                      int tokens, float* out, stream_t stream) {
    (void)layer, (void)first, (void)count, (void)q, (void)k, (void)v, (void)tokens, (void)out, (void)stream;
  }

  /// Whether tokens come with scores of the model's gate, and these, of the selected conversation: [kv_heads, tokens] on the
  /// device. Behind each `prefill` of a layer, and behind a whole step.
  virtual bool takes_scores() const { return false; }
  virtual void set_scores(int layer, std::int64_t first, const float* scores, int tokens, stream_t stream) {
    (void)layer, (void)first, (void)scores, (void)tokens, (void)stream;
  }

  /// Ends a turn's prefill, after its last chunk has passed through every layer. A cache may drop tokens here.
  virtual void end_prefill(stream_t stream) = 0;

  /// What the host has to do before a decode step of 1 to 8 tokens of each conversation. Never captured.
  virtual void begin_step(int tokens, stream_t stream) = 0;
  /// Of the step that `begin_step` began: steps that launch different things differ in this number, and are captured apart.
  virtual int step_actions() const { return 0; }
  /// What the device has to do before the first layer of a step. Captured with the step.
  virtual void begin_step_on_device(int tokens, stream_t stream) = 0;
  /// Appends a step's tokens to `layer` and writes their attention to `out`. Captured once, replayed as lengths grow.
  virtual void decode(int layer, const void* q, const void* k, const void* v, int tokens, float* out,
                      stream_t stream) = 0;
  /// After the stream has done a whole step.
  virtual void end_step() {}

  /// On the device, by conversation: the logical position of a step's first token, from `begin_step_on_device` on.
  virtual const std::int32_t* step_position() const = 0;

  /// The logical position of the next token: tokens seen so far, whatever has been dropped.
  virtual std::int64_t next_position() const = 0;

  captured_steps& steps() { return steps_; }

 private:
  captured_steps steps_;
};

}  // namespace engine::cuda
