// Another scorer's scores, multiplied by what stands in a token's rows, before the budget sees them.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by (score + epsilon) * factor: `S` gives the score and `F` the factor. Budget and selector see the
/// product. A token that `S` puts before all others (score infinity) stays there.
/// Shapes   scores [kv_heads, tokens].   Unit: token.
/// Errors   parameters out of range, and whatever `S` refuses: tessera::error.
/// Cost     that of `S`, and one read of what `F` looks at.
/// Paper    Expected Attention, arXiv:2510.00636, as kvpress 0.5.5 has it.
template <scorer S, contents_scorer F>
struct multiplied_by : S {
  static constexpr const char* name = "multiplied_by";

  F factor{};
  float epsilon = 0;

  /// A product that overflows says nothing: NaN.
  TESSERA_HD float multiplied(float score, float own) const {
    if (score == infinity) return score;
    const float product = (score + epsilon) * own;
    return product < infinity ? product : product - product;
  }

  void check(index_t budget) const {
    S::check(budget);
    factor.check(budget);
    check_parameters(*this);
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    S::parameters(self, visit);
    F::parameters(self.factor, visit);
    visit("epsilon", self.epsilon, value_range{0.0f, 1.0f}, "added to scores before they are multiplied");
  }
};

TESSERA_NAMESPACE_END
