// Vectors in the basis in which the engine hands them over.
#pragma once

#include "../../core/parameters.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// No rotation: a segment's elements are those of the vectors as they are, all of them candidates to stay.
struct as_given {
  static constexpr const char* name = "as_given";
  static constexpr bool rotates = false;
  index_t channels(int dim) const { return dim; }
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

TESSERA_NAMESPACE_END
