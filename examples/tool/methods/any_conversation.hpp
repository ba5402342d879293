// A conversation over any method's cache: what does not depend on where the cache lies.
#pragma once

#include <memory>
#include <tessera/runtime/any/any_cache.hpp>
#include <utility>
#include <vector>

#include "method_cache.hpp"

namespace tool {

/// One sequence of a tessera::any_cache, which its forks share; `cache_`, `sequence_` and what is noted of them are the backend's to use.
class any_conversation : public method_cache {
 public:
  ~any_conversation() override {
    try {
      if (cache_.use_count() > 1) cache_->close(sequence_);
    } catch (...) {  // a sequence that cannot be closed goes with the cache
    }
  }

  index_t judged_together() const override { return facts().chunk; }
  void announce(index_t tokens) override {
    if (facts().chunk == 0) return;
    if (facts().shares_pages) reserved_ = cache_->plan_pages(sequence_, tokens).final_pages;
    cache_->announce(sequence_, tokens);
  }
  std::optional<page_counts> pages() const override {
    if (!facts().shares_pages) return std::nullopt;
    const auto used = cache_->pages(sequence_);
    return page_counts{{used.begin(), used.end()}, {reserved_.begin(), reserved_.end()}};
  }
  void begin_chunk(std::span<const std::uint8_t> boundaries) override { boundaries_ = boundaries; }
  bool rereads() const override { return facts().rereads; }
  bool takes_scores() const override { return facts().takes_scores; }

  std::int64_t next_position() const override { return cache_->next_position(sequence_); }
  index_t prompt_tokens() const override { return cache_->prompt_tokens(sequence_); }
  index_t announced() const override { return cache_->announced(sequence_); }
  bool saves() const override { return facts().saves; }
  void save(const std::function<void(const void*, std::size_t)>& sink) override { cache_->save(sequence_, sink); }
  void set_budget(index_t tokens) override { cache_->set_budget(tokens); }

  index_t queries_needed(index_t tokens) const override { return cache_->queries_needed(tokens); }
  offset_t full_bytes(index_t tokens) const override {
    const offset_t elements = offset_t(shape().kv_heads) * (facts().k_dim + facts().v_dim);
    return offset_t(shape().layers) * tokens * elements * (given_ == element_type::fp32 ? 4 : 2);
  }
  read_count reads() const override { return reads_; }
  std::vector<index_t> positions(int layer, index_t head) const override {
    return cache_->positions(layer, sequence_, head);
  }

  void trace_attended() override { cache_->trace_attended(true); }
  std::vector<std::vector<index_t>> attended(int layer) const override { return cache_->attended(layer, sequence_); }
  bool trace_lines() override {
    cache_->trace_lines(true);
    return true;
  }
  tessera::prompt_lines lines(int layer) const override { return cache_->lines(layer, sequence_); }
  std::optional<unpacked_rows> unpacked(int layer) override {
    if (!facts().packs) return std::nullopt;
    return cache_->unpacked(layer, sequence_);
  }

 protected:
  /// given: of the rows that the model gives.
  any_conversation(std::unique_ptr<tessera::any_cache> cache, element_type given)
      : cache_(std::move(cache)), given_(given) {}
  any_conversation(const any_conversation& other)
      : method_cache(other),
        cache_(other.cache_->clone()),
        given_(other.given_),
        sequence_(other.sequence_),
        reserved_(other.reserved_),
        step_(other.step_),
        boundaries_(other.boundaries_),
        reads_(other.reads_) {}
  /// A fork.
  any_conversation(const any_conversation& other, index_t sequence)
      : cache_(other.cache_), given_(other.given_), sequence_(sequence) {}
  any_conversation& operator=(const any_conversation&) = delete;

  const tessera::any_cache_facts& facts() const { return cache_->facts(); }
  const tessera::model_shape& shape() const { return cache_->shape(); }
  /// Rows [tokens, heads, dim] of the host: of queries; of keys; of values.
  input_rows queries(const float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, shape().q_heads, facts().k_dim);
  }
  input_rows keys(const float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, shape().kv_heads, facts().k_dim);
  }
  input_rows values(const float* data, index_t tokens) const {
    return tessera::nhd_rows(data, tokens, shape().kv_heads, facts().v_dim);
  }
  void ended_prompt() {
    boundaries_ = {};
    reads_ = {};
  }

  std::shared_ptr<tessera::any_cache> cache_;
  element_type given_;
  index_t sequence_ = 0;
  std::vector<index_t> reserved_;  // pages by group, for when the prompt has ended
  tessera::batch step_;
  std::span<const std::uint8_t> boundaries_{};  // of the chunk, or the step, that passes through the layers
  read_count reads_;
};

/// The cache of one conversation over any method's cache on the CPU, which is empty. given: element type of the rows that
/// the model gives; rotates: their channels are mixed before they are stored.
std::unique_ptr<method_cache> cpu_conversation(std::unique_ptr<tessera::any_cache> cache, element_type given,
                                               bool rotates);

}  // namespace tool
