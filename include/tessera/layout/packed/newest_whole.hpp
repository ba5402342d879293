// The newest tokens always stay whole.
#pragma once

#include <algorithm>

#include "../../core/parameters.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Packs all of a prompt but its newest `tail` tokens; decoded ones join the packed tokens `tail` at a time, so that
/// the newest `tail` are whole at any time.
/// Paper    ThinK, arXiv:2407.21018 (32). Differs: its code leaves every decoded key whole.
struct newest_whole {
  static constexpr const char* name = "newest_whole";
  index_t tail = 32;

  index_t packed_after_prompt(index_t whole) const { return (std::max)(0, whole - tail); }
  index_t packed_after_step(index_t whole) const { return (std::max)(0, whole / tail - 1) * tail; }
  void check() const { check_parameters(*this); }
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("tail", self.tail, value_range{1, max_tokens}, "newest tokens that stay whole");
  }
};

TESSERA_NAMESPACE_END
