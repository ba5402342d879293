// Quest's scorer: the largest dot product that a key between a page's extremes could have.
#pragma once

#include <algorithm>
#include <cmath>

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a page by the sum over all channels of max(q * smallest, q * largest), summed over the query heads of the
/// group: an upper bound of each head's dot products with the page's keys.
///
/// Shapes   scores [kv_heads, tokens].   Unit: token; the slots of a page tie.
/// Errors   page out of range: tessera::error.
/// Cost     of each page one value per channel, two where the group's signs differ; 2 * k_dim values per page are held.
/// Paper    Quest, arXiv:2406.10774, Sec. 3.3 (page 16, no division by sqrt(k_dim), as its code). Differs: one choice
///          per kv_head by the sum over the group, as RocketKV's comparison has it (arXiv:2502.14051, App. A.3);
///          three pages at least are not forced in; page 0 takes that comparison's page, the ratio rounded up. The
///          newest page is read whatever its score, as by Quest's CUDA system: it has few keys at first, so its bound
///          is lower than that of full pages. `newest=0` leaves it to its score, as Quest's accuracy code does.
struct page_min_max {
  static constexpr const char* name = "page_min_max";
  static constexpr observes observed = observes::step;
  static constexpr bool comparable_across_heads = false;
  static constexpr bool normalised = false;
  static constexpr bool adds_mean_value = false;

  index_t page = 16;     ///< 0: by the budget
  index_t channels = 0;  ///< always all, once fitted
  index_t newest = 1;    ///< newest tokens whose pages are read in any case

  page_min_max fitted(double ratio, int k_dim) const {
    return {page > 0 ? page : index_t(std::clamp(std::ceil(ratio), 1.0, double(max_tokens))), k_dim, newest};
  }

  TESSERA_HD bool takes_upper(float own, float) const { return own > 0; }
  TESSERA_HD float row_scale(float, float, float) const { return 1; }

  index_t protected_tail(index_t read) const { return (std::min)(newest, read); }

  void check(index_t) const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("page", self.page, value_range{0, max_tokens},
          "consecutive stored tokens that are scored together; 0: by the budget");
    visit("newest", self.newest, value_range{0, max_tokens}, "newest tokens whose pages are read in any case");
  }
};

static_assert(check_scorer<page_min_max>());

TESSERA_NAMESPACE_END
