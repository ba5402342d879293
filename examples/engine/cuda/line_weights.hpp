// Random weights whose attention lies along lines, for timing methods that look for them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <tessera/core/error.hpp>
#include <vector>

#include "weights.hpp"

namespace engine::cuda {

/// Random weights, but for what makes attention lie along lines in every layer and head, the same in all of them:
///
/// Three channels of the hidden state are planted. The embedding sets them and no layer writes to them: `everywhere` of
/// every token, `marked` of tokens whose id is a multiple of `every_column`, `ordinary` of the others. The rest of an
/// embedding is noise of size 1, and what layers add is scaled by 1 / sqrt(2 layers): a planted channel is about as large
/// in the last layer as in the first. From `everywhere` queries take a component in pairs of channels that RoPE
/// turns together, whose products with keys hang on the distance alone:
///   pairs 26 to 37   with the same component of an ordinary token's key: a logit of `near` at distance 0, half of that
///                    at 600 tokens, about 3 from 2,000 to 8,000: the slash lines near the diagonal
///   pairs 56 to 63   with that of a marked token's key: a logit of `far`, of which 131,072 tokens take 1 %: the
///                    vertical lines
/// What else queries and keys have is noise of size 1, which gives logits a spread of 1.
/// The lines that carry 0.955 of a long prompt of random tokens are 6 to 7 % of the causal pairs at 32K to 128K in
/// Llama-3.1-8B's shape (4 to 10 % by layer and head): 500 to 700 slashes and most of the marked columns.
/// Errors   a head dim other than 128.
class line_weights final : public weight_source {
 public:
  static constexpr int every_column = 16;

  line_weights(const llama_config& config, std::uint64_t seed) : config_(config), random_(seed) {
    tessera::require(config.head_dim == 128, "head_dim", config.head_dim, "128",
                     "choose the pairs of channels for another one by how fast they turn");
  }

  weight_matrix stacked(std::initializer_list<part> parts, std::int32_t inputs) override {
    const std::string& name = parts.begin()->name;
    const auto is = [&](const char* part) { return name.find(part) != std::string::npos; };
    if (is("embed_tokens")) {
      weight_matrix embedding = random_.matrix(parts, inputs, std::sqrt(3.0f));
      plant_tokens(embedding);
      return embedding;
    }
    const float usual = random_weights::spread(inputs);
    if (is("o_proj") || is("down_proj")) {
      weight_matrix added = random_.matrix(parts, inputs, usual / std::sqrt(2.0f * float(config_.num_hidden_layers)));
      const std::size_t planted_rows = std::size_t(planted_channels) * std::size_t(inputs) * sizeof(bf16);
      check(cudaMemset(added.values.data(), 0, planted_rows), "cudaMemset");
      return added;
    }
    weight_matrix matrix = random_.matrix(parts, inputs, usual);
    if (is("q_proj")) plant_heads(matrix);
    return matrix;
  }
  device_array<float> norm(const std::string& name, std::int32_t width) override { return random_.norm(name, width); }
  device_array<float> biases(std::initializer_list<part> parts) override { return random_.biases(parts); }

 private:
  enum channel : int { everywhere, ordinary, marked, planted_channels };
  struct pairs {
    int first, end;
  };
  static constexpr pairs band{26, 38}, steady{56, 64};
  static constexpr float planted = 8;  // two such channels of 4,096 add 3 % to the square of a hidden state
  static constexpr double near = 13, far = 9;

  void plant_tokens(weight_matrix& embedding) const {
    std::vector<float> all(std::size_t(embedding.outputs), planted), chosen(all.size()), others(all.size());
    for (std::size_t id = 0; id < all.size(); ++id) (id % every_column == 0 ? chosen : others)[id] = planted;
    put_column(embedding, 0, everywhere, all);
    put_column(embedding, 0, ordinary, others);
    put_column(embedding, 0, marked, chosen);
  }

  /// Stacked q, k and v: queries of every head look for both, keys are one or the other.
  void plant_heads(weight_matrix& qkv) const {
    const std::int32_t q = config_.q_size(), k = config_.kv_size();
    std::vector<float> both(std::size_t(q), 0.0f), no_query(both);
    add(both, band, near), add(both, steady, far);
    put_column(qkv, 0, everywhere, both);
    put_column(qkv, 0, ordinary, no_query);
    put_column(qkv, 0, marked, no_query);
    std::vector<float> none(std::size_t(k), 0.0f), close(none), column(none);
    add(close, band, near), add(column, steady, far);
    put_column(qkv, q, everywhere, none);
    put_column(qkv, q, ordinary, close);
    put_column(qkv, q, marked, column);
  }

  /// Weights of every head that make a planted channel a vector whose product with itself is the logit `size`.
  void add(std::vector<float>& weights, pairs which, double size) const {
    const double each = std::sqrt(size * std::sqrt(double(config_.head_dim)) / (which.end - which.first)) / planted;
    for (std::size_t head = 0; head < weights.size(); head += std::size_t(config_.head_dim)) {
      for (int pair = which.first; pair < which.end; ++pair) weights[head + std::size_t(pair)] = float(each);
    }
  }

  /// Sets what the rows from `first` on take from an input channel.
  static void put_column(weight_matrix& matrix, std::int32_t first, int from, const std::vector<float>& values) {
    const device_array<bf16> rounded = uploaded(std::vector<bf16>(values.begin(), values.end()));
    const std::size_t row = std::size_t(matrix.inputs) * sizeof(bf16);
    bf16* const to = matrix.values.data() + std::int64_t(first) * matrix.inputs + from;
    check(cudaMemcpy2D(to, row, rounded.data(), sizeof(bf16), sizeof(bf16), values.size(), cudaMemcpyDeviceToDevice),
          "cudaMemcpy2D");
  }

  llama_config config_;
  random_weights random_;
};

}  // namespace engine::cuda
