// Scorer: what matters? Gives every stored token a score; higher is kept first.
#pragma once

#include <concepts>
#include <type_traits>
#include <vector>

#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Which queries a scorer has to see. The cache keeps what is declared here and nothing else.
enum class observes {
  nothing,      ///< positions only
  window,       ///< the last queries of a turn's prompt; scored once, when the prompt ends
  every_query,  ///< every query of the prompt and of decoding, accumulated as they come
  step          ///< the queries of one decode step: a retrieval scorer
};

/// Scores by position alone.
///   score(position of the token, position of the next token) -> float
template <class S>
concept positional_scorer = S::observed == observes::nothing&& requires(const S s, index_t at) {
  { s.score(at, at) } -> std::same_as<float>;
};

/// Scores by what queries make of a key. The backends compute logits; a scorer says what one query row adds to a token.
///   weigh(logit, lse) -> float   lse: the log-sum-exp of the row over all keys that it sees
/// A token's score is the sum of `weigh` over the observed rows and the query heads of its group, then `finish`.
template <class S>
concept attentive_scorer = S::observed != observes::nothing&& requires(const S s, float x) {
  { s.weigh(x, x) } -> std::same_as<float>;
};

/// A scorer that says how many of the prompt's last queries it observes.
template <class S>
concept has_window = requires(S& s) {
  { s.window } -> std::same_as<index_t&>;
};

/// A policy that turns what it observed into scores.
///   name                                 its published name, or the quantity
///   observed                             one of `observes`
///   comparable_across_heads              whether scores of two heads may be ranked against each other
///   window                               index_t, where it observes a window: how many of the last queries
///   protected_tail(budget)               newest tokens that are kept whatever their score
///   finish(in, n, out, scratch)          last pass over a head's scores (pooling); out != in
///   check(budget)                        throws tessera::error on parameters that make no sense
template <class S>
concept scorer = std::is_trivially_copyable_v<S> && (positional_scorer<S> || attentive_scorer<S>) &&
    (S::observed != observes::window || has_window<S>) && requires(const S s, const float* in, float* out, index_t n,
                                                            std::vector<float>& scratch) {
  { S::name } -> std::convertible_to<const char*>;
  { S::comparable_across_heads } -> std::convertible_to<bool>;
  { s.protected_tail(n) } -> std::same_as<index_t>;
  s.finish(in, n, out, scratch);
  s.check(n);
};

/// One sentence for each clause that a type may miss: nvcc gives no reason for a failed concept.
template <class S>
constexpr bool check_scorer() {
  static_assert(std::is_trivially_copyable_v<S>, "tessera: a scorer must be trivially copyable");
  static_assert(
      requires { S::name; }, "tessera: a scorer must name itself: static constexpr const char* name");
  static_assert(
      requires { S::observed; }, "tessera: a scorer must say what it observes: static constexpr observes observed");
  static_assert(
      requires { S::comparable_across_heads; },
      "tessera: a scorer must say whether its scores are comparable_across_heads");
  static_assert(positional_scorer<S> || attentive_scorer<S>,
                "tessera: a scorer that observes nothing needs float score(position, next_position); any other needs "
                "float weigh(logit, lse)");
  static_assert(
      requires(const S s, index_t n) {
        { s.protected_tail(n) } -> std::same_as<index_t>;
      },
      "tessera: scorer::protected_tail(budget) must return index_t");
  static_assert(S::observed != observes::window || has_window<S>,
                "tessera: a scorer that observes the window must hold index_t window, the queries it observes");
  static_assert(scorer<S>, "tessera: a scorer needs finish(in, n, out, scratch) and check(budget)");
  return scorer<S>;
}

TESSERA_NAMESPACE_END
