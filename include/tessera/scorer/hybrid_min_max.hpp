// RocketKV's hybrid sparse attention: pages scored by their extreme keys, on the query's largest channels only.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../math/coverage.hpp"

TESSERA_NAMESPACE_BEGIN

/// Estimates a step's probabilities from pages of extreme keys on the `channels` channels with the largest |q|.
///
/// The group shares channels and sides: of a channel the larger values are read where the group's sum of q is above 0,
/// else the smaller ones. (So a page's logit bounds those of its keys only for query heads that agree with the sum.)
/// Each row's softmax runs over slots, with the scale made up for the channels left out; probabilities are summed over
/// the group, which orders as their mean. A page of one slot is its key: with all channels these are true
/// probabilities. Left to the budget (0), with c the ratio: page = ceil(sqrt(c)), or 1 where that exceeds c; channels =
/// D * page / c, rounded down. Then the pages' bytes are 1 / (2 c) of the keys' and values'.
/// Shapes   scores [kv_heads, tokens].   Unit: token; the slots of a page tie.
/// Errors   page or channels out of range, channels above k_dim: tessera::error.
/// Cost     one value per page and chosen channel is read; 2 * k_dim values per page are held, k_dim for page 1.
/// Paper    RocketKV, arXiv:2502.14051, Sec. 3.4 and Algorithm 1, rounding of its accuracy code. Differs: a sum of 0
///          takes the smaller values, as that code does and Algorithm 1 does not; fp32 softmax; no padding of the last
///          page. The newest page is left to its score, as by that code; with `newest=1` steps read it in any case.
struct hybrid_min_max {
  static constexpr const char* name = "hybrid_min_max";
  static constexpr observes observed = observes::step;
  static constexpr bool comparable_across_heads = true;
  static constexpr bool normalised = true;
  static constexpr bool adds_mean_value = false;

  index_t page = 0;      ///< 0: by the budget
  index_t channels = 0;  ///< 0: by the budget
  index_t newest = 0;    ///< newest tokens whose pages are read in any case

  hybrid_min_max fitted(double ratio, int k_dim) const {
    hybrid_min_max result = *this;
    if (page == 0) {
      const double side = std::ceil(std::sqrt(ratio));
      result.page = side > ratio ? 1 : index_t((std::min)(side, double(max_tokens)));
    }
    if (channels == 0) {
      result.channels = index_t(std::clamp(double(k_dim) * double(result.page) / ratio, 1.0, double(k_dim)));
    }
    require(result.channels <= k_dim, "channels", channels, "0 to the head dim, which is " + std::to_string(k_dim),
            "pass 0 to let the budget decide");
    return result;
  }

  TESSERA_HD bool takes_upper(float, float total) const { return total > 0; }
  TESSERA_HD float row_scale(float scale, float chosen, float whole) const {
    return coverage_scale(scale, chosen, whole);
  }

  index_t protected_tail(index_t read) const { return (std::min)(newest, read); }

  void check(index_t) const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("page", self.page, value_range{0, max_tokens},
          "consecutive stored tokens that are scored together; 0: by the budget");
    visit("channels", self.channels, value_range{0, largest_head_dim},
          "channels of a key that a score reads; 0: by the budget");
    visit("newest", self.newest, value_range{0, max_tokens}, "newest tokens whose pages are read in any case");
  }
};

static_assert(check_scorer<hybrid_min_max>());

TESSERA_NAMESPACE_END
