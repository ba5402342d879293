// The body of find_eigenvectors: Eigen's solver. No other header of the library includes Eigen. Methods that rotate
// rows include this header.
#pragma once

#include "rotation.hpp"

#ifndef __CUDACC__  // nvcc takes 31 s and forty warnings for one solver (CUDA 13.0)

#ifdef __GNUC__  // g++ 12 warns in its own AVX-512 header, which Eigen inlines
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <Eigen/Eigenvalues>

TESSERA_NAMESPACE_BEGIN

template <class Real>
void find_eigenvectors(const Real* matrix, index_t dim, Real* values, Real* vectors) {
  using square = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic>;
  const Eigen::SelfAdjointEigenSolver<square> solver(Eigen::Map<const square>(matrix, dim, dim));
  require(solver.info() == Eigen::Success, "eigenvectors of a second moment", "not found", "a solver that converges",
          "scale keys and values");
  Eigen::Map<Eigen::Matrix<Real, Eigen::Dynamic, 1>>(values, dim) = solver.eigenvalues();
  Eigen::Map<square>(vectors, dim, dim) = solver.eigenvectors();  // column-major: an eigenvector is contiguous
}

TESSERA_NAMESPACE_END

#ifdef __GNUC__
#pragma GCC diagnostic pop
#endif

#endif

TESSERA_NAMESPACE_BEGIN
/// This header has been included.
template <>
inline constexpr bool eigenvectors_included<double> = true;
TESSERA_NAMESPACE_END
