// Calibrates a profile: the share of its tokens that each head keeps when all heads of a layer compete, measured over
// many prompts.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "../core/error.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/plan/layer_scores.hpp"
#include "../math/share.hpp"
#include "../math/winners.hpp"
#include "profile.hpp"

TESSERA_NAMESPACE_BEGIN

/// The fraction of its tokens that each head of a layer keeps when the layer keeps its best
/// ceil(share * kv_heads * tokens) tokens of all heads. These include the protected tail of each head. A head keeps at
/// least one token.
/// Shapes   returns [kv_heads], each in (0, 1].   Cost  O(n) over the layer's scores on average.
inline host_vector<double> layer_wide_shares(const layer_scores& scores, double share) {
  offset_t tokens = 0, tails = 0;
  for (index_t h = 0; h < scores.kv_heads; ++h) {
    tokens += scores.tokens[h];
    tails += scores.tokens[h] - scores.candidates(h);
  }
  host_vector<index_t> won(std::size_t(scores.kv_heads));
  count_winners(scores, (std::max<offset_t>)(0, decimal_share(share).up(tokens) - tails), won.data());
  host_vector<double> result;
  for (index_t h = 0; h < scores.kv_heads; ++h) {
    const index_t kept = won[std::size_t(h)] + scores.tokens[h] - scores.candidates(h);
    result.push_back(scores.tokens[h] > 0 ? double((std::max)(1, kept)) / double(scores.tokens[h]) : 1.0);
  }
  return result;
}

/// Collects the shares of all heads of a model, prompt by prompt.
class calibration {
 public:
  calibration(index_t layers, index_t kv_heads) : layers_(layers), kv_heads_(kv_heads) {}

  /// Shapes   shares [layers, kv_heads], those of one prompt.
  /// Errors   shares of other counts: tessera::error.
  void add(host_vector<double> shares) {
    require(shares.size() == std::size_t(layers_) * std::size_t(kv_heads_), "shares of a prompt", shares.size(),
            std::to_string(layers_) + " layers of " + std::to_string(kv_heads_) + " KV heads",
            "pass one share for each head of the model");
    samples_.push_back(std::move(shares));
  }
  index_t samples() const { return index_t(samples_.size()); }
  const host_vector<double>& sample(index_t i) const { return samples_[std::size_t(i)]; }

  /// The profile: mean and sample standard deviation over the prompts (divisor: prompts - 1; 0 for a single prompt),
  /// and the budget min(1, mean + alpha * deviation).
  /// Errors   no samples: tessera::error.
  profile finish(double share, double alpha) const {
    require(!samples_.empty(), "samples", 0, "at least 1", "add the shares of a prompt");
    profile result;
    result.share = share;
    result.samples = samples();
    result.layers = layers_;
    result.kv_heads = kv_heads_;
    const std::size_t heads = std::size_t(layers_) * std::size_t(kv_heads_);
    result.mean.assign(heads, 0);
    result.deviation.assign(heads, 0);
    result.budget.assign(heads, 0);
    for (std::size_t h = 0; h < heads; ++h) {
      for (const auto& one : samples_) result.mean[h] += one[h] / double(samples_.size());
      for (const auto& one : samples_) result.deviation[h] += (one[h] - result.mean[h]) * (one[h] - result.mean[h]);
      result.deviation[h] = samples_.size() > 1 ? std::sqrt(result.deviation[h] / double(samples_.size() - 1)) : 0.0;
      result.mean[h] = (std::min)(1.0, result.mean[h]);
    }
    result.set_alpha(alpha);
    return result;
  }

 private:
  index_t layers_, kv_heads_;
  host_vector<host_vector<double>> samples_;
};

/// Spearman's rank correlation of two rankings of the same heads. Equal numbers share the mean of their ranks. 1: the
/// same order; 0 if all numbers of one ranking are equal.
/// Errors   `a` and `b` of different sizes: tessera::error.
inline double rank_correlation(const host_vector<double>& a, const host_vector<double>& b) {
  require(a.size() == b.size(), "numbers of the second order", b.size(),
          "those of the first, which are " + std::to_string(a.size()), "compare two orders of the same heads");
  const auto ranks = [](const host_vector<double>& of) {
    host_vector<std::size_t> order(of.size());
    std::iota(order.begin(), order.end(), std::size_t(0));
    std::sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) { return of[x] < of[y]; });
    host_vector<double> result(of.size());
    for (std::size_t first = 0, last = 0; first < order.size(); first = last) {
      while (last < order.size() && of[order[last]] == of[order[first]]) ++last;
      for (std::size_t i = first; i < last; ++i) result[order[i]] = double(first + last - 1) / 2;
    }
    return result;
  };
  const auto x = ranks(a), y = ranks(b);
  const double middle = (double(x.size()) - 1) / 2;
  double both = 0, of_x = 0, of_y = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    both += (x[i] - middle) * (y[i] - middle);
    of_x += (x[i] - middle) * (x[i] - middle);
    of_y += (y[i] - middle) * (y[i] - middle);
  }
  return of_x > 0 && of_y > 0 ? both / std::sqrt(of_x * of_y) : 0.0;
}

TESSERA_NAMESPACE_END
