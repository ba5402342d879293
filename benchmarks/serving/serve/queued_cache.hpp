// A cache whose calls go to one queue, and what a scheduler asks about its memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <utility>

#include <tessera/concepts/schedule.hpp>
#include <tessera/core/host/host_vector.hpp>
#include <tessera/core/plan/capacity.hpp>
#include <tessera/core/types.hpp>
#include <tessera/runtime/turn/mixed_batch.hpp>
#include <tessera/runtime/turn/sequence_options.hpp>

#include "requests.hpp"
#include "swap_space.hpp"

namespace serving {

/// A cache of the library and the queue of its calls: a stream on a GPU, nothing on the CPU. All sequences are opened with
/// the same options. Memory is counted in units: pages, where rows lie in a pool of pages, else bytes.
/// Saved    a saved sequence: see swap_space.
template <class Cache, class Saved = saved_bytes, class... Queue>
class queued_cache {
  using recipe_type = std::decay_t<decltype(std::declval<const Cache&>().recipe())>;
  using placement = typename Cache::layout::placement_type;
  static constexpr bool in_groups = requires(const placement& where) { where.groups(1, 1); };
  static constexpr bool in_pages = requires { placement::page; } && !in_groups;

 public:
  using saved_type = Saved;
  static constexpr bool cuts_prompts = Cache::cuts_prompts;
  static constexpr bool drops = recipe_type::retain_type::drops;
  /// Whether `prepare` sets memory aside for all that a pass's chunks may take: not on the CPU, and not where ends of chunks
  /// drop rows, which may leave shared pages.
  static constexpr bool reserves_chunks =
      sizeof...(Queue) > 0 && !(drops && recipe_type::schedule_type::fires_at(tessera::moment::chunk_end));

  queued_cache(Cache& cache, tessera::sequence_options options, Queue... queue)
      : cache_(cache), options_(options), queue_(queue...) {
    const tessera::model_shape& shape = cache.shape();
    const auto& where = cache.recipe().placement;
    if constexpr (in_groups) {
      tables_ = where.groups(shape.layers, shape.kv_heads).count();
      page_ = where.page;
      unit_bytes_ = offset_t(where.page) * where.groups(shape.layers, shape.kv_heads).heads * row_bytes();
    } else if constexpr (in_pages) {
      tables_ = shape.layers;
      page_ = placement::page;
      unit_bytes_ = offset_t(placement::page) * shape.kv_heads * row_bytes();
    }
  }

  // --- calls of the cache --------------------------------------------------------------------------------------------

  index_t open() {
    return call([&](auto... queue) { return cache_.open(options_, queue...); });
  }
  index_t fork(index_t id) {
    return call([&](auto... queue) { return cache_.fork(id, queue...); });
  }
  index_t fork(index_t id, index_t position) {
    return call([&](auto... queue) { return cache_.fork(id, position, queue...); });
  }
  void close(index_t id) {
    call([&](auto... queue) { cache_.close(id, queue...); });
  }
  void truncate(index_t id, index_t position) {
    call([&](auto... queue) { cache_.truncate(id, position, queue...); });
  }
  void announce(index_t id, index_t tokens) { cache_.announce(id, tokens); }
  void end_prefill(index_t id) {
    call([&](auto... queue) { cache_.end_prefill(id, queue...); });
  }
  template <class Sink>
  void save(index_t id, Sink&& sink) {
    call([&](auto... queue) { cache_.save(id, sink, queue...); });
  }
  template <class Source>
  index_t load(Source&& source) {
    return call([&](auto... queue) { return cache_.load(source, queue...); });
  }
  /// Prepares a pass.
  tessera::mixed_batch prepare(const tessera::host_vector<tessera::batch_item>& items) {
    return call([&](auto... queue) { return cache_.prepare(items, queue...); });
  }
  /// Begins it on a device.
  void begin(const tessera::mixed_batch& work) {
    if constexpr (sizeof...(Queue) > 0) {
      if (work.has_step()) call([&](auto... queue) { cache_.begin_step(work.step, queue...); });
    }
  }
  template <class Rows, class Out>
  void process(index_t layer, const tessera::mixed_batch& work, const Rows& q, const Rows& k, const Rows& v,
               const Out& out) {
    call([&](auto... queue) { cache_.process(layer, work, q, k, v, out, {}, queue...); });
  }
  bool can_save() const { return cache_.can_save(); }
  index_t settled(index_t id) const { return cache_.settled(id); }
  index_t next_position(index_t id) const { return cache_.next_position(id); }
  index_t prompt_tokens(index_t id) const { return cache_.prompt_tokens(id); }
  index_t announced(index_t id) const { return cache_.announced(id); }
  const tessera::model_shape& shape() const { return cache_.shape(); }

  // --- memory --------------------------------------------------------------------------------------------------------

  offset_t available() const { return units(cache_.available()); }
  /// Whether the memory of a sequence's prompt was set aside when it was announced.
  bool sets_aside(index_t id) const { return in_groups && cache_.announced(id) > 0; }
  /// At most what `tokens` more tokens of a sequence take, with copies of shared pages that are filled in part.
  offset_t growth(offset_t tokens) const {
    return tables_ > 0 ? tables_ * (tessera::ceil_div(tokens, page_) + 1) : tokens * cache_.full_bytes(1);
  }
  /// At most what a first prompt takes that comes in chunks, if its first `shared` tokens are those of a fork.
  offset_t need(index_t prompt, index_t chunk, index_t shared) const {
    const offset_t alone = units(cache_.bound(prompt, 0, chunk, options_));
    if (shared == 0) return alone;
    offset_t more = growth(prompt - shared);
    if (drops) more += growth(kept(prompt));  // which leaves shared pages
    return (std::min)(alone, more);
  }
  /// Of so many saved bytes.
  offset_t units_of(offset_t bytes) const { return tables_ > 0 ? bytes / unit_bytes_ + 1 : bytes; }
  offset_t bytes_of(offset_t count) const { return count * unit_bytes_; }

 private:
  template <class Call>
  decltype(auto) call(const Call& made) const {
    return std::apply(made, queue_);
  }
  static offset_t row_bytes() { return Cache::layout::token_bytes(); }
  offset_t units(const tessera::capacity& given) const { return tables_ > 0 ? given.pages : given.bytes; }
  offset_t kept(index_t tokens) const {
    return options_.budget.is_share() ? offset_t(std::ceil(options_.budget.share * tokens)) : tokens;
  }

  Cache& cache_;
  tessera::sequence_options options_;
  std::tuple<Queue...> queue_;
  offset_t tables_ = 0, page_ = 1, unit_bytes_ = 1;  // page tables of a sequence; 0: rows lie in runs
};

}  // namespace serving
