#include "tensors.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tessera/core/error.hpp>
#include <tessera/core/parameters.hpp>

namespace tool {

using engine::any_size;
using engine::safetensors_file;

namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) {
    text += (text.empty() ? "[" : ", ") + (size == any_size ? "any" : std::to_string(size));
  }
  return text.empty() ? "[]" : text + "]";
}

// Reads a tensor whose axes are given by name; a size of any_size leaves an axis open.
tensor read(const safetensors_file& in, const std::string& name, const std::vector<std::int64_t>& sizes,
            const std::string& axes) {
  tessera::require(in.contains(name), "tensor " + name, "missing", axes, "add it to the file");
  const std::vector<std::int64_t>& shape = in.at(name).shape;
  bool fits = shape.size() == sizes.size();
  for (std::size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = shape[i] >= 1 && shape[i] <= std::numeric_limits<index_t>::max() &&
           (sizes[i] == any_size || shape[i] == sizes[i]);
  }
  std::string allowed = axes;
  for (const std::int64_t size : sizes) {
    if (size != any_size) {
      allowed = axes + ", here " + shape_text(sizes);
      break;
    }
  }
  tessera::require(fits, "shape of tensor " + name, shape_text(shape), allowed, "dump it in that shape");
  tensor result{in.to_fp32(name, sizes), {}};
  engine::require_finite(name, result.values);
  for (std::size_t i = 0; i < 3; ++i) result.shape[i] = index_t(shape[i]);
  return result;
}

element_type element_of(const engine::tensor_view& tensor) {
  switch (tensor.type) {
    case engine::dtype::f32:
      return element_type::fp32;
    case engine::dtype::f16:
      return element_type::fp16;
    case engine::dtype::bf16:
      return element_type::bf16;
    default:
      break;
  }
  tessera::fail("type of tensor k", engine::dtype_name(tensor.type), "F32, F16 or BF16", "dump it in one of these");
}

// One flag for each of `tokens` tokens; none where the file has none.
std::vector<std::uint8_t> read_boundaries(const safetensors_file& in, const std::string& name, index_t tokens) {
  if (!in.contains(name)) return {};
  const std::int64_t shape[] = {tokens};
  const engine::dtype type = in.at(name).type;
  tessera::require(type == engine::dtype::u8, "type of tensor " + name, engine::dtype_name(type), "U8",
                   "dump one byte a token");
  const std::vector<std::int64_t> flags = in.to_int64(name, shape);
  for (std::size_t i = 0; i < flags.size(); ++i) {
    tessera::require(flags[i] <= 1, name + "[" + std::to_string(i) + "]", flags[i], "0 or 1",
                     "write 1 where a segment ends");
  }
  return {flags.begin(), flags.end()};
}

}  // namespace

layer_tensors read_layer(const safetensors_file& in) {
  layer_tensors layer;
  layer.k = read(in, "k", {any_size, any_size, any_size}, "[kv_heads, tokens, head_dim]");
  layer.element = element_of(in.at("k"));
  layer.kv_heads = layer.k.shape[0];
  layer.tokens = layer.k.shape[1];
  layer.head_dim = layer.k.shape[2];
  const std::int64_t heads = layer.kv_heads, dim = layer.head_dim;
  layer.v = read(in, "v", {heads, layer.tokens, dim}, "[kv_heads, tokens, head_dim] as k");
  tessera::require(in.at("v").type == in.at("k").type, "type of tensor v", engine::dtype_name(in.at("v").type),
                   "that of k, which is " + std::string(engine::dtype_name(in.at("k").type)),
                   "dump keys and values in one type");
  layer.boundaries = read_boundaries(in, "boundaries", layer.tokens);
  if (in.contains("scores")) {
    const std::int64_t shape[] = {heads, layer.tokens};
    layer.scores = in.to_fp32("scores", shape);
    engine::require_finite("scores", layer.scores);
  }

  if (in.contains("q")) layer.q = read(in, "q", {any_size, any_size, dim}, "[n_q, q_heads, head_dim]");
  const bool decodes = in.contains("q_decode") || in.contains("k_decode") || in.contains("v_decode");
  if (decodes) {
    const std::int64_t q_heads = layer.q ? layer.q->shape[1] : any_size;
    layer.q_decode = read(in, "q_decode", {any_size, q_heads, dim}, "[steps, q_heads, head_dim]");
    const std::int64_t steps = layer.q_decode->shape[0];
    layer.k_decode = read(in, "k_decode", {steps, heads, dim}, "[steps, kv_heads, head_dim]");
    layer.v_decode = read(in, "v_decode", {steps, heads, dim}, "[steps, kv_heads, head_dim]");
    layer.step_boundaries = read_boundaries(in, "boundaries_decode", layer.q_decode->shape[0]);
  }
  layer.q_heads = layer.q ? layer.q->shape[1] : layer.q_decode ? layer.q_decode->shape[1] : layer.kv_heads;
  tessera::require(layer.q_heads % layer.kv_heads == 0, "q_heads of tensor q", layer.q_heads,
                   "a multiple of kv_heads, which are " + std::to_string(layer.kv_heads),
                   "check that q is [n_q, q_heads, head_dim] and k [kv_heads, tokens, head_dim]");
  if (in.contains("output_projection")) {
    layer.projection = read(in, "output_projection", {layer.q_heads, dim, any_size}, "[q_heads, head_dim, hidden]");
  }
  return layer;
}

const char* turns_name(const safetensors_file& in) { return in.contains("turns") ? "turns" : "turn"; }

std::vector<std::pair<index_t, index_t>> read_turns(const safetensors_file& in, index_t tokens) {
  std::vector<std::int64_t> first{0};
  const std::string name = turns_name(in);
  if (in.contains(name)) {
    const std::int64_t shape[] = {any_size};
    const engine::dtype type = in.at(name).type;
    tessera::require(type == engine::dtype::i64, "type of tensor " + name, engine::dtype_name(type), "I64",
                     "dump the first row of each turn");
    for (const std::int64_t row : in.to_int64(name, shape)) {
      if (row == 0 && first.size() == 1) continue;  // where the first turn begins anyway
      tessera::require(row > first.back() && row < tokens, "a row of tensor " + name, row,
                       tessera::value_range<std::int64_t>{first.back() + 1, tokens - 1}.text() + " behind " +
                           std::to_string(first.back()),
                       "dump the first row of each turn, ascending");
      first.push_back(row);
    }
  }
  first.push_back(tokens);
  std::vector<std::pair<index_t, index_t>> turns;
  for (std::size_t i = 1; i < first.size(); ++i) turns.emplace_back(index_t(first[i - 1]), index_t(first[i]));
  return turns;
}

void require_products(const layer_tensors& layer) {
  const auto largest = [](const tensor& of) {
    float most = 0;
    for (const float value : of.values) most = std::max(most, std::abs(value));
    return double(most);
  };
  constexpr double most = std::numeric_limits<float>::max();
  if (largest(*layer.q) * largest(layer.k) * layer.head_dim < most) return;
  const input_rows q = layer.q->tokens_first(), k = layer.k.heads_first();
  for (index_t row = 0; row < q.tokens; ++row) {
    for (index_t head = 0; head < layer.q_heads; ++head) {
      for (index_t token = 0; token < layer.tokens; ++token) {
        const float *a = q.row(0, row, head), *b = k.row(0, token, head / (layer.q_heads / layer.kv_heads));
        double sum = 0, absolute = 0;
        for (index_t d = 0; d < layer.head_dim; ++d) {
          sum += double(a[d]) * double(b[d]);
          absolute += std::abs(double(a[d]) * double(b[d]));
        }
        if (absolute < most) continue;
        tessera::fail("layer 0, query head " + std::to_string(head) + ", prompt query " + std::to_string(row) +
                          ": the product with the key of token " + std::to_string(token),
                      sum, "terms whose sum float holds, below 3.4e38", "scale queries and keys");
      }
    }
  }
}

}  // namespace tool
