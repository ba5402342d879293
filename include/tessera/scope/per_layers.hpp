// All heads of several consecutive layers keep the same slots.
#pragma once

#include "../core/parameters.hpp"
#include "per_layer.hpp"

TESSERA_NAMESPACE_BEGIN

/// As `per_layer`, and the set of one layer serves the next ones: the first of every `reuse` layers chooses, the others
/// keep what it keeps and observe nothing. Layers that do not follow the recipe (dense or sliding ones) are left out of
/// the runs. Where a cache chooses; operations choose for the layer that they are asked about.
template <over_heads Join>
struct per_layers : per_layer<Join> {
  index_t reuse = 1;

  /// Of the layers that follow the recipe, the one whose set the `i`-th keeps.
  TESSERA_HD index_t chooser(index_t i) const { return i - i % reuse; }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("reuse", self.reuse, value_range{1, 1 << 16},
          "consecutive layers that keep the set which the first of them chooses");
  }
};

static_assert(check_scope<per_layers<over_heads::sum>>() && reusing_scope<per_layers<over_heads::sum>>);

TESSERA_NAMESPACE_END
