// Team: who works on one item? One lane on the CPU, a warp or a block on the GPU.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Lanes that run a policy body together.
///   size >= 1 (static), rank() in [0, size)
///   sum, max     every lane gets the total of all lanes
///   scan         exclusive prefix sum by rank
///   sync         all lanes arrive before any leaves
template <class T>
concept team_type = std::is_trivially_copyable_v<T> &&(T::size >= 1) && requires(const T t, float x, index_t i) {
  { t.rank() } -> std::convertible_to<int>;
  { t.sum(x) } -> std::same_as<float>;
  { t.sum(i) } -> std::same_as<index_t>;
  { t.max(x) } -> std::same_as<float>;
  { t.scan(i) } -> std::same_as<index_t>;
  t.sync();
};

template <class T>
constexpr bool check_team() {
  static_assert(std::is_trivially_copyable_v<T>, "tessera: a team must be trivially copyable");
  static_assert(
      requires { T::size; }, "tessera: a team must give its size: static constexpr int size");
  static_assert(team_type<T>, "tessera: a team needs rank, sum of float and index_t, max, scan and sync");
  return team_type<T>;
}

TESSERA_NAMESPACE_END
