// Sums over a prompt's queries on the CPU, chunk by chunk, for their mean and covariance.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/prompt/query_statistics.hpp"
#include "../../../core/views.hpp"
#include "../kernel/executor.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Adds the queries of positions `first`, `first` + 1, ... from position `least` on to sums in the caller's memory,
/// one at a time, in order and in double, so chunks of any size give the same bits. Queries that are not finite are
/// left out. Element d of a query turns with element d + D / 2, by position * frequencies[d].
/// Shapes   q [tokens, heads, D] of one sequence, frequencies [D / 2]. Needs no memory.
template <int D, class E>
void add_queries(const rows_view<E>& q, index_t first, index_t least, const float* frequencies,
                 const summed_queries& to, executor& workers) {
  workers.for_each(q.heads, [&](index_t head, int) {
    double* sums = to.sums + offset_t(head) * D;
    double* products = to.products + offset_t(head) * D * D;
    double query[D];
    for (index_t t = (std::max)(0, least - first); t < q.tokens; ++t) {
      const E* from = q.row(0, t, head);
      bool finite = true;
      for (int d = 0; d < D; ++d) finite &= std::isfinite(float(from[d]));
      if (!finite) continue;
      for (int d = 0; d < D / 2; ++d) {
        const double angle = double(float(first + t) * frequencies[d]);
        const double cosine = std::cos(angle), sine = std::sin(angle);
        const double a = double(float(from[d])), b = double(float(from[d + D / 2]));
        query[d] = a * cosine + b * sine;
        query[d + D / 2] = b * cosine - a * sine;
      }
      ++to.counts[head];
      for (int i = 0; i < D; ++i) {
        sums[i] += query[i];
        for (int j = 0; j <= i; ++j) products[i * D + j] += query[i] * query[j];
      }
    }
  });
}

/// Sums of one sequence in memory of their own.
template <int D>
class query_sums {
 public:
  /// Allocates the sums of `heads` heads, zeros, if they are not there.
  void prepare(index_t heads) {
    if (!counts_.empty()) return;
    host_vector<double> sums(std::size_t(heads) * D, 0.0), products(std::size_t(heads) * D * D, 0.0);
    counts_.assign(std::size_t(heads), 0);  // the last that may fail
    sums_.swap(sums);
    products_.swap(products);
  }
  void clear() { *this = {}; }

  /// See add_queries.
  template <class E>
  void add(const rows_view<E>& q, index_t first, index_t least, const float* frequencies, executor& workers) {
    add_queries<D>(q, first, least, frequencies, {counts_.data(), sums_.data(), products_.data()}, workers);
  }

  query_statistics view() const { return {counts_.data(), sums_.data(), products_.data()}; }
  static offset_t bytes_of(index_t heads) {
    return heads * offset_t(sizeof(offset_t) + (std::size_t(D) + std::size_t(D) * D) * sizeof(double));
  }
  offset_t bytes() const {
    return offset_t(counts_.capacity() * sizeof(offset_t) + (sums_.capacity() + products_.capacity()) * sizeof(double));
  }

 private:
  host_vector<offset_t> counts_;
  host_vector<double> sums_, products_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
