// Where the weights of a model on the device come from: a checkpoint, or chance.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <vector>

#include "device.hpp"
#include "engine/checkpoint.hpp"
#include "ops.hpp"

namespace engine::cuda {

template <class T>
device_array<T> uploaded(const std::vector<T>& values) {
  device_array<T> array(values.size());
  check(cudaMemcpy(array.data(), values.data(), array.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  return array;
}

struct part {
  std::string name;
  std::int32_t outputs;
};

/// Where the weights of a new model come from.
class weight_source {
 public:
  virtual ~weight_source() = default;
  /// Stacks weights that share their input, so that one product computes them all.
  virtual weight_matrix stacked(std::initializer_list<part> parts, std::int32_t inputs) = 0;
  virtual device_array<float> norm(const std::string& name, std::int32_t width) = 0;
  /// Biases one behind the other.
  virtual device_array<float> biases(std::initializer_list<part> parts) = 0;
};

/// What else becomes of a layer's queries, keys and values, where the model has it (Qwen 2 and 3).
struct projection_weights {
  device_array<float> bias;            // [q_size + 2 * kv_size], or empty
  device_array<float> q_norm, k_norm;  // [head_dim], or empty

  projection_weights() = default;
  /// `attention`: the layer's prefix of names.
  projection_weights(weight_source& weights, const llama_config& config, const std::string& attention) {
    if (config.qkv_bias) {
      bias = weights.biases({{attention + "q_proj.bias", config.q_size()},
                             {attention + "k_proj.bias", config.kv_size()},
                             {attention + "v_proj.bias", config.kv_size()}});
    }
    if (config.qk_norm) {
      q_norm = weights.norm(attention + "q_norm.weight", config.head_dim);
      k_norm = weights.norm(attention + "k_norm.weight", config.head_dim);
    }
  }
  std::size_t bytes() const { return bias.bytes() + q_norm.bytes() + k_norm.bytes(); }
  bool any() const { return bytes() > 0; }
};

class checkpoint_weights final : public weight_source {
 public:
  explicit checkpoint_weights(const std::filesystem::path& directory) : weights_(checkpoint::open(directory)) {}

  weight_matrix stacked(std::initializer_list<part> parts, std::int32_t inputs) override {
    std::vector<bf16> all;
    std::int32_t outputs = 0;
    for (const part& part : parts) {
      for (const float value : weights_.weight(part.name, {part.outputs, inputs})) all.push_back(bf16(value));
      outputs += part.outputs;
    }
    return {outputs, inputs, uploaded(all)};
  }
  device_array<float> norm(const std::string& name, std::int32_t width) override {
    return uploaded(weights_.weight(name, {width}));
  }
  device_array<float> biases(std::initializer_list<part> parts) override {
    std::vector<float> all;
    for (const part& part : parts) {
      const std::vector<float> own = weights_.weight(part.name, {part.outputs});
      all.insert(all.end(), own.begin(), own.end());
    }
    return uploaded(all);
  }

 private:
  checkpoint weights_;
};

class random_weights final : public weight_source {
 public:
  explicit random_weights(std::uint64_t seed) : seed_(seed) {}

  /// With this spread a product of inputs of size 1 keeps about that size.
  static float spread(std::int32_t inputs) { return std::sqrt(3.0f / float(inputs)); }

  weight_matrix stacked(std::initializer_list<part> parts, std::int32_t inputs) override {
    return matrix(parts, inputs, spread(inputs));
  }
  /// Of values from [-spread, spread).
  weight_matrix matrix(std::initializer_list<part> parts, std::int32_t inputs, float spread) {
    std::int32_t outputs = 0;
    for (const part& part : parts) outputs += part.outputs;
    weight_matrix matrix{outputs, inputs, device_array<bf16>(std::size_t(outputs) * std::size_t(inputs))};
    fill_random(matrix.values.data(), element::bf16, std::int64_t(matrix.values.size()), spread, seed_++, nullptr);
    return matrix;
  }
  device_array<float> norm(const std::string&, std::int32_t width) override {
    return uploaded(std::vector<float>(std::size_t(width), 1.0f));
  }
  device_array<float> biases(std::initializer_list<part> parts) override {
    std::int32_t outputs = 0;
    for (const part& part : parts) outputs += part.outputs;
    return uploaded(std::vector<float>(std::size_t(outputs), 0.0f));
  }

 private:
  std::uint64_t seed_;
};

}  // namespace engine::cuda
