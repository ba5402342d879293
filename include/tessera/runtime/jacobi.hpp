// Eigenvectors of a small symmetric matrix without a library: for programs that nvcc compiles, which do not see Eigen's
// solver.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../core/host/host_vector.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Eigenvalues, ascending, and eigenvectors, one per row, of a symmetric matrix [dim, dim]. Jacobi's rotations sweep
/// the matrix row by row until only rounding errors are left off the diagonal.
///
/// Cost     some eight sweeps of dim squared / 2 rotations: several times the cost of Eigen's solver
///          (runtime/eigen.hpp).
template <class Real>
void find_eigenvectors_by_jacobi(const Real* matrix, index_t dim, Real* values, Real* vectors) {
  const auto n = std::size_t(dim);
  host_vector<Real> a(matrix, matrix + n * n), turned(n * n, Real(0));
  for (std::size_t i = 0; i < n; ++i) turned[i * n + i] = 1;
  const auto rotate_rows = [n](Real* p, Real* q, Real c, Real s) {
    for (std::size_t k = 0; k < n; ++k) {
      const Real x = p[k], y = q[k];
      p[k] = c * x - s * y, q[k] = s * x + c * y;
    }
  };
  Real trace = 0;
  for (std::size_t i = 0; i < n; ++i) trace += std::abs(a[i * n + i]);
  const Real least = Real(1e-17) * trace;  // a matrix of lower rank leaves noise below this
  for (int sweep = 0; sweep < 40; ++sweep) {
    bool rotated = false;
    for (std::size_t p = 0; p + 1 < n; ++p) {
      for (std::size_t q = p + 1; q < n; ++q) {
        const Real beside = a[p * n + q], pp = a[p * n + p], qq = a[q * n + q];
        // An element below this bound changes neither eigenvalue, and the eigenvectors by no more than rounding.
        if (std::abs(beside) <= (std::max)(least, Real(1e-15) * std::sqrt(std::abs(pp * qq)))) continue;
        rotated = true;
        const Real theta = (qq - pp) / (2 * beside);
        const Real t = (theta < 0 ? Real(-1) : Real(1)) / (std::abs(theta) + std::sqrt(theta * theta + 1));
        const Real c = 1 / std::sqrt(t * t + 1), s = t * c;
        rotate_rows(a.data() + p * n, a.data() + q * n, c, s);
        for (std::size_t k = 0; k < n; ++k) {
          Real* row = a.data() + k * n;
          const Real x = row[p], y = row[q];
          row[p] = c * x - s * y, row[q] = s * x + c * y;
        }
        a[p * n + q] = a[q * n + p] = 0;
        rotate_rows(turned.data() + p * n, turned.data() + q * n, c, s);
      }
    }
    if (!rotated) break;
  }
  host_vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t x, std::size_t y) { return a[x * n + x] < a[y * n + y]; });
  for (std::size_t i = 0; i < n; ++i) {
    values[i] = a[order[i] * n + order[i]];
    std::copy_n(turned.data() + order[i] * n, n, vectors + i * n);
  }
}

TESSERA_NAMESPACE_END
