// Schedule: when again? Says at which moments the keep set is chosen anew.
#pragma once

#include <concepts>

#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The moments at which a cache asks its schedule.
enum class moment {
  prefill_end,  ///< a turn's prompt has passed through every layer
  step_end      ///< a decode step has been attended
};

/// A policy that says when to retain.
///   name
///   after_steps         whether it can fire at step_end at all (known when compiling)
///   due(moment)         whether to retain now
template <class S>
concept schedule = requires(const S s, moment now) {
  { S::name } -> std::convertible_to<const char*>;
  { S::after_steps } -> std::convertible_to<bool>;
  { s.due(now) } -> std::same_as<bool>;
};

template <class S>
constexpr bool check_schedule() {
  static_assert(
      requires { S::name; }, "tessera: a schedule must name itself: static constexpr const char* name");
  static_assert(
      requires { S::after_steps; }, "tessera: a schedule must say whether it can fire after_steps");
  static_assert(schedule<S>, "tessera: a schedule needs bool due(moment)");
  return schedule<S>;
}

TESSERA_NAMESPACE_END
