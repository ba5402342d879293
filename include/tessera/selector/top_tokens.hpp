// The best single tokens.
#pragma once

#include "../concepts/selector.hpp"

TESSERA_NAMESPACE_BEGIN

/// Chooses the tail and the best-scored other tokens, `keep` in all.
/// Ties     to the lower index; NaN last.   Cost  O(n) on average.
struct top_tokens {
  static constexpr const char* name = "top_tokens";
  using unit = token_unit;

  index_t select(const float* scores, index_t n, index_t tail, index_t keep, index_t* out,
                 top_k_scratch& scratch) const {
    keep = std::clamp(keep, 0, n);
    tail = std::clamp(tail, 0, keep);
    index_t count = top_k(scores, n - tail, keep - tail, out, scratch);
    for (index_t slot = n - tail; slot < n; ++slot) out[count++] = slot;
    return count;
  }

  index_t unit_slots() const { return 1; }

  void check() const {}

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_selector<top_tokens>());

TESSERA_NAMESPACE_END
