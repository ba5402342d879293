// Scope: whose? Says whether every kv_head chooses for itself, or all heads of a layer together.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/config.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A scope in which all heads of a layer keep the same slots. Their scores become one row before the scorer's last
/// pass; budget and selector then see one head.
///   join(joined, score) -> float     joined: of the heads before; the first head's score stands alone. TESSERA_HD
///   joined(total, heads) -> float    heads: query heads that the total adds up, or kv_heads where no query was asked
///                                    or a group's rows are not summed. TESSERA_HD
template <class S>
concept joining_scope = requires(const S s, float score, index_t heads) {
  { s.join(score, score) } -> std::same_as<float>;
  { s.joined(score, heads) } -> std::same_as<float>;
};

/// A joining scope in which layers keep what another one has chosen, where a cache chooses at a prompt's end.
///   chooser(place) -> index_t        of the layers that follow the recipe, counted from 0: whose set the place-th
///                                    keeps; at most `place`
///   check(), parameters(self, visit) as every policy has them
template <class S>
concept reusing_scope = joining_scope<S> && requires(const S s, index_t place) {
  { s.chooser(place) } -> std::same_as<index_t>;
  s.check();
};

/// A scope in which one threshold runs over the heads of all layers.
template <class S>
concept model_scope = requires {
  requires S::over_model;
};

/// A scope in which the query heads of a group may choose apart, each a list of its own over what their kv_head stores.
/// Only for what is read: what is stored is their kv_head's.
///   by_query_head() -> bool          whether they do
///   check(), parameters(self, visit) as every policy has them
template <class S>
concept splitting_scope = requires(const S s) {
  { s.by_query_head() } -> std::same_as<bool>;
  s.check();
};

/// A policy that says which heads choose together.
///   name, and `over_model`, or `join` and `joined` where the heads of a layer do; without them every kv_head chooses
///   for itself
template <class S>
concept scope = std::is_trivially_copyable_v<S> && requires {
  { S::name } -> std::convertible_to<const char*>;
} &&(joining_scope<S> || !requires { &S::join; });

/// Whether a type is a scope; what it lacks is said in a sentence.
template <class S>
constexpr bool check_scope() {
  static_assert(
      requires { S::name; }, "tessera: a scope must name itself: static constexpr const char* name");
  static_assert(scope<S>,
                "tessera: a scope over a layer needs float join(joined, score) and float joined(total, heads)");
  return scope<S>;
}

TESSERA_NAMESPACE_END
