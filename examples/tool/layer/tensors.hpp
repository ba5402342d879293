// One layer's tensors, dumped from any engine into a safetensors file: read and checked.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/files/safetensors.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

/// A tensor of three axes as fp32.
struct tensor {
  std::vector<float> values;
  index_t shape[3] = {};

  input_rows tokens_first() const { return tessera::nhd_rows(values.data(), shape[0], shape[1], shape[2]); }
  input_rows heads_first() const { return tessera::hnd_rows(values.data(), shape[1], shape[0], shape[2]); }
};

/// Everything in the input file, checked.
struct layer_tensors {
  element_type element;
  tensor k, v;
  std::optional<tensor> q, q_decode, k_decode, v_decode, projection;
  std::vector<std::uint8_t> boundaries, step_boundaries;
  std::vector<float> scores;  // [kv_heads, tokens], or none
  index_t kv_heads = 0, tokens = 0, head_dim = 0, q_heads = 0;
};

/// Errors: a tensor that is missing, of another shape or type, or not finite.
layer_tensors read_layer(const engine::safetensors_file& in);

/// What the tensor with the turns is called: `turns`, or `turn` where there is no `turns`.
const char* turns_name(const engine::safetensors_file& in);

/// The turns of the prompt, each from its first row to the next one's. Errors: rows that do not ascend or that k has not.
std::vector<std::pair<index_t, index_t>> read_turns(const engine::safetensors_file& in, index_t tokens);

/// Errors: a product of a query and a key that float does not hold, which would rank the token as none.
void require_products(const layer_tensors& layer);

}  // namespace tool
