// Layout: stored how? Names the element type and the head dims, and which units of selection it can hold.
#pragma once

#include <concepts>

#include "../core/types.hpp"
#include "../core/units.hpp"

TESSERA_NAMESPACE_BEGIN

/// A policy that stores kept tokens.
///   name, element_type, k_dim, v_dim
///   accepts<Unit>                whether selections of that unit can be stored
///   token_bytes()                bytes of K and V that one token of one kv_head takes
template <class L>
concept layout = element<typename L::element_type> && requires {
  { L::name } -> std::convertible_to<const char*>;
  { L::k_dim } -> std::convertible_to<int>;
  { L::v_dim } -> std::convertible_to<int>;
  { L::template accepts<token_unit> } -> std::convertible_to<bool>;
  { L::token_bytes() } -> std::same_as<offset_t>;
};

template <class L>
constexpr bool check_layout() {
  static_assert(
      requires { typename L::element_type; }, "tessera: a layout must name its element_type");
  static_assert(
      requires { L::k_dim + L::v_dim; }, "tessera: a layout must give k_dim and v_dim");
  static_assert(
      requires { L::template accepts<token_unit>; },
      "tessera: a layout must say which units it accepts: template <class Unit> static constexpr bool accepts");
  static_assert(layout<L>, "tessera: a layout needs a name and static offset_t token_bytes()");
  return layout<L>;
}

TESSERA_NAMESPACE_END
