// A cache whose method is chosen when the program runs.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "../core/host/host_vector.hpp"
#include "../core/logit_rule.hpp"
#include "../core/model_shape.hpp"
#include "../core/plan/capacity.hpp"
#include "../core/views.hpp"
#include "turn/mixed_batch.hpp"
#include "turn/sequence_options.hpp"

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

/// A cache on the CPU whose method was chosen by name. Each call is basic_cache's of the same name. Rows are fp32, of
/// which the cache's element type is stored. Passes through the model are those of `prepare` and `process`: chunks of
/// prompts and steps of different lengths in one call. A virtual call a layer costs nothing beside attention.
/// Errors   those of basic_cache: tessera::error.
class any_cache {
 public:
  virtual ~any_cache() = default;

  virtual index_t open(const sequence_options& options = {}) = 0;
  virtual index_t fork(index_t id) = 0;
  virtual void save(index_t id, const std::function<void(const void*, std::size_t)>& sink) = 0;
  virtual index_t load(const std::function<std::size_t(void*, std::size_t)>& source) = 0;
  virtual void close(index_t id) = 0;
  virtual void truncate(index_t id, index_t position) = 0;
  virtual void cancel(index_t id) = 0;
  virtual index_t settled(index_t id) const = 0;
  virtual index_t next_position(index_t id) const = 0;

  virtual void announce(index_t id, index_t tokens) = 0;
  /// boundaries [rows]: for a method that `needs_segments`, 1 for a token after which a segment of the text ends, else
  /// 0.
  virtual mixed_batch prepare(const host_vector<batch_item>& items, std::span<const std::uint8_t> boundaries = {}) = 0;
  virtual void process(index_t layer, const mixed_batch& work, const rows_view<const float>& q,
                       const rows_view<const float>& k, const rows_view<const float>& v,
                       const rows_view<float>& out) = 0;
  virtual void end_layer(index_t layer, index_t id) = 0;
  virtual void end_prefill(index_t id) = 0;

  virtual host_vector<index_t> positions(index_t layer, index_t id, index_t head) const = 0;
  virtual capacity bound(index_t prompt, index_t answer, index_t chunk = 0) const = 0;
  virtual offset_t bytes(index_t id) const = 0;
  virtual offset_t bytes_read(index_t id) const = 0;
  virtual offset_t full_bytes(index_t tokens) const = 0;
  virtual const model_shape& shape() const = 0;

  /// Facts of the method.
  virtual bool needs_segments() const = 0;       ///< of prompts
  virtual bool needs_step_segments() const = 0;  ///< and of steps
  virtual bool rereads() const = 0;              ///< prompts must pass through the model once more before they end
  virtual bool drops() const = 0;                ///< `end_layer` behind a prompt's last chunk frees memory
};

TESSERA_NAMESPACE_END
