// One-dimensional pooling of scores over tokens: stride 1, same length out as in.
#pragma once

#include <algorithm>

#include "../core/config.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// How the scores of neighbours become one.
enum class pooling { max, average };

/// Pooling over `kernel` neighbours, an odd number; 1 for none.
struct pooling_window {
  index_t kernel = 1;
  pooling kind = pooling::max;
};

/// out[i] = max of in[i - kernel/2 .. i + kernel/2], cut at the ends. A NaN counts as -infinity for
/// its neighbours and stays last itself.
/// Shapes   in, out [n], not the same memory; kernel odd.
/// Cost     O(n) whatever the kernel: block-wise prefix and suffix maxima (van Herk, Gil and Werman).
inline void max_pool(const float* in, index_t n, index_t kernel, float* out, host_vector<float>& scratch) {
  kernel = (std::min)(kernel, 2 * n + 1);  // a wider one reaches no further
  const index_t half = kernel / 2;
  const auto at = [&](index_t i) {
    const float value = i < half || i >= n + half ? -infinity : in[i - half];
    return value == value ? value : -infinity;
  };
  const index_t padded = ceil_div(n + 2 * half, kernel) * kernel;
  scratch.resize(std::size_t(padded) * 2);
  float* prefix = scratch.data();
  float* suffix = prefix + padded;
  for (index_t i = 0; i < padded; ++i) {
    const float value = i < n + 2 * half ? at(i) : -infinity;
    prefix[i] = i % kernel == 0 ? value : (std::max)(prefix[i - 1], value);
  }
  for (index_t i = padded - 1; i >= 0; --i) {
    const float value = i < n + 2 * half ? at(i) : -infinity;
    suffix[i] = (i + 1) % kernel == 0 ? value : (std::max)(suffix[i + 1], value);
  }
  for (index_t i = 0; i < n; ++i) out[i] = in[i] == in[i] ? (std::max)(suffix[i], prefix[i + kernel - 1]) : -infinity;
}

/// out[i] = sum of in[i - kernel/2 .. i + kernel/2] / kernel, zeros beyond the ends (so the ends are attenuated, as
/// PyTorch's avg_pool1d does by default). A NaN or infinite score counts as 0 in its neighbours' means and ranks last
/// itself: it never poisons another token.
/// Cost     O(n * kernel): a running sum would make a score depend on every earlier one's rounding.
inline void average_pool(const float* in, index_t n, index_t kernel, float* out) {
  const index_t half = kernel / 2;
  for (index_t i = 0; i < n; ++i) {
    if (!(in[i] - in[i] == 0)) {
      out[i] = -infinity;
      continue;
    }
    float sum = 0;
    for (index_t j = (std::max)(0, i - half); j <= (std::min)(n - 1, i + half); ++j)
      sum += in[j] - in[j] == 0 ? in[j] : 0;
    out[i] = sum / float(kernel);
  }
}

/// Pools by `window`: see max_pool and average_pool. `scratch` is memory of the former.
inline void pool_scores(const pooling_window& window, const float* in, index_t n, float* out,
                        host_vector<float>& scratch) {
  if (window.kind == pooling::max) {
    max_pool(in, n, window.kernel, out, scratch);
  } else {
    average_pool(in, n, window.kernel, out);
  }
}

TESSERA_NAMESPACE_END
