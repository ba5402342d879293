#include "compress.hpp"

#include <limits>

#include "registry.hpp"
#include "values.hpp"

namespace tool {
namespace {

using engine::any_size;
using engine::safetensors_file;

/// A tensor of three axes as fp32.
struct tensor {
  std::vector<float> values;
  index_t shape[3] = {};

  input_rows tokens_first() const { return tessera::nhd_rows(values.data(), shape[0], shape[1], shape[2]); }
  input_rows heads_first() const { return tessera::hnd_rows(values.data(), shape[1], shape[0], shape[2]); }
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "[" : ", ") + std::to_string(size);
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
      allowed = axes + ", here " + shape_text(sizes) + " (-1: any)";
      break;
    }
  }
  tessera::require(fits, "shape of tensor " + name, shape_text(shape), allowed, "dump it in that shape");
  tensor result{in.to_fp32(name, sizes), {}};
  engine::require_finite(name, result.values);
  for (std::size_t i = 0; i < 3; ++i) result.shape[i] = index_t(shape[i]);
  return result;
}

/// Everything in the input file, checked.
struct layer_tensors {
  element_type element;
  tensor k, v;
  std::optional<tensor> q, q_decode, k_decode, v_decode;
  index_t kv_heads = 0, tokens = 0, head_dim = 0, q_heads = 0;
};

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

void check_boundaries(const safetensors_file& in, index_t tokens) {
  if (!in.contains("boundaries")) return;
  const std::int64_t shape[] = {tokens};
  const engine::dtype type = in.at("boundaries").type;
  tessera::require(type == engine::dtype::u8, "type of tensor boundaries", engine::dtype_name(type), "U8",
                   "dump one byte a token");
  const std::vector<std::int64_t> flags = in.to_int64("boundaries", shape);
  for (std::size_t i = 0; i < flags.size(); ++i) {
    tessera::require(flags[i] <= 1, "boundaries[" + std::to_string(i) + "]", flags[i], "0 or 1",
                     "write 1 where a segment ends");
  }
}

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
  check_boundaries(in, layer.tokens);

  if (in.contains("q")) layer.q = read(in, "q", {any_size, any_size, dim}, "[n_q, q_heads, head_dim]");
  const bool decodes = in.contains("q_decode") || in.contains("k_decode") || in.contains("v_decode");
  if (decodes) {
    const std::int64_t q_heads = layer.q ? layer.q->shape[1] : any_size;
    layer.q_decode = read(in, "q_decode", {any_size, q_heads, dim}, "[steps, q_heads, head_dim]");
    const std::int64_t steps = layer.q_decode->shape[0];
    layer.k_decode = read(in, "k_decode", {steps, heads, dim}, "[steps, kv_heads, head_dim]");
    layer.v_decode = read(in, "v_decode", {steps, heads, dim}, "[steps, kv_heads, head_dim]");
  }
  layer.q_heads = layer.q ? layer.q->shape[1] : layer.q_decode ? layer.q_decode->shape[1] : layer.kv_heads;
  tessera::require(layer.q_heads % layer.kv_heads == 0, "q_heads of tensor q", layer.q_heads,
                   "a multiple of kv_heads, which are " + std::to_string(layer.kv_heads),
                   "check that q is [n_q, q_heads, head_dim] and k [kv_heads, tokens, head_dim]");
  return layer;
}

// Gives the prompt to the cache and ends it.
void prefill(const layer_tensors& layer, const std::string& method, method_cache& cache) {
  const index_t needed = cache.queries_needed(layer.tokens);
  const index_t given = layer.q ? layer.q->shape[0] : 0;
  tessera::require(
      given >= needed && given <= layer.tokens, "n_q, the rows of tensor q", layer.q ? given : 0,
      std::to_string(needed) + " to " + std::to_string(layer.tokens) + " for " + method,
      needed == layer.tokens ? "dump the queries of every prompt token" : "dump the queries of the last prompt tokens");
  input_rows q = layer.q ? layer.q->tokens_first() : input_rows{};
  q.heads = layer.q_heads;
  cache.observe(0, q, layer.k.heads_first(), layer.v.heads_first());
  cache.end_prefill();
}

// What lies in the file beside what this method reads.
std::vector<std::string> unused_tensors(const safetensors_file& in, const method_cache& cache,
                                        const layer_tensors& layer) {
  std::vector<std::string> all;
  for (const auto& [name, tensor] : in.tensors()) {
    const bool known = name == "k" || name == "v" || name == "q_decode" || name == "k_decode" || name == "v_decode" ||
                       (name == "q" && cache.queries_needed(layer.tokens) > 0);
    if (!known) all.push_back(name);
  }
  return all;
}

struct index_lists {
  std::vector<std::int64_t> indptr{0};
  std::vector<index_t> indices;
  void add(const std::vector<index_t>& row) {
    indices.insert(indices.end(), row.begin(), row.end());
    indptr.push_back(std::int64_t(indices.size()));
  }
  void write(engine::safetensors_writer& file, const std::string& name) const {
    file.add(name + ".indptr", {std::int64_t(indptr.size())}, std::span<const std::int64_t>(indptr));
    file.add(name + ".indices", {std::int64_t(indices.size())}, std::span<const std::int32_t>(indices));
  }
};

// Runs the decode steps one by one and writes down what they read and what came out.
void decode(const layer_tensors& layer, method_cache& cache, engine::safetensors_writer& file) {
  const index_t steps = layer.q_decode ? layer.q_decode->shape[0] : 0;
  const std::size_t row = std::size_t(layer.q_heads) * std::size_t(layer.head_dim);
  std::vector<float> out(std::size_t(steps) * row), lse(std::size_t(steps) * std::size_t(layer.q_heads));
  index_lists attended;
  const auto one = [](const tensor& all, index_t step) {
    input_rows rows = all.tokens_first();
    rows.data = rows.row(0, step, 0);
    rows.tokens = 1;
    return rows;
  };
  cache.trace_attended();
  for (index_t step = 0; step < steps; ++step) {
    cache.step(0, one(*layer.q_decode, step), one(*layer.k_decode, step), one(*layer.v_decode, step),
               out.data() + std::size_t(step) * row, lse.data() + std::size_t(step) * std::size_t(layer.q_heads));
    for (const auto& positions : cache.attended(0)) attended.add(positions);
  }
  attended.write(file, "attend");
  file.add("out", {steps, layer.q_heads, layer.head_dim}, std::span<const float>(out));
  file.add("lse", {steps, layer.q_heads}, std::span<const float>(lse));
}

}  // namespace

compressed compress(const safetensors_file& in, const compress_options& options) {
  const method_info& method = find_method(options.method);
  const auto parameters = method.configured(options.settings);
  const layer_tensors layer = read_layer(in);
  const index_t steps = layer.q_decode ? layer.q_decode->shape[0] : 0;
  const auto cache = make_cache(method, options.where,
                                {{1, layer.q_heads, layer.kv_heads},
                                 layer.head_dim,
                                 layer.element,
                                 options.budget,
                                 options.settings,
                                 options.workers,
                                 layer.tokens + steps});
  compressed result;
  prefill(layer, method.name, *cache);
  index_lists kept;
  for (index_t head = 0; head < layer.kv_heads; ++head) kept.add(cache->positions(0, head));
  kept.write(result.file, "keep");
  result.unused = unused_tensors(in, *cache, layer);
  result.kv_heads = layer.kv_heads;
  result.tokens = layer.tokens;
  result.kept = kept.indptr.back();
  result.bytes_full = cache->full_bytes(layer.tokens);
  result.bytes_held = cache->bytes();
  decode(layer, *cache, result.file);
  result.reads = cache->reads();

  result.file.set_metadata("method", method.name);
  if (method.has_budget && options.budget) result.file.set_metadata("budget", std::to_string(*options.budget));
  for (const parameter_info& parameter : parameters) result.file.set_metadata(parameter.name, parameter.value);
  result.file.set_metadata("bytes_full", std::to_string(result.bytes_full));
  result.file.set_metadata("bytes_held", std::to_string(result.bytes_held));
  result.file.set_metadata("bytes_read_per_step",
                           std::to_string(result.reads.steps ? result.reads.bytes / result.reads.steps : 0));
  return result;
}

}  // namespace tool
