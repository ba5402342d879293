// Schedule: when the first stage chooses.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The moments at which a cache asks its schedule.
enum class moment {
  prompt_end,  ///< a turn's prompt has passed through every layer
  step_begin,  ///< a decode step's tokens are stored and not yet attended
  step_end,    ///< a decode step has been attended
  chunk_end    ///< a chunk of a prompt has been attended, and another one is about to be written
};

/// The clock of a conversation at a moment.
struct turn_clock {
  index_t turn = 0;     ///< ended prompts, one that ends now included
  index_t steps = 0;    ///< decode steps since the turn's prompt ended, the present one included
  index_t outputs = 0;  ///< tokens of these steps
  index_t tokens = 0;   ///< tokens of the present step
  index_t waiting = 0;  ///< prompt tokens since the first stage chose last, or since the turn began
  index_t coming = 0;   ///< prompt tokens that are about to be written
};

/// A policy that says when the first stage chooses.
///   name
///   fires_at(moment)        static constexpr: whether it can fire at this kind of moment
///   due(moment, clock)      whether to choose now; called on the host before the moment. At a chunk's end it may not
///                           become false where more tokens wait or come: the bound of a cache relies on it
/// One with parameters has check() and parameters(self, visit) too.
template <class S>
concept schedule = requires(const S s, moment now, const turn_clock& at) {
  { S::name } -> std::convertible_to<const char*>;
  { std::bool_constant<S::fires_at(moment::step_end)>::value } -> std::convertible_to<bool>;
  { s.due(now, at) } -> std::same_as<bool>;
};

/// Whether a type is a schedule. A sentence says what it lacks.
template <class S>
constexpr bool check_schedule() {
  static_assert(requires { S::name; }, "tessera: a schedule must name itself: static constexpr const char* name");
  static_assert(
      requires { std::bool_constant<S::fires_at(moment::step_end)>::value; },
      "tessera: a schedule must say when it can fire at all: static constexpr bool fires_at(moment)");
  static_assert(schedule<S>, "tessera: a schedule needs bool due(moment, const turn_clock&)");
  return schedule<S>;
}

/// Whether a schedule can fire in decode steps.
template <schedule S>
inline constexpr bool fires_in_steps = S::fires_at(moment::step_begin) || S::fires_at(moment::step_end);

TESSERA_NAMESPACE_END
