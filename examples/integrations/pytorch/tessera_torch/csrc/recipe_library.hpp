// What a recipe's library is asked for. The operators (operators.cpp) know no recipe and the recipes' libraries (one a
// recipe, element type and head dim) know no PyTorch, so each side compiles alone and in seconds.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <tessera/backend/cpu/kernel/executor.hpp>
#include <tessera/runtime/any/any_cache.hpp>
#include <vector>

namespace tessera_torch {

using tessera::index_t;
using tessera::offset_t;

/// Rows of a tensor where they lie. Null: none.
using tensor_rows = tessera::untyped_output;

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

}  // namespace tessera_torch

// What a recipe's library exports; build.py writes the definitions.
extern "C" {
/// Errors: tessera::error, for parameters or shapes that make no sense.
tessera::any_cache* tessera_torch_make(const tessera_torch::cache_request& request);
/// An independent copy of a cache that this library made, in other memory.
tessera::any_cache* tessera_torch_copy(const tessera::any_cache& cache, const tessera_torch::device_memory& memory);
/// One line a parameter: name, default, what is allowed, what it means, with tabs between.
const char* tessera_torch_parameters();
/// Whether a turn's prompt must pass through the model once more, by `reread`, before it ends.
bool tessera_torch_rereads();
/// Whether the engine gives tokens their scores.
bool tessera_torch_takes_scores();
/// Whether tokens of an answer can be taken back.
bool tessera_torch_takes_back();
/// Whether a layer drops tokens as soon as a prompt's last call has been through it.
bool tessera_torch_drops_by_layer();
/// Whether a step chooses what it reads: its tokens share one choice, so that drafts are checked token by token.
bool tessera_torch_retrieves();
/// Whether a layer's choice depends on other layers of its cache, or on how many there are.
bool tessera_torch_looks_over_layers();
/// Whether steps add up queries or values, so that layers cannot read keys and values of another one.
bool tessera_torch_adds_up();
/// Whether the method turns queries back, and so needs `model_shape::rope_frequencies`.
bool tessera_torch_turns_queries();
}
