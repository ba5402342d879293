#include "gate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <tessera/core/error.hpp>

#include "engine/files/gguf.hpp"
#include "engine/files/input_file.hpp"
#include "engine/files/safetensors.hpp"

namespace engine {
namespace {

// One head's numbers: out = norm(x + bias).
void norm(const float* x, const float* bias, const std::vector<float>& weight, std::array<float, gate_width>& out) {
  float squares = 0;
  for (std::size_t d = 0; d < gate_width; ++d) {
    out[d] = x[d] + (bias ? bias[d] : 0.0f);
    squares += out[d] * out[d];
  }
  const float scale = 1.0f / std::sqrt(squares / float(gate_width) + gate_eps);
  for (std::size_t d = 0; d < gate_width; ++d) out[d] *= scale * weight[d];
}

float product(const float* a, const float* b) {
  float sum = 0;
  for (std::int32_t d = 0; d < gate_width; ++d) sum += a[d] * b[d];
  return sum / std::sqrt(float(gate_width));
}

}  // namespace

std::optional<std::vector<gate_layer>> load_gate(const std::filesystem::path& model, const llama_config& config) {
  const std::filesystem::path path = model / "gate" / "gate.safetensors";
  if (is_gguf(model) || !there(path)) return std::nullopt;
  const safetensors_file file = safetensors_file::open(path);
  const std::int64_t hidden = config.hidden_size, heads = config.num_attention_heads,
                     kv_heads = config.num_key_value_heads;
  const auto read = [&](const std::string& name, std::initializer_list<std::int64_t> shape) {
    std::vector<float> values = file.to_fp32(name, {shape.begin(), shape.size()});
    require_finite(name, values);
    return values;
  };
  std::vector<gate_layer> layers;
  for (std::int32_t index = 0; index < config.num_hidden_layers; ++index) {
    const std::string prefix = "layers." + std::to_string(index) + ".";
    gate_layer& layer = layers.emplace_back();
    layer.projections = {std::int32_t((heads + kv_heads) * gate_width), config.hidden_size,
                         read(prefix + "q_proj.weight", {heads * gate_width, hidden})};
    const std::vector<float> keys = read(prefix + "k_proj.weight", {kv_heads * gate_width, hidden});
    layer.projections.values.insert(layer.projections.values.end(), keys.begin(), keys.end());
    layer.q_bias = read(prefix + "q_proj.bias", {heads * gate_width});
    layer.q_norm = read(prefix + "q_norm.weight", {gate_width});
    layer.k_norm = read(prefix + "k_norm.weight", {gate_width});
    layer.k_base = read(prefix + "k_base", {kv_heads, 1, gate_sinks, gate_width});
    layer.b = read(prefix + "b", {kv_heads, heads / kv_heads});
  }
  const std::string next = "layers." + std::to_string(config.num_hidden_layers) + ".b";
  tessera::require(!file.contains(next), "layers of " + printable(path.native()), "more than the model's",
                   std::to_string(config.num_hidden_layers), "use the gate of this model");
  return layers;
}

void gate_scores(tessera::cpu::executor& executor, const llama_config& config, const gate_layer& gate,
                 const float* normed, std::int32_t tokens, float* projected, float* scores) {
  linear(executor, normed, tokens, gate.projections, projected);
  const std::int32_t heads = config.num_attention_heads, kv_heads = config.num_key_value_heads,
                     group = heads / kv_heads;
  const std::int64_t width = gate.projections.outputs;
  executor.for_each(
      tokens,
      [&](tessera::index_t t, int) {
        const float* row = projected + t * width;
        std::array<float, gate_width> q, k;
        for (std::int32_t h = 0; h < kv_heads; ++h) {
          norm(row + (heads + h) * gate_width, nullptr, gate.k_norm, k);
          float sum = 0;
          for (std::int32_t g = h * group; g < (h + 1) * group; ++g) {
            norm(row + g * gate_width, gate.q_bias.data() + g * gate_width, gate.q_norm, q);
            const float logit = product(q.data(), k.data()) + gate.b[std::size_t(g)];
            float others = 0;
            for (std::int32_t s = 0; s < gate_sinks; ++s)
              others += std::exp(product(q.data(), gate.k_base.data() + (h * gate_sinks + s) * gate_width) - logit);
            sum += 1.0f / (1.0f + others);
          }
          scores[std::int64_t(h) * tokens + t] = sum / float(group);
        }
      },
      20.0 * double(width));
}

void require_gate(bool takes_scores, bool has_gate) {
  tessera::require(!takes_scores || has_gate, "the model", "without a gate",
                   "a folder of safetensors with gate/gate.safetensors, as the method takes its scores from a gate",
                   "train one (examples/model/training/train_gate.py), or choose another method");
}

}  // namespace engine
