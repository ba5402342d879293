// CriticalKV's scorer: another one's scores, multiplied by what stands in the value.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../math/share.hpp"

TESSERA_NAMESPACE_BEGIN

/// Chooses a part of what a head keeps by the scores of `S` alone, and the rest by (score + epsilon) * weight, where
/// the weight is the score that `W` gives the token's value.
///
/// A budget counts by the scores of `S`. The part that is chosen first is `first` of what the head keeps, at least 1
/// token unless `first` is 0. The protected tail counts into it. A token that `S` puts before all others (score
/// infinity) stays there.
/// Shapes   scores [kv_heads, tokens].   Unit: token.
/// Errors   parameters out of range, and whatever `S` refuses: tessera::error.
/// Cost     that of `S`, one read of V; with an output projection a product of every value with it.
/// Paper    CriticalKV, arXiv:2502.03805, as kvpress 0.5.5 has it.
template <scorer S, contents_scorer W>
struct weighted_by : S {
  static constexpr const char* name = "weighted_by";

  W weight{};
  float first = 0.5f;
  float epsilon = 1e-4f;

  /// A product that overflows says nothing: NaN.
  TESSERA_HD float weighted(float score, float own) const {
    if (score == infinity) return score;
    const float product = (score + epsilon) * own;
    return product < infinity ? product : product - product;
  }
  TESSERA_HD index_t taken_first(index_t keep) const {
    const index_t part = index_t(decimal_share(first).down(keep));
    return part < 1 && first > 0 && keep > 0 ? 1 : part;
  }

  void check(index_t budget) const {
    S::check(budget);
    weight.check(budget);
    check_parameters(*this);
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    S::parameters(self, visit);
    W::parameters(self.weight, visit);
    visit("first", self.first, value_range{0.0f, 1.0f}, "part of what a head keeps that goes by the scores alone");
    visit("epsilon", self.epsilon, value_range{0.0f, 1.0f}, "added to scores before they are multiplied");
  }
};

TESSERA_NAMESPACE_END
