// What is known of a turn's queries as a whole: how many there were, and sums from which mean and covariance follow.
#pragma once

#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Sums over the queries of one layer and sequence, by query head, with RoPE undone.
/// Shapes   counts [q_heads], sums [q_heads, k_dim], products [q_heads, k_dim, k_dim]: the lower triangle of the sums
///          of q[i] * q[j], the rest is not read.
struct query_statistics {
  const offset_t* counts = nullptr;
  const double* sums = nullptr;
  const double* products = nullptr;
};

/// The same in memory that sums are added to.
struct summed_queries {
  offset_t* counts = nullptr;
  double* sums = nullptr;
  double* products = nullptr;
};

TESSERA_NAMESPACE_END
