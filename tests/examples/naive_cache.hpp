// A cache that drops nothing and computes attention term by term in double: what the engine's tests compare with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "engine/config.hpp"
#include "engine/kv_cache.hpp"

namespace engine_tests {

class naive_cache : public engine::kv_cache {
 public:
  /// `first_position` above 0 plays a cache whose first tokens were dropped.
  explicit naive_cache(const engine::llama_config& config, std::int64_t first_position = 0)
      : config_(config), position_(first_position), keys_(layers()), values_(layers()) {}

  void prefill(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    append_and_attend(layer, q, k, v, tokens, out);
  }
  void decode(int layer, const float* q, const float* k, const float* v, int tokens, float* out) override {
    append_and_attend(layer, q, k, v, tokens, out);
  }
  void end_prefill() override { ++turns; }
  std::int64_t next_position() const override { return position_; }

  const std::vector<float>& keys(int layer) const { return keys_[std::size_t(layer)]; }
  const std::vector<float>& values(int layer) const { return values_[std::size_t(layer)]; }

  int turns = 0;  ///< calls of end_prefill
  int calls = 0;  ///< calls of prefill and decode

 private:
  std::size_t layers() const { return std::size_t(config_.num_hidden_layers); }

  void append_and_attend(int layer, const float* q, const float* k, const float* v, int tokens, float* out) {
    ++calls;
    auto& keys = keys_[std::size_t(layer)];
    auto& values = values_[std::size_t(layer)];
    const std::int64_t dim = config_.head_dim, row = config_.kv_size();
    const std::int64_t before = std::int64_t(keys.size()) / row;
    keys.insert(keys.end(), k, k + tokens * row);
    values.insert(values.end(), v, v + tokens * row);
    const int group = config_.num_attention_heads / config_.num_key_value_heads;
    for (int token = 0; token < tokens; ++token)
      for (int head = 0; head < config_.num_attention_heads; ++head) {
        const std::int64_t offset = (std::int64_t(token) * config_.num_attention_heads + head) * dim;
        attend(q + offset, keys.data() + head / group * dim, values.data() + head / group * dim, row,
               before + token + 1, out + offset);
      }
    if (layer + 1 == config_.num_hidden_layers) position_ += tokens;
  }

  void attend(const float* q, const float* k, const float* v, std::int64_t stride, std::int64_t seen,
              float* out) const {
    const int dim = config_.head_dim;
    std::vector<double> weights(static_cast<std::size_t>(seen));
    for (std::int64_t token = 0; token < seen; ++token) {
      double dot = 0;
      for (int i = 0; i < dim; ++i) dot += double(q[i]) * k[token * stride + i];
      weights[std::size_t(token)] = dot / std::sqrt(double(dim));
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (auto& weight : weights) total += weight = std::exp(weight - largest);
    std::vector<double> sums(std::size_t(dim), 0.0);
    for (std::int64_t token = 0; token < seen; ++token)
      for (int i = 0; i < dim; ++i) sums[std::size_t(i)] += weights[std::size_t(token)] * v[token * stride + i];
    for (int i = 0; i < dim; ++i) out[i] = float(sums[std::size_t(i)] / total);
  }

  engine::llama_config config_;
  std::int64_t position_;
  std::vector<std::vector<float>> keys_, values_;  // a layer each: [tokens, kv_heads, head_dim]
};

}  // namespace engine_tests
