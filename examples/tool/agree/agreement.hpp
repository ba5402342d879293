// How far a method's predictions are from those of the full cache, when both are given the same text.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pieces.hpp"
#include "tool/eval/evaluate.hpp"

namespace tool {

/// The next token's distribution, as logits and what they sum up to. Two of the same bits are no distance apart.
struct next_token {
  std::vector<float> logits;
  double log_sum = 0;  ///< log of the sum of the logits' exponentials

  explicit next_token(std::vector<float> from);
  double log_probability(engine::token_t token) const { return double(logits[std::size_t(token)]) - log_sum; }
};

/// KL(p, q) in nats, computed in double. NaN where a logit is no number.
double divergence(const next_token& p, const next_token& q);

/// Sums over the steps of one variant. A step predicts the next token of the text, which it is then given.
struct agreement {
  std::int64_t pieces = 0, steps = 0;
  std::int64_t same = 0;            ///< the likeliest token is that of the full cache
  std::int64_t identical = 0;       ///< every logit has the bits of the full cache's
  double surprise = 0;              ///< -log p of the text's own tokens, in nats
  std::vector<double> divergences;  ///< KL(full, method) of each step, in nats
  struct step_sum {
    double divergence = 0;
    std::int64_t count = 0;
  };
  std::vector<step_sum> by_step;          ///< by the step's number in its piece
  double bytes_held = 0, bytes_full = 0;  ///< right after the prompts
  double bytes_read = 0;

  double perplexity() const;
  double mean_divergence() const;
  /// The smallest divergence that `share` of the steps do not exceed; NaN where one of them is.
  double divergence_of(double share) const;
  double same_share() const { return steps ? double(same) / double(steps) : 0; }
  double identical_share() const { return steps ? double(identical) / double(steps) : 0; }
};

/// The sums of all variants over the pieces whose prompts have up to `length` tokens.
struct length_sums {
  std::int64_t length;
  std::vector<agreement> by_variant;
};

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
  /// By length, ascending.
  const std::vector<length_sums>& sums() const { return sums_; }

 private:
  void follow(std::size_t variant, const text_piece& piece, std::vector<float> logits, method_cache& cache,
              agreement& own);

  runner& model_;
  const engine::tokenizer& tokenizer_;
  evaluation evaluation_;
  std::function<void()> tick_ = [] {};
  std::vector<length_sums> sums_;
  std::vector<next_token> full_;  // by step, of the piece that runs
};

/// Rows method x budget, a table for each length: perplexity, divergence, agreement and memory.
std::string agreement_table(const std::vector<variant>& variants, const std::vector<length_sums>& sums);
/// A JSON array with one object a variant and length. What is no number is null.
std::string agreement_json(const std::vector<variant>& variants, const std::vector<length_sums>& sums);

}  // namespace tool
