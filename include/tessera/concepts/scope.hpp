// Scope: which heads choose together. Every kv_head chooses for itself, or several heads make one choice.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/config.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A scope in which all heads of a layer keep the same slots. Their scores become one row before the scorer's last
/// pass; budget and selector then see one head.
///   join(joined, score) -> float     joined: of the previous heads, at first the first head's score. TESSERA_HD
///   joined(total, heads) -> float    heads: query heads in the total, or kv_heads where there are no queries or a
///                                    group's rows are not summed. TESSERA_HD
template <class S>
concept joining_scope = requires(const S s, float score, index_t heads) {
  { s.join(score, score) } -> std::same_as<float>;
  { s.joined(score, heads) } -> std::same_as<float>;
};

/// A joining scope in which layers reuse the choice of an earlier one, where a cache chooses at a prompt's end.
///   chooser(i) -> index_t            of the layers that follow the recipe, counted from 0: the one whose choice the
///                                    i-th keeps; at most `i`
///   check(), parameters(self, visit) as every policy has them
template <class S>
concept reusing_scope = joining_scope<S> && requires(const S s, index_t place) {
  { s.chooser(place) } -> std::same_as<index_t>;
  s.check();
};

/// A scope with one threshold for the heads of all layers.
template <class S>
concept model_scope = requires { requires S::over_model; };

/// A scope in which the query heads of a group may choose separately, each among the stored tokens of its kv_head. It
/// is only for choices of what is read, because tokens are stored by kv_head.
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
} && (joining_scope<S> || !requires { &S::join; });

/// Whether a type is a scope. A sentence says what it lacks.
template <class S>
constexpr bool check_scope() {
  static_assert(requires { S::name; }, "tessera: a scope must name itself: static constexpr const char* name");
  static_assert(scope<S>,
                "tessera: a scope over a layer needs float join(joined, score) and float joined(total, heads)");
  return scope<S>;
}

TESSERA_NAMESPACE_END
