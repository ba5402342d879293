// Ada-KV's budget: heads compete for the layer's tokens, with a floor for each.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "../concepts/budget.hpp"
#include "../core/parameters.hpp"
#include "../math/ordered.hpp"

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
  TESSERA_HD index_t share(index_t won, index_t base, index_t tail) const {
    // Double, so that int(0.2 * base) is what the decimal fraction says; 0.2f is a little above 0.2.
    const double fraction = ::round(double(floor) * 1e6) / 1e6;
    const double least = ::floor(fraction * double(base));
    // Two roundings: a fused multiply-add could round another way.
#ifdef __CUDA_ARCH__
    const double count = __dadd_rn(__dmul_rn(double(won), 1.0 - fraction), least);
#else
    const double count = double(won) * (1.0 - fraction) + least;
#endif
    return tail + index_t(::rint(count));
  }

  void allot(const layer_scores& scores, index_t* counts) const {
    const index_t heads = scores.kv_heads, tail = scores.protected_tail;
    const index_t base = std::max(0, tokens - tail);
    index_t longest = 0;
    for (index_t h = 0; h < heads; ++h) longest = std::max(longest, scores.candidates(h));
    if (base >= longest) {
      for (index_t h = 0; h < heads; ++h) counts[h] = scores.tokens[h];
      return;
    }
    struct candidate {
      std::uint32_t score;
      index_t head, slot;
      bool operator<(const candidate& other) const {
        if (score != other.score) return score > other.score;
        return head != other.head ? head < other.head : slot < other.slot;
      }
    };
    std::vector<candidate> all;
    for (index_t h = 0; h < heads; ++h) {
      const float* s = scores.head(h);
      for (index_t i = 0; i < scores.candidates(h); ++i) all.push_back({ordered_bits(s[i]), h, i});
    }
    const std::size_t places = std::min(all.size(), std::size_t(heads) * std::size_t(base));
    if (places < all.size()) std::nth_element(all.begin(), all.begin() + offset_t(places), all.end());
    std::vector<index_t> won(std::size_t(heads), 0);
    for (std::size_t i = 0; i < places; ++i) ++won[std::size_t(all[i].head)];
    for (index_t h = 0; h < heads; ++h) counts[h] = std::min(scores.tokens[h], share(won[std::size_t(h)], base, tail));
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
