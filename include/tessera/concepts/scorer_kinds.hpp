// The kinds of scorers: what each kind scores by, and which members it needs.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The queries that a scorer observes. The cache keeps what is declared here and nothing else.
enum class observes {
  nothing,      ///< no query: positions, or stored rows
  window,       ///< the last queries of a turn's prompt; scored once, when the prompt ends
  every_query,  ///< every query of the prompt and of decoding, accumulated as they come
  /// queries of a text that passes through the model once more before a prompt ends, accumulated as they come
  rereading,
  statistics,  ///< mean and covariance of the queries of a turn's prompt
  given,       ///< no query: the engine sets the scores of tokens
  step         ///< the queries of one decode step: a retrieval scorer
};

/// Whether scores accumulate beside the tokens, in a column of the store.
constexpr bool lies_beside_tokens(observes observed) {
  return observed == observes::every_query || observed == observes::rereading || observed == observes::given;
}

/// How the weights of several query rows become a token's score. A scorer of queries names one as `rows`; else: sum.
enum class row_join {
  sum,
  mean,     ///< the sum divided by the rows; of a window
  maximum,  ///< the largest weight; weights must not be negative
  newest    ///< the weight of the newest query alone; its rows are summed over the group
};

/// The stored rows that a scorer of contents reads.
enum class stored_rows { keys, values };

/// Scores by position alone.
///   score(position of the token, position of the next token) -> float
template <class S>
concept positional_scorer = S::observed == observes::nothing && requires(const S s, index_t at) {
  { s.score(at, at) } -> std::same_as<float>;
};

/// Scores by a token's stored row. Backends run over the channels of the row; sums are over channels, in any order.
///   reads                          one of `stored_rows`
///   measures                       static constexpr int: how many sums a row has, at most 4
///   measure(x, anchor, sums)       adds a channel's element to sums [measures]; anchor: see below, 0 without one.
///                                  TESSERA_HD
///   score(sums) -> float           of the row. TESSERA_HD
template <class S>
concept contents_scorer = S::observed == observes::nothing && requires(const S s, float x, float* sums) {
  { S::reads } -> std::convertible_to<stored_rows>;
  { std::integral_constant<int, S::measures>::value } -> std::convertible_to<int>;
  s.measure(x, x, sums);
  { s.score(static_cast<const float*>(sums)) } -> std::same_as<float>;
};

/// A scorer of contents that compares each row with an anchor: the mean of the head's stored rows, each of them scaled.
///   anchor_scale(sums) -> float    of a row, from its measures with anchor 0. TESSERA_HD
template <class S>
concept anchored_scorer = contents_scorer<S> && requires(const S s, const float* sums) {
  { s.anchor_scale(sums) } -> std::same_as<float>;
};

/// The scale of a channel's elements: x * factor + shift.
struct channel_scale {
  float factor, shift;
};

/// Scores keys and values beside those of the tokens behind them. A head's slots from `sinks` on are cut into
/// partitions of `lag`; each row of a partition is measured against the next partition, so its last full one and what
/// follows have no score of this kind. Scores of a partition are ranked: the largest softmax of its spreads, keys' and
/// values' averaged, has the highest rank; ties to the lower slot.
///   sinks, lag                         index_t members; lag at least 2
///   measures                           static constexpr int, at most 4
///   scale(low, high) -> channel_scale  of a channel: between the smallest and the largest finite element that the next
///                                      partition has in it (infinity and -infinity: it has none). TESSERA_HD
///   measure(x, scale, sums)            adds an element on its channel's scale. TESSERA_HD
///   spread(sums, channels) -> float    of a row. TESSERA_HD
///   ranked(rank) -> float              the score of a slot that ranks above `rank` slots of its partition. TESSERA_HD
///   outside(slot, stored) -> float     the score of a slot outside every partition that has a next one; the head
///                                      stores `stored` slots. TESSERA_HD
template <class S>
concept lagged_scorer = S::observed == observes::nothing && requires(const S s, float x, float* sums, index_t n) {
  { s.sinks } -> std::convertible_to<index_t>;
  { s.lag } -> std::convertible_to<index_t>;
  { std::integral_constant<int, S::measures>::value } -> std::convertible_to<int>;
  { s.scale(x, x) } -> std::same_as<channel_scale>;
  s.measure(x, channel_scale{}, sums);
  { s.spread(static_cast<const float*>(sums), n) } -> std::same_as<float>;
  { s.ranked(n) } -> std::same_as<float>;
  { s.outside(n, n) } -> std::same_as<float>;
};

/// Scores by the logits of queries. The backends compute logits; a scorer weighs one query row's logit of a token.
///   weigh(logit, lse) -> float   lse: the log-sum-exp of the row over all keys that it sees
/// A token's score is the sum of `weigh` over the observed rows and the query heads of its group, then `finish`.
template <class S>
concept attentive_scorer =
    S::observed != observes::nothing && S::observed != observes::given && requires(const S s, float x) {
      { s.weigh(x, x) } -> std::same_as<float>;
    };

/// Scores by statistics of queries. Backends undo RoPE on a prompt's queries from position `sinks` on, compute their
/// mean and covariance, and apply the mean of RoPE's rotations over the next `future` positions. From these follow the
/// mean and the variance of a key's logits. A score is the softmax of `expect` over the stored tokens after the sinks,
/// averaged over the group. The score of sinks is infinity.
///   sinks, future                        index_t members; future at least 1
///   expect(mean, variance) -> float      TESSERA_HD
template <class S>
concept statistical_scorer = S::observed == observes::statistics && requires(const S s, float x) {
  { s.sinks } -> std::convertible_to<index_t>;
  { s.future } -> std::convertible_to<index_t>;
  { s.expect(x, x) } -> std::same_as<float>;
};

/// A retrieval scorer that ranks segments of the text. All tokens of a segment have one score, from the mean of the
/// segment's stored keys and the mean query of the answer's current segment. Backends keep both means.
///   start                        first stored slots that come before all others
///   whole                        a step reads everything while the answer's present segment has at most `whole` tokens
///   weigh(logit, 0) -> float     of the two means' logit, summed over the group
template <class S>
concept segment_mean_scorer = S::observed == observes::step && attentive_scorer<S> && requires(const S s) {
  { s.start } -> std::convertible_to<index_t>;
  { s.whole } -> std::convertible_to<index_t>;
};

/// A retrieval scorer that reads an estimate in place of the keys. A page is a run of `page` consecutive stored slots.
/// Its estimate is the smallest and the largest value of each channel (core/stored/page_extrema.hpp); for a page of one
/// slot it is the key. The scorer reads `channels` of the channels c: those with the largest sums of |q| over the rows,
/// ties to the lower channel. A row r is one query head of the group, of one token of the step. Backends compute for
/// row r and page p
///   logit[r, p] = sum over c of q[r, c] * (takes_upper(q[r, c], sum over rows of q[., c]) ? upper : lower)[c, p],
/// times row_scale. A slot's score is the sum over the rows that see it of its page's logit or, where `normalised`, of
/// the softmax of these logits, soft-capped by the rule, over the slots that the row sees: a page counts its slots. A
/// logit that is NaN or +infinity is left out of its row's softmax and ranks its page last; a row with a query that is
/// not finite adds nothing; a slot that no row sees ranks last.
///   page, channels                     index_t; 0 where they follow from the budget, at least 1 once fitted
///   fitted(ratio, k_dim)               this scorer with both set: keys are to be estimated from 1 / ratio of their
///                                      bytes
///   normalised                         see above
///   adds_mean_value                    whether the mean of V replaces tokens that are not attended
///   takes_upper(own, total) -> bool
///   row_scale(scale, chosen, whole) -> float   scale: the rule's; sums of the row's |q| over the chosen and all
///                                              channels
template <class S>
concept paged_scorer = S::observed == observes::step && requires(const S s, float x, double ratio, int k_dim) {
  { s.page } -> std::convertible_to<index_t>;
  { s.channels } -> std::convertible_to<index_t>;
  { s.fitted(ratio, k_dim) } -> std::same_as<S>;
  { S::normalised } -> std::convertible_to<bool>;
  { S::adds_mean_value } -> std::convertible_to<bool>;
  { s.takes_upper(x, x) } -> std::same_as<bool>;
  { s.row_scale(x, x, x) } -> std::same_as<float>;
};

/// A scorer whose scores the engine sets.
template <class S>
concept given_scorer = S::observed == observes::given;

/// Whether a type is a scorer of one of these kinds.
template <class S>
concept scorer_of_a_kind = given_scorer<S> || positional_scorer<S> || contents_scorer<S> || lagged_scorer<S> ||
                           attentive_scorer<S> || statistical_scorer<S> || paged_scorer<S>;

namespace detail {

/// The kind of scorer that a type is meant to be, by its members, where `observed` leaves it open.
template <class S>
inline constexpr bool names_pages = requires { &S::page; } || requires { &S::channels; } ||
                                    requires { &S::takes_upper; } || requires { &S::row_scale; };
template <class S>
inline constexpr bool names_a_lag =
    requires { &S::lag; } || requires { &S::spread; } || requires { &S::ranked; } || requires { &S::outside; };
template <class S>
inline constexpr bool names_contents =
    requires { S::reads; } || requires { S::measures; } || requires { &S::measure; } || requires { &S::anchor_scale; };

template <class S>
inline constexpr bool says_measures = requires {
  { std::integral_constant<int, S::measures>::value } -> std::convertible_to<int>;
};

template <class S>
constexpr void check_contents_scorer() {
  static_assert(
      requires {
        { S::reads } -> std::convertible_to<stored_rows>;
      }, "tessera: a scorer by contents needs static constexpr stored_rows reads, keys or values");
  static_assert(says_measures<S>,
                "tessera: a scorer by contents needs static constexpr int measures, the numbers that a row's channels "
                "add up to");
  static_assert(
      requires(const S s, float x, float* sums) { s.measure(x, x, sums); },
      "tessera: a scorer by contents needs void measure(float x, float anchor, float* sums) const");
  static_assert(
      requires(const S s, const float* sums) {
        { s.score(sums) } -> std::same_as<float>;
      }, "tessera: a scorer by contents needs float score(const float* sums) const");
}

template <class S>
constexpr void check_lagged_scorer() {
  static_assert(
      requires(const S s) {
        { s.sinks } -> std::convertible_to<index_t>;
      }, "tessera: a lagged scorer needs index_t sinks, the first slots, which are in no partition");
  static_assert(
      requires(const S s) {
        { s.lag } -> std::convertible_to<index_t>;
      }, "tessera: a lagged scorer needs index_t lag, the slots of a partition");
  static_assert(says_measures<S>,
                "tessera: a lagged scorer needs static constexpr int measures, the numbers that a row's channels add "
                "up to");
  static_assert(
      requires(const S s, float x) {
        { s.scale(x, x) } -> std::same_as<channel_scale>;
      }, "tessera: a lagged scorer needs channel_scale scale(float low, float high) const");
  static_assert(
      requires(const S s, float x, float* sums) { s.measure(x, channel_scale{}, sums); },
      "tessera: a lagged scorer needs void measure(float x, channel_scale scale, float* sums) const");
  static_assert(
      requires(const S s, const float* sums, index_t n) {
        { s.spread(sums, n) } -> std::same_as<float>;
      }, "tessera: a lagged scorer needs float spread(const float* sums, index_t channels) const");
  static_assert(
      requires(const S s, index_t n) {
        { s.ranked(n) } -> std::same_as<float>;
      }, "tessera: a lagged scorer needs float ranked(index_t rank) const");
  static_assert(
      requires(const S s, index_t n) {
        { s.outside(n, n) } -> std::same_as<float>;
      }, "tessera: a lagged scorer needs float outside(index_t slot, index_t stored) const");
}

template <class S>
constexpr void check_statistical_scorer() {
  static_assert(
      requires(const S s) {
        { s.sinks } -> std::convertible_to<index_t>;
      }, "tessera: a scorer of statistics needs index_t sinks, the first positions, whose queries do not count");
  static_assert(
      requires(const S s) {
        { s.future } -> std::convertible_to<index_t>;
      }, "tessera: a scorer of statistics needs index_t future, the positions to come that it looks over");
  static_assert(
      requires(const S s, float x) {
        { s.expect(x, x) } -> std::same_as<float>;
      }, "tessera: a scorer of statistics needs float expect(float mean, float variance) const");
}

template <class S>
constexpr void check_paged_scorer() {
  static_assert(
      requires(const S s) {
        { s.page } -> std::convertible_to<index_t>;
      }, "tessera: a paged scorer needs index_t page, the slots of a page; 0: it follows from the budget");
  static_assert(
      requires(const S s) {
        { s.channels } -> std::convertible_to<index_t>;
      }, "tessera: a paged scorer needs index_t channels, those that it reads; 0: they follow from the budget");
  static_assert(
      requires(const S s, double ratio, int k_dim) {
        { s.fitted(ratio, k_dim) } -> std::same_as<S>;
      },
      "tessera: a paged scorer needs fitted(double ratio, int k_dim) const, which returns the scorer with page and "
      "channels set");
  static_assert(
      requires {
        { S::normalised } -> std::convertible_to<bool>;
      }, "tessera: a paged scorer needs static constexpr bool normalised: whether scores are a softmax over slots");
  static_assert(
      requires {
        { S::adds_mean_value } -> std::convertible_to<bool>;
      },
      "tessera: a paged scorer needs static constexpr bool adds_mean_value: whether what is not attended counts as "
      "the mean of V");
  static_assert(
      requires(const S s, float x) {
        { s.takes_upper(x, x) } -> std::same_as<bool>;
      }, "tessera: a paged scorer needs bool takes_upper(float own, float total) const");
  static_assert(
      requires(const S s, float x) {
        { s.row_scale(x, x, x) } -> std::same_as<float>;
      }, "tessera: a paged scorer needs float row_scale(float scale, float chosen, float whole) const");
}

/// Asserts the members of the kind that a type is meant to be, if the type is no kind of scorer.
template <class S>
constexpr void check_scorer_kind() {
  if constexpr (S::observed == observes::statistics) {
    check_statistical_scorer<S>();
  } else if constexpr (S::observed == observes::step && names_pages<S>) {
    check_paged_scorer<S>();
  } else if constexpr (S::observed != observes::nothing) {
    static_assert(attentive_scorer<S>,
                  "tessera: a scorer that observes queries needs float weigh(float logit, float lse) const");
  } else if constexpr (names_a_lag<S>) {
    check_lagged_scorer<S>();
  } else if constexpr (names_contents<S>) {
    check_contents_scorer<S>();
  } else {
    static_assert(positional_scorer<S>,
                  "tessera: a scorer that observes nothing needs float score(index_t position, index_t next_position) "
                  "const; one that names what it reads scores what is stored");
  }
}

template <class S>
inline constexpr bool says_what_it_observes = requires {
  { std::integral_constant<observes, S::observed>::value } -> std::convertible_to<observes>;
};

}  // namespace detail

TESSERA_NAMESPACE_END
