// Exact, deterministic top-k on the host.
#pragma once

#include <algorithm>
#include <functional>

#include "../core/host/host_vector.hpp"
#include "ordered.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scratch that selectors reuse from call to call, so that a step allocates only while lengths grow.
struct top_k_scratch {
  host_vector<std::uint64_t> keys;
  host_vector<float> scores;
  host_vector<index_t> ids;
};

/// The `k` best of `scores [n]` into `out [k]`, ascending by index. Score descending, ties to the lower index, NaN
/// last.
/// Shapes   0 <= k; k above n selects all n.   Returns  how many were written: min(k, n).
/// Cost     O(n) on average (nth_element over 64-bit keys) and O(k log k) for the order.
inline index_t top_k(const float* scores, index_t n, index_t k, index_t* out, top_k_scratch& scratch) {
  if (k >= n) {
    for (index_t i = 0; i < n; ++i) out[i] = i;
    return n;
  }
  if (k <= 0) return 0;
  auto& keys = scratch.keys;
  keys.resize(std::size_t(n));
  for (index_t i = 0; i < n; ++i) keys[std::size_t(i)] = rank_key(scores[i], i);
  std::nth_element(keys.begin(), keys.begin() + k, keys.end(), std::greater<>{});
  for (index_t i = 0; i < k; ++i) out[i] = rank_index(keys[std::size_t(i)]);
  std::sort(out, out + k);
  return k;
}

TESSERA_NAMESPACE_END
