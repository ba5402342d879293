// The body of find_eigenvectors: Eigen's solver. The one header of the library that includes Eigen.
#pragma once

#include <Eigen/Eigenvalues>

#include "rotation.hpp"

TESSERA_NAMESPACE_BEGIN

template <class Real>
void find_eigenvectors(const Real* matrix, index_t dim, Real* values, Real* vectors) {
  using square = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic>;
  const Eigen::SelfAdjointEigenSolver<square> solver(Eigen::Map<const square>(matrix, dim, dim));
  require(solver.info() == Eigen::Success, "eigenvectors of a second moment", "not found", "a solver that converges",
          "scale keys and values");
  Eigen::Map<Eigen::Matrix<Real, Eigen::Dynamic, 1>>(values, dim) = solver.eigenvalues();
  Eigen::Map<square>(vectors, dim, dim) = solver.eigenvectors();  // by columns: each eigenvector lies in one piece
}

TESSERA_NAMESPACE_END
