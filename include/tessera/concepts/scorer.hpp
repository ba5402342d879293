// Scorer: what matters? Gives every stored token a score; higher is kept first.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/host/host_vector.hpp"
#include "../core/types.hpp"
#include "../math/pool.hpp"

TESSERA_NAMESPACE_BEGIN

/// Which queries a scorer has to see. The cache keeps what is declared here and nothing else.
enum class observes {
  nothing,      ///< no query: positions, or what is stored
  window,       ///< the last queries of a turn's prompt; scored once, when the prompt ends
  every_query,  ///< every query of the prompt and of decoding, accumulated as they come
  /// queries of a text that passes through the model once more before a prompt ends, accumulated as they come
  rereading,
  statistics,  ///< what the queries of a turn's prompt are like: their mean and covariance
  step         ///< the queries of one decode step: a retrieval scorer
};

/// Whether scores accumulate beside the tokens, in a column of the store.
constexpr bool lies_beside_tokens(observes observed) {
  return observed == observes::every_query || observed == observes::rereading;
}

/// How what several query rows say of a token becomes its score. A scorer of queries names one as `rows`; else: sum.
enum class row_join {
  sum,
  mean,     ///< the sum divided by the rows; of a window
  maximum,  ///< of weights that are never below 0
  newest    ///< what the newest query alone says, of every query that has come; its rows are summed over the group
};

/// Which stored rows a scorer by contents reads.
enum class stored_rows { keys, values };

/// Scores by position alone.
///   score(position of the token, position of the next token) -> float
template <class S>
concept positional_scorer = S::observed == observes::nothing&& requires(const S s, index_t at) {
  { s.score(at, at) } -> std::same_as<float>;
};

/// Scores by what is stored of a token. Backends run over the channels of its row; sums are over channels, in any
/// order.
///   reads                          one of `stored_rows`
///   measures                       static constexpr int: numbers that a row's channels add up to, at most 4
///   measure(x, anchor, sums)       adds what a channel's element says to sums [measures]; anchor: see below, 0 without
///                                  one. TESSERA_HD
///   score(sums) -> float           of the row. TESSERA_HD
template <class S>
concept contents_scorer = S::observed == observes::nothing&& requires(const S s, float x, float* sums) {
  { S::reads } -> std::convertible_to<stored_rows>;
  { std::integral_constant<int, S::measures>::value } -> std::convertible_to<int>;
  s.measure(x, x, sums);
  { s.score(static_cast<const float*>(sums)) } -> std::same_as<float>;
};

/// One that compares each row with the mean of all rows that the head stores, each scaled before it is added.
///   anchor_scale(sums) -> float    of a row, from its measures with anchor 0. TESSERA_HD
template <class S>
concept anchored_scorer = contents_scorer<S> && requires(const S s, const float* sums) {
  { s.anchor_scale(sums) } -> std::same_as<float>;
};

/// What the elements of a channel are put on: x * factor + shift.
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
///   measure(x, scale, sums)            adds what an element says on its channel's scale. TESSERA_HD
///   spread(sums, channels) -> float    of a row. TESSERA_HD
///   ranked(rank) -> float              the score of the slot that so many of its partition rank behind. TESSERA_HD
///   outside(slot, stored) -> float     of a slot that is in no partition with a next one, `stored` slots in all.
///                                      TESSERA_HD
template <class S>
concept lagged_scorer = S::observed == observes::nothing&& requires(const S s, float x, float* sums, index_t n) {
  { s.sinks } -> std::convertible_to<index_t>;
  { s.lag } -> std::convertible_to<index_t>;
  { std::integral_constant<int, S::measures>::value } -> std::convertible_to<int>;
  { s.scale(x, x) } -> std::same_as<channel_scale>;
  s.measure(x, channel_scale{}, sums);
  { s.spread(static_cast<const float*>(sums), n) } -> std::same_as<float>;
  { s.ranked(n) } -> std::same_as<float>;
  { s.outside(n, n) } -> std::same_as<float>;
};

/// Scores by what queries make of a key. The backends compute logits; a scorer says what one query row adds to a token.
///   weigh(logit, lse) -> float   lse: the log-sum-exp of the row over all keys that it sees
/// A token's score is the sum of `weigh` over the observed rows and the query heads of its group, then `finish`.
template <class S>
concept attentive_scorer = S::observed != observes::nothing&& requires(const S s, float x) {
  { s.weigh(x, x) } -> std::same_as<float>;
};

/// Scores by what queries are like, not by what each of them sees. Backends take mean and covariance of a prompt's
/// queries from position `sinks` on, turned back to position 0, and turn them by the mean of RoPE's rotations over the
/// next `future` positions; so a key's logits have a mean and a variance. A score is the softmax of `expect` over the
/// stored tokens behind the sinks, averaged over the group; the sinks' is infinity.
///   sinks, future                        index_t members; future at least 1
///   expect(mean, variance) -> float      TESSERA_HD
template <class S>
concept statistical_scorer = S::observed == observes::statistics&& requires(const S s, float x) {
  { s.sinks } -> std::convertible_to<index_t>;
  { s.future } -> std::convertible_to<index_t>;
  { s.expect(x, x) } -> std::same_as<float>;
};

/// A retrieval scorer that ranks segments of the text, all tokens of one alike: by the mean of the keys that are stored
/// of it and the mean query of the segment that is being written. Backends keep both.
///   start                        first stored slots that come before all others
///   whole                        while the segment that is being written has no more tokens, a step reads everything
///   weigh(logit, 0) -> float     of the two means' logit, summed over the group
template <class S>
concept segment_mean_scorer = S::observed == observes::step&& attentive_scorer<S>&& requires(const S s) {
  { s.start } -> std::convertible_to<index_t>;
  { s.whole } -> std::convertible_to<index_t>;
};

/// A retrieval scorer that reads an estimate in place of the keys: of runs of `page` consecutive stored slots the
/// smallest and the largest value of each channel (core/stored/page_extrema.hpp; of a page of one slot, its key), on
/// `channels` of the channels. Backends compute, for row r of the step (a token's query head of the group), page p and
/// the channels c with the largest sums of |q| over the rows (ties to the lower channel),
///   logit[r, p] = sum over c of q[r, c] * (takes_upper(q[r, c], sum over rows of q[., c]) ? upper : lower)[c, p],
/// times row_scale. A slot's score is the sum over the rows that see it of its page's logit or, where `normalised`, of
/// the softmax of these logits, soft-capped by the rule, over the slots that the row sees: a page counts its slots. A
/// logit that is NaN or +infinity is left out of its row's softmax and ranks its page last; a row with a query that is
/// not finite says nothing; a slot that no row sees ranks behind all others.
///   page, channels                     index_t; 0 where they follow from the budget, at least 1 once fitted
///   fitted(ratio, k_dim)               this scorer with both set: keys are to be estimated from 1 / ratio of their
///                                      bytes
///   normalised                         see above
///   adds_mean_value                    whether what is not attended is made up for by the mean of V
///   takes_upper(own, total) -> bool
///   row_scale(scale, chosen, whole) -> float   scale: the rule's; sums of the row's |q| over the chosen and all
///                                              channels
template <class S>
concept paged_scorer = S::observed == observes::step&& requires(const S s, float x, double ratio, int k_dim) {
  { s.page } -> std::convertible_to<index_t>;
  { s.channels } -> std::convertible_to<index_t>;
  { s.fitted(ratio, k_dim) } -> std::same_as<S>;
  { S::normalised } -> std::convertible_to<bool>;
  { S::adds_mean_value } -> std::convertible_to<bool>;
  { s.takes_upper(x, x) } -> std::same_as<bool>;
  { s.row_scale(x, x, x) } -> std::same_as<float>;
};

/// A scorer's last pass over the scores of a head's candidates. Without any of these, scores stay as they are.
///   pooled() -> pooling_window            every score becomes the largest or the mean of its neighbours'
///   finish_at(in, n, i) -> float          what score i becomes, from all scores of the head: TESSERA_HD
///   finish(in, n, out, scratch)           the whole pass, on the host; out != in. Beside `finish_at`: the same, faster
template <class S>
concept pooling_scorer = requires(const S s) {
  { s.pooled() } -> std::same_as<pooling_window>;
};
template <class S>
concept slot_finishing_scorer = requires(const S s, const float* in, index_t n) {
  { s.finish_at(in, n, n) } -> std::same_as<float>;
};
template <class S>
concept finishing_scorer = requires(const S s, const float* in, float* out, index_t n, host_vector<float>& scratch) {
  s.finish(in, n, out, scratch);
};
/// Whether what is named as a last pass is one.
template <class S>
inline constexpr bool finishes_rightly = (pooling_scorer<S> || !requires { &S::pooled; }) &&
                                         (slot_finishing_scorer<S> || !requires { &S::finish_at; }) &&
                                         (finishing_scorer<S> || !requires { &S::finish; });

/// A scorer whose finished scores are multiplied by what another one finds in a token's value, after the budget has
/// counted.
///   weight                             a member: a contents_scorer of values. Where the engine gives the output
///                                      projection, the mean over the group of its scores of the projected values
///   weighted(score, weight) -> float   what is selected by. TESSERA_HD
///   taken_first(keep) -> index_t       of the `keep` slots of a head, tail included, so many are taken by the scores
///                                      alone. TESSERA_HD
template <class S>
concept weighted_scorer = requires(const S s, float x, index_t n) {
  requires contents_scorer<std::remove_cvref_t<decltype(s.weight)>>;
  requires !anchored_scorer<std::remove_cvref_t<decltype(s.weight)>>;
  requires stored_rows(std::remove_cvref_t<decltype(s.weight)>::reads)
  == stored_rows::values;
  { s.weighted(x, x) } -> std::same_as<float>;
  { s.taken_first(n) } -> std::same_as<index_t>;
};

/// A scorer whose scores are multiplied by what another one finds in a token's rows, before its last pass and the
/// budget.
///   factor                                 a member: a contents_scorer
///   multiplied(score, factor) -> float     TESSERA_HD
template <class S>
concept multiplied_scorer = requires(const S s, float x) {
  requires contents_scorer<std::remove_cvref_t<decltype(s.factor)>>;
  { s.multiplied(x, x) } -> std::same_as<float>;
};

/// What a scorer may know of a segment of the text, from its finished scores.
struct segment_statistics {
  float importance = 0;
  float diversity = 0;
};

/// A scorer whose last pass, after those above, sees the segments of the text among a head's candidates.
///   describe_segment(scores, n) -> segment_statistics     of one segment; scores that are not finite say nothing.
///                                                         TESSERA_HD
///   rescored(score, own, most) -> float                   own: its segment's statistics; most: the largest importance
///                                                         of all segments. TESSERA_HD
/// Beside it, for devices: describe_segment(team, scores, n), the same by a team of lanes (core/one_lane.hpp).
template <class S>
concept segment_scorer = requires(const S s, const float* scores, index_t n, float x, const segment_statistics& own) {
  { s.describe_segment(scores, n) } -> std::same_as<segment_statistics>;
  { s.rescored(x, own, x) } -> std::same_as<float>;
};

/// How a scorer's rows become one score.
template <class S>
inline constexpr row_join joins_rows_by = [] {
  if constexpr (requires { S::rows; }) return row_join(S::rows);
  return row_join::sum;
}();

/// How many rows saw a token is not counted, so a mean needs a window; a window of one query is its newest.
template <class S>
inline constexpr bool rows_join_rightly = (joins_rows_by<S> != row_join::mean || S::observed == observes::window) &&
                                          (joins_rows_by<S> != row_join::newest ||
                                           S::observed == observes::every_query) &&
                                          (joins_rows_by<S> == row_join::sum || S::observed != observes::step);

/// A scorer that says how many of the prompt's last queries it observes.
template <class S>
concept has_window = requires(S& s) {
  { s.window } -> std::same_as<index_t&>;
};

/// A scorer whose window goes on from prompts into answers and from turn to turn: it observes the newest queries,
/// whoever they are, and can score whenever a schedule asks.
///   window_follows                       static: true
template <class S>
concept following_scorer = has_window<S> && S::observed == observes::window&& requires {
  requires S::window_follows;
};

/// A scorer that observes, of every query, those at positions that it takes.
///   takes(position) -> bool
template <class S>
concept sampling_scorer = S::observed == observes::every_query&& requires(const S s, index_t position) {
  { s.takes(position) } -> std::same_as<bool>;
};

/// A policy that turns what it observed into scores.
///   name                                 its published name, or the quantity
///   observed                             one of `observes`
///   rows                                 one of `row_join`, where it is not the sum
///   comparable_across_heads              whether scores of two heads may be ranked against each other
///   window                               index_t, where it observes a window: how many of the last queries
///   protected_tail(budget)               newest tokens that are kept whatever their score
///   pooled, finish_at or finish          a last pass over a head's scores, see above. Not for a paged scorer
///   check(budget)                        throws tessera::error on parameters that make no sense
template <class S>
concept scorer = std::is_trivially_copyable_v<S> &&
                 (positional_scorer<S> || contents_scorer<S> || lagged_scorer<S> || attentive_scorer<S> ||
                  statistical_scorer<S> || paged_scorer<S>)&&finishes_rightly<S> &&
                 (S::observed != observes::window || has_window<S>)&&rows_join_rightly<S>&& requires(const S s,
                                                                                                     index_t n) {
  { S::name } -> std::convertible_to<const char*>;
  { S::comparable_across_heads } -> std::convertible_to<bool>;
  { s.protected_tail(n) } -> std::same_as<index_t>;
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
  static_assert(
      positional_scorer<S> || contents_scorer<S> || lagged_scorer<S> || attentive_scorer<S> || statistical_scorer<S> ||
          paged_scorer<S>,
      "tessera: a scorer that observes nothing needs float score(position, next_position), or, to score what is "
      "stored, "
      "reads, measures, measure(x, anchor, sums) and float score(sums), or, beside the tokens behind it, sinks, lag, "
      "measures, "
      "scale(low, high), measure(x, scale, sums), spread(sums, channels), ranked(rank) and outside(slot, stored); one "
      "of statistics "
      "needs sinks, future and float expect(mean, variance); any other needs float weigh(logit, lse), or, to read "
      "pages in a step, page, channels, fitted(ratio, k_dim), normalised, "
      "adds_mean_value, takes_upper(own, total) and row_scale(scale, chosen, whole)");
  static_assert(
      requires(const S s, index_t n) {
        { s.protected_tail(n) } -> std::same_as<index_t>;
      },
      "tessera: scorer::protected_tail(budget) must return index_t");
  static_assert(S::observed != observes::window || has_window<S>,
                "tessera: a scorer that observes the window must hold index_t window, the queries it observes");
  static_assert(
      rows_join_rightly<S>,
      "tessera: a mean over query rows needs a window, and the newest query alone a scorer that observes every "
      "query; else rows are summed, or the maximum of them is taken");
  static_assert(finishes_rightly<S>,
                "tessera: a scorer's last pass is pooling_window pooled(), float finish_at(in, n, i) or "
                "finish(in, n, out, scratch)");
  static_assert(scorer<S>, "tessera: a scorer needs check(budget)");
  return scorer<S>;
}

/// Whether devices can run it: all but a last pass that is the host's alone.
template <class S>
concept device_scorer = scorer<S> &&(pooling_scorer<S> || slot_finishing_scorer<S> || !finishing_scorer<S>);

/// Whether a scorer runs on a device; what it lacks is said in a sentence.
template <class S>
constexpr bool check_device_scorer() {
  static_assert(device_scorer<S>,
                "tessera: this scorer's finish runs on the host only; a device needs float finish_at(in, n, i) with "
                "TESSERA_HD, or pooling_window pooled()");
  return device_scorer<S>;
}

TESSERA_NAMESPACE_END
