// Attention: how stored tokens are read, and the rule that turns dot products into logits.
#pragma once

#include <concepts>

#include "../core/logit_rule.hpp"

TESSERA_NAMESPACE_BEGIN

/// A policy that attends the stored rows.
///   name
///   gathers     whether it reads a selection (true) or every stored token (false)
///   rule        scale, soft cap, masks, sinks
template <class A>
concept attention = requires(A& a) {
  { A::name } -> std::convertible_to<const char*>;
  { A::gathers } -> std::convertible_to<bool>;
  { a.rule } -> std::same_as<logit_rule&>;
};

/// Whether a type is an attention. A sentence says what it lacks.
template <class A>
constexpr bool check_attention() {
  static_assert(requires { A::name; }, "tessera: an attention must name itself: static constexpr const char* name");
  static_assert(requires { A::gathers; }, "tessera: an attention must say whether it gathers a selection");
  static_assert(attention<A>, "tessera: an attention must hold a logit_rule named rule");
  return attention<A>;
}

TESSERA_NAMESPACE_END
