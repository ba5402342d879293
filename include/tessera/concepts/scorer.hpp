// Scorer: how important each stored token is. Tokens with higher scores are kept first.
#pragma once

#include <concepts>
#include <type_traits>

#include "../core/host/host_vector.hpp"
#include "../core/types.hpp"
#include "../math/pool.hpp"
#include "scorer_kinds.hpp"

TESSERA_NAMESPACE_BEGIN

/// A scorer's last pass over the scores of a head's candidates. Without any of these, scores stay as they are.
///   pooled() -> pooling_window            every score becomes the largest or the mean of its neighbours'
///   finish_at(in, n, i) -> float          the finished score i, from all scores of the head: TESSERA_HD
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
/// Whether a scorer's last pass, if it has one, has the right signature.
template <class S>
inline constexpr bool finishes_rightly =
    (pooling_scorer<S> || !requires { &S::pooled; }) && (slot_finishing_scorer<S> || !requires { &S::finish_at; }) &&
    (finishing_scorer<S> || !requires { &S::finish; });

/// A scorer whose finished scores are multiplied by another scorer's score of a token's value, after the budget has
/// counted.
///   weight                             a member: a contents_scorer of values. Where the engine gives the output
///                                      projection, the mean over the group of its scores of the projected values
///   weighted(score, weight) -> float   the score of the selection. TESSERA_HD
///   taken_first(keep) -> index_t       how many of a head's `keep` slots, tail included, are selected by the scores
///                                      alone. TESSERA_HD
template <class S>
concept weighted_scorer = requires(const S s, float x, index_t n) {
  requires contents_scorer<std::remove_cvref_t<decltype(s.weight)>>;
  requires !anchored_scorer<std::remove_cvref_t<decltype(s.weight)>>;
  requires stored_rows(std::remove_cvref_t<decltype(s.weight)>::reads) == stored_rows::values;
  { s.weighted(x, x) } -> std::same_as<float>;
  { s.taken_first(n) } -> std::same_as<index_t>;
};

/// A scorer whose scores are multiplied by another scorer's score of a token's rows, before the last pass and the
/// budget.
///   factor                                 a member: a contents_scorer
///   multiplied(score, factor) -> float     TESSERA_HD
template <class S>
concept multiplied_scorer = requires(const S s, float x) {
  requires contents_scorer<std::remove_cvref_t<decltype(s.factor)>>;
  { s.multiplied(x, x) } -> std::same_as<float>;
};

/// Statistics of a segment of the text, from its finished scores.
struct segment_statistics {
  float importance = 0;
  float diversity = 0;
};

/// A scorer whose last pass, after those above, uses the segments of the text among a head's candidates.
///   describe_segment(scores, n) -> segment_statistics     of one segment; scores that are not finite are left out.
///                                                         TESSERA_HD
///   rescored(score, segment, largest) -> float            segment: its statistics; largest: the largest importance of
///                                                         all segments. TESSERA_HD
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

/// Whether a scorer's `rows` fits what it observes. A mean needs a window, because the rows that see a token are not
/// counted otherwise. `newest` is for scorers that observe every query: others can take a window of one query instead.
template <class S>
inline constexpr bool rows_join_rightly =
    (joins_rows_by<S> != row_join::mean || S::observed == observes::window) &&
    (joins_rows_by<S> != row_join::newest || S::observed == observes::every_query) &&
    (joins_rows_by<S> == row_join::sum || S::observed != observes::step);

/// A scorer that observes a fixed number of the prompt's last queries.
template <class S>
concept has_window = requires(S& s) {
  { s.window } -> std::same_as<index_t&>;
};

/// A scorer whose window goes on from prompts into answers and from turn to turn: it observes the newest queries of the
/// conversation, and can score at any moment of a schedule.
///   window_follows                       static: true
template <class S>
concept following_scorer = has_window<S> && S::observed == observes::window && requires { requires S::window_follows; };

/// A scorer that observes only the queries at positions of its choice.
///   takes(position) -> bool
template <class S>
concept sampling_scorer = S::observed == observes::every_query && requires(const S s, index_t position) {
  { s.takes(position) } -> std::same_as<bool>;
};

/// A policy that turns observations into scores.
///   name                                 its published name, or the quantity
///   observed                             one of `observes`
///   rows                                 one of `row_join`, where it is not the sum
///   comparable_across_heads              whether scores of two heads may be ranked against each other
///   window                               index_t, where it observes a window: how many of the last queries
///   protected_tail(budget)               newest tokens that are kept whatever their score
///   pooled, finish_at or finish          a last pass over a head's scores, see above. Not for a paged scorer
///   check(budget)                        throws tessera::error on parameters that make no sense
template <class S>
concept scorer =
    std::is_trivially_copyable_v<S> && scorer_of_a_kind<S> && finishes_rightly<S> &&
    (S::observed != observes::window || has_window<S>) && rows_join_rightly<S> && requires(const S s, index_t n) {
      { S::name } -> std::convertible_to<const char*>;
      { S::comparable_across_heads } -> std::convertible_to<bool>;
      { s.protected_tail(n) } -> std::same_as<index_t>;
      s.check(n);
    };

/// Asserts each member that a scorer of this kind needs, with a message of its own: nvcc gives no reason for a failed
/// concept.
template <class S>
constexpr bool check_scorer() {
  static_assert(std::is_trivially_copyable_v<S>, "tessera: a scorer must be trivially copyable");
  static_assert(
      requires {
        { S::name } -> std::convertible_to<const char*>;
      }, "tessera: a scorer must name itself: static constexpr const char* name");
  static_assert(detail::says_what_it_observes<S>,
                "tessera: a scorer must say what it observes: static constexpr observes observed");
  static_assert(
      requires {
        { S::comparable_across_heads } -> std::convertible_to<bool>;
      }, "tessera: a scorer must say whether its scores are comparable_across_heads");
  if constexpr (detail::says_what_it_observes<S>) {
    if constexpr (!scorer_of_a_kind<S>) detail::check_scorer_kind<S>();
    static_assert(S::observed != observes::window || has_window<S>,
                  "tessera: a scorer that observes the window must hold index_t window, the queries it observes");
    static_assert(
        rows_join_rightly<S>,
        "tessera: a mean over query rows needs a window, and the newest query alone a scorer that observes every "
        "query; else rows are summed, or the maximum of them is taken");
  }
  static_assert(
      requires(const S s, index_t n) {
        { s.protected_tail(n) } -> std::same_as<index_t>;
      }, "tessera: scorer::protected_tail(budget) must return index_t");
  static_assert(finishes_rightly<S>,
                "tessera: a scorer's last pass is pooling_window pooled(), float finish_at(in, n, i) or "
                "finish(in, n, out, scratch)");
  static_assert(requires(const S s, index_t n) { s.check(n); }, "tessera: a scorer needs check(budget)");
  return scorer<S>;
}

/// Whether devices can run a scorer: its last pass must not exist for the host alone.
template <class S>
concept device_scorer = scorer<S> && (pooling_scorer<S> || slot_finishing_scorer<S> || !finishing_scorer<S>);

/// Whether a scorer runs on a device. A sentence says what it lacks, there or anywhere.
template <class S>
constexpr bool check_device_scorer() {
  static_assert(check_scorer<S>());
  static_assert(pooling_scorer<S> || slot_finishing_scorer<S> || !finishing_scorer<S>,
                "tessera: this scorer's finish runs on the host only; a device needs float finish_at(in, n, i) with "
                "TESSERA_HD, or pooling_window pooled()");
  return device_scorer<S>;
}

TESSERA_NAMESPACE_END
