#include <algorithm>

#include "engine/cuda/weights.hpp"
#include "gate_kernel.hpp"

namespace engine::cuda {
namespace {

// x + bias, normed.
__device__ void norm(const float* x, const float* bias, const float* weight, float (&out)[gate_width]) {
  float squares = 0;
  for (int d = 0; d < gate_width; ++d) {
    out[d] = x[d] + (bias ? bias[d] : 0.0f);
    squares += out[d] * out[d];
  }
  const float scale = rsqrtf(squares / gate_width + gate_eps);
  for (int d = 0; d < gate_width; ++d) out[d] *= scale * weight[d];
}

__device__ float product(const float (&a)[gate_width], const float* b) {
  float sum = 0;
  for (int d = 0; d < gate_width; ++d) sum += a[d] * b[d];
  return sum * rsqrtf(float(gate_width));
}

// A thread for each row and kv_head.
__global__ void gate_scores_entry(const float* projected, int rows, int each, int kv_heads, int group,
                                  const float* q_bias, const float* q_norm, const float* k_norm, const float* k_base,
                                  const float* b, float* scores) {
  const std::int64_t item = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (item >= std::int64_t(rows) * kv_heads) return;
  const int row = int(item / kv_heads), head = int(item % kv_heads), heads = kv_heads * group;
  const float* own = projected + std::int64_t(row) * (heads + kv_heads) * gate_width;
  float q[gate_width], k[gate_width];
  norm(own + (heads + head) * gate_width, nullptr, k_norm, k);
  float sum = 0;
  for (int g = head * group; g < (head + 1) * group; ++g) {
    norm(own + g * gate_width, q_bias + g * gate_width, q_norm, q);
    const float logit = product(q, k) + b[g];
    float others = 0;
    for (int s = 0; s < gate_sinks; ++s)
      others += expf(product(q, k_base + (head * gate_sinks + s) * gate_width) - logit);
    sum += 1.0f / (1.0f + others);
  }
  scores[(std::int64_t(row / each) * kv_heads + head) * each + row % each] = sum / float(group);
}

}  // namespace

device_gate::device_gate(const gate_layer& gate)
    : q_bias(uploaded(gate.q_bias)),
      q_norm(uploaded(gate.q_norm)),
      k_norm(uploaded(gate.k_norm)),
      k_base(uploaded(gate.k_base)),
      b(uploaded(gate.b)) {
  std::vector<bf16> rounded;
  rounded.reserve(gate.projections.values.size());
  for (const float value : gate.projections.values) rounded.push_back(bf16(value));
  projections = {gate.projections.outputs, gate.projections.inputs, uploaded(rounded)};
}

void gate_scores(const llama_config& config, const device_gate& gate, const float* projected, std::int32_t rows,
                 std::int32_t each, float* scores, cudaStream_t stream) {
  const std::int32_t kv_heads = config.num_key_value_heads;
  const std::int64_t items = std::int64_t(rows) * kv_heads;
  constexpr unsigned threads = 128;
  gate_scores_entry<<<unsigned((items + threads - 1) / threads), threads, 0, stream>>>(
      projected, rows, each, kv_heads, config.num_attention_heads / kv_heads, gate.q_bias.data(), gate.q_norm.data(),
      gate.k_norm.data(), gate.k_base.data(), gate.b.data(), scores);
  check(cudaGetLastError(), "launch of gate_scores");
}

}  // namespace engine::cuda
