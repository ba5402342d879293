// Budget: how many tokens each kv_head keeps.
#pragma once

#include <algorithm>
#include <concepts>

#include "../core/plan/layer_extent.hpp"
#include "../core/plan/layer_scores.hpp"
#include "../core/plan/stage_plan.hpp"
#include "../math/winners.hpp"

TESSERA_NAMESPACE_BEGIN

/// A budget that goes by lengths alone.
///   share(head_extent) -> index_t     tokens that the head keeps; TESSERA_HD, for all backends
template <class B>
concept length_budget = requires(const B b, const head_extent& head) {
  { b.share(head) } -> std::same_as<index_t>;
};

/// A budget for which heads compete. Of all candidates of a layer, the best kv_heads * base win; base = tokens - tail.
///   share_won(won, base, tail) -> index_t     tokens of a head with `won` winners; TESSERA_HD, for all backends
template <class B>
concept winners_budget = requires(const B b, index_t n) {
  { b.share_won(n, n, n) } -> std::same_as<index_t>;
};

/// A budget with its own implementation on the host.
///   allot(scores, counts)     one count per head, in [min(protected tail, tokens), tokens of that head]
template <class B>
concept host_budget = requires(const B b, const layer_scores& scores, index_t* counts) { b.allot(scores, counts); };

/// A policy that allots a layer's tokens to its heads.
///   name                      its published name
///   compares_heads            whether it ranks scores of different heads against each other
///   tokens                    the budget: tokens per kv_head, the protected tail included
///   share, share_won or allot see above; the backends limit a head's count to between its tail and its stored tokens.
///                             A share may not fall where more tokens are stored: the bound of a cache relies on it
///   check()                   throws tessera::error on parameters that make no sense
/// It may also say
///   fits(layer_extent) -> bool                  whether all of a layer stays, whatever the scores; else: longest <=
///                                               tokens
///   upper_bound(layer_extent) -> token_bound    upper bounds of the tokens that it gives, on the host; else: all
///                                               stored ones
///   check_model(layers, kv_heads)               throws tessera::error for a model of other counts
///   fitted(prompt) -> budget                    the budget of a conversation that has taken `prompt` tokens: made
///                                               whenever a turn's prompt ends
///   table() -> share_table&                     numbers by layer and kv_head in the caller's memory: devices copy them
///   even_heads                                  true: heads of equal length keep equally many, exactly `upper_bound`;
///                                               else: false
template <class B>
concept budget = (length_budget<B> || winners_budget<B> || host_budget<B>) && requires(const B b, B& m) {
  { B::name } -> std::convertible_to<const char*>;
  { B::compares_heads } -> std::convertible_to<bool>;
  { m.tokens } -> std::same_as<index_t&>;
  b.check();
};

/// A budget that is split over both stages whenever a turn's prompt ends.
///   plan(prompt) -> stage_plan     prompt: tokens that the conversation has taken until then
///   require_room(plan, window)     throws tessera::error where a first stage's window does not fit the plan
///   planned(plan)                  the budget that allots the plan's `retained` tokens
template <class B>
concept planning_budget = budget<B> && requires(const B b, index_t prompt, const stage_plan& plan) {
  { b.plan(prompt) } -> std::same_as<stage_plan>;
  b.require_room(plan, prompt);
  { b.planned(plan) } -> budget;
};

/// A budget that gives each head a share of a turn's new tokens. The head's tokens of earlier turns come on top. In a
/// first stage that drops tokens, chosen ones stay (core/prompt/prompt_reach.hpp).
///   fitted(prompt)      the budget of a conversation that has taken `prompt` tokens
///   knows_shares()      whether it can say how many tokens a head keeps of a part of a prompt
/// It may also say
///   check_model(layers, kv_heads)   throws tessera::error if it was made for another model
template <class B>
concept share_budget = length_budget<B> && requires(const B b, index_t prompt) {
  { b.fitted(prompt) } -> std::same_as<B>;
  { b.knows_shares() } -> std::same_as<bool>;
};

/// Whether a budget keeps all of a layer, whatever the scores.
template <class B>
TESSERA_HD bool keeps_all(const B& budget, const layer_extent& layer) {
  if constexpr (requires { budget.fits(layer); }) {
    return budget.fits(layer);
  } else {
    return layer.longest <= budget.tokens;
  }
}

/// Upper bounds of the tokens that a budget gives to the heads of a layer.
template <class B>
token_bound bound_kept(const B& budget, const layer_extent& layer) {
  const offset_t all = offset_t(layer.kv_heads) * layer.longest;
  if constexpr (requires { budget.upper_bound(layer); }) {
    const token_bound bound = budget.upper_bound(layer);
    return {(std::min)(layer.longest, bound.longest), (std::min)(all, bound.total)};
  } else {
    return {layer.longest, all};
  }
}

/// Whether heads of equal length keep equally many: exactly `bound_kept`.
template <class B>
inline constexpr bool keeps_heads_even = [] {
  if constexpr (requires { B::even_heads; }) return bool(B::even_heads);
  return false;
}();

/// The number of tokens that a budget gives to each head, computed on the host.
template <class B>
void allot_counts(const B& budget, const layer_scores& scores, index_t* counts) {
  const index_t heads = scores.kv_heads, tail = scores.protected_tail;
  if constexpr (host_budget<B>) {
    budget.allot(scores, counts);
  } else if constexpr (length_budget<B>) {
    for (index_t h = 0; h < heads; ++h) counts[h] = budget.share(scores.extent(h));
  } else {
    const index_t base = (std::max)(0, budget.tokens - tail);
    index_t longest = 0;
    for (index_t h = 0; h < heads; ++h) longest = (std::max)(longest, scores.candidates(h));
    if (base >= longest) {
      std::copy_n(scores.tokens, heads, counts);
      return;
    }
    count_winners(scores, offset_t(heads) * base, counts);
    for (index_t h = 0; h < heads; ++h) {
      counts[h] = (std::min)(scores.tokens[h], budget.share_won(counts[h], base, tail));
    }
  }
}

/// Whether a type is a budget. A sentence says what it lacks.
template <class B>
constexpr bool check_budget() {
  static_assert(requires { B::name; }, "tessera: a budget must name itself: static constexpr const char* name");
  static_assert(requires { B::compares_heads; }, "tessera: a budget must say whether it compares_heads");
  static_assert(
      requires(B& b) {
        { b.tokens } -> std::same_as<index_t&>;
      }, "tessera: a budget must hold index_t tokens, the tokens per kv_head");
  static_assert(length_budget<B> || winners_budget<B> || host_budget<B>,
                "tessera: a budget needs index_t share(head_extent), index_t share_won(won, base, tail) or "
                "allot(layer_scores, counts)");
  static_assert(budget<B>, "tessera: a budget needs check()");
  return budget<B>;
}

/// Whether devices can run it.
template <class B>
constexpr bool check_device_budget() {
  static_assert(length_budget<B> || winners_budget<B>,
                "tessera: this budget runs on the host only; a device needs index_t share(head_extent) or "
                "index_t share_won(won, base, tail), with TESSERA_HD");
  return length_budget<B> || winners_budget<B>;
}

TESSERA_NAMESPACE_END
