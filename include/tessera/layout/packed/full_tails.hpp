// The newest tokens stay whole until there is a tail of them.
#pragma once

#include "../../core/parameters.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Packs whole tails: what is left of a prompt beyond a multiple of `tail` tokens stays as it is, and so do decoded
/// tokens until a step has filled the tail.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 5.3 (32).
struct full_tails {
  static constexpr const char* name = "full_tails";
  index_t tail = 32;

  /// How many of `whole` tokens that are not packed yet are packed when a prompt ends, and when a step has ended.
  index_t packed_after_prompt(index_t whole) const { return whole / tail * tail; }
  index_t packed_after_step(index_t whole) const { return whole / tail * tail; }
  void check() const { check_parameters(*this); }
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("tail", self.tail, value_range{1, max_tokens},
          "newest tokens that are packed together, once there are so many");
  }
};

TESSERA_NAMESPACE_END
