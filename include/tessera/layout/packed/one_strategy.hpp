// Every segment is packed alike.
#pragma once

#include "../../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Channels, groups and blocks of every segment are those of the recipe.
struct one_strategy {
  static constexpr const char* name = "one_strategy";
  static constexpr bool searches = false;
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

TESSERA_NAMESPACE_END
