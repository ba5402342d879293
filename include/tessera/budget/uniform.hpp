// The same number of tokens for every head.
#pragma once

#include "../concepts/budget.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Allots `tokens` to every kv_head, the protected tail included; all of a head that holds fewer.
/// Errors   tokens out of range: tessera::error.   Cost  none.
struct uniform {
  static constexpr const char* name = "uniform";
  static constexpr bool compares_heads = false, even_heads = true;
  static constexpr value_range<index_t> budgets = token_budgets;

  index_t tokens = 1024;

  /// The same in every layer.
  TESSERA_HD index_t share(const head_extent& head) const { return tokens < head.stored ? tokens : head.stored; }

  token_bound upper_bound(const layer_extent& layer) const {
    const index_t longest = (std::min)(layer.longest, (std::max)(tokens, layer.protected_tail));
    return {longest, offset_t(layer.kv_heads) * longest};
  }

  void check() const { budgets.check("budget", tokens, "pass how many tokens each head may keep"); }

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_budget<uniform>());

TESSERA_NAMESPACE_END
