// A cache whose method is chosen when the program runs.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "../../core/engine/untyped_rows.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/logit_rule.hpp"
#include "../../core/model_shape.hpp"
#include "../../core/plan/capacity.hpp"
#include "../../core/plan/layer_peak.hpp"
#include "../../core/plan/ranked_tokens.hpp"
#include "../../core/prompt/prompt_lines.hpp"
#include "../page_plan.hpp"
#include "../turn/mixed_batch.hpp"
#include "../turn/sequence_options.hpp"

TESSERA_NAMESPACE_BEGIN

/// A parameter of a method as text: {"window", "16"}, {"pool_kind", "average"}.
struct named_setting {
  std::string name, value;
};

/// What a cache by name is made from. Parameters that are not set have the method's defaults.
struct any_cache_request {
  model_shape shape;
  std::optional<index_t> budget;  ///< tokens, for a method that has one
  host_vector<named_setting> settings{};
  logit_rule rule{};  ///< of the model's attention
};

/// Facts of a cache's method, and of the rows that it takes.
struct any_cache_facts {
  index_t k_dim = 0, v_dim = 0;
  element_kind input = element_kind::fp32;   ///< of q, k and v
  element_kind output = element_kind::fp32;  ///< of attention
  index_t chunk = 0;                         ///< prompt tokens behind which the method chooses; 0: at a prompt's end
  bool needs_segments = false;               ///< prompts must come with the boundaries of their segments
  bool needs_step_segments = false;          ///< and so must steps
  bool rereads = false;                      ///< prompts must pass through the model once more before they end
  bool drops_by_layer = false;               ///< `end_layer` behind a prompt's last chunk frees memory
  bool shares_pages = false;                 ///< heads share pages by groups: see `pages`
  bool packs = false;                        ///< rows are packed: see `unpacked`
  bool cuts_prompts = false;                 ///< of a prompt that has begun, some tokens can be taken back
  bool saves = false;                        ///< `save` and `load` work
  bool takes_scores = false;                 ///< the engine gives scores: see `set_scores`
};

/// K and V of a layer as they are stored, head after head: [kv_heads, tokens, k_dim] and [.., v_dim].
struct unpacked_rows {
  host_vector<float> k, v;
};

/// A cache whose method was chosen by name, on the CPU or on a GPU. Each call is basic_cache's of the same name. A
/// virtual call a layer costs nothing beside attention. Drafts need the method's own type.
/// Rows     of the element types that `facts` says; where the backend has its memory.
/// Queues   `stream` is a cudaStream_t on a GPU; the CPU has none and takes null.
/// Errors   those of basic_cache, and rows of another element type: tessera::error, before anything changes.
class any_cache {
 public:
  virtual ~any_cache() = default;

  /// An independent copy, with all sequences.
  virtual std::unique_ptr<any_cache> clone() const = 0;
  virtual const model_shape& shape() const = 0;
  virtual const any_cache_facts& facts() const = 0;

  // --- sequences -----------------------------------------------------------------------------------------------------

  virtual void set_budget(index_t tokens, void* stream = nullptr) = 0;
  virtual index_t open(const sequence_options& options = {}, void* stream = nullptr) = 0;
  virtual index_t fork(index_t id, void* stream = nullptr) = 0;
  virtual index_t fork(index_t id, index_t position, void* stream = nullptr) = 0;
  /// Errors   also: a method that cannot be saved here (`facts`).
  virtual void save(index_t id, const std::function<void(const void*, std::size_t)>& sink, void* stream = nullptr) = 0;
  virtual index_t load(const std::function<std::size_t(void*, std::size_t)>& source, void* stream = nullptr) = 0;
  virtual void close(index_t id, void* stream = nullptr) = 0;
  virtual void truncate(index_t id, index_t position, void* stream = nullptr) = 0;
  virtual void cancel(index_t id, void* stream = nullptr) = 0;
  virtual index_t settled(index_t id) const = 0;
  virtual index_t next_position(index_t id) const = 0;

  // --- prompts -------------------------------------------------------------------------------------------------------

  /// On the CPU nothing happens: its memory grows with the rows.
  virtual void reserve(index_t id, index_t tokens, void* stream = nullptr) = 0;
  virtual void announce(index_t id, index_t tokens) = 0;
  virtual index_t announced(index_t id) const = 0;
  virtual index_t prompt_tokens(index_t id) const = 0;
  /// boundaries [tokens]: for a method that `needs_segments`, 1 for a token after which a segment of the text ends,
  /// else 0.
  virtual void prefill(index_t layer, index_t id, const untyped_input& q, const untyped_input& k,
                       const untyped_input& v, std::span<const std::uint8_t> boundaries = {},
                       void* stream = nullptr) = 0;
  virtual void prefill_attention(index_t layer, index_t id, const untyped_input& q, const untyped_output& out,
                                 const rows_view<float>& lse = {}, void* stream = nullptr) = 0;
  /// Errors   also: a method that rereads nothing.
  virtual void reread(index_t layer, index_t id, index_t first, index_t count, const untyped_input& q,
                      const untyped_input& k, const untyped_input& v, const untyped_output& out,
                      void* stream = nullptr) = 0;
  /// scores [kv_heads, tokens], fp32, where the backend has its memory.
  /// Errors   also: a method that takes none (`facts`).
  virtual void set_scores(index_t layer, index_t id, index_t first, index_t tokens, const float* scores,
                          void* stream = nullptr) = 0;
  virtual void end_layer(index_t layer, index_t id, void* stream = nullptr) = 0;
  virtual void end_prefill(index_t id, void* stream = nullptr) = 0;

  // --- steps, and passes of chunks and steps -------------------------------------------------------------------------

  virtual batch prepare_step(const host_vector<index_t>& ids, index_t tokens,
                             std::span<const std::uint8_t> boundaries = {}, void* stream = nullptr) = 0;
  virtual mixed_batch prepare(const host_vector<batch_item>& items, std::span<const std::uint8_t> boundaries = {},
                              void* stream = nullptr) = 0;
  /// The device's part of a step, before its layers. On the CPU nothing is left to do.
  virtual void begin_step(const batch& step, void* stream = nullptr) = 0;
  virtual void decode(index_t layer, const batch& step, const untyped_input& q, const untyped_input& k,
                      const untyped_input& v, const untyped_output& out, const rows_view<float>& lse = {},
                      void* stream = nullptr) = 0;
  virtual void attend(index_t layer, const batch& step, const untyped_input& q, const untyped_output& out,
                      const rows_view<float>& lse = {}, void* stream = nullptr) = 0;
  virtual void process(index_t layer, const mixed_batch& work, const untyped_input& q, const untyped_input& k,
                       const untyped_input& v, const untyped_output& out, const rows_view<float>& lse = {},
                       void* stream = nullptr) = 0;
  /// On a GPU: see basic_cache. On the CPU null.
  virtual const index_t* step_positions() const = 0;

  // --- answers -------------------------------------------------------------------------------------------------------

  virtual host_vector<index_t> positions(index_t layer, index_t id, index_t head) const = 0;
  virtual index_t queries_needed(index_t tokens) const = 0;  ///< the recipe's
  virtual capacity bound(const turn_extent& turn, const sequence_options& options) const = 0;
  capacity bound(index_t prompt, index_t answer, index_t chunk = 0, const sequence_options& options = {}) const {
    return bound(turn_extent{prompt, answer, chunk}, options);
  }
  virtual capacity available() const = 0;
  virtual offset_t bytes(index_t id) const = 0;
  virtual offset_t bytes_read(index_t id) const = 0;
  virtual offset_t full_bytes(index_t tokens) const = 0;
  /// Memory for what is stored and `tokens` more of every sequence. On the CPU nothing happens: it has no more.
  virtual void fit_memory(index_t tokens, void* stream = nullptr) = 0;

  /// Where heads share pages by groups: the pages of each group, and those that a prompt will need. Else no groups.
  virtual host_vector<index_t> pages(index_t id) const = 0;
  virtual page_plan plan_pages(index_t id, index_t tokens) const = 0;
  /// Of packed rows, what is left of a layer's K and V. On a GPU it synchronises. Errors   rows that are not packed.
  virtual unpacked_rows unpacked(index_t layer, index_t id) = 0;

  // --- traces --------------------------------------------------------------------------------------------------------

  virtual void trace_attended(bool on) = 0;
  virtual const host_vector<host_vector<index_t>>& attended(index_t layer, index_t id) const = 0;
  virtual void trace_lines(bool on) = 0;
  virtual const prompt_lines& lines(index_t layer, index_t id) const = 0;
  /// Errors   a cache on a GPU: tessera::error.
  virtual void trace_ranked(bool on) = 0;
  virtual const ranked_tokens& ranked(index_t layer, index_t id) const = 0;
};

TESSERA_NAMESPACE_END
