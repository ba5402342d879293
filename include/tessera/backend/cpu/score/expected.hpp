// Scores by expected future queries, on the CPU: mean and variance of each key's logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../../concepts/scorer.hpp"
#include "../../../core/host/float_mode.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../core/prompt/query_statistics.hpp"
#include "../kernel/rows.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scratch of score_expected, one for each worker.
struct expected_workspace {
  host_vector<double> mean, covariance;  // of one query head, rotated
  host_vector<float> mean_row, square;   // the same in fp32
  host_vector<float> logits;             // of one query head, by slot
};

namespace detail {

/// The mean of RoPE's rotations over `future` positions from `next` on: a cosine and a sine for each pair of channels.
template <int D>
void mean_rotation(const float* frequencies, index_t next, index_t future, double* cosines, double* sines) {
  std::fill_n(cosines, D / 2, 0.0);
  std::fill_n(sines, D / 2, 0.0);
  for (index_t p = 0; p < future; ++p) {
    for (int d = 0; d < D / 2; ++d) {
      const double angle = double(float(next + p) * frequencies[d]);
      cosines[d] += std::cos(angle) / double(future);
      sines[d] += std::sin(angle) / double(future);
    }
  }
}

/// Rotates a vector of D elements that lie `stride` apart, in place.
template <int D>
void rotate(const double* cosines, const double* sines, double* x, int stride) {
  for (int d = 0; d < D / 2; ++d) {
    double &a = x[d * stride], &b = x[(d + D / 2) * stride];
    const double turned = a * cosines[d] - b * sines[d];
    b = a * sines[d] + b * cosines[d];
    a = turned;
  }
}

/// Mean and covariance of a query head's queries, rotated; zeros without queries.
template <int D>
void rotated_moments(const query_statistics& seen, index_t q_head, const double* cosines, const double* sines,
                     expected_workspace& workspace) {
  const double count = double((std::max<offset_t>)(1, seen.counts[q_head]));
  const double* sums = seen.sums + offset_t(q_head) * D;
  const double* products = seen.products + offset_t(q_head) * D * D;
  workspace.mean.resize(D);
  workspace.covariance.resize(std::size_t(D) * D);
  for (int i = 0; i < D; ++i) workspace.mean[std::size_t(i)] = sums[i] / count;
  for (int i = 0; i < D; ++i) {
    for (int j = 0; j <= i; ++j) {
      const double value =
          products[i * D + j] / count - workspace.mean[std::size_t(i)] * workspace.mean[std::size_t(j)];
      workspace.covariance[std::size_t(i * D + j)] = workspace.covariance[std::size_t(j * D + i)] = value;
    }
  }
  rotate<D>(cosines, sines, workspace.mean.data(), 1);
  for (int i = 0; i < D; ++i) rotate<D>(cosines, sines, workspace.covariance.data() + i * D, 1);
  for (int i = 0; i < D; ++i) rotate<D>(cosines, sines, workspace.covariance.data() + i, D);
  workspace.mean_row.assign(workspace.mean.begin(), workspace.mean.end());
  workspace.square.assign(workspace.covariance.begin(), workspace.covariance.end());
}

}  // namespace detail

/// The scores of all slots of one (sequence, kv_head): see statistical_scorer.
/// Shapes   out [length]; frequencies [k_dim / 2].   Cost  K once for each query head of the group, k_dim squared
///          products a token and query head.
template <class View, statistical_scorer Scorer>
void score_expected(const View& view, index_t sequence, index_t head, const Scorer& scorer,
                    const query_statistics& seen, index_t group, const logit_rule& rule, const float* frequencies,
                    index_t next, float* out, expected_workspace& workspace) {
  constexpr int D = View::k_dim;
  const default_float_mode mode;
  const index_t length = view.length(sequence, head);
  const float scale = rule.scale_for(D);
  double cosines[D / 2], sines[D / 2];
  detail::mean_rotation<D>(frequencies, next, scorer.future, cosines, sines);
  workspace.logits.resize(std::size_t(length));
  std::fill_n(out, length, 0.0f);
  alignas(64) float key[D], product[D];
  for (index_t g = 0; g < group; ++g) {
    detail::rotated_moments<D>(seen, head * group + g, cosines, sines, workspace);
    const float *mean = workspace.mean_row.data(), *square = workspace.square.data();
    float top = -infinity;
    for (index_t slot = 0; slot < length; ++slot) {
      float& logit = workspace.logits[std::size_t(slot)] = -infinity;
      if (view.position(sequence, head, slot) < scorer.sinks) continue;
      load_key(view, sequence, head, slot, key);
      std::fill_n(product, D, 0.0f);
      for (int i = 0; i < D; ++i) {
        for (int j = 0; j < D; ++j) product[j] += key[i] * square[i * D + j];
      }
      float along = 0, spread = 0;
      for (int d = 0; d < D; ++d) {
        along += mean[d] * key[d];
        spread += product[d] * key[d];
      }
      logit = scorer.expect(along * scale, spread * scale * scale);
      if (!(logit < infinity)) logit = std::numeric_limits<float>::quiet_NaN();
      if (logit > top) top = logit;
    }
    double total = 0;
    for (float& logit : workspace.logits) {
      logit = logit == -infinity ? 0.0f : std::exp(logit - top);
      total += logit == logit ? double(logit) : 0.0;
    }
    for (index_t slot = 0; slot < length; ++slot) {
      out[slot] += workspace.logits[std::size_t(slot)] / float(total > 0 ? total : 1) / float(group);
    }
  }
  for (index_t slot = 0; slot < length; ++slot) {
    if (view.position(sequence, head, slot) < scorer.sinks) out[slot] = infinity;
  }
}

}  // namespace cpu
TESSERA_NAMESPACE_END
