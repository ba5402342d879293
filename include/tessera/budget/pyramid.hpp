// PyramidKV's budget: many tokens in the first layers, few in the last.
#pragma once

#include <limits>

#include "../concepts/budget.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Allots tokens that fall linearly over the layers, `tokens` per kv_head on average (slightly above: the step is
/// rounded down).
///
/// With base = tokens - tail: the last layer gets about base / beta, the first 2 * base - base / beta, each plus the
/// tail. A prompt shorter than 2 * base falls back to the same count in every layer.
/// Errors   a parameter out of range; `layer` without `layers`: tessera::error.
/// Cost     a few integer operations a head.
/// Paper    PyramidKV, arXiv:2406.02069; integer arithmetic and branches of its reference code. A model of one layer
///          gets the tail and base.
struct pyramid {
  static constexpr const char* name = "pyramid";
  static constexpr bool compares_heads = false;
  static constexpr value_range<index_t> budgets = token_budgets;
  static constexpr index_t max_layers = 1 << 16;

  index_t tokens = 1024;
  index_t beta = 20;
  index_t layer = -1;   ///< -1: the cache's own; set where one layer of a model is compressed alone
  index_t layers = -1;  ///< -1: the layers of the cache

  /// The line over the layers, tail excluded, for a prompt with `candidates` tokens outside the tail.
  struct line {
    index_t least, largest, step;
  };
  TESSERA_HD line plan(index_t depth, index_t base, index_t candidates) const {
    line result{base / beta, 2 * base - base / beta, 0};
    if (result.largest >= candidates) {
      result.largest = candidates;
      result.least = 2 * base - result.largest;
    }
    result.step = depth > 1 ? (result.largest - result.least) / (depth - 1) : 0;
    return result;
  }

  TESSERA_HD index_t share(const head_extent& head) const {
    const index_t stored = head.stored, tail = head.protected_tail, base = tokens > tail ? tokens - tail : 0;
    const index_t depth = layers > 0 ? layers : head.layers, index = layer >= 0 ? layer : head.layer;
    index_t kept = base;
    if (depth > 1 && stored >= 2 * base) {
      const line over_layers = plan(depth, base, stored > tail ? stored - tail : 0);
      kept = over_layers.largest - index * over_layers.step;
    }
    return tail + kept < stored ? tail + kept : stored;
  }

  token_bound upper_bound(const layer_extent& extent) const {
    const index_t tail = extent.protected_tail, base = (std::max)(0, tokens - tail);
    const index_t depth = layers > 0 ? layers : extent.layers, index = layer >= 0 ? layer : extent.layer;
    // The steepest line, or a flatter one through the base; steps are rounded down, so late layers get a little more.
    const line steepest = plan(depth, base, (std::numeric_limits<index_t>::max)());
    const index_t kept = (std::max)(base, steepest.largest - index * steepest.step) + depth;
    const index_t longest = (std::min)(extent.longest, (std::max)(tokens, tail + kept));
    return {longest, offset_t(extent.kv_heads) * longest};
  }

  void check() const {
    budgets.check("budget", tokens, "pass how many tokens each head may keep");
    check_parameters(*this);
    require((layer < 0 && layers < 0) || (layers >= 1 && layer >= 0 && layer < layers), "layer",
            std::to_string(layer) + " of " + std::to_string(layers) + " layers",
            "both unset (-1), or 0 <= layer < layers", "pass layer and layers together, or neither");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("beta", self.beta, value_range{1, max_tokens},
          "the last layer keeps about 1 / beta of the average outside the window");
    visit("layer", self.layer, value_range{-1, max_layers - 1},
          "which layer this is, where it is compressed alone; -1 for the cache's own");
    visit("layers", self.layers, value_range{-1, max_layers},
          "how many layers the model has, given with layer; -1 for the cache's own");
  }
};

static_assert(check_budget<pyramid>());

TESSERA_NAMESPACE_END
