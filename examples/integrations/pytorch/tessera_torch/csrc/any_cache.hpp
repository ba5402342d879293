// One recipe's cache behind an interface. The operators (operators.cpp) know no recipe and the recipes' libraries (one a
// recipe, element type and head dim) know no PyTorch, so each side compiles alone and in seconds.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tessera/backend/cpu/kernel/executor.hpp>
#include <tessera/core/logit_rule.hpp>
#include <tessera/core/model_shape.hpp>
#include <tessera/runtime/any_cache.hpp>
#include <tessera/runtime/turn/sequence_options.hpp>
#include <vector>

namespace tessera_torch {

using tessera::index_t;
using tessera::offset_t;

/// Rows of a tensor [sequences, heads, tokens, dim] where they lie: strides in elements, that of dim is 1. Null: none.
struct tensor_rows {
  void* data = nullptr;
  offset_t sequence_stride = 0, token_stride = 0, head_stride = 0;
  index_t sequences = 0, tokens = 0, heads = 0, dim = 0;

  template <class T>
  tessera::rows_view<T> as() const {
    return {static_cast<T*>(data), sequence_stride, token_stride, head_stride, sequences, tokens, heads, dim};
  }
};

/// Where a cache on a GPU takes memory from: what tessera::cuda::allocate_from is given. Null functions: the library's own.
struct device_memory {
  void* (*take)(void* context, std::size_t bytes) = nullptr;
  void (*give_back)(void* context, void* data, std::size_t bytes) = nullptr;
  void* context = nullptr;
};

/// One flag a token: whether a segment of the text ends after it. On the host; empty: not said.
using text_flags = std::span<const std::uint8_t>;

/// What a cache is made from.
struct cache_request {
  tessera::model_shape shape;
  tessera::logit_rule rule;
  std::optional<index_t> budget;
  std::vector<tessera::named_setting> settings;
  std::shared_ptr<const std::vector<double>>
      table;  ///< a number for each head of the model, for budgets by such; or null
  std::shared_ptr<tessera::cpu::executor> workers;
  index_t sequences = 1;
  index_t tokens = 0;           ///< longest conversation; CUDA allocates for it, the CPU as tokens come
  index_t step_tokens = 1;      ///< of a step at most; CUDA alone, the CPU takes 8
  index_t smallest_budget = 0;  ///< of a sequence; 0: that of all; CUDA alone
  index_t first_prompt =
      0;  ///< tokens of the longest first prompt, if it comes whole in one call; 0: not known; CUDA alone
  index_t first_answer = 0;  ///< then the tokens behind it that there is room for
  device_memory memory;      ///< CUDA alone
};

/// The cache of a batch of conversations. `stream` is a cudaStream_t, null on the CPU.
/// Errors   tessera::error, before anything is changed.
class any_cache {
 public:
  virtual ~any_cache() = default;

  virtual std::unique_ptr<any_cache> clone(const device_memory& memory) const = 0;  ///< an independent copy
  virtual index_t open(const tessera::sequence_options& options, void* stream) = 0;

  /// Makes room in every layer, so that a prompt in chunks does not move what it has stored.
  virtual void reserve(index_t id, index_t tokens, void* stream) = 0;
  /// One sequence's chunk: stored, shown to the scorer, attended. Rows have one sequence. boundaries: after which tokens a
  /// segment of the text ends, or none. is_last: nothing of the prompt comes behind it, so a layer that can chooses at once.
  virtual void prompt(index_t layer, index_t id, const tensor_rows& q, const tensor_rows& k, const tensor_rows& v,
                      const tensor_rows& out, text_flags boundaries, bool is_last, void* stream) = 0;
  /// Tokens that repeat `count` tokens from position `first` on: they attend to the prompt and to themselves, and are forgotten.
  virtual void reread(index_t layer, index_t id, index_t first, index_t count, const tensor_rows& q,
                      const tensor_rows& k, const tensor_rows& v, const tensor_rows& out, void* stream) = 0;
  virtual void end_prompt(index_t id, void* stream) = 0;
  /// Takes back the tokens from `position` on; `settled`: the smallest position that this takes.
  virtual void truncate(index_t id, index_t position, void* stream) = 0;
  virtual index_t settled(index_t id) const = 0;
  /// A sequence as bytes, between two turns or steps; and such bytes in place of a sequence, which keeps its id.
  virtual void save(index_t id, const std::function<void(const void*, std::size_t)>& sink, void* stream) = 0;
  virtual void load(index_t id, const std::function<std::size_t(void*, std::size_t)>& source, void* stream) = 0;

  /// A step is: `prepare_step`, the host's part; `begin_step` and every layer's `step`, which a CUDA graph may capture. A
  /// graph is replayed after `prepare_step` has answered the same number as when it was captured: what is done in a step.
  virtual int prepare_step(const std::vector<index_t>& ids, index_t tokens, text_flags boundaries, void* stream) = 0;
  virtual void begin_step(void* stream) = 0;
  virtual void step(index_t layer, const tensor_rows& q, const tensor_rows& k, const tensor_rows& v,
                    const tensor_rows& out, void* stream) = 0;

  virtual void set_budget(index_t tokens, void* stream) = 0;
  /// Memory for what is stored and `tokens` more; gives the rest back. The CPU does so by itself.
  virtual void fit_memory(index_t tokens, void* stream) = 0;
  virtual offset_t bytes(index_t id) const = 0;
  virtual offset_t bytes_read(index_t id) const = 0;
  virtual offset_t full_bytes(index_t tokens) const = 0;
  virtual index_t next_position(index_t id) const = 0;
  virtual std::vector<index_t> positions(index_t layer, index_t id, index_t head) const = 0;
};

}  // namespace tessera_torch

// What a recipe's library exports; build.py writes the definitions.
extern "C" {
/// Errors: tessera::error, for parameters or shapes that make no sense.
tessera_torch::any_cache* tessera_torch_make(const tessera_torch::cache_request& request);
/// One line a parameter: name, default, what is allowed, what it means, with tabs between.
const char* tessera_torch_parameters();
/// Whether a turn's prompt must pass through the model once more, by `reread`, before it ends.
bool tessera_torch_rereads();
/// Whether tokens of an answer can be taken back.
bool tessera_torch_takes_back();
/// Whether a layer drops tokens as soon as a prompt's last call has been through it.
bool tessera_torch_drops_by_layer();
/// Whether a step chooses what it reads: its tokens share one choice, so that drafts are checked token by token.
bool tessera_torch_retrieves();
/// Whether the method turns queries back, and so needs `model_shape::rope_frequencies`.
bool tessera_torch_turns_queries();
}
