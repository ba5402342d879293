// Ada-KV's budget: heads compete for the layer's tokens, with a floor for each.
#pragma once

#include "../concepts/budget.hpp"
#include "../core/parameters.hpp"
#include "../math/share.hpp"

TESSERA_NAMESPACE_BEGIN

/// Allots a layer's tokens where the scores are: of all heads' candidates together the best kv_heads * base are counted
/// by head, and every head is moved a fraction `floor` of the way towards base = tokens - tail.
///
/// count(h) = tail + round(c_h * (1 - floor) + int(floor * base)), rounded half to even, at most what the head holds.
/// Rounding may move a layer's total by up to kv_heads / 2 tokens, as in the reference. Equal scores: the lower head,
/// then the lower slot, counts first. When every head fits into base, all is kept.
/// Errors   tokens or floor out of range: tessera::error.
/// Cost     O(n) over the layer's scores.
/// Paper    Ada-KV, arXiv:2407.11550, Algorithm 1; the floor of its Sec. 4 is 0.2.
struct adaptive {
  static constexpr const char* name = "adaptive";
  static constexpr bool compares_heads = true;
  static constexpr value_range<index_t> budgets = token_budgets;

  index_t tokens = 1024;
  float floor = 0.2f;

  /// What a head keeps that won so many of the layer's places; before the limit of what it stores.
  TESSERA_HD index_t share_won(index_t won, index_t base, index_t tail) const {
    // In parts of a decimal, so that halves are halves: 0.2f is a little above 0.2, and 0.35 * 90 in double below 31.5.
    const decimal_share fraction(floor);
    constexpr offset_t whole = decimal_share<float>::whole;
    const offset_t count = offset_t(won) * (whole - fraction.parts) + fraction.down(base) * whole;
    const offset_t below = count / whole, rest = 2 * (count % whole);
    return tail + index_t(below + (rest > whole || (rest == whole && below % 2 != 0)));
  }

  token_bound upper_bound(const layer_extent& layer) const {
    // Rounding moves a head by less than one token.
    const offset_t total = offset_t(layer.kv_heads) * (offset_t((std::max)(tokens, layer.protected_tail)) + 1);
    return {index_t((std::min<offset_t>)(layer.longest, total)), total};
  }

  void check() const {
    budgets.check("budget", tokens, "pass how many tokens each head may keep");
    check_parameters(*this);
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("floor", self.floor, value_range{0.0f, 1.0f}, "fraction of the budget that every head is sure of");
  }
};

static_assert(check_budget<adaptive>());

TESSERA_NAMESPACE_END
