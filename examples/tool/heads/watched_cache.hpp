// Keys, values and queries of a prompt, as a model hands them to its cache.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/config.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

/// A cache of one conversation; keys, the newest queries and, where asked for, values of prompts are remembered on the
/// way.
class watched_cache final : public method_cache {
 public:
  watched_cache(std::unique_ptr<method_cache> held, const engine::llama_config& config, index_t rows,
                bool values = false)
      : held_(std::move(held)),
        q_size_(std::size_t(config.q_size())),
        kv_size_(std::size_t(config.kv_size())),
        rows_(rows),
        holds_values_(values),
        keys_(std::size_t(config.num_hidden_layers)),
        values_(keys_.size()),
        queries_(keys_.size()) {}

  /// [tokens, kv_heads, head_dim] of a layer (values: empty unless asked for), and of its newest `rows` tokens [rows, q_heads, head_dim].
  const std::vector<float>& keys(int layer) const { return keys_[std::size_t(layer)]; }
  const std::vector<float>& values(int layer) const { return values_[std::size_t(layer)]; }
  const std::vector<float>& queries(int layer) const { return queries_[std::size_t(layer)]; }

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    auto &keys = keys_[std::size_t(layer)], &values = values_[std::size_t(layer)];
    auto& queries = queries_[std::size_t(layer)];
    keys.insert(keys.end(), k, k + std::size_t(tokens) * kv_size_);
    if (holds_values_) values.insert(values.end(), v, v + std::size_t(tokens) * kv_size_);
    queries.insert(queries.end(), q, q + std::size_t(tokens) * q_size_);
    const std::size_t most = std::size_t(rows_) * q_size_;
    if (queries.size() > most) queries.erase(queries.begin(), queries.end() - std::ptrdiff_t(most));
    held_->prefill(layer, q, k, v, tokens, out);
  }
  void end_prefill() override { held_->end_prefill(); }
  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    held_->decode(layer, q, k, v, tokens, out);
  }
  std::int64_t next_position() const override { return held_->next_position(); }
  void observe(int layer, const input_rows& q, const input_rows& k, const input_rows& v) override {
    held_->observe(layer, q, k, v);
  }
  void step(int layer, const input_rows& q, const input_rows& k, const input_rows& v, float* out, float* lse) override {
    held_->step(layer, q, k, v, out, lse);
  }
  std::unique_ptr<method_cache> clone() const override { return held_->clone(); }
  void set_budget(index_t tokens) override { held_->set_budget(tokens); }
  index_t queries_needed(index_t tokens) const override { return held_->queries_needed(tokens); }
  offset_t bytes() const override { return held_->bytes(); }
  offset_t full_bytes(index_t tokens) const override { return held_->full_bytes(tokens); }
  read_count reads() const override { return held_->reads(); }
  std::vector<index_t> positions(int layer, index_t head) const override { return held_->positions(layer, head); }
  void trace_attended() override { held_->trace_attended(); }
  std::vector<std::vector<index_t>> attended(int layer) const override { return held_->attended(layer); }

 private:
  std::unique_ptr<method_cache> held_;
  std::size_t q_size_, kv_size_;
  index_t rows_;
  bool holds_values_;
  std::vector<std::vector<float>> keys_, values_, queries_;
};

}  // namespace tool
