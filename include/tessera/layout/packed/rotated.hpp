// Vectors in a basis in which their energy gathers in few channels.
#pragma once

#include "../../core/parameters.hpp"
#include "../../core/types.hpp"
#include "../../math/share.hpp"

TESSERA_NAMESPACE_BEGIN

/// A rotation for every (segment, layer, kv_head), K and V apart: the eigenvectors of the uncentred second moment of
/// the packed rows, but for the round(truncate * dim) with the smallest eigenvalues. Neighbours in strength lie far
/// apart in it (`spread_step`). For groups of several channels, the rotation is reordered, so that channels which are
/// chosen for the same vectors are neighbours.
///
/// Bytes    4 * channels * dim for each of K and V: rotations are fp32, because with rounded ones steps choose other
///          blocks.
/// Errors   a second moment with NaN or infinity: tessera::error.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 2.3, 4.2, 5.2 (bottom quarter), 5.5 (reordering, whose algorithm it does
///          not give: pairs and then pairs of pairs are matched greedily by how often both are chosen).
struct rotated {
  static constexpr const char* name = "rotated";
  static constexpr bool rotates = true;

  float truncate = 0.25f;

  index_t channels(int dim) const { return dim - index_t(decimal_share(truncate).nearest(dim)); }
  void check() const { check_parameters(*this); }
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("truncate", self.truncate, value_range{0.0f, 1.0f}, "share of the channels, the weakest, that is left out");
  }
};

TESSERA_NAMESPACE_END
