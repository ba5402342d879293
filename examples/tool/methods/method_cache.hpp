// One method's cache behind an interface, so that commands can choose methods, element types and head dims at run time.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tessera/backend/cpu/kernel/executor.hpp>
#include <tessera/core/error.hpp>
#include <tessera/core/model_shape.hpp>
#include <tessera/core/parameters.hpp>
#include <tessera/core/views.hpp>
#include <tessera/runtime/any/any_cache.hpp>
#include <utility>
#include <vector>

#include "engine/kv_cache.hpp"
#include "tool_layouts.hpp"

namespace engine::cuda {
class kv_cache;
}

namespace tool {

using tessera::index_t;
using tessera::offset_t;

/// Rows that a cache reads, in any strides: [tokens, heads, head_dim].
using input_rows = tessera::rows_view<const float>;

using element_type = tessera::element_kind;
using tessera::ranked_tokens;
using tessera::unpacked_rows;

/// What was read by the decode steps since the prompt ended.
struct read_count {
  offset_t bytes = 0;
  index_t steps = 0;
};

/// Pages of each group of heads, once a prompt has ended.
struct page_counts {
  std::vector<std::int64_t> used, reserved;
};

/// The cache of one conversation under one method.
class method_cache : public engine::kv_cache {
 public:
  /// Prompt tokens that are compressed together while a prompt comes in; 0: all of it when it ends.
  virtual index_t judged_together() const { return 0; }
  /// Says how many tokens the next prompt will have. A cache that compresses it while it comes in needs to know.
  virtual void announce(index_t tokens) { (void)tokens; }
  /// Of a cache whose heads share pages by groups.
  virtual std::optional<page_counts> pages() const { return std::nullopt; }

  /// Appends a chunk of the prompt and lets the method see its queries; computes no attention.
  virtual void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) = 0;

  /// A decode step with its log-sum-exp. Shapes: out [tokens, q_heads, head_dim], lse [tokens, q_heads].
  virtual void step(int layer, const input_rows& q, const input_rows& k, const input_rows& v, float* out,
                    float* lse) = 0;

  /// The attention of a prompt chunk that was observed, with its log-sum-exp. Shapes: as `step`.
  /// Errors: a cache on another backend than the CPU.
  virtual void attend_prompt(int, const input_rows&, float*, float*) {
    tessera::fail("attention of a prompt by itself", "asked of this cache", "a cache on the CPU", "use --backend cpu");
  }

  /// Writes the conversation as bytes, between two turns; reads one in place of an empty one.
  /// Errors: those of basic_cache::save and load; a cache that cannot, as `saves` says: searched strategies of packed rows on a GPU.
  virtual void save(const std::function<void(const void*, std::size_t)>&) { require_saves(); }
  virtual void load(const std::function<std::size_t(void*, std::size_t)>&) { require_saves(); }
  virtual bool saves() const { return false; }
  void require_saves() const {
    tessera::require(saves(), "saved conversation", "asked of packed rows whose strategies are searched on a GPU",
                     "fixed strategies", "pass --set strategy=fixed, or use --backend cpu");
  }

  /// An independent copy.
  virtual std::unique_ptr<method_cache> clone() const = 0;

  /// Another conversation of the same cache that stands where this one does, in the middle of a prompt too. Pages are shared, and so is
  /// the budget. Errors: no room for one more, as `cache_request::forks` says; several conversations that decode together.
  virtual std::unique_ptr<method_cache> fork() {
    tessera::fail("fork of a conversation", "asked of this cache", "a cache of one conversation",
                  "read the prompt anew");
  }
  virtual index_t prompt_tokens() const { return 0; }  ///< of the prompt under way, so far
  virtual index_t announced() const { return 0; }      ///< what it was announced with; 0: it was not

  /// Changes the budget; it counts from the next `end_prefill` or decode step. Nothing happens where there is none.
  virtual void set_budget(index_t tokens) = 0;

  /// How many of the last queries of a prompt of `tokens` tokens the method has to see.
  virtual index_t queries_needed(index_t tokens) const = 0;

  virtual offset_t bytes() const = 0;                     ///< bytes held, all layers
  virtual offset_t full_bytes(index_t tokens) const = 0;  ///< bytes of an uncompressed cache of that many tokens
  virtual read_count reads() const = 0;

  /// Logical positions that a layer stores for one head, ascending.
  virtual std::vector<index_t> positions(int layer, index_t head) const = 0;

  /// From now on decode steps write down what they attend: see `attended`.
  virtual void trace_attended() = 0;
  /// Logical positions that the last step attended in a layer, by kv_head.
  virtual std::vector<std::vector<index_t>> attended(int layer) const = 0;

  /// From now on the end of a prompt writes down what was ranked: see `ranked`. False where this cache cannot.
  virtual bool trace_ranked() { return false; }
  virtual ranked_tokens ranked(int) const { return {}; }

  /// What is left of the vectors of a layer, in the engine's basis, of a method that leaves elements out; else nothing.
  virtual std::optional<unpacked_rows> unpacked(int) { return std::nullopt; }

  /// From now on prompts write down which lines they attend: see `lines`. False where this cache cannot.
  virtual bool trace_lines() { return false; }
  /// Of the last chunk; no heads where all of its rows attend everything.
  virtual tessera::prompt_lines lines(int) const { return {}; }

  /// The same cache for the engine on the device; null for a cache of the CPU.
  virtual engine::cuda::kv_cache* on_device() { return nullptr; }
};

/// Turns, each from its first token to the next one's, cut where a cache compresses what has come.
inline std::vector<std::pair<index_t, index_t>> chunks_of(const std::vector<std::pair<index_t, index_t>>& turns,
                                                          const method_cache& cache) {
  const index_t most = cache.judged_together();
  if (most == 0) return turns;
  std::vector<std::pair<index_t, index_t>> chunks;
  for (const auto& [begin, end] : turns) {
    for (index_t first = begin; first < end; first = chunks.back().second)
      chunks.emplace_back(first, first + std::min(most, end - first));
  }
  return chunks;
}

/// A value given for a parameter by name, as on the command line.
struct setting {
  std::string name;
  std::string value;
};

/// What a cache is made from.
struct cache_request {
  tessera::model_shape shape;
  int head_dim = 0;  ///< one of `head_dims`
  element_type element = element_type::bf16;
  std::optional<index_t> budget;  ///< tokens per kv_head; must be there where the method has a budget
  std::vector<setting> settings;
  std::shared_ptr<tessera::cpu::executor> workers;
  index_t tokens = 0;  ///< most tokens that the conversation will have; CUDA allocates for them, the CPU as they come
  index_t conversations = 1;  ///< that decode together, on CUDA
  index_t forks = 0;          ///< of the conversation, most at a time, on CUDA
  index_t index_tokens = 0;   ///< most tokens whose keys an index holds at a time, on CUDA; 0: `tokens`
  /// Of a method that packs prompts, on CUDA: tokens of the longest prompt, so that memory for whole rows is one prompt's. No
  /// conversation's prompt begins before another one's has ended. 0: `tokens`.
  index_t turn_tokens = 0;
};

inline constexpr int head_dims[] = {TESSERA_TOOL_HEAD_DIMS};  // what this build of the tool is for

struct parameter_info {
  std::string name, value, allowed, about;
};

struct policy_info {
  std::string axis, name;
};

/// All that the tool knows of a method.
struct method_info {
  std::string name, paper;
  bool has_budget = false;
  bool ranks = false;                     ///< gives tokens scores when a prompt ends
  bool needs_segments = false;            ///< a prompt must come with the boundaries of its segments
  bool keeps_blocks_of_segments = false;  ///< `ranked_tokens::blocks` says of what size
  bool on_cuda = true;                    ///< the CUDA backend runs it
  bool takes_profile = false;             ///< heads keep calibrated shares; with a profile there is no budget
  bool fuses_chunks = false;              ///< compresses a prompt while it comes in, so that no two share a prefill
  bool rereads = false;                   ///< a prompt passes through the model once more before it ends
  bool takes_scores = false;              ///< the model's gate scores its tokens
  bool takes_projection = false;          ///< weighs values behind the output projection, where there is one
  bool needs_profile = false;             ///< the setting `profile` must be there
  bool needs_rope = false;                ///< the shape must say how the model's RoPE turns
  bool chooses_lines = false;             ///< a prompt's rows attend lines, chosen by all of its queries
  bool needs_step_segments = false;       ///< decode steps must come with the boundaries of their segments, too
  tessera::value_range<index_t> budgets;  ///< what the budget may be
  std::string budget_counts;              ///< and what it counts
  std::vector<policy_info> policies;
  std::vector<parameter_info> parameters;  ///< with the paper's defaults

  /// The parameters with their values after `settings`. Errors: an unknown name, a value of the wrong type.
  std::vector<parameter_info> (*configured)(const std::vector<setting>& settings);
  /// Those with what the budget comes to for a first prompt of `prompt` tokens in place of "by the budget".
  std::vector<parameter_info> (*planned)(const std::vector<setting>& settings, std::optional<index_t> budget,
                                         index_t prompt, int head_dim);
  /// A cache on the CPU; see `make_cache` for the other backend.
  /// Errors: as `configured`; parameters or shapes that make no sense.
  std::unique_ptr<method_cache> (*make)(const cache_request& request);
};

}  // namespace tool
