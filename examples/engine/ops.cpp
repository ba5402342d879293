#include "ops.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <numbers>
#include <tessera/core/types.hpp>

namespace engine {
namespace {

using row_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using const_rows = Eigen::Map<const row_matrix>;
using strided_rows = Eigen::Map<row_matrix, 0, Eigen::OuterStride<>>;
using row_array = Eigen::Map<Eigen::ArrayXf>;
using const_row_array = Eigen::Map<const Eigen::ArrayXf>;

// Up to this many rows a product is bound by reading the weights; from there on by arithmetic.
constexpr std::int32_t few_rows = 8;
// Tiles are fixed rather than derived from the thread count, so that the thread count cannot change a bit.
constexpr std::int32_t tile_rows = 128;
constexpr std::int32_t tile_outputs = 512;
constexpr std::int32_t panel_floats = 1 << 15;  // 128 KiB: a panel of weights stays in L2 while each row uses it
// Waking a helper takes about 25 us (2-core EPYC VM): as long as this many multiply-adds on one thread.
constexpr std::int64_t worth_splitting = 1 << 20;

// Calls body(first, last) over runs of rows, in parallel.
template <class Body>
void for_row_runs(tessera::cpu::executor& executor, std::int32_t rows, const Body& body) {
  constexpr std::int32_t run = 32;
  executor.for_each(tessera::ceil_div(rows, run),
                    [&](tessera::index_t item, int) { body(item * run, std::min(rows, (item + 1) * run)); });
}

// One to eight rows: a matrix-vector product a row, over panels of outputs.
void linear_few(tessera::cpu::executor& executor, const float* x, std::int32_t rows, const matrix& weight, float* y) {
  const bool split = std::int64_t(rows) * weight.outputs * weight.inputs >= worth_splitting;
  const std::int32_t panel = split ? std::max(panel_floats / weight.inputs, 16) : weight.outputs;
  executor.for_each(tessera::ceil_div(weight.outputs, panel), [&](tessera::index_t item, int) {
    const std::int32_t first = item * panel, count = std::min(panel, weight.outputs - first);
    const const_rows w(weight.values.data() + std::int64_t(first) * weight.inputs, count, weight.inputs);
    for (std::int32_t row = 0; row < rows; ++row) {
      float* out = y + std::int64_t(row) * weight.outputs + first;
      Eigen::Map<Eigen::VectorXf>(out, count).noalias() =
          w * Eigen::Map<const Eigen::VectorXf>(x + std::int64_t(row) * weight.inputs, weight.inputs);
    }
  });
}

void linear_many(tessera::cpu::executor& executor, const float* x, std::int32_t rows, const matrix& weight, float* y) {
  const std::int32_t row_tiles = tessera::ceil_div(rows, tile_rows);
  const std::int32_t output_tiles = tessera::ceil_div(weight.outputs, tile_outputs);
  executor.for_each(row_tiles * output_tiles, [&](tessera::index_t item, int) {
    const std::int32_t first_row = item % row_tiles * tile_rows, row_count = std::min(tile_rows, rows - first_row);
    const std::int32_t first = item / row_tiles * tile_outputs, count = std::min(tile_outputs, weight.outputs - first);
    const const_rows in(x + std::int64_t(first_row) * weight.inputs, row_count, weight.inputs);
    const const_rows w(weight.values.data() + std::int64_t(first) * weight.inputs, count, weight.inputs);
    float* out = y + std::int64_t(first_row) * weight.outputs + first;
    strided_rows(out, row_count, count, Eigen::OuterStride<>(weight.outputs)).noalias() = in * w.transpose();
  });
}

// Llama 3 (transformers' rope_type "llama3"): waves longer than the original context are slowed by `factor`, short
// ones stay, those between are blended by how many turns they make within the original context.
double stretched(double frequency, const llama3_rope& scaling) {
  const double turns = scaling.original_context * frequency / (2 * std::numbers::pi);
  const double kept =
      std::clamp((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0);
  return frequency * (kept + (1 - kept) / scaling.factor);
}

// x / (1 + exp(-x)) of up to 16 values, in a block of fixed size. On a plain row Eigen would run its scalar exp up to
// the first aligned element and its vector exp from there, and a result would depend on where the row lies in memory.
constexpr std::int32_t silu_lanes = 16;
void silu(const float* in, std::int32_t count, float* out) {
  Eigen::Array<float, silu_lanes, 1> x = Eigen::Array<float, silu_lanes, 1>::Zero();
  std::copy_n(in, count, x.data());
  x = x / (1.0f + (-x).exp());
  std::copy_n(x.data(), count, out);
}

// Rotates one head.
void rotate(const float* in, const float* cosines, const float* sines, std::int32_t half, float* out) {
  for (std::int32_t i = 0; i < half; ++i) {
    const float low = in[i], high = in[i + half];
    out[i] = low * cosines[i] - high * sines[i];
    out[i + half] = high * cosines[i] + low * sines[i];
  }
}

}  // namespace

void linear(tessera::cpu::executor& executor, const float* x, std::int32_t rows, const matrix& weight, float* y) {
  (rows <= few_rows ? linear_few : linear_many)(executor, x, rows, weight, y);
}

void rms_norm(tessera::cpu::executor& executor, const float* x, std::int32_t rows, std::span<const float> weight,
              float eps, float* y) {
  const auto width = std::int64_t(weight.size());
  for_row_runs(executor, rows, [&](std::int32_t first, std::int32_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      const const_row_array in(x + row * width, width);
      const float scale = 1.0f / std::sqrt(in.square().mean() + eps);
      row_array(y + row * width, width) = in * scale * const_row_array(weight.data(), width);
    }
  });
}

void add(tessera::cpu::executor& executor, const float* y, std::int32_t rows, std::int32_t width, float* x) {
  for_row_runs(executor, rows, [&](std::int32_t first, std::int32_t last) {
    const std::int64_t offset = std::int64_t(first) * width, count = std::int64_t(last - first) * width;
    row_array(x + offset, count) += const_row_array(y + offset, count);
  });
}

void add_bias(tessera::cpu::executor& executor, std::span<const float> bias, std::int32_t rows, float* x) {
  for_row_runs(executor, rows, [&](std::int32_t first, std::int32_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      float* const values = x + row * std::int64_t(bias.size());
      for (std::size_t i = 0; i < bias.size(); ++i) values[i] += bias[i];
    }
  });
}

void norm_heads(tessera::cpu::executor& executor, const llama_config& config, std::span<const float> q_norm,
                std::span<const float> k_norm, std::int32_t tokens, float* qkv) {
  const std::int64_t dim = config.head_dim, row_size = config.q_size() + 2 * std::int64_t(config.kv_size());
  for_row_runs(executor, tokens, [&](std::int32_t first, std::int32_t last) {
    for (std::int64_t token = first; token < last; ++token) {
      for (std::int64_t head = 0; head < config.num_attention_heads + config.num_key_value_heads; ++head) {
        float* const values = qkv + token * row_size + head * dim;
        double squares = 0;
        for (std::int64_t i = 0; i < dim; ++i) squares += double(values[i]) * double(values[i]);
        const float scale = float(1 / std::sqrt(squares / double(dim) + double(config.rms_norm_eps)));
        const std::span<const float> weight = head < config.num_attention_heads ? q_norm : k_norm;
        for (std::int64_t i = 0; i < dim; ++i) values[i] *= scale * weight[std::size_t(i)];
      }
    }
  });
}

void swiglu(tessera::cpu::executor& executor, const float* gate_up, std::int32_t rows, std::int32_t width, float* y) {
  for_row_runs(executor, rows, [&](std::int32_t first, std::int32_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      const float *gate = gate_up + row * 2 * width, *up = gate + width;
      float* out = y + row * width;
      for (std::int32_t i = 0; i < width; i += silu_lanes) {
        const std::int32_t count = std::min(silu_lanes, width - i);
        silu(gate + i, count, out + i);
        for (std::int32_t j = i; j < i + count; ++j) out[j] *= up[j];
      }
    }
  });
}

std::vector<float> rope_frequencies(const llama_config& config) {
  std::vector<float> frequencies(std::size_t(config.head_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double frequency = std::pow(config.rope_theta, -2.0 * double(i) / config.head_dim);
    frequencies[i] = float(config.rope_scaling ? stretched(frequency, *config.rope_scaling) : frequency);
    if (!config.rope_factors.empty()) frequencies[i] = float(frequency / double(config.rope_factors[i]));
  }
  return frequencies;
}

rope_table make_rope_table(std::span<const float> frequencies, std::int64_t first, std::int32_t tokens) {
  rope_table table;
  table.cosines.reserve(frequencies.size() * std::size_t(tokens));
  table.sines.reserve(frequencies.size() * std::size_t(tokens));
  for (std::int64_t position = first; position < first + tokens; ++position)
    for (const float frequency : frequencies) {
      const float angle = float(position) * frequency;
      table.cosines.push_back(float(std::cos(double(angle))));
      table.sines.push_back(float(std::sin(double(angle))));
    }
  return table;
}

rope_table make_still_table(std::size_t frequencies, std::int32_t tokens) {
  const std::size_t count = frequencies * std::size_t(tokens);
  return {std::vector<float>(count, 1.0f), std::vector<float>(count, 0.0f)};
}

void split_and_rotate(tessera::cpu::executor& executor, const llama_config& config, const rope_table& table,
                      const float* qkv, std::int32_t tokens, float* q, float* k, float* v) {
  const std::int32_t dim = config.head_dim, half = dim / 2;
  const std::int64_t q_size = config.q_size(), kv_size = config.kv_size();
  for_row_runs(executor, tokens, [&](std::int32_t first, std::int32_t last) {
    for (std::int64_t token = first; token < last; ++token) {
      const float* cosines = table.cosines.data() + token * half;
      const float* sines = table.sines.data() + token * half;
      const float* row = qkv + token * (q_size + 2 * kv_size);
      for (std::int32_t head = 0; head < config.num_attention_heads; ++head)
        rotate(row + head * dim, cosines, sines, half, q + token * q_size + head * dim);
      row += q_size;
      for (std::int32_t head = 0; head < config.num_key_value_heads; ++head)
        rotate(row + head * dim, cosines, sines, half, k + token * kv_size + head * dim);
      std::copy_n(row + kv_size, kv_size, v + token * kv_size);
    }
  });
}

}  // namespace engine
