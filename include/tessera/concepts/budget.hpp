// Budget: how many? Says how many tokens each kv_head keeps.
#pragma once

#include <concepts>

#include "../core/layer_scores.hpp"
#include "../core/stage_plan.hpp"

TESSERA_NAMESPACE_BEGIN

/// A policy that allots a layer's tokens to its heads.
///   name                      its published name
///   compares_heads            whether it ranks scores of different heads against each other
///   tokens                    the budget: tokens per kv_head, the protected tail included
///   allot(scores, counts)     one count per head, in [min(protected tail, tokens), tokens of that head]
///   check()                   throws tessera::error on parameters that make no sense
template <class B>
concept budget = requires(const B b, B& m, const layer_scores& scores, index_t* counts) {
  { B::name } -> std::convertible_to<const char*>;
  { B::compares_heads } -> std::convertible_to<bool>;
  { m.tokens } -> std::same_as<index_t&>;
  b.allot(scores, counts);
  b.check();
};

/// A budget that is split over both stages once the length of the first prompt is known.
///   plan(prompt) -> stage_plan     prompt: tokens of the conversation's first prompt
///   planned(plan)                  the budget that allots the plan's `retained` tokens
template <class B>
concept planning_budget = budget<B> && requires(const B b, index_t prompt, const stage_plan& plan) {
  { b.plan(prompt) } -> std::same_as<stage_plan>;
  { b.planned(plan) } -> budget;
};

template <class B>
constexpr bool check_budget() {
  static_assert(
      requires { B::name; }, "tessera: a budget must name itself: static constexpr const char* name");
  static_assert(
      requires { B::compares_heads; }, "tessera: a budget must say whether it compares_heads");
  static_assert(
      requires(B & b) {
        { b.tokens } -> std::same_as<index_t&>;
      },
      "tessera: a budget must hold index_t tokens, the tokens per kv_head");
  static_assert(budget<B>, "tessera: a budget needs allot(layer_scores, counts) and check()");
  return budget<B>;
}

TESSERA_NAMESPACE_END
