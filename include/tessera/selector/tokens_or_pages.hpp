// The best tokens or the best whole pages, as a run-time parameter says.
#pragma once

#include "../core/parameters.hpp"
#include "top_pages.hpp"
#include "top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Chooses as `top_tokens` or as `top_pages` does.
///
/// RocketKV's accuracy code selects tokens and cuts inside the last page (at its lower slots here); its GPU code
/// selects pages, which reads longer runs.
/// Ties     to the lower slot or page.   Cost  O(n) on average.
struct tokens_or_pages {
  static constexpr const char* name = "tokens_or_pages";
  using unit = page_unit;

  selection_unit choice = selection_unit::token;
  index_t page = 1;  ///< the scorer's, in a recipe

  index_t select(const float* scores, index_t n, index_t tail, index_t keep, index_t* out,
                 top_k_scratch& scratch) const {
    if (choice == selection_unit::token) return top_tokens{}.select(scores, n, tail, keep, out, scratch);
    return top_pages{page}.select(scores, n, tail, keep, out, scratch);
  }
  index_t select_pages(const float* scores, index_t n, index_t tail, index_t keep, index_t* out,
                       top_k_scratch& scratch) const {
    return top_pages{page}.select_pages(scores, n, tail, keep, out, scratch);
  }

  void check() const {}

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("unit", self.choice, one_word_of{"token or page"}, "what a step chooses: single tokens, or whole pages");
  }
};

static_assert(check_selector<tokens_or_pages>());

/// What a selector chooses behind an estimate of pages.
template <class Selector>
constexpr selection_unit unit_chosen_by(const Selector& selector) {
  constexpr bool says = requires { selector.choice; }, tokens = std::is_same_v<Selector, top_tokens>;
  static_assert(says || tokens || std::is_same_v<typename Selector::unit, page_unit>,
                "tessera: an estimate chooses tokens or whole pages");
  if constexpr (says) {
    return selector.choice;
  } else {
    return tokens ? selection_unit::token : selection_unit::page;
  }
}

TESSERA_NAMESPACE_END
