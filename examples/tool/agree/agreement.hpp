// How far a method's predictions are from those of the full cache, when both are given the same text.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tool/eval/evaluate.hpp"

namespace tool {

/// Sums over the steps of one variant. A step predicts the next token of the text, which it is then given.
struct agreement {
  std::int64_t steps = 0, same = 0;       ///< same: the likeliest token is that of the full cache
  double surprise = 0;                    ///< -log p of the text's own tokens, in nats
  std::vector<double> divergences;        ///< KL(full, method) of each step, in nats
  std::vector<double> by_step;            ///< their sums by the step's number in its piece
  double bytes_held = 0, bytes_full = 0;  ///< right after the prompts
  double bytes_read = 0;

  double perplexity() const;
  double mean_divergence() const;
  /// The smallest divergence that `share` of the steps do not exceed.
  double divergence_of(double share) const;
  double same_share() const { return steps ? double(same) / double(steps) : 0; }
};

/// A piece of a text: a prompt, and the tokens behind it.
struct text_piece {
  std::vector<engine::token_t> prompt, following;
};

/// `count` pieces of a text, from its beginning to its end at even distances; they may overlap. `first`: tokens that each
/// begins with.
/// Errors   a text with fewer tokens than one piece.
std::vector<text_piece> pieces_of(std::span<const engine::token_t> text, std::span<const engine::token_t> first,
                                  std::size_t count, std::int64_t prompt, std::int64_t following);

/// Feeds the same pieces to every variant. The first one is the full cache.
class agreement_run {
 public:
  /// Keeps references: model and tokenizer must outlive it. Errors: as evaluation's.
  agreement_run(runner& model, const engine::tokenizer& tokenizer, std::vector<variant> variants, element_type element,
                std::shared_ptr<tessera::cpu::executor> workers);

  /// One piece, under every variant. What `tick` throws leaves the sums as they were before.
  void run(const text_piece& piece);
  void call_often(std::function<void()> tick);

  const std::vector<variant>& variants() const { return evaluation_.variants(); }
  const std::vector<agreement>& sums() const { return sums_; }

 private:
  void follow(std::size_t variant, const text_piece& piece, std::vector<float> logits, method_cache& cache,
              std::vector<agreement>& sums);

  runner& model_;
  const engine::tokenizer& tokenizer_;
  evaluation evaluation_;
  std::function<void()> tick_ = [] {};
  std::vector<agreement> sums_;
  std::vector<std::vector<float>> full_;  // log-probabilities by step, of the piece that runs
};

/// Rows method x budget; perplexity, divergence, agreement and memory.
std::string agreement_table(const std::vector<variant>& variants, const std::vector<agreement>& sums);
/// A JSON array with one object a variant.
std::string agreement_json(const std::vector<variant>& variants, const std::vector<agreement>& sums);

}  // namespace tool
