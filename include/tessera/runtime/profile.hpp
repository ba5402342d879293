// The calibrated profile of a model: the share of a prompt that each kv_head keeps.
#pragma once

#include <algorithm>
#include <string>

#include "../core/error.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/parameters.hpp"
#include "../core/plan/share_table.hpp"

TESSERA_NAMESPACE_BEGIN

/// Mean and deviation of the shares over the sampled prompts, and the budget: min(1, mean + alpha * deviation), or
/// other numbers that the author of the profile set.
/// Shapes   mean, deviation, budget [layers, kv_heads].
/// Paper    TANGRAM, arXiv:2606.06302, Sec. 4.1.
struct profile {
  static constexpr value_range<double> alphas{0, 1e6};

  std::string model, method;
  double share = 0;  ///< the share of a layer's tokens that was kept during calibration
  index_t samples = 0;
  double alpha = 2;
  index_t layers = 0, kv_heads = 0;
  host_vector<double> mean, deviation, budget;

  /// The budgets of all layers.
  share_table shares() const { return {budget.data(), layers, kv_heads}; }
  /// The budgets of one layer, for a cache of that layer alone.
  share_table shares(index_t layer) const {
    value_range{0, layers - 1}.check("layer", layer, "pass a layer of the profile");
    return {budget.data() + offset_t(layer) * kv_heads, 1, kv_heads};
  }

  /// Recomputes the budget from mean and deviation with another alpha.
  void set_alpha(double chosen) {
    alphas.check("alpha", chosen, "pass how many deviations above its mean a head keeps");
    alpha = chosen;
    for (std::size_t i = 0; i < budget.size(); ++i) budget[i] = (std::min)(1.0, mean[i] + alpha * deviation[i]);
  }

  /// Scales the budget so that its mean is `share`. What heads exceed 1 by goes to the other heads.
  void renormalise() {
    double wanted = share * double(budget.size());
    host_vector<double> all = budget;
    std::sort(all.begin(), all.end(), [](double a, double b) { return a > b; });
    double left = 0;
    for (const double one : all) left += one;
    double scale = wanted / left;
    for (const double one : all) {
      if (one * scale <= 1) break;
      wanted -= 1;  // the largest remaining head keeps everything
      left -= one;
      scale = left > 0 ? wanted / left : 0;
    }
    for (double& one : budget) one = (std::min)(1.0, one * scale);
  }

  /// Errors   tables of the wrong size, a share, alpha or table entry out of its range: tessera::error.
  void check() const {
    require(share > 0 && share <= 1, "share of the profile", share, "in (0, 1]", "calibrate it again");
    require(samples >= 1, "samples of the profile", samples, "at least 1", "calibrate it again");
    alphas.check("alpha of the profile", alpha, "calibrate it again");
    require(layers >= 1 && kv_heads >= 1, "layers and kv_heads of the profile",
            std::to_string(layers) + " and " + std::to_string(kv_heads), "at least 1 each", "calibrate it again");
    const std::size_t heads = std::size_t(layers) * std::size_t(kv_heads);
    check_table("mean", mean, heads, 0);
    check_table("deviation", deviation, heads, -1);
    check_table("budget", budget, heads, 0);
  }

 private:
  /// Checks a table's size, and that its numbers are above `least` and at most 1.
  void check_table(const char* name, const host_vector<double>& table, std::size_t heads, double least) const {
    require(table.size() == heads, std::string(name) + " of the profile", table.size(),
            std::to_string(layers) + " layers of " + std::to_string(kv_heads) + " KV heads", "calibrate it again");
    for (std::size_t i = 0; i < heads; ++i) {
      const bool allowed = least < 0 ? table[i] >= 0 && table[i] <= 1 : table[i] > least && table[i] <= 1;
      require(allowed,
              std::string(name) + " of layer " + std::to_string(i / std::size_t(kv_heads)) + ", kv_head " +
                  std::to_string(i % std::size_t(kv_heads)),
              table[i], least < 0 ? "in [0, 1]" : "in (0, 1]", "calibrate the profile again");
    }
  }
};

TESSERA_NAMESPACE_END
