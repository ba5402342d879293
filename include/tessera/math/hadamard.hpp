// The Walsh-Hadamard transform of a row, which spreads a few large channels over all.
#pragma once

#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Multiplies a row by a Hadamard matrix, in place: orthogonal, symmetric, its own inverse. Queries and keys that are
/// both transformed have the products they had; outputs over transformed values are transformed back by one more call.
/// A row whose channels were unlike has them alike, so that few bits an element lose less (QuaRot, arXiv:2404.00456).
/// Shapes   row [dim]. Where dim is no power of two, each of its parts of the largest power of two that divides it (80:
///          five of 16) is multiplied by itself.
/// Errors   none. A row with an element that is not finite loses the whole part.
/// Cost     dim * log2(part) additions; nothing is allocated.
TESSERA_HD inline void hadamard(float* row, int dim) {
  const int part = dim & -dim;
  float scale = 1;
  for (int size = part; size > 1; size /= 2) scale *= 0.70710678118654752f;
  for (int half = 1; half < part; half *= 2) {
    for (int begin = 0; begin < dim; begin += 2 * half) {
      for (int d = begin; d < begin + half; ++d) {
        const float a = row[d], b = row[d + half];
        row[d] = a + b;
        row[d + half] = a - b;
      }
    }
  }
  for (int d = 0; d < dim; ++d) row[d] *= scale;
}

TESSERA_NAMESPACE_END
