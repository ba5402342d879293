// The gate of a model on the device, and the memory that it works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/cuda/kv_cache.hpp"
#include "gate_kernel.hpp"

namespace engine::cuda {

/// Scores the rows that enter the layers' attention, [rows, hidden], and hands the scores to caches. There may be no gate:
/// see `is_there`.
class model_gate {
 public:
  model_gate() = default;
  /// `step_rows`: the most rows of a step.
  model_gate(const llama_config& config, const std::vector<gate_layer>& layers, std::int32_t step_rows)
      : layers_(layers.begin(), layers.end()), step_(config, step_rows, std::int32_t(layers.size())) {}

  bool is_there() const { return !layers_.empty(); }
  std::size_t bytes() const {
    std::size_t total = 0;
    for (const device_gate& one : layers_) total += one.bytes();
    return total;
  }

  /// Memory for chunks of so many rows.
  void make_room(const llama_config& config, std::int32_t rows) {
    if (chunk_.rows >= rows) return;
    chunk_ = {};  // frees the old one first
    chunk_ = memory(config, rows, 1);
  }
  /// A chunk's, of tokens from position `first` on, behind its rows in a layer.
  void score_chunk(products& with, const llama_config& config, int index, const bf16* normed, std::int32_t rows,
                   std::int64_t first, kv_cache& cache, cudaStream_t stream) {
    run(with, config, index, normed, rows, rows, chunk_.projected.data(), chunk_.scores.data(), stream);
    cache.set_scores(index, first, chunk_.scores.data(), rows, stream);
  }
  /// A step's, of runs of `each` rows. Positions change from step to step and a captured step's arguments do not, so that
  /// `hand_over` is called behind the step.
  void score_step(products& with, const llama_config& config, int index, const bf16* normed, std::int32_t rows,
                  std::int32_t each, cudaStream_t stream) {
    run(with, config, index, normed, rows, each, step_.projected.data(), of_step(config, index, rows), stream);
  }
  /// `first`: of each conversation, the position of the step's first token.
  void hand_over(const llama_config& config, const std::vector<std::int64_t>& first, std::int32_t each, kv_cache& cache,
                 cudaStream_t stream) {
    const auto rows = std::int32_t(first.size()) * each;
    for (std::size_t i = 0; i < first.size(); ++i) {
      cache.select(int(i));
      for (int index = 0; index < int(layers_.size()); ++index) {
        const float* scores = of_step(config, index, rows) + std::int64_t(i) * config.num_key_value_heads * each;
        cache.set_scores(index, first[i], scores, each, stream);
      }
    }
  }

 private:
  struct memory {
    std::int32_t rows = 0;
    device_array<float> projected, scores;

    memory() = default;
    memory(const llama_config& config, std::int32_t count, std::int32_t layers)
        : rows(count),
          projected(std::size_t(count) * std::size_t(config.num_attention_heads + config.num_key_value_heads) *
                    gate_width),
          scores(std::size_t(count) * std::size_t(config.num_key_value_heads) * std::size_t(layers)) {}
  };

  float* of_step(const llama_config& config, int index, std::int32_t rows) {
    return step_.scores.data() + std::int64_t(index) * rows * config.num_key_value_heads;
  }
  void run(products& with, const llama_config& config, int index, const bf16* normed, std::int32_t rows,
           std::int32_t each, float* projected, float* scores, cudaStream_t stream) {
    const device_gate& gate = layers_[std::size_t(index)];
    with.linear(normed, rows, gate.projections, projected);
    gate_scores(config, gate, projected, rows, each, scores, stream);
  }

  std::vector<device_gate> layers_;
  memory chunk_, step_;
};

}  // namespace engine::cuda
