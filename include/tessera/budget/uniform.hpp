// The same number of tokens for every head.
#pragma once

#include "../concepts/budget.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Allots `tokens` to every kv_head, the protected tail included; all of a head that holds fewer.
/// Errors   tokens out of range: tessera::error.
struct uniform {
  static constexpr const char* name = "uniform";
  static constexpr bool compares_heads = false;
  static constexpr value_range<index_t> budgets = token_budgets;

  index_t tokens = 1024;

  /// What a head that stores `stored` tokens keeps: the same in every layer.
  TESSERA_HD index_t share(index_t stored, index_t, index_t, index_t) const {
    return tokens < stored ? tokens : stored;
  }

  void allot(const layer_scores& scores, index_t* counts) const {
    for (index_t h = 0; h < scores.kv_heads; ++h) {
      counts[h] = share(scores.tokens[h], scores.protected_tail, scores.layer, scores.layers);
    }
  }

  void check() const { budgets.check("budget", tokens, "pass how many tokens each head may keep"); }

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_budget<uniform>());

TESSERA_NAMESPACE_END
