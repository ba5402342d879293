// SABlock's scorer: segments of the text raise the scores of their tokens.
#pragma once

#include <cmath>

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/one_lane.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// How a segment's importance and diversity become one weight.
enum class segment_form {
  product,  ///< importance * (1 + alpha * diversity) / (1 + alpha)
  balance   ///< (1 - alpha) * importance + alpha * diversity
};

/// Multiplies another scorer's finished scores by a factor for each segment: 1 + strength * lambda * weight.
///
/// A segment's importance is the mean score of its tokens, divided by the largest mean of the head's segments. Its
/// diversity is the entropy of its scores, divided by the logarithm of its tokens: 0 for one token, 1 where all score
/// alike. The factor is one for all tokens of a segment, so their order stays. Only candidates count: tokens that are
/// kept in any case belong to no segment here.
/// Shapes   scores [kv_heads, tokens].   Unit: token. Sums in double.
/// Errors   parameters out of range, and whatever the inner scorer refuses: tessera::error.
/// Cost     two passes over the scores, one logarithm a token.
/// Paper    SABlock, arXiv:2510.22556, Sec. III-C (Eqs. 5 to 8). Differs: the formulas are not in the public text;
///          these are reconstructed from its prose. Both statistics are put on a scale from 0 to 1 before they are
///          combined.
template <scorer S>
struct by_segment : S {
  static constexpr const char* name = "by_segment";
  static constexpr double smallest = 1e-6;  ///< beside sums and inside logarithms

  float alpha = 0.5f;
  float lambda = 0.5f;
  float strength = 4;
  segment_form form = segment_form::product;

  TESSERA_HD segment_statistics describe_segment(const float* scores, index_t n) const {
    return describe_segment(one_lane{}, scores, n);
  }
  template <class Team>
  TESSERA_HD segment_statistics describe_segment(const Team& team, const float* scores, index_t n) const {
    double sum = 0, entropy = 0;
    for (index_t i = team.rank(); i < n; i += Team::size) sum += finite(scores[i]);
    sum = team.sum(sum);
    for (index_t i = team.rank(); i < n; i += Team::size) {
      const double p = finite(scores[i]) / (sum + smallest);
      if (p > 0) entropy -= p * std::log(p + smallest);
    }
    entropy = team.sum(entropy);
    return {n > 0 ? float(sum / n) : 0.0f, n > 1 && sum > 0 ? float(entropy / std::log(double(n))) : 0.0f};
  }

  TESSERA_HD float rescored(float score, const segment_statistics& own, float most) const {
    const float importance = most > 0 ? own.importance / most : 0;
    const float weight = form == segment_form::product ? importance * (1 + alpha * own.diversity) / (1 + alpha)
                                                       : (1 - alpha) * importance + alpha * own.diversity;
    return score * (1 + strength * lambda * weight);
  }

  void check(index_t budget) const {
    S::check(budget);
    check_parameters(*this);
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    S::parameters(self, visit);
    visit("alpha", self.alpha, value_range{0.0f, 1.0f}, "weight of a segment's diversity beside its importance");
    visit("lambda", self.lambda, value_range{0.0f, 1.0f}, "how far segments raise scores; 0: not at all");
    visit("strength", self.strength, value_range{0.0f, 100.0f}, "factor of lambda");
    visit("form", self.form, one_word_of{"product or balance"}, "how importance and diversity are combined");
  }

 private:
  TESSERA_HD static double finite(float score) { return score - score == 0 ? double(score) : 0.0; }
};

TESSERA_NAMESPACE_END
