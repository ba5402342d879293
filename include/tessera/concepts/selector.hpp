// Selector: which? Turns scores and a count into an ascending list of slots.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/types.hpp"
#include "../core/units.hpp"
#include "../math/top_k.hpp"

TESSERA_NAMESPACE_BEGIN

/// A policy that chooses slots of one head.
///   name, unit                                        its name; token_unit or block_unit
///   select(scores, n, tail, keep, out, scratch)       writes strictly ascending slots, returns how many: min(keep, n).
///       The newest `tail` of the n slots are always chosen (the newest `keep` of them when keep < tail).
///       Deterministic: score descending, ties to the lower index, NaN last.
///   check()                                           throws tessera::error on parameters that make no sense
template <class S>
concept selector = std::is_trivially_copyable_v<S> &&
    requires(const S s, const float* scores, index_t n, index_t* out, top_k_scratch& scratch) {
  typename S::unit;
  { S::name } -> std::convertible_to<const char*>;
  { s.select(scores, n, n, n, out, scratch) } -> std::same_as<index_t>;
  s.check();
};

template <class S>
constexpr bool check_selector() {
  static_assert(std::is_trivially_copyable_v<S>, "tessera: a selector must be trivially copyable");
  static_assert(
      requires { S::name; }, "tessera: a selector must name itself: static constexpr const char* name");
  static_assert(
      requires { typename S::unit; }, "tessera: a selector must name its unit: token_unit or block_unit");
  static_assert(selector<S>,
                "tessera: a selector needs index_t select(scores, n, tail, keep, out, scratch) and check()");
  return selector<S>;
}

TESSERA_NAMESPACE_END
