// Measures what the heads of a model look at while it answers: how much lies beyond the first and the newest tokens.
#pragma once

#include <memory>
#include <vector>

#include "gates.hpp"
#include "tool/backend.hpp"
#include "tool/eval/evaluate.hpp"

namespace tool {

/// Passes every question with its answer through the model, uncompressed, and looks at the rows that answer: those of the
/// prompt's last token and of the answer's tokens but the last. A gate is the mean over these rows of the mass that the
/// softmax gives to tokens behind the first `sinks` and before the newest `recent`, the largest of the group's query heads.
class head_probe {
 public:
  head_probe(runner& model, index_t sinks, index_t recent, std::shared_ptr<tessera::cpu::executor> workers);

  /// Adds one question. Shapes: prompt and answer in tokens, the answer not empty.
  void add(const std::vector<engine::token_t>& prompt, const std::vector<engine::token_t>& answer);

  /// Errors: no question was added.
  head_gates found() const;

 private:
  runner& model_;
  index_t sinks_, recent_, questions_ = 0;
  std::int64_t rows_ = 0;
  std::shared_ptr<tessera::cpu::executor> workers_;
  std::vector<double> sums_;  // [layers, kv_heads]
};

}  // namespace tool
